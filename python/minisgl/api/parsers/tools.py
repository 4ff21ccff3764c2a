"""Tool calls in generated text: the forms in which model families write them, and one parser for all."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from minisgl.api.parsers.pieces import Content, ParsedCall, Parser, Piece, ValueScanner, split_at
from minisgl.api.parsers.values import read_calls
from minisgl.api.structured import json_text
from minisgl.core.params import ToolCalls

MAX_HEAD_CHARS: Final = 256  # between a marker and the value; in which a value without a marker must name its tool
# Between a marker and the value: the name of the function, or nothing. The value is JSON, a list, or text with tags.
_HEAD: Final = re.compile(
    r"""\s*(?:<｜tool▁call▁begin｜>\s*)?(?:function<｜tool▁sep｜>)?
    (?: (?P<name>[\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\]|<｜tool▁sep｜>)?\s*(?:```json\s*)?(?=\{)
      | (?:```(?:json)?\s*)?(?=[{\[])
      | (?=<function=)
      | (?=[\w.-]+\s*</?(?:arg_key|tool_call)>) )""",
    re.VERBOSE,
)
_JUNK: Final = " \t\r\n;,`}])"  # between calls, and what models write too much after one
_MARKERS: Final = re.compile(r"<[^<>\s]+>|\[[A-Z_]+\]")


def _openai_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _mistral_id() -> str:
    # Mistral's templates refuse any other form of id when the call is part of the conversation.
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


@dataclass(frozen=True)
class ToolForm:
    """The form of a model family's calls: a marker of `open`, a value, and markers of `close`, which may be absent.

    All forms share the reader of values (`values.py`). `sign` is a regular expression that finds the family by its chat
    template. A grammar enforces calls like `call`, with "$name" and "$arguments": the first marker of `open` (if not
    `is_bare`), `begin`, calls with `between` between them, `end`, the last marker of `close`.

    `is_bare`: a value at the start of the answer is a call without a marker, if it names an offered tool.
    """

    sign: str
    open: tuple[str, ...]
    close: tuple[str, ...] = ()
    call: str = '{"name": "$name", "arguments": $arguments}'
    begin: str = "["
    between: str = ", "
    end: str = "]"
    is_bare: bool = False
    new_id: Callable[[], str] = _openai_id

    @property
    def markers(self) -> frozenset[str]:
        """All texts of the form that may be special tokens, which the detokenizer would hide."""
        return frozenset((*self.open, *self.close, *_MARKERS.findall(self.call)))

    def calls(self, functions: list[dict[str, Any]], is_single: bool, is_exact: bool = True) -> str:
        """Return the JSON of the `ToolCalls` to `functions`: one call (`is_single`), or more.

        With `is_exact`, arguments follow the function's `parameters`; else they are any object.
        """
        calls = []
        for function in functions:
            schema = (is_exact and function.get("parameters")) or {"type": "object"}
            before, after = self.call.split("$arguments")
            name = json.dumps(function["name"], ensure_ascii=False)[1:-1]
            calls.append((before.replace("$name", name), schema, after))
        begin, end = (("",), ("",)) if self.is_bare else (self.open, self.close or ("",))
        between = None if is_single else self.between
        whole = ToolCalls(calls, begin[0] + self.begin, between, self.end + end[-1], sorted(self.markers))
        return json_text(whole, "tools")


TOOL_FORMS: Final = {
    "hermes": ToolForm(
        "<tool_call>",
        ("<tool_call>", "<function="),
        ("</function>", "</tool_call>"),
        begin="\n",
        between="\n</tool_call>\n<tool_call>\n",
        end="\n",
    ),
    "mistral": ToolForm(r"\[TOOL_CALLS\]", ("[TOOL_CALLS]",), new_id=_mistral_id),
    "deepseek": ToolForm(
        "<｜tool▁call▁begin｜>",
        ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
        ("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>$name\n```json\n$arguments\n```<｜tool▁call▁end｜>",
        begin="",
        between="\n",
        end="",
    ),
    "phi4": ToolForm(r"<\|tool\|>", ("<|tool_call|>", "functools"), ("<|/tool_call|>",)),
    "granite": ToolForm(r"<\|tool_call\|>", ("<|tool_call|>",)),
    "lfm2": ToolForm(r"<\|tool_list_start\|>", ("<|tool_call_start|>",), ("<|tool_call_end|>",)),
    "llama3": ToolForm(
        r"<\|python_tag\|>|<\|start_header_id\|>ipython|Environment: ipython",
        ("<|python_tag|>",),
        call='{"name": "$name", "parameters": $arguments}',
        begin="",
        between="; ",
        end="",
        is_bare=True,
    ),
    "pythonic": ToolForm(r"\[func_?name1?\(", ("<|python_start|>",), ("<|python_end|>",), is_bare=True),
}


class ToolParser(Parser):
    """Splits text into `Content` and `ParsedCall`.

    A call is emitted when its value is complete and valid. Text that proves not to be a call is content. White space
    between and around calls is dropped.

    The states: `_at_start` if a call may have no marker, `_in_text` before a marker, `_in_head` between the marker and
    the value, `_in_value`, `_in_tail` after a call, where closing markers are dropped and another value may follow.
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
        self._name: str | None = None
        self._is_marked = False
        self._scanner = ValueScanner()
        self._end = ""  # the marker that ends a value with tags; "": the scanner finds the end
        self._calls = 0
        self._has_content = False

    def flush(self) -> list[Piece]:
        pieces: list[Piece] = []
        if self._state == self._in_tail:
            return pieces
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
        is_part = marker == "<function="  # of the value
        self._raw = [] if is_part else [marker]
        self._is_marked = marker != ""
        self._size = 0
        self._scanner = ValueScanner()
        self._state = self._in_head
        return marker + rest if is_part else rest

    def _in_head(self, text: str, pieces: list[Piece]) -> str:
        """Consume what precedes the value. If no value begins soon, the marker is content, and `text` is read again."""
        head = _HEAD.match(text[:MAX_HEAD_CHARS])
        if head is None:
            if len(text) >= MAX_HEAD_CHARS:
                return self._reject(pieces, text)
            self._held = text
            return ""
        self._name = head["name"]
        value = text[head.end() :]
        self._end = "" if value[0] in "{[" else "</function>" if value[0] == "<" else "</tool_call>"
        self._raw = ["".join(self._raw) + head[0]]
        self._state = self._in_value
        return value

    def _in_value(self, text: str, pieces: list[Piece]) -> str:
        if self._end:
            before, marker, rest = split_at(text, self._end)
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
        calls = read_calls("".join(self._raw[1:]), self._name, self._tools)
        if not calls or (not self._is_marked and any(name not in self._tools for name, _ in calls)):
            self._reject(pieces)
            return
        for name, arguments in calls:
            if not (self._only_first and self._calls):
                pieces.append(ParsedCall(self._form.new_id(), name, arguments))
            self._calls += 1
        self._state = self._in_tail
        self._raw = []

    def _in_tail(self, text: str, pieces: list[Piece]) -> str:
        rest = text.lstrip(_JUNK)
        self._raw.append(text[: len(text) - len(rest)])
        marker = next((m for m in self._form.close if rest.startswith(m)), "")
        if marker:
            self._raw = []
            return rest[len(marker) :]
        if not rest or any(m != rest and m.startswith(rest) for m in (*self._form.close, *self._form.open)):
            self._held = rest
            return ""
        self._space += self._raw
        if rest[0] in "{[" and not rest.startswith(self._form.open):
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
