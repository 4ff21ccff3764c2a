"""Terminal input and output for the chat: line editing and completion, word wrap, no echo while text streams."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import sys
import termios
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from minisgl.process.processes import signal_handler

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession

TAB: Final = 8
# A space, a word (Korean has spaces), or a character of a script without spaces with what must not begin a line: marks,
# the rest of an emoji, closing punctuation.
PIECE: Final = re.compile(
    r"\s|[^\s\u2e80-\uabff\ud7b0-\U0010ffff]+|"
    r"\S(?:\u200d\S?|[\u0300-\u036f\u3099\u309a\u20e3\ufe00-\ufe0f\U0001f3fb-\U0001f3ff、。，．：；！？）」』】》])*"
)
FENCES: Final = ("```", "~~~")

LineReader = Callable[[str], str]  # prompt -> line; raises EOFError at the end of the input, and KeyboardInterrupt


class WordWrap:
    """Breaks streamed text between words, but not in code blocks. `width` returns the columns; 0 breaks nothing."""

    def __init__(self, width: Callable[[], int]) -> None:
        self._width = width
        self._column = 0
        self._word = ""  # held back: if it continues, it may belong on the next line
        self._is_code = False
        self._is_line_start = True

    @classmethod
    def of_stdout(cls) -> WordWrap:
        """Return a `WordWrap` for the terminal of stdout. If stdout is a file, it breaks nothing."""
        return cls(lambda: shutil.get_terminal_size().columns if sys.stdout.isatty() else 0)

    def feed(self, text: str) -> str:
        """Add text; return what can be written now."""
        if not self._width():
            return self.flush() + text
        pieces = PIECE.findall(self._word + text)
        self._word = pieces.pop() if pieces and not pieces[-1].isspace() else ""
        return "".join(map(self._wrapped, pieces))

    def flush(self) -> str:
        """Return the rest of the text, at its end."""
        word, self._word = self._word, ""
        return self._wrapped(word) if word else ""

    def _wrapped(self, piece: str) -> str:
        if piece == "\n":
            self._column, self._is_line_start = 0, True
            return piece
        if self._is_line_start and not piece.isspace():
            self._is_code ^= piece.startswith(FENCES)
            self._is_line_start = False
        width = max(self._width(), 1)
        size = TAB - self._column % TAB if piece == "\t" else sum(map(_columns, piece))
        fits = self._column + size < width or not self._column or self._is_code
        self._column = (self._column + size if fits else size * (not piece.isspace())) % width
        return piece if fits else "\n" if piece.isspace() else f"\n{piece}"


def _columns(character: str) -> int:
    is_mark = unicodedata.category(character) in ("Mn", "Me", "Cf")  # Cf: joins emoji
    return 0 if is_mark else 1 + (unicodedata.east_asian_width(character) in "WF")


@contextlib.contextmanager
def no_echo() -> Iterator[None]:
    """Hide what is typed within the block. The next prompt gets it, even after a Ctrl-C."""
    if not sys.stdin.isatty():
        yield
        return
    old = termios.tcgetattr(sys.stdin)
    new = [*old[:3], (old[3] & ~termios.ECHO) | termios.NOFLSH, *old[4:]]
    termios.tcsetattr(sys.stdin, termios.TCSADRAIN, new)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, old)


def interruptible() -> contextlib.AbstractContextManager[None]:
    """Raise KeyboardInterrupt for SIGINT within the block."""
    return signal_handler(signal.SIGINT, signal.default_int_handler)


def line_reader(commands: Sequence[str]) -> LineReader:
    """Return the best line reader that the terminal and the installed packages allow. Tab completes `commands`."""
    if not sys.stdin.isatty():
        return lambda _: _interruptible_input("")
    try:
        return _session(commands).prompt
    except ImportError:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (gives input() line editing, and the history of this session)
        return _interruptible_input


def _interruptible_input(prompt: str) -> str:
    with interruptible():
        return input(prompt)


def _session(commands: Sequence[str]) -> PromptSession[str]:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.history import FileHistory, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
    from prompt_toolkit.shortcuts import CompleteStyle

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    path = _history_file()
    return PromptSession(
        history=InMemoryHistory() if path is None else FileHistory(path),
        key_bindings=keys,
        completer=WordCompleter(list(commands), sentence=True),
        complete_style=CompleteStyle.READLINE_LIKE,
        complete_while_typing=False,
    )


def _history_file() -> Path | None:
    """Return the file with the history of earlier sessions, readable only by this user; None if it cannot be made."""
    folder = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "minisgl"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = folder / "chat_history"
        path.touch(mode=0o600)
    except OSError:
        return None
    return path
