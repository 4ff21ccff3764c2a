"""Reads harmony, the form of gpt-oss: messages with a header that names a channel and maybe a recipient.

<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from minisgl.api.parsers.forms import HARMONY, TOOL_FORMS
from minisgl.api.parsers.pieces import MAX_HEAD_CHARS, Content, ParsedCall, Parser, Piece, Reasoning, split_at
from minisgl.api.parsers.values import NAME, read_calls

_START: Final = "<|start|>"
_CHANNEL: Final = "<|channel|>"
_MESSAGE: Final = "<|message|>"
_ENDS: Final = ("<|end|>", "<|call|>", "<|return|>")
_CHANNEL_NAME: Final = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT: Final = re.compile(rf"\bto=(?:functions\.)?({NAME})")


class ChannelParser(Parser):
    """Splits text into `Reasoning` (the channel "analysis"), `ParsedCall` (to a recipient), and `Content`.

    Texts of several messages are joined with line breaks. Text without a header is content. A message to a recipient
    that is no JSON object is shown with its header, in its channel.

    The states: `_between` messages, `_in_header`, `_in_body`.
    """

    def __init__(self, tools: Mapping[str, Any] | None, only_first: bool = False) -> None:
        """`tools` are the parameters of the offered tools, by name; None: nothing is a call."""
        super().__init__(self._between)
        self._tools = tools
        self._only_first = only_first
        self._calls = 0
        self._kind: type[Content] | type[Reasoning] = Content
        self._shown: set[type[Content] | type[Reasoning]] = set()
        self._gap = ""  # before the next text of this message
        self._space: list[str] = []  # between messages; shown if no header follows
        self._header = ""
        self._name: str | None = None
        self._body: list[str] = []  # of a call

    def flush(self) -> list[Piece]:
        pieces: list[Piece] = []
        if self._state == self._in_body:
            self._add(self._held, pieces)
            self._end_message(pieces)
        elif self._held.startswith((_START, _CHANNEL)) and _RECIPIENT.search(self._held) is None:
            pass  # the beginning of a message without text
        elif self._held or not (self._shown or self._calls):
            self._open(Content)
            self._add("".join([*self._space, self._held]), pieces)
        return pieces

    def _between(self, text: str, pieces: list[Piece]) -> str:
        rest = text.lstrip()
        self._space.append(text[: len(text) - len(rest)])
        begins = (_START, _CHANNEL, _MESSAGE, "to=")  # the prompt may end before the recipient
        if rest.startswith(begins):
            self._space = []
            self._state = self._in_header
            return rest
        if any(begin.startswith(rest) for begin in begins):
            self._held = rest
            return ""
        self._open(Content)
        return "".join([*self._space, rest])

    def _in_header(self, text: str, pieces: list[Piece]) -> str:
        header, marker, rest = text[:MAX_HEAD_CHARS].partition(_MESSAGE)
        if not marker and len(text) < MAX_HEAD_CHARS:
            self._held = text
            return ""
        names = _CHANNEL_NAME.findall(header)
        self._open(Reasoning if marker and names[-1:] == ["analysis"] else Content)
        if not marker:  # not a header
            self._add(text[:1], pieces)
            return text[1:]
        recipient = _RECIPIENT.search(header)
        self._header = header + marker
        if recipient is not None and self._tools is not None:
            self._name = recipient[1]
        elif recipient is not None:
            self._add(self._header, pieces)
        return rest + text[MAX_HEAD_CHARS:]

    def _open(self, kind: type[Content] | type[Reasoning]) -> None:
        """Begin the body of a message."""
        self._state = self._in_body
        self._kind = kind
        self._gap = "\n" if kind in self._shown else ""

    def _in_body(self, text: str, pieces: list[Piece]) -> str:
        before, marker, rest = split_at(text, *_ENDS, _START, _CHANNEL)
        self._add(before, pieces)
        if not marker:
            self._held = rest
            return ""
        self._end_message(pieces)
        return rest if marker in _ENDS else marker + rest

    def _add(self, text: str, pieces: list[Piece]) -> None:
        """Add `text` to the message: show it, or keep it if it is of a call."""
        if self._name is not None:
            self._body.append(text)
        elif text:
            pieces.append(self._kind(self._gap + text))
            self._gap = ""
            self._shown.add(self._kind)

    def _end_message(self, pieces: list[Piece]) -> None:
        name, body, self._name, self._body = self._name, "".join(self._body), None, []
        self._space = []
        self._state = self._between
        if name is None:
            return
        calls = read_calls(body.strip(), name, self._tools or {}) if body.strip() else []
        if not calls:
            self._add(self._header + body, pieces)
        elif not (self._only_first and self._calls):
            pieces.append(ParsedCall(TOOL_FORMS[HARMONY].new_id(), *calls[0]))
        self._calls += len(calls)
