"""Who may import whom: the table in docs/rooms.md, held against the syntax trees."""

from __future__ import annotations

import sys
import tomllib
from graphlib import TopologicalSorter
from importlib.metadata import packages_distributions, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools.code_lines import PACKAGE, imported_rooms, imports, read_table, room_of

ALLOWED = {room.name: {*room.may_import} for room in read_table()}
# May not even indirectly import torch at module level: these run in processes that must stay small.
TORCH_FREE = {"settings", "process", "checkpoint", "tokenizer", "api", "launch", "grammar", "__init__", "__main__"}
TORCH_FREE |= {name for name in ALLOWED if name.partition("/")[0] == "core"} | {"tools/chat", "tools/bench"}
TORCH_FREE_FILES = {"distributed/__init__.py", "distributed/info.py", "device/machine.py", "layers/rope.py"}


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_follow_the_order(path: Path) -> None:
    room, where = room_of(path), str(path.relative_to(PACKAGE))
    assert room in ALLOWED, f"{room} is missing in the table of rooms"
    forbidden = imported_rooms(path, {*ALLOWED}) - ALLOWED[room]
    assert not forbidden, f"{where} may not import {', '.join(sorted(forbidden))}"
    if room in TORCH_FREE or where in TORCH_FREE_FILES:
        eager = {module.partition(".")[0] for module, is_eager in imports(path) if is_eager}
        assert "torch" not in eager, f"{where} must not need torch"


def test_no_files_import_each_other_in_a_circle() -> None:
    """Neither for types, nor inside of functions."""
    files = {
        ".".join(("minisgl", *path.relative_to(PACKAGE).with_suffix("").parts)): path for path in PACKAGE.rglob("*.py")
    }
    graph: dict[str, set[str]] = {}
    for name, path in files.items():
        graph[name] = {module for module, _ in imports(path) if module in files and module != name}
    TopologicalSorter(graph).prepare()


def test_dependencies_are_declared() -> None:
    """What the package imports is a dependency of its own, not of a dependency, in the version that is tested here."""
    project = tomllib.loads((PACKAGE.parents[1] / "pyproject.toml").read_text())["project"]
    declared = {canonicalize_name(r.name): r for r in map(Requirement, project["dependencies"])}
    extras = [spec for name, specs in project["optional-dependencies"].items() if name != "dev" for spec in specs]
    names = declared.keys() | {canonicalize_name(Requirement(spec).name) for spec in extras}
    eager = {module.partition(".")[0] for f in PACKAGE.rglob("*.py") for module, is_eager in imports(f) if is_eager}
    outside = eager - sys.stdlib_module_names - {"minisgl", "triton"}  # torch brings triton where it works
    owners = {module: set(map(canonicalize_name, found)) for module, found in packages_distributions().items()}
    assert not {module for module in outside & owners.keys() if not names & owners[module]}
    assert declared["jinja2"].specifier.contains("3.1.6") and not declared["jinja2"].specifier.contains("3.1.5")
    assert {"huggingface-hub", "starlette"} <= declared.keys() and not declared["uvicorn"].specifier.contains("1.0")
    for name, requirement in declared.items():
        assert requirement.specifier.contains(version(name).partition("+")[0]), name
