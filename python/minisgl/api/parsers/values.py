"""Reads the calls in the value of a tool call: JSON, Python, text with tags, or JSON with bare names."""

from __future__ import annotations

import ast
import contextlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any, Final

import msgspec

Call = tuple[str, str]  # name, arguments as a JSON object
NAME: Final = r"[\w./:-]+"  # of a function
_QUOTES: Final = " \t\r\n\"'"  # and white space, around names in tags
MAX_PARTS: Final = 256  # of a schema that are searched for types
MAX_PYTHON_CHARS: Final = 64 * 1024  # its syntax tree is 100 times as large
_ERRORS: Final = (msgspec.MsgspecError, ValueError, TypeError, AttributeError, SyntaxError, RecursionError, MemoryError)
_TYPES: Final = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
_PYTHON_NAMES: Final = {"True": "true", "False": "false", "None": "null"}
_ESCAPE: Final = re.compile(r"\\(?:[\\'\"abfnrtvxuUN0-7\n]|(.))", re.DOTALL)  # Python warns of the second kind
_PYTHON_PART: Final = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[\[{(]|[\]})]|,""", re.DOTALL)
_PYTHON_CALL: Final = re.compile(rf"\s*({NAME})\s*\((.*)\)\s*", re.DOTALL)
_PYTHON_ARGUMENT: Final = re.compile(r"\s*([\w.$-]+)\s*=(.*)", re.DOTALL)
_BARE: Final = re.compile(
    r"""(?P<quote><\|"\|>|<escape>)(?P<text>.*?)(?P=quote)|"(?:[^"\\]|\\.)*"|(?P<bare>[^\s{}\[\],:"][^{}\[\],:]*)""",
    re.DOTALL,
)


class _WrittenCall(msgspec.Struct):
    name: str = ""
    tool_name: str = ""
    arguments: msgspec.Raw = msgspec.Raw()
    parameters: msgspec.Raw = msgspec.Raw()


@dataclass(frozen=True)
class Tags:
    """The tags of a call: around its name, the names of its arguments, and their values.

    `pad` stands on both sides of a value. A value without `close` ends at the next argument.
    """

    begin: str
    named: str
    key: str
    value: str
    close: str
    pad: str = ""


def read_calls(
    text: str, name: str | None, schemas: Mapping[str, Any], tags: Tags | None = None, is_unquoted: bool = False
) -> list[Call]:
    """Return the calls in `text`; [] for any other text. With `name`, `text` has only the arguments.

    `schemas` are the parameters of the offered tools, by name. They give the types of arguments between `tags`.
    `is_unquoted`: names and words need no quotes, as in Gemma's calls.
    """
    try:
        if tags is not None:
            return [_tagged(text, schemas, tags)]
        if name is not None:
            return [(name, _arguments((_BARE.sub(_quoted, text) if is_unquoted else text).encode()))]
        if re.match(rf"(?:\[\s*)?{NAME}\(", text):
            return _python_calls(text)
        read = msgspec.json.decode(text.encode(), type=_WrittenCall | list[_WrittenCall])
        calls = read if isinstance(read, list) else [read]
        named = [(c.name or c.tool_name, _arguments(bytes(c.arguments), bytes(c.parameters))) for c in calls]
        return named if all(name for name, _ in named) else []
    except _ERRORS:
        return []


def _arguments(*given: bytes) -> str:
    """Return the first JSON object in `given`; "{}" if there is nothing but null and blanks. Raises `MsgspecError`."""
    for raw in given:
        if raw.startswith(b'"'):  # a JSON string with JSON in it
            raw = msgspec.json.decode(raw, type=str).strip().encode()
        if raw not in (b"", b"null"):
            msgspec.json.decode(raw, type=dict[str, Any])
            return raw.decode()
    return "{}"


def _quoted(match: re.Match[str]) -> str:
    """Return a string, key or bare word of Gemma's calls as JSON."""
    if match["quote"] is not None:
        return json.dumps(match["text"], ensure_ascii=False)
    if match["bare"] is None:
        return match[0]
    word, is_key = match["bare"].strip(), match.string.startswith(":", match.end())
    return (json.dumps(word, ensure_ascii=False).encode() if is_key else _typed(word, set())).decode()


class _JsonNames(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.expr:
        names = {"true": True, "false": False, "null": None}
        return ast.Constant(names[node.id]) if node.id in names else node


def _python(text: str) -> Any:
    """Return the value of a literal of Python. Raises one of `_ERRORS` for another text."""
    known = _ESCAPE.sub(lambda m: "\\" + m[0] if m[1] else m[0], text.strip())
    return ast.literal_eval(_JsonNames().visit(ast.parse(known, mode="eval")).body)


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False).encode()  # refuses lone surrogates


def _split(text: str) -> list[str]:
    """Split `text` at the commas that are in no bracket and no string."""
    parts, start, depth = [], 0, 0
    for match in _PYTHON_PART.finditer(text):
        depth += (match[0] in "[{(") - (match[0] in "]})")
        if match[0] == "," and depth == 0:
            parts.append(text[start : match.start()])
            start = match.end()
    return [part for part in (*parts, text[start:]) if part.strip()]


def _python_calls(text: str) -> list[Call]:
    """Return the calls in `f(x=1)` or `[f(x=1), g(y="a")]`. Unlike in Python, any word may be a name."""
    if len(text) > MAX_PYTHON_CHARS:
        raise ValueError("too long")
    calls = []
    for call in _split(text[1:-1] if text.startswith("[") else text):
        name, given = _matched(_PYTHON_CALL, call)
        arguments = dict(_matched(_PYTHON_ARGUMENT, argument) for argument in _split(given))
        calls.append((name, _json({key: _python(value) for key, value in arguments.items()}).decode()))
    return calls


def _matched(pattern: re.Pattern[str], text: str) -> tuple[str, str]:
    """Return both groups of `pattern` in the whole of `text`. Raises `ValueError` if it does not match."""
    if match := pattern.fullmatch(text):
        return match[1], match[2]
    raise ValueError(f"not of this form: {text[:40]}")


def _tagged(text: str, schemas: Mapping[str, Any], tags: Tags) -> Call:
    """Return the call in a text with `tags`, or with a JSON object instead of the arguments."""
    head, *parts = text.removeprefix(tags.begin).split(tags.key)
    name, _, given = head.partition(tags.named)
    if not re.fullmatch(NAME, name := name.strip(_QUOTES)) and name not in schemas:
        raise ValueError("no name")
    schema = schemas.get(name) or {}
    if not parts and (inside := given.strip()):
        return name, _arguments(inside.encode())
    arguments = {}
    for part in parts:
        key, _, rest = part.partition(tags.value)
        value = rest.partition(tags.close)[0].removeprefix(tags.pad).removesuffix(tags.pad)
        key = key.partition("<")[0].strip(_QUOTES)
        types = types_of((schema.get("properties") or {}).get(key), schema)
        arguments[key] = msgspec.Raw(_typed(value, types))
    return name, msgspec.json.encode(arguments).decode()


def _typed(text: str, types: set[str]) -> bytes:
    """Return `text` as JSON of one of `types` (any, if there are none): as it stands if it is, else as a string."""
    raw = _PYTHON_NAMES.get(text.strip(), text.strip()).encode()
    try:
        kind = _TYPES.get(type(msgspec.json.decode(raw)), "null")
    except (msgspec.MsgspecError, RecursionError):
        kind = "string"
        if types and "string" not in types and len(text) <= MAX_PYTHON_CHARS:
            with contextlib.suppress(*_ERRORS):
                return _json(_python(text))
    is_number = kind == "integer" and "number" in types
    is_json = kind != "string" and (kind in types or is_number or "string" not in types)
    return raw if is_json else msgspec.json.encode(text)


def types_of(schema: Any, root: Any) -> set[str]:
    """Return the JSON types that `schema` (of the document `root`) names; none if it allows any."""
    types: set[str] = set()
    for part in parts_of(schema, root):
        named = part.get("type")
        types |= {t for t in (named if isinstance(named, list) else [named]) if isinstance(t, str)}
        types |= {_TYPES.get(type(value), "null") for value in constants_of(part)}
    return types


def constants_of(part: dict[str, Any]) -> list[Any]:
    """Return the values that one part of a schema allows; none if it lists no values."""
    return part.get("enum") or [part[k] for k in ("const",) if k in part]


def parts_of(schema: Any, root: Any) -> list[dict[str, Any]]:
    """Return `schema`, and all that it refers to or is made of, up to `MAX_PARTS`."""
    parts = [schema] if isinstance(schema, dict) else []
    for part in parts:
        branches = [b for keyword in ("anyOf", "oneOf", "allOf") for b in part.get(keyword) or ()]
        if isinstance(ref := part.get("$ref"), str):
            keys = ref.removeprefix("#/").split("/")
            branches.append(reduce(lambda node, key: node.get(key) if isinstance(node, dict) else None, keys, root))
        parts += [b for b in branches if isinstance(b, dict)][: MAX_PARTS - len(parts)]
    return parts
