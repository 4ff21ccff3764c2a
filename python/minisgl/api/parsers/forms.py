"""The forms in which model families write tool calls: a table of markers and bodies, which parser and grammar share."""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import string
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

from minisgl.api.parsers.values import NAME, Tags, constants_of, parts_of, types_of
from minisgl.api.structured import json_text
from minisgl.core.params import KEY, NUMBER, CallItem, ToolCalls

HARMONY: Final = "harmony"  # the name of a form whose messages have channels (channels.py)
MARKER: Final = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]")  # what may be a special token
JSON_CALL: Final = '{"name": "$name", "arguments": $arguments}'
# What a schema may have whose arguments are written one by one, and those of their parts that are written without JSON.
_OBJECT: Final = {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema", "strict"}
_NOTES: Final = {"title", "description", "default", "examples", "example", "deprecated", "$comment"}
_OTHER_REF: Final = re.compile(r'"\$ref": "#(?!/(?:\$defs|definitions)/)')
_TEXT: Final = {"type", "enum", "const", "anyOf", "$ref", "nullable"} | _NOTES


@dataclass(frozen=True)
class Body:
    """What stands between the markers of a call.

    `head` is a regular expression for what precedes the value: it ends where the value begins, and may have groups for
    the `name` of the function and the `id` of the call. The value ends with `end`, or else with its last bracket. It is
    JSON, Python, or has `tags`. `is_unquoted`: JSON may lack quotes, or have Gemma's.
    """

    head: str
    end: str = ""
    tags: Tags | None = None
    is_unquoted: bool = False


FENCE: Final = r"(?:```(?:json)?\s*)?"
JSON: Final = Body(FENCE + r"(?=[{\[])")
NAMED: Final = Body(rf"(?P<name>{NAME})(?:\[CALL_ID\](?P<id>\w+))?(?:\[ARGS\])?\s*{FENCE}(?=\{{)")
PYTHON: Final = Body(rf"(?={NAME}\()")
XML: Final = Body(
    r"(?=<function=)", "</function>", Tags("<function=", ">", "<parameter=", ">", "</parameter>", pad="\n")
)
INVOKE: Final = Body(
    r"(?=<invoke name=)", "</invoke>", Tags("<invoke name=", ">", "<parameter name=", ">", "</parameter>")
)
PAIRS: Final = Body(
    rf"(?={NAME}\s*</?(?:arg_key|tool_call)>)",
    "</tool_call>",
    Tags("", "<", "<arg_key>", "<arg_value>", "</arg_value>"),
)
DEEPSEEK: Final = Body(
    rf"(?:<｜tool▁call▁begin｜>\s*)?(?:function<｜tool▁sep｜>)?(?P<name>{NAME})(?:<｜tool▁sep｜>)?\s*{FENCE}(?=\{{)"
)
KIMI: Final = Body(
    r"(?:<\|tool_call_begin\|>\s*)?"
    rf"(?P<id>(?:functions\.)?(?P<name>{NAME}):\d+)\s*<\|tool_call_argument_begin\|>\s*{FENCE}(?=\{{)"
)
GEMMA: Final = Body(rf"call:\s*(?P<name>{NAME})\s*(?=\{{)", "<tool_call|>", is_unquoted=True)


def _openai_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _mistral_id() -> str:
    # Mistral's templates refuse any other form of id when the call is part of the conversation.
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


class _NeedsJSONError(Exception):
    """The arguments cannot be written one by one so that they follow their schema."""


@dataclass(frozen=True)
class ToolForm:
    """The form of a model family's calls: a marker of `open`, a value, and markers of `close`, which may be absent.

    `sign` is a regular expression that finds the family by its chat template. A value has one of `bodies`. A grammar
    enforces this text: the first marker of `open` (if not `is_bare`), `begin`, calls with `between` between them (None:
    only one), `end`, the last marker of `close`. A call is `native` with "$name" and "$arguments", which are `item`s
    with "$key" and "$value" and `comma` between them, or `text_item`s if the value is a text. A form without `native`,
    and arguments that cannot be written so, have `call`, with arguments in JSON.

    `is_bare`: a value at the start of the answer is a call without a marker, if it names an offered tool.
    `variant_of` names the form for which users ask by a flag and which has the same texts to read.
    """

    sign: str
    open: tuple[str, ...]
    close: tuple[str, ...] = ()
    bodies: tuple[Body, ...] = (JSON, NAMED)
    call: str = JSON_CALL
    native: str = ""
    item: str = ""
    text_item: str = ""
    comma: str = ""
    begin: str = "["
    between: str | None = ", "
    end: str = "]"
    is_bare: bool = False
    new_id: Callable[[], str] = _openai_id
    variant_of: str = ""

    @property
    def markers(self) -> frozenset[str]:
        """All texts of the form that may be special tokens, which the detokenizer would hide."""
        heads = (re.sub(r"\\|\?P<\w+>", "", body.head) for body in self.bodies)
        texts = " ".join((*heads, self.call, self.native, self.text_item))
        return frozenset((*self.open, *self.close, *MARKER.findall(texts)))

    def calls(self, functions: list[dict[str, Any]], is_single: bool, is_exact: bool = True) -> str:
        """Return the JSON of the `ToolCalls` to `functions`: one call (`is_single`), or more.

        With `is_exact`, arguments follow the function's `parameters`; else they are any object.
        """
        named = [(f["name"], (is_exact and f.get("parameters")) or {"type": "object"}) for f in functions]
        calls = [_around(self.call, name, schema) for name, schema in named]
        if self.native and all(re.fullmatch(NAME, name) for name, _ in named):
            with contextlib.suppress(
                _NeedsJSONError, TypeError, AttributeError
            ):  # the compiler refuses malformed schemas
                calls = [_around(self.native, name, self._items(schema)) for name, schema in named]
        begin, end = (("",), ("",)) if self.is_bare else (self.open, self.close or ("",))
        between = None if is_single else self.between
        markers = sorted(self.markers)
        return json_text(
            ToolCalls(calls, begin[0] + self.begin, between, self.end + end[-1], markers, self.comma), "tools"
        )

    def _items(self, schema: dict[str, Any]) -> list[CallItem]:
        """Return the arguments of a call one by one. Raises `_NeedsJSONError`."""
        properties, required = schema.get("properties") or {}, schema.get("required") or []
        is_plain = schema.keys() <= _OBJECT | _NOTES and {*required} <= properties.keys()
        is_map = not properties and isinstance(schema.get("additionalProperties"), dict)
        if not is_plain or is_map or _OTHER_REF.search(json.dumps(schema)):
            raise _NeedsJSONError
        if not properties and schema.get("additionalProperties") is not False:
            texts = [self._item(KEY, None, "*")] if self.text_item else []
            return texts if self.text_item == self.item else [*texts, self._item(KEY, {}, "*")]
        # With commas, arguments that may be missing come last.
        keys = sorted(properties, key=lambda key: self.comma != "" and key not in required)
        if not all(re.fullmatch(r"[\w.$-]+", key) for key in keys):
            raise _NeedsJSONError
        values = {key: self._value(properties[key], schema) for key in keys}
        return [self._item(key, values[key], "" if key in required else "?") for key in keys]

    def _item(self, key: str, value: dict[str, Any] | list[str] | None, count: str) -> CallItem:
        before, after = (self.item if isinstance(value, dict) else self.text_item).split("$value")
        return CallItem(before.replace("$key", key), value, after, count)

    def _value(self, schema: Any, root: dict[str, Any]) -> dict[str, Any] | list[str] | None:
        """Return the value of an argument as in a `CallItem`. Raises `_NeedsJSONError`."""
        types, parts = types_of(schema, root), parts_of(schema, root)
        if not isinstance(schema, dict):
            raise _NeedsJSONError
        if self.text_item and (not types or "string" in types):
            constants = [value for part in parts for value in constants_of(part)]
            if not types <= {"string", "null"} or any(not part.keys() <= _TEXT for part in parts):
                raise _NeedsJSONError
            return [c if isinstance(c, str) else json.dumps(c) for c in constants] or None
        return schema | {key: root[key] for key in ("$defs", "definitions") if key in root}


def _around(call: str, name: str, arguments: Any) -> tuple[str, Any, str]:
    """Return a call as in `ToolCalls`, with the name as in a string of JSON."""
    before, after = call.split("$arguments")
    return before.replace("$name", json.dumps(name, ensure_ascii=False)[1:-1]), arguments, after


def _pairs(sign: str, pad: str) -> ToolForm:
    """Return GLM's form, with `pad` between the tags."""
    item = f"<arg_key>$key</arg_key>{pad}<arg_value>$value</arg_value>{pad}"
    between = "</tool_call>\n<tool_call>"
    return replace(
        HERMES, sign=sign, native=f"$name{pad}$arguments", item=item, text_item=item, begin="", between=between, end=""
    )


HERMES: Final = ToolForm(
    "<tool_call>",
    ("<tool_call>", "<function="),
    ("</function>", "</tool_call>"),
    (JSON, NAMED, XML, PAIRS),
    begin="\n",
    between="\n</tool_call>\n<tool_call>\n",
    end="\n",
)
_QWEN: Final = "<parameter=$key>\n$value\n</parameter>\n"
QWEN: Final = replace(
    HERMES, sign="<function=", native="<function=$name>\n$arguments</function>", item=_QWEN, text_item=_QWEN
)
_MINIMAX: Final = '<parameter name="$key">$value</parameter>\n'
MISTRAL: Final = ToolForm(r"\[TOOL_CALLS\]", ("[TOOL_CALLS]",), new_id=_mistral_id)
PYTHONIC: Final = ToolForm(
    r"\[func_?name1?\(",
    ("<|python_start|>",),
    ("<|python_end|>",),
    (JSON, PYTHON),
    native="$name($arguments)",
    item="$key=$value",
    comma=", ",
    is_bare=True,
)
R1: Final = ToolForm(
    "<｜tool▁call▁begin｜>",
    ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
    ("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
    (DEEPSEEK,),
    call="<｜tool▁call▁begin｜>function<｜tool▁sep｜>$name\n```json\n$arguments\n```<｜tool▁call▁end｜>",
    begin="",
    between="\n",
    end="",
)
GEMMA4: Final = ToolForm(
    r"<\|tool_call>",
    ("<|tool_call>",),
    ("<tool_call|>",),
    (GEMMA,),
    call="call:$name$arguments",
    native="call:$name{$arguments}",
    item="$key:$value",
    text_item='$key:<|"|>$value<|"|>',
    comma=",",
    begin="",
    between="<tool_call|><|tool_call>",
    end="",
)

# By the name of the parser. A template has the first form whose sign it has.
TOOL_FORMS: Final = {
    HARMONY: ToolForm(
        r"<\|channel\|>",
        ("<|channel|>commentary to=functions.",),
        call="$name <|constrain|>json<|message|>$arguments",
        begin="",
        between=None,  # the end of a call ends the answer
        end="",
    ),
    "seed_oss": replace(
        QWEN,
        sign="<seed:tool_call>",
        open=("<seed:tool_call>", "<function="),
        close=("</function>", "</seed:tool_call>"),
        between="\n</seed:tool_call>\n<seed:tool_call>\n",
    ),
    "qwen3_coder": QWEN,
    "glm47": replace(_pairs(r"<tool_call>\{function-name\}<arg_key>", ""), variant_of="glm45"),
    "glm45": _pairs("<arg_key>", "\n"),
    "minimax_m2": ToolForm(
        "<minimax:tool_call>",
        ("<minimax:tool_call>", "<invoke name="),
        ("</invoke>", "</minimax:tool_call>"),
        (INVOKE, JSON),
        native='<invoke name="$name">\n$arguments</invoke>',
        item=_MINIMAX,
        text_item=_MINIMAX,
        begin="\n",
        between="\n",
        end="\n",
    ),
    "hermes": HERMES,
    "mistral_v11": replace(
        MISTRAL,
        sign=r"\[ARGS\]",
        call="$name[ARGS]$arguments",
        begin="",
        between="[TOOL_CALLS]",
        end="",
        variant_of="mistral",
    ),
    "mistral": MISTRAL,
    "kimi_k2": ToolForm(
        r"<\|tool_calls_section_begin\|>",
        ("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>", "<|tool_call_begin|>"),
        ("<|tool_call_end|>", "<|tool_call_section_end|>", "<|tool_calls_section_end|>"),
        (KIMI,),
        call=f"<|tool_call_begin|>functions.$name:{NUMBER}<|tool_call_argument_begin|>$arguments<|tool_call_end|>",
        begin="",
        between="",
        end="",
    ),
    "deepseek_v31": replace(
        R1,
        sign=r"<｜tool▁call▁begin｜>(?:'\s*\+\s*tool\['function'\]|tool_call_name)",
        call="<｜tool▁call▁begin｜>$name<｜tool▁sep｜>$arguments<｜tool▁call▁end｜>",
        between="",
        variant_of="deepseek",
    ),
    "deepseek": R1,
    "gemma4": GEMMA4,
    "functiongemma": replace(
        GEMMA4,
        sign="<start_function_call>",
        open=("<start_function_call>",),
        close=("<end_function_call>",),
        bodies=(replace(GEMMA, end="<end_function_call>"),),
        text_item="$key:<escape>$value<escape>",
        between="<end_function_call><start_function_call>",
    ),
    "command": ToolForm(
        r"<\|START_ACTION\|>",
        ("<|START_ACTION|>",),
        ("<|END_ACTION|>",),
        call=f'{{"tool_call_id": "{NUMBER}", "tool_name": "$name", "parameters": $arguments}}',
        begin="[\n    ",
        between=",\n    ",
        end="\n]",
    ),
    "olmo3": replace(
        PYTHONIC,
        sign="<function_calls>",
        open=("<function_calls>",),
        close=("</function_calls>",),
        begin="\n",
        between="\n",
        end="\n",
        is_bare=False,
    ),
    "hunyuan": ToolForm("<tool_calls>", ("<tool_calls>",), ("</tool_calls>",)),
    "phi4": ToolForm(r"<\|tool\|>", ("<|tool_call|>", "functools"), ("<|/tool_call|>",)),
    "granite": ToolForm(r"<\|tool_call\|>|<function_call>", ("<|tool_call|>", "<function_call>")),
    "lfm2": replace(
        PYTHONIC,
        sign=r"<\|tool_(?:list|call)_start\|>",
        open=("<|tool_call_start|>",),
        close=("<|tool_call_end|>",),
        is_bare=False,
    ),
    "llama3": ToolForm(
        r"<\|python_tag\|>|<\|start_header_id\|>ipython|Environment: ipython",
        ("<|python_tag|>",),
        call='{"name": "$name", "parameters": $arguments}',
        begin="",
        between="; ",
        end="",
        is_bare=True,
    ),
    "pythonic": PYTHONIC,
}
