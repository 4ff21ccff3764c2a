"""Who may import whom: the table in docs/architecture.md, held against the syntax trees."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.code_lines import PACKAGE, imported_rooms, imports, read_table, room_of

ALLOWED = {room.name: {*room.may_import} for room in read_table()}
# May not even indirectly import torch at module level: these run in processes that must stay small.
TORCH_FREE = {"errors", "registry", "settings", "core", "params", "process", "checkpoint", "message", "tokenizer"}
TORCH_FREE |= {"api", "launch", "chat", "bench", "__init__", "__main__", "grammar"}
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
