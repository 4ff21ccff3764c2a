"""Tool calls in generated text: the forms in which model families write them, and one parser for all."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from minisgl.api.parsers.pieces import Content, JsonScanner, ParsedCall, Parser, Piece, first_not_space, split_at
from minisgl.api.structured import json_text
from minisgl.params import Grammar, ToolCalls

MAX_HEAD_CHARS: Final = 256  # between a marker and the JSON
_NAME: Final = re.compile(r"[\w.-]+")


def _openai_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _mistral_id() -> str:
    # Mistral's templates refuse any other form of id when the call is part of the conversation.
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


@dataclass(frozen=True)
class ToolForm:
    """The form of a model family's calls: `open`, then JSON, then `close` (which may be empty).

    `is_bare`: JSON at the start of the answer is a call without a marker, if it names an offered tool; more calls may
    follow after semicolons. `has_name_before`: the marker may be followed by `name[ARGS]{arguments}`. `is_special`:
    the marker is a special token, which the detokenizer would hide. `forced` is the grammar of forced calls, with empty
    `calls` and the separator for several calls in `between`.
    """

    open: str
    close: str = ""
    is_bare: bool = False
    has_name_before: bool = False
    is_special: bool = False
    new_id: Callable[[], str] = _openai_id
    forced: ToolCalls = field(default_factory=lambda: ToolCalls([]))
    arguments: str = "arguments"

    def grammar(self, tools: list[dict[str, Any]], is_single: bool) -> Grammar:
        """Return the grammar of one call (`is_single`) or more to `tools`, which are OpenAI's function descriptions."""
        calls = []
        for function in tools:
            before = f'{{"name": {json.dumps(function["name"], ensure_ascii=False)}, "{self.arguments}": '
            calls.append((before, function.get("parameters") or {"type": "object"}, "}"))
        between = None if is_single else self.forced.between
        forced = msgspec.structs.replace(self.forced, calls=calls, between=between)
        return Grammar("calls", json_text(forced, "tools"), param="tools")


TOOL_FORMS: Final = {
    "hermes": ToolForm(
        "<tool_call>",
        "</tool_call>",
        forced=ToolCalls([], open="<tool_call>\n", between="\n", close="\n</tool_call>"),
    ),
    "mistral": ToolForm(
        "[TOOL_CALLS]",
        has_name_before=True,
        is_special=True,
        new_id=_mistral_id,
        forced=ToolCalls([], special="[TOOL_CALLS]", begin="[", between=", ", end="]"),
    ),
    "llama3": ToolForm("<|python_tag|>", is_bare=True, forced=ToolCalls([], between="; "), arguments="parameters"),
}


class _WrittenCall(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw()
    parameters: msgspec.Raw = msgspec.Raw()


def _arguments(raw: bytes) -> str:
    """Return the JSON object in `raw`, which may be inside a JSON string. Raises `msgspec.MsgspecError` without one."""
    if raw.startswith(b'"'):
        raw = msgspec.json.decode(raw, type=str).strip().encode()
    msgspec.json.decode(raw, type=dict[str, Any])
    return raw.decode()


def read_calls(text: str, name: str | None = None) -> list[tuple[str, str]]:
    """Return (name, arguments) of the call or array of calls in `text`; [] for any other text.

    With `name`, `text` has only the arguments.
    """
    try:
        data = text.encode()
        if name is not None:
            return [(name, _arguments(data))]
        if text.startswith("["):
            written = msgspec.json.decode(data, type=list[_WrittenCall])
        else:
            written = [msgspec.json.decode(data, type=_WrittenCall)]
        calls = [(c.name, _arguments(bytes(c.arguments) or bytes(c.parameters) or b"{}")) for c in written]
        return calls if all(name for name, _ in calls) else []
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return []


class ToolParser(Parser):
    """Splits text into `Content` and `ParsedCall`.

    A call is emitted when it is complete and valid. Text that proves not to be a call is content. White space between
    and around calls is dropped.

    The states: `_in_text` before a marker, `_in_head` between the marker and the JSON, `_in_value` inside the JSON,
    `_in_tail` between the JSON and the closing marker.
    """

    def __init__(self, form: ToolForm, tools: frozenset[str], only_first: bool = False) -> None:
        """`tools` are the names of offered tools. `only_first` drops all calls after the first."""
        super().__init__(self._in_text)
        self._form = form
        self._tools = tools
        self._only_first = only_first
        self._may_be_bare = form.is_bare
        self._space: list[str] = []  # white space after the last text; shown if more text follows
        self._raw: list[str] = []  # everything since the marker; content if it is not a call
        self._value: list[str] = []
        self._name: str | None = None
        self._is_marked = False
        self._scanner = JsonScanner()
        self._calls = 0
        self._has_content = False

    def flush(self) -> list[Piece]:
        pieces: list[Piece] = []
        if self._state == self._in_tail:  # the model omitted the closing marker, or a stop string cut it off
            self._end_call(pieces)
        else:
            self._reject(pieces)
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
            if self._form.open.startswith(rest):  # also when `rest` is empty
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
        self._raw = [self._form.open] if is_marked else []
        self._value = []
        self._name = None
        self._scanner = JsonScanner()
        self._state = self._in_head if is_marked else self._in_value
        self._is_marked = is_marked
        return rest

    def _in_head(self, text: str, pieces: list[Piece]) -> str:
        """Consume white space, and a name if the form has one, up to the bracket that opens the JSON.

        If the bracket is missing, the marker is content, and the short `text` is read again.
        """
        form = self._form
        start = end = first_not_space(text)
        if start < len(text) and text[start] not in ("{[" if form.has_name_before else "{"):
            end = text.find("{", start) if form.has_name_before else -1
            if end < 0 and not form.has_name_before:
                return self._reject(pieces, text)
            end = len(text) if end < 0 else end
        if end > MAX_HEAD_CHARS:
            return self._reject(pieces, text)
        if end == len(text):
            self._held = text
            return ""
        if start < end:
            name, bracket, _ = text[start:end].partition("[")
            if not _NAME.fullmatch(name) or (bracket and not text.endswith("[ARGS]", start, end)):
                return self._reject(pieces, text)
            self._name = name
        self._raw.append(text[:end])
        self._state = self._in_value
        return text[end:]

    def _in_value(self, text: str, pieces: list[Piece]) -> str:
        end = self._scanner.feed(text)
        self._value.append(text[:end])
        self._raw.append(text[:end])
        if end is None:
            return ""
        self._state = self._in_tail
        if not self._form.close:
            self._end_call(pieces)
        return text[end:]

    def _in_tail(self, text: str, pieces: list[Piece]) -> str:
        start = first_not_space(text)
        close = self._form.close
        if text.startswith(close, start):
            self._raw.append(text[: start + len(close)])
            self._end_call(pieces)
            return text[start + len(close) :]
        if start == len(text):
            self._raw.append(text)
        elif close.startswith(text[start:]):
            self._raw.append(text[:start])
            self._held = text[start:]
        else:
            return self._reject(pieces, text)
        return ""

    def _end_call(self, pieces: list[Piece]) -> None:
        """Emit the calls in the value. If it has none, everything since the marker is content."""
        calls = read_calls("".join(self._value), self._name)
        if not calls or (not self._is_marked and any(name not in self._tools for name, _ in calls)):
            self._reject(pieces)
            return
        for name, arguments in calls:
            if not (self._only_first and self._calls):
                pieces.append(ParsedCall(self._form.new_id(), name, arguments))
            self._calls += 1
        self._state = self._in_text
        self._raw = []
        self._held = ""

    def _reject(self, pieces: list[Piece], rest: str = "") -> str:
        """Emit everything since the marker as content; return `rest`, the text that was not consumed."""
        raw, self._raw = "".join(self._raw), []
        self._state = self._in_text
        if raw:
            self._may_be_bare = False
            self._show(raw, pieces)
        return rest

    def _show(self, text: str, pieces: list[Piece]) -> None:
        """Emit `text` as content, except for trailing white space, which waits for the next text."""
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
