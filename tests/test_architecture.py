"""Who may import whom. Read from the syntax trees, so imports inside functions count too."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "python" / "minisgl"

# A package (or top-level module) may import those on its right, besides itself. The order is docs/architecture.md's.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "registry": {"errors"},
    "demo": set(),
    "settings": {"errors"},
    "params": {"errors"},
    "core": {"errors", "params"},
    "process": {"errors"},
    "checkpoint": {"errors"},
    "device": {"errors"},
    "ops": {"core", "errors", "registry"},
    "triton": {"core", "errors", "ops", "process"},
    "message": {"core", "errors", "params", "process"},
    "distributed": {"errors", "ops", "process", "settings", "triton"},
    "kvcache": {"core", "errors", "ops", "registry"},
    "attention": {"core", "errors", "kvcache", "ops", "registry", "triton"},
    "layers": {"attention", "core", "distributed", "errors", "ops"},
    "models": {"attention", "checkpoint", "core", "device", "distributed", "errors", "layers", "ops", "registry"},
    "engine": {"attention", "checkpoint", "core", "device", "distributed", "errors", "kvcache", "models", "native"}
    | {"ops", "params", "process", "settings", "triton"},
    "native": {"core", "device", "engine", "errors", "models", "ops"},
    "grammar": {"core", "errors", "params", "tokenizer"},
    "scheduler": {"checkpoint", "core", "distributed", "engine", "errors", "kvcache", "message", "params", "process"}
    | {"settings"},
    "tokenizer": {"checkpoint", "core", "errors", "message", "params", "process", "settings"},
    "llm": {"checkpoint", "core", "distributed", "errors", "message", "params", "process", "scheduler", "settings"}
    | {"tokenizer"},
    "api": {"checkpoint", "core", "errors", "message", "params", "process", "settings", "tokenizer"},
    "launch": {"api", "checkpoint", "core", "device", "distributed", "errors", "message", "params", "process"}
    | {"settings", "tokenizer"},
    "chat": {"api", "core", "errors", "launch", "message", "params", "process", "settings"},
    "bench": {"api", "chat", "checkpoint", "core", "device", "errors", "launch", "layers", "llm", "message", "models"}
    | {"ops", "params", "process", "scheduler", "settings", "tokenizer"},
    "verify": {"bench", "checkpoint", "core", "device", "engine", "errors", "llm", "message", "native", "params"}
    | {"settings", "tokenizer"},
    "__init__": {"core", "llm", "params"},
    "__main__": {"bench", "chat", "checkpoint", "errors", "launch", "llm", "process", "settings", "verify"},
}
# The exceptions, inside functions only: the spawn target is the scheduler process, `minisgl env` lists backends.
LAZY_ONLY = {
    ("launch/targets.py", "scheduler"),
    ("scheduler/scheduler.py", "grammar"),
    ("launch/environment.py", "attention"),
    ("launch/environment.py", "ops"),
    ("api/frontend.py", "launch"),
}
# May not even indirectly import torch at module level: these run in processes that must stay small.
TORCH_FREE = {"errors", "registry", "settings", "core", "params", "process", "checkpoint", "message", "tokenizer"}
TORCH_FREE |= {"api", "launch", "chat", "bench", "__init__", "__main__", "grammar"}
TORCH_FREE_FILES = {"distributed/__init__.py", "distributed/info.py", "device/driver.py"}  # the launcher reads them
TORCH_USERS = {"checkpoint/safetensors.py"}


def sources() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def package_of(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    return parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """(module, at module level and at run time) of every import; those under TYPE_CHECKING count as not at run time."""
    tree = ast.parse(path.read_text())

    def visit(node: ast.AST, eager: bool) -> Iterator[tuple[str, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from ((a.name, eager) for a in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{path}: relative import"
                names = [f"{child.module}.{a.name}" for a in child.names] if child.module == "minisgl" else []
                yield from ((name, eager) for name in (names or [child.module or ""]))
            else:
                is_function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
                is_typing = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
                yield from visit(child, eager and not is_function and not is_typing)

    return visit(tree, True)


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_follow_the_order(path: Path) -> None:
    package = package_of(path)
    assert package in ALLOWED, f"{package} has no place in the import order"
    where = str(path.relative_to(ROOT))
    for module, eager in imports(path):
        parts = module.split(".")
        if parts[0] == "minisgl" and len(parts) > 1 and parts[1] in ALLOWED:
            target = parts[1]
            if target == package or (not eager and (where, target) in LAZY_ONLY):
                continue
            assert target in ALLOWED[package], f"{where} may not import {module}"
        elif parts[0] == "torch" and eager and (package in TORCH_FREE or where in TORCH_FREE_FILES):
            assert where in TORCH_USERS, f"{where} must not need torch"
