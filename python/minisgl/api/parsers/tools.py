"""One parser for all forms of tool calls in generated text."""

from __future__ import annotations

import re
from enum import Enum, auto
from typing import Final

from minisgl.api.parsers.pieces import Content, JsonScanner, Piece, ToolCall, first_not_space, split_at
from minisgl.api.parsers.tool_forms import ToolForm, read_calls

MAX_HEAD_CHARS: Final = 256  # of what may stand between a marker and the JSON
STRIDE: Final = 512  # characters read at once: the rest of a long text is not copied at every marker
_NAME: Final = re.compile(r"[\w.-]+")


class _State(Enum):
    TEXT = auto()  # looking for a marker
    HEAD = auto()  # behind it, before the JSON
    VALUE = auto()  # inside the JSON
    TAIL = auto()  # behind it, before the closing marker


class ToolParser:
    """Text -> `Content` and `ToolCall`. A call is given out when it is complete and valid, never before, so what turns
    out to be none stays content. White space between the calls and around all of them belongs to them."""

    def __init__(self, form: ToolForm, tools: frozenset[str], only_first: bool = False) -> None:
        """`tools` are the names that the request offers; `only_first` drops the calls after the first."""
        self._form = form
        self._tools = tools
        self._only_first = only_first
        self._state = _State.TEXT
        self._may_be_bare = form.is_bare
        self._held = ""  # the beginning of a marker, perhaps
        self._space: list[str] = []  # white space behind the last text; shown if more text comes
        self._raw: list[str] = []  # everything since the marker, to be content if it is no call
        self._value: list[str] = []
        self._name: str | None = None
        self._is_marked = False
        self._scanner = JsonScanner()
        self._calls = 0
        self._has_content = False

    def feed(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        for i in range(0, len(text), STRIDE):
            rest, self._held = self._held + text[i : i + STRIDE], ""
            while rest:
                rest = self._step(rest, pieces)
        return pieces

    def _step(self, text: str, pieces: list[Piece]) -> str:
        """Read `text` as far as one state goes; returns the rest."""
        match self._state:
            case _State.TEXT:
                return self._in_text(text, pieces)
            case _State.HEAD:
                return self._in_head(text, pieces)
            case _State.VALUE:
                return self._in_value(text, pieces)
            case _State.TAIL:
                return self._in_tail(text, pieces)

    def flush(self) -> list[Piece]:
        pieces: list[Piece] = []
        # A complete value without its closing marker: the model (or a stop string) has left it out.
        if self._state is not _State.TAIL or not self._accept(pieces):
            self._reject(pieces)
            if self._held:
                self._show(self._held, pieces)
        if self._space and not self._calls:
            pieces.append(Content("".join(self._space)))
        return pieces

    def _in_text(self, text: str, pieces: list[Piece]) -> str:
        if self._may_be_bare:
            separators = " \t\r\n;" if self._calls else " \t\r\n"
            rest = text.lstrip(separators)
            self._space.append(text[: len(text) - len(rest)])
            if rest.startswith("{"):
                return self._begin(rest, is_marked=False)
            if self._form.open.startswith(rest):  # also when nothing is left
                self._held = rest
                return ""
            self._may_be_bare = rest.startswith(self._form.open)
            text = rest
        before, rest, is_found = split_at(text, self._form.open)
        self._show(before, pieces)
        if is_found:
            return self._begin(rest, is_marked=True)
        self._held = rest
        return ""

    def _begin(self, rest: str, is_marked: bool) -> str:
        self._raw, self._value, self._name = [self._form.open] if is_marked else [], [], None
        self._scanner = JsonScanner()
        self._state = _State.HEAD if is_marked else _State.VALUE
        self._is_marked = is_marked
        return rest

    def _in_head(self, text: str, pieces: list[Piece]) -> str:
        """Up to the bracket that opens the JSON: white space, and a name where the form has one."""
        form = self._form
        start = end = first_not_space(text)
        if start < len(text) and text[start] not in ("{[" if form.has_name_before else "{"):
            end = text.find("{", start) if form.has_name_before else -1
            if end < 0 and not form.has_name_before:
                return self._leave_head(text, pieces)
            end = len(text) if end < 0 else end
        if end > MAX_HEAD_CHARS:
            return self._leave_head(text, pieces)
        if end == len(text):
            self._held = text
            return ""
        if start < end:
            name, bracket, _ = text[start:end].partition("[")
            if not _NAME.fullmatch(name) or (bracket and not text.endswith("[ARGS]", start, end)):
                return self._leave_head(text, pieces)
            self._name = name
        self._raw.append(text[:end])
        self._state = _State.VALUE
        return text[end:]

    def _leave_head(self, text: str, pieces: list[Piece]) -> str:
        """The marker is content; `text`, all that follows it, is read again (it is short, so this stays linear)."""
        self._reject(pieces)
        return text

    def _in_value(self, text: str, pieces: list[Piece]) -> str:
        end = self._scanner.feed(text)
        self._value.append(text[:end])
        self._raw.append(text[:end])
        if end is None:
            return ""
        self._state = _State.TAIL
        if not self._form.close and not self._accept(pieces):
            self._reject(pieces)
        return text[end:]

    def _in_tail(self, text: str, pieces: list[Piece]) -> str:
        start = first_not_space(text)
        close = self._form.close
        if text.startswith(close, start):
            self._raw.append(text[: start + len(close)])
            if not self._accept(pieces):
                self._reject(pieces)
            return text[start + len(close) :]
        if start == len(text):
            self._raw.append(text)
        elif close.startswith(text[start:]):
            self._raw.append(text[:start])
            self._held = text[start:]
        else:
            self._reject(pieces)
            return text
        return ""

    def _accept(self, pieces: list[Piece]) -> bool:
        """Give out the calls in the value; False when it is none."""
        calls = read_calls("".join(self._value), self._name)
        if not calls or (not self._is_marked and any(name not in self._tools for name, _ in calls)):
            return False
        for name, arguments in calls:
            if not (self._only_first and self._calls):
                pieces.append(ToolCall(self._form.new_id(), name, arguments))
            self._calls += 1
        self._state = _State.TEXT
        self._raw = []
        return True

    def _reject(self, pieces: list[Piece]) -> None:
        """Everything since the marker is content after all."""
        raw, self._raw = "".join(self._raw), []
        self._state = _State.TEXT
        if raw:
            self._may_be_bare = False
            self._show(raw, pieces)

    def _show(self, text: str, pieces: list[Piece]) -> None:
        """`text` is content, but for the white space at its end, which waits for what follows."""
        shown = text.rstrip()
        if shown:
            self._may_be_bare = False
            before = "" if self._calls and not self._has_content else "".join(self._space)
            start = first_not_space(shown) if self._calls and not self._has_content else 0
            pieces.append(Content(before + shown[start:]))
            self._space = []
            self._has_content = True
        if len(shown) < len(text):
            self._space.append(text[len(shown) :])
