"""The table of rooms in docs/rooms.md shows the size of the code and no import that is not needed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.code_lines import LAZY_IMPORTS, PACKAGE, code_lines, count_rooms, imports, measured, read_table


def test_the_table_of_rooms_is_up_to_date() -> None:
    assert {*count_rooms()} == {room.name for room in read_table()}
    assert read_table() == measured(read_table()), "run `make rooms`, and say in the commit what the growth is for"


def test_blank_lines_comments_and_docstrings_are_not_counted(tmp_path: Path) -> None:
    python, cpp = tmp_path / "a.py", tmp_path / "a.h"
    python.write_text('"""Two\nlines."""\n\n# why\nx = [\n    1,  # one\n]\n\ndef f():\n    "Doc."\n    return x\n')
    cpp.write_text("// why\n\nint f() {\n    return 1;  // one\n}\n")
    assert (code_lines(python), code_lines(cpp)) == (5, 3)


@pytest.mark.parametrize(("file", "room"), sorted(LAZY_IMPORTS))
def test_exceptions_to_the_order_are_needed(file: str, room: str) -> None:
    assert any(
        module.startswith(f"minisgl.{room}".replace("/", ".")) for module, eager in imports(PACKAGE / file) if not eager
    )
