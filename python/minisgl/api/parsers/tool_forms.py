"""The forms in which model families write tool calls, and the JSON inside them."""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from minisgl.api.structured import to_text
from minisgl.params import Grammar, ToolCalls


def _openai_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _mistral_id() -> str:
    # Mistral's templates refuse any other id when the call comes back as history.
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


@dataclass(frozen=True)
class ToolForm:
    """How a family of models writes calls: `open`, then JSON, then `close` (which may be empty).

    `is_bare`: JSON at the start of the answer is a call without a marker too, if it names an offered tool, and more of
    them may follow behind semicolons. `has_name_before`: the marker may be followed by `name[ARGS]{arguments}`.
    `shows_special`: the marker is a special token, which the detokenizer would hide. `writes` is how a call is written
    when there must be one, without `calls` and, in `between`, for several.
    """

    open: str
    close: str = ""
    is_bare: bool = False
    has_name_before: bool = False
    shows_special: bool = False
    new_id: Callable[[], str] = _openai_id
    writes: ToolCalls = field(default_factory=lambda: ToolCalls([]))
    arguments: str = "arguments"

    def grammar(self, tools: list[dict[str, Any]], is_single: bool) -> Grammar:
        """That of one or more calls of `tools`, functions as OpenAI describes them, with arguments by their schemas."""
        calls = []
        for function in tools:
            before = f'{{"name": {json.dumps(function["name"], ensure_ascii=False)}, "{self.arguments}": '
            calls.append((before, function.get("parameters") or {"type": "object"}, "}"))
        written = msgspec.structs.replace(self.writes, calls=calls)
        if is_single:
            written = msgspec.structs.replace(written, between=None)
        return Grammar("calls", to_text(written, "tools"), param="tools")


TOOL_FORMS: Final = {
    "hermes": ToolForm(
        "<tool_call>",
        "</tool_call>",
        writes=ToolCalls([], open="<tool_call>\n", between="\n", close="\n</tool_call>"),
    ),
    "mistral": ToolForm(
        "[TOOL_CALLS]",
        has_name_before=True,
        shows_special=True,
        new_id=_mistral_id,
        writes=ToolCalls([], special="[TOOL_CALLS]", begin="[", between=", ", end="]"),
    ),
    "llama3": ToolForm("<|python_tag|>", is_bare=True, writes=ToolCalls([], between="; "), arguments="parameters"),
}


class _WrittenCall(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw()
    parameters: msgspec.Raw = msgspec.Raw()


def _arguments(raw: bytes) -> str:
    """The JSON object in `raw`, or in the JSON string there; raises `msgspec.MsgspecError`."""
    if raw.startswith(b'"'):
        raw = msgspec.json.decode(raw, type=str).strip().encode()
    msgspec.json.decode(raw, type=dict[str, Any])
    return raw.decode()


def read_calls(text: str, name: str | None = None) -> list[tuple[str, str]]:
    """(name, arguments) of the call or the array of calls in `text`; empty when it is anything else.

    With `name`, `text` is the arguments alone.
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
