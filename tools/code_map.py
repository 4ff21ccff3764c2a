"""Write the two maps of the code: the parts with their sizes in README.md, and every file in docs/files.md.

python tools/code_map.py --write
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.code_lines import PACKAGE, ROOT, count_rooms

KINDS = {".py", ".cpp", ".h", ".cu", ".html"}
GENERATED = {"prebuilt", "__pycache__"}
PARTS: dict[str, tuple[str, ...]] = {
    "**core**: plans, steps, pages, models": (
        "core/plan",
        "core/layout",
        "core/specs",
        "core/params",
        "scheduler",
        "engine",
        "speculative",
        "kvcache",
        "layers",
        "models",
    ),
    "attention backends and ops": ("attention", "ops"),
    "kernels for NVIDIA GPUs": ("kernels", "kernels/triton", "kernels/hopper", "kernels/hopper/cuda"),
    "the CPU's step, called from Python": ("native",),
    "the CPU's step in C++": ("native/cpp",),
    "several ranks": ("distributed",),
    "server: HTTP, tokenizer, processes": ("api", "tokenizer", "core/message", "process", "launch", "ray"),
    "settings, checkpoints, devices": (
        "settings",
        "checkpoint",
        "device",
        "core",
        "core/registry",
        "core/rounding",
        "core/errors",
        "demo",
    ),
    "grammars": ("grammar",),
    "Python API, terminal chat, command line": ("llm", "tools/chat", "__init__", "__main__"),
    "benchmarks, verification, replay": ("tools", "tools/bench", "tools/verify", "tools/replay"),
}


def subject(path: Path) -> str:
    """Return the first line of the file's docstring or opening comment."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
    first = text.partition("\n")[0]
    return first.lstrip("/ ") if first.startswith("//") else ""


def tree(folder: Path = PACKAGE, depth: int = 1) -> list[str]:
    """Return the lines of a folder: its files, then its folders, each with its subject."""
    lines = []
    for path in sorted(folder.iterdir(), key=lambda path: (path.is_dir(), path.name)):
        name = "  " * depth + path.name
        if path.suffix in KINDS and path.name != "__init__.py":
            lines.append(f"{name:26} {subject(path)}".rstrip())
        elif path.is_dir() and path.name not in GENERATED and any(p.suffix in KINDS for p in path.iterdir()):
            init = path / "__init__.py"
            lines.append(f"{name + '/':26} {subject(init) if init.exists() else ''}".rstrip())
            lines.extend(tree(path, depth + 1))
    return lines


def parts() -> list[str]:
    """Return the table of parts; raise `LookupError` for a room that is in none of them."""
    counts = count_rooms()
    if missing := set(counts) - {room for rooms in PARTS.values() for room in rooms}:
        raise LookupError(f"no part in {Path(__file__).name} has {', '.join(sorted(missing))}")
    lines = ["| part | where | code lines |", "|---|---|--:|"]
    for name, rooms in PARTS.items():
        present = [room for room in rooms if room in counts]
        where = ", ".join(f"`{room}/`" if (PACKAGE / room).is_dir() else f"`{room}.py`" for room in present)
        lines.append(f"| {name} | {where} | {sum(counts[room][0] for room in present):,} |")
    total = sum(lines for lines, _ in counts.values())
    return [*lines, f"| all | `python/minisgl/` | {total:,} |"]


def blocks() -> dict[Path, tuple[str, str, str]]:
    """Return, for each page, the marker before the map, the map, and the marker after it."""
    files = "\n".join(["```", "python/minisgl/", *tree(), "```"])
    return {
        ROOT / "docs" / "files.md": ("<!-- files: `make rooms` -->", files, "<!-- end of files -->"),
        ROOT / "README.md": ("<!-- parts: `make rooms` -->", "\n".join(parts()), "<!-- end of parts -->"),
    }


def main() -> None:
    for page, (begin, text, end) in blocks().items():
        if "--write" in sys.argv:
            before, _, rest = page.read_text(encoding="utf-8").partition(begin)
            page.write_text(f"{before}{begin}\n{text}\n{end}{rest.partition(end)[2]}", encoding="utf-8")
        else:
            print(text)


if __name__ == "__main__":
    main()
