"""Hold the tree of files in docs/architecture.md against the package: every file with the first line of its docstring.

python tools/file_tree.py          print the tree
python tools/file_tree.py --write  rewrite the tree in docs/architecture.md
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "python" / "minisgl"
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- files: written by `make rooms` -->", "<!-- end of files -->"
KINDS = {".py", ".cpp", ".h", ".html"}
GENERATED = {"prebuilt", "__pycache__"}


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


def block() -> str:
    """Return the part of the page between the two markers, the markers included."""
    lines = [BEGIN, "```", "python/minisgl/", "  __init__.py              " + subject(PACKAGE / "__init__.py"), *tree()]
    return "\n".join([*lines, "```", END])


def main() -> None:
    page = PAGE.read_text(encoding="utf-8")
    before, after = page.partition(BEGIN)[0], page.partition(END)[2]
    if "--write" in sys.argv:
        PAGE.write_text(before + block() + after, encoding="utf-8")
    else:
        print(block())


if __name__ == "__main__":
    main()
