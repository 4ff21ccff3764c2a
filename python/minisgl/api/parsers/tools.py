"""Tool calls in generated text: one parser for all forms."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from minisgl.api.parsers.forms import JSON, PYTHON, Body, ToolForm
from minisgl.api.parsers.pieces import MAX_HEAD_CHARS, Content, ParsedCall, Parser, Piece, ValueScanner, split_at
from minisgl.api.parsers.values import NAME, read_calls

_JUNK: Final = " \t\r\n;,`}])"  # between calls, and what models write too much after one
_NAME: Final = re.compile(NAME)


class ToolParser(Parser):
    """Splits text into `Content` and `ParsedCall`.

    A call is emitted when its value is complete and valid. Text that proves not to be a call is content. White space
    between and around calls is dropped.

    The states: `_at_start` if a call may have no marker, `_in_text` before a marker, `_in_head` between the marker and
    the value, `_in_value`, `_in_tail` after a call, where closing markers are dropped and another value may follow.
    A call has the id that the model wrote, if it wrote one that is new, or else one of the form.
    """

    def __init__(self, form: ToolForm, tools: Mapping[str, Any], only_first: bool = False) -> None:
        """`tools` are the parameters of the offered tools, by name. `only_first` drops all calls after the first."""
        super().__init__(self._at_start if form.is_bare else self._in_text)
        self._form = form
        self._tools = tools
        self._only_first = only_first
        self._space: list[str] = []  # white space after the last text; shown if more text follows
        # What precedes a value, and its parts; or what follows a call. Content if it is not a call.
        self._raw: list[str] = []
        self._size = 0  # characters of the value
        self._heads = [(body, re.compile(rf"\s*{body.head}")) for body in form.bodies]
        self._body: Body = JSON
        self._name: str | None = None
        self._id: str | None = None
        self._ids: set[str] = set()
        self._is_marked = False
        self._scanner = ValueScanner()
        self._is_closed = False  # whether a closing marker has followed the last call
        self._calls = 0
        self._has_content = False

    def flush(self) -> list[Piece]:
        pieces: list[Piece] = []
        if self._state == self._in_tail:
            if not any(marker.startswith(self._held) for marker in (*self._form.close, *self._form.open)):
                self._show(self._held, pieces)
            return pieces
        if self._state == self._in_value and self._body.is_unquoted:  # whose brackets tell whether it is complete
            self._raw.append(self._held)
            self._held = ""
            self._end_value(pieces)
        while self._state == self._in_head and self._held:  # no call begins at the marker, but one may after it
            rest, self._held = self._reject(pieces, self._held), ""
            pieces += self.feed(rest)
        self._reject(pieces)
        self._show(self._held, pieces)
        if (space := "".join(self._space)) and not self._calls:
            pieces.append(Content(space))
        return pieces

    def _at_start(self, text: str, pieces: list[Piece]) -> str:
        rest = text.lstrip()
        self._space.append(text[: len(text) - len(rest)])
        if not rest or any(m.startswith(rest) for m in self._form.open):
            self._held = rest
            return ""
        self._state = self._in_text
        return self._begin(rest) if rest[0] in "{[`" else rest

    def _in_text(self, text: str, pieces: list[Piece]) -> str:
        before, marker, rest = split_at(text, *self._form.open)
        self._show(before, pieces)
        if marker:
            return self._begin(rest, marker)
        self._held = rest
        return ""

    def _begin(self, rest: str, marker: str = "") -> str:
        is_part = any(body.tags is not None and body.tags.begin == marker for body in self._form.bodies)  # of the value
        self._raw = [] if is_part else [marker]
        self._is_marked = marker != ""
        self._size = 0
        self._scanner = ValueScanner()
        self._state = self._in_head
        return marker + rest if is_part else rest

    def _in_head(self, text: str, pieces: list[Piece]) -> str:
        """Consume what precedes the value. If no value begins soon, the marker is content, and `text` is read again."""
        matches = ((body, head.match(text, 0, MAX_HEAD_CHARS)) for body, head in self._heads)
        self._body, head = next((found for found in matches if found[1] is not None), (JSON, None))
        if head is None:
            if len(text) >= MAX_HEAD_CHARS:
                return self._reject(pieces, text)
            self._held = text
            return ""
        groups = head.groupdict()
        self._name, self._id = groups.get("name"), groups.get("id")
        self._raw = ["".join(self._raw) + head[0]]
        self._state = self._in_value
        return text[head.end() :]

    def _in_value(self, text: str, pieces: list[Piece]) -> str:
        if self._body.end:
            before, marker, rest = split_at(text, self._body.end)
            part, is_complete = before + marker, marker != ""
            self._held = "" if is_complete else rest
        else:
            end = self._scanner.feed(text)
            part, rest, is_complete = text[:end], text[end:] if end else "", end is not None
        self._raw.append(part)
        if not self._is_marked and self._size < MAX_HEAD_CHARS <= self._size + len(part):
            start = "".join(self._raw[1:])[:MAX_HEAD_CHARS]
            if not any(name in start for name in self._tools):  # an answer in JSON; is not held back until its end
                return self._reject(pieces, rest)
        self._size += len(part)
        if not is_complete:
            return ""
        self._end_value(pieces)
        return rest

    def _end_value(self, pieces: list[Piece]) -> None:
        """Emit the calls in the value. If it has none, everything since the marker is content."""
        body = self._body
        text = "".join(self._raw[1:]).removesuffix(body.end)
        calls = read_calls(text, self._name, self._tools, body.tags, body.is_unquoted)
        if not calls or (not self._is_marked and any(name not in self._tools for name, _ in calls)):
            self._reject(pieces)
            return
        for name, arguments in calls:
            if not (self._only_first and self._calls):
                written = "" if self._id in self._ids else self._id
                call = ParsedCall(written or self._form.new_id(), name, arguments)
                self._ids.add(call.id)
                pieces.append(call)
            self._calls += 1
        self._state = self._in_tail
        self._is_closed = False
        self._raw = []

    def _in_tail(self, text: str, pieces: list[Piece]) -> str:
        rest = text.lstrip(_JUNK)
        self._raw.append(text[: len(text) - len(rest)])
        marker = next((m for m in self._form.close if rest.startswith(m)), "")
        if marker:
            self._raw = []
            self._is_closed = True
            return rest[len(marker) :]
        if not rest or any(m != rest and m.startswith(rest) for m in (*self._form.close, *self._form.open)):
            self._held = rest
            return ""
        name = None if self._is_closed or self._body is not PYTHON else _NAME.match(rest, 0, MAX_HEAD_CHARS)
        if name and len(rest) == name.end() < MAX_HEAD_CHARS:
            self._held = rest
            return ""
        self._space += self._raw
        if (rest[0] in "{[" and not rest.startswith(self._form.open)) or (name and rest.startswith("(", name.end())):
            return self._begin(rest)
        self._raw = []
        self._state = self._in_text
        return rest

    def _reject(self, pieces: list[Piece], rest: str = "") -> str:
        """Emit everything since the marker as content; return `rest`, the text that was not consumed."""
        raw, self._raw = "".join(self._raw), []
        self._state = self._in_text
        self._show(raw, pieces)
        return rest

    def _show(self, text: str, pieces: list[Piece]) -> None:
        """Emit `text` as content, except for trailing white space, which waits for the next text."""
        if shown := text.rstrip():
            is_after_calls = self._calls > 0 and not self._has_content
            pieces.append(Content(shown.lstrip() if is_after_calls else "".join([*self._space, shown])))
            self._space = []
            self._has_content = True
        self._space.append(text[len(shown) :])
