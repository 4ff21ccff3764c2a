"""Reading what somebody types: lines with editing and history, and messages of several lines."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from minisgl.chat.interrupt import interruptible

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession

LineReader = Callable[[str], str]  # prompt -> what was typed; raises EOFError at the end and KeyboardInterrupt
BLOCK: Final = '"""'


def read_message(read_line: LineReader) -> str:
    """One message: a line, lines that each end with a backslash but the last, or all between two triple quotes."""
    line = read_line("> ")
    if line.strip().startswith(BLOCK):
        lines = [line.strip().removeprefix(BLOCK)]
        while not lines[-1].rstrip().endswith(BLOCK):
            lines.append(read_line("… "))
        lines[-1] = lines[-1].rstrip().removesuffix(BLOCK)
        return "\n".join(lines).strip("\n")
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(read_line("… "))
    return "\n".join(lines).strip()


def line_reader() -> LineReader:
    """The best that terminal and installed packages allow."""
    if not sys.stdin.isatty():
        return lambda _: _interruptible_input("")
    try:
        return _session().prompt
    except ImportError:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (gives input() line editing, and the history of this session)
        return _interruptible_input


def _interruptible_input(prompt: str) -> str:
    with interruptible():
        return input(prompt)


def _session() -> PromptSession[str]:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    path = _history_file()
    return PromptSession(history=InMemoryHistory() if path is None else FileHistory(path), key_bindings=keys)


def _history_file() -> Path | None:
    """Where lines are remembered from one session to the next, readable by nobody else; None: nowhere."""
    folder = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "minisgl"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = folder / "chat_history"
        path.touch(mode=0o600)
    except OSError:
        return None
    return path
