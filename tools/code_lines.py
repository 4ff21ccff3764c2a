"""Count the code lines of the package by room, and hold docs/rooms.md's table of rooms against the code.

Blank lines, comments and docstrings are not counted. A room is a folder or a module directly below python/minisgl, or
below one of the folders that only group rooms.

    python tools/code_lines.py          print lines and files of each room, and the total
    python tools/code_lines.py --write  rewrite the table's counts, and drop imports that no room needs any more
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "python" / "minisgl"
PAGE = ROOT / "docs" / "rooms.md"
BEGIN, END = "<!-- rooms: counts are written by `make rooms` -->", "<!-- end of rooms -->"
HEAD = "| room | what lives there | may import | code lines | files |\n|---|---|---|--:|--:|"
# Imports inside functions that break the order on purpose: (file, room). The scheduler is a spawn target, `minisgl
# doctor` looks at everything.
LAZY_IMPORTS = {
    ("launch/children.py", "scheduler"),
    ("launch/doctor.py", "attention"),
    ("launch/doctor.py", "native"),
    ("launch/doctor.py", "ops"),
    ("launch/doctor.py", "kernels/triton"),
}
GROUPS = {"core", "kernels", "tools"}
_LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
_LAYOUT |= {tokenize.ENCODING, tokenize.ENDMARKER}


@dataclass(frozen=True)
class Room:
    """A row of the table."""

    name: str
    content: str
    may_import: tuple[str, ...]
    lines: int
    files: int

    def __str__(self) -> str:
        imports = " ".join(self.may_import)
        return f"| `{self.name}` | {self.content} | {imports} | {self.lines:,} | {self.files} |"


def code_lines(path: Path) -> int:
    """Lines of a Python or C++ file without blank lines, comments and docstrings."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        return sum(bool(line.strip()) and not line.lstrip().startswith("//") for line in text.splitlines())
    docstrings = set[int]()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def room_of(path: Path) -> str:
    """The room of a file of the package; C++ is a room of its own."""
    relative = path.relative_to(PACKAGE)
    if path.suffix != ".py":
        return str(relative.parent)
    parts = relative.with_suffix("").parts
    return "/".join(parts[:2] if parts[0] in GROUPS and parts[1] != "__init__" else parts[:1])


def count_rooms() -> dict[str, tuple[int, int]]:
    """(code lines, files) of each room that has any."""
    counts: dict[str, tuple[int, int]] = {}
    for path in sorted(p for pattern in ("*.py", "*.cpp", "*.h", "*.cu") for p in PACKAGE.rglob(pattern)):
        lines, files = counts.get(room_of(path), (0, 0))
        counts[room_of(path)] = lines + code_lines(path), files + 1
    return counts


def total(counts: dict[str, tuple[int, int]]) -> str:
    """One sentence: Python and C++ apart."""
    is_cpp = {name: name.endswith(("/cpp", "/cuda")) for name in counts}
    python, cpp = ([counts[name] for name in counts if is_cpp[name] is wanted] for wanted in (False, True))
    (lines, files), (cpp_lines, cpp_files) = map(sum, zip(*python, strict=True)), map(sum, zip(*cpp, strict=True))
    return f"{lines:,} code lines of Python in {files} files, {cpp_lines:,} of C++ in {cpp_files}"


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """(module, whether it is imported with the file) of every import; one for typing alone is not imported."""
    tree = ast.parse(path.read_text(encoding="utf-8"))

    def visit(node: ast.AST, eager: bool) -> Iterator[tuple[str, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from ((a.name, eager) for a in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{path}: relative import"
                is_group = child.module in {"minisgl", *(f"minisgl.{group}" for group in GROUPS)}
                names = [f"{child.module}.{a.name}" for a in child.names] if is_group else []
                yield from ((name, eager) for name in (names or [child.module or ""]))
            else:
                is_function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
                is_typing = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
                yield from visit(child, eager and not is_function and not is_typing)

    return visit(tree, True)


def imported_rooms(path: Path, rooms: set[str]) -> set[str]:
    """Which of `rooms` a file imports, besides its own and `LAZY_IMPORTS`."""
    where = str(path.relative_to(PACKAGE))
    found = set()
    for module, eager in imports(path):
        _, *parts = module.split(".") if module.startswith("minisgl.") else [""]
        room = "/".join(parts[: 2 if parts[:1] and parts[0] in GROUPS else 1])
        if room in rooms - {room_of(path)} and (eager or (where, room) not in LAZY_IMPORTS):
            found.add(room)
    return found


def read_table() -> list[Room]:
    """The rows of docs/rooms.md, in import order."""
    rooms = []
    for line in PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0].splitlines():
        if line.startswith("| `"):
            name, content, may_import, lines, files = (cell.strip() for cell in line.strip("|").split("|"))
            rooms.append(
                Room(name.strip("`"), content, tuple(may_import.split()), int(lines.replace(",", "")), int(files))
            )
    return rooms


def measured(rooms: list[Room]) -> list[Room]:
    """`rooms` with the code's counts, without imports that no file of theirs needs and without empty rooms."""
    counts, names = count_rooms(), {room.name for room in rooms}
    used = {name: set[str]() for name in counts}
    for path in PACKAGE.rglob("*.py"):
        used[room_of(path)] |= imported_rooms(path, names)
    return [
        replace(
            room,
            may_import=tuple(name for name in room.may_import if name in used[room.name]),
            lines=counts[room.name][0],
            files=counts[room.name][1],
        )
        for room in rooms
        if room.name in counts
    ]


def table(rooms: list[Room]) -> str:
    """What stands between `BEGIN` and `END`."""
    counts = {room.name: (room.lines, room.files) for room in rooms}
    return "\n".join(["", HEAD, *map(str, rooms), "", f"In all: {total(counts)}.", ""])


def main() -> None:
    if sys.argv[1:] == ["--write"]:
        text = PAGE.read_text(encoding="utf-8")
        before, rest = text.split(BEGIN)
        PAGE.write_text(before + BEGIN + table(measured(read_table())) + END + rest.split(END)[1], encoding="utf-8")
    else:
        counts = count_rooms()
        for name, (lines, files) in sorted(counts.items(), key=lambda item: -item[1][0]):
            print(f"{lines:6,} {files:4} {name}")
        print(total(counts))


if __name__ == "__main__":
    main()
