"""Reads the calls in the value of a tool call: JSON, a list in Python, or text with tags."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from functools import reduce
from typing import Annotated, Any, Final

import msgspec

Call = tuple[str, str]  # name, arguments as a JSON object
MAX_PARTS: Final = 256  # of a schema that are searched for types
MAX_PYTHON_CHARS: Final = 64 * 1024  # its syntax tree is 100 times as large
_ERRORS: Final = (msgspec.MsgspecError, ValueError, TypeError, AttributeError, SyntaxError, RecursionError, MemoryError)
_TYPES: Final = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
_PYTHON_NAMES: Final = {"True": "true", "False": "false", "None": "null"}
_ESCAPE: Final = re.compile(r"\\(?:[\\'\"abfnrtvxuUN0-7\n]|(.))", re.DOTALL)  # Python warns of the second kind


class _WrittenCall(msgspec.Struct):
    name: Annotated[str, msgspec.Meta(min_length=1)]
    arguments: msgspec.Raw = msgspec.Raw()
    parameters: msgspec.Raw = msgspec.Raw()


def read_calls(text: str, name: str | None, schemas: Mapping[str, Any]) -> list[Call]:
    """Return the calls in `text`; [] for any other text. With `name`, `text` has only the arguments.

    `schemas` are the parameters of the offered tools, by name. They give the types of arguments between tags.
    """
    try:
        if name is not None:
            return [(name, _arguments(text.encode()))]
        if text[0] not in "{[":
            return [_tagged(text, schemas)]
        if re.match(r"\[\s*[\w.]+\(", text):
            return _python_calls(text)
        read = msgspec.json.decode(text.encode(), type=_WrittenCall | list[_WrittenCall])
        calls = read if isinstance(read, list) else [read]
        return [(c.name, _arguments(bytes(c.arguments), bytes(c.parameters))) for c in calls]
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


class _JsonNames(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.expr:
        names = {"true": True, "false": False, "null": None}
        return ast.Constant(names[node.id]) if node.id in names else node


def _python_calls(text: str) -> list[Call]:
    """Return the calls in a list such as `[f(x=1), g(y="a")]`. Raises one of `_ERRORS` for another text."""
    if len(text) > MAX_PYTHON_CHARS:
        raise ValueError("too long")
    known = _ESCAPE.sub(lambda m: "\\" + m[0] if m[1] else m[0], text)
    tree = _JsonNames().visit(ast.parse(known, mode="eval"))
    calls = []
    for call in tree.body.elts:
        arguments = {k.arg: ast.literal_eval(k.value) for k in call.keywords}
        if call.args or None in arguments:
            raise ValueError("an argument without a name")
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        calls.append((ast.unparse(call.func), written.encode().decode()))  # without lone surrogates
    return calls


def _tagged(text: str, schemas: Mapping[str, Any]) -> Call:
    """Return the call in `<function=f><parameter=x>1</parameter></function>` or `f<arg_key>x</arg_key><arg_value>1`.

    White space around names and one line break on both sides of a value do not count.
    """
    tags = ("<parameter=", ">", "</parameter>")
    if is_glm := not text.startswith("<function="):
        tags = ("<arg_key>", "</arg_key>", "</arg_value>")
    head, *parts = text.removeprefix("<function=").removesuffix("</function>").split(tags[0])
    name = head.partition("<" if is_glm else ">")[0].strip()
    schema = schemas.get(name) or {}
    arguments = {}
    for part in parts:
        key, _, rest = part.partition(tags[1])
        value = (rest.lstrip().removeprefix("<arg_value>") if is_glm else rest).partition(tags[2])[0]
        types = types_of((schema.get("properties") or {}).get(key.strip()), schema)
        arguments[key.strip()] = msgspec.Raw(_typed(value.removeprefix("\n").removesuffix("\n"), types))
    return name, msgspec.json.encode(arguments).decode()


def _typed(text: str, types: set[str]) -> bytes:
    """Return `text` as JSON of one of `types` (any, if there are none): as it stands if it is, else as a string."""
    raw = _PYTHON_NAMES.get(text, text).strip().encode()
    try:
        kind = _TYPES.get(type(msgspec.json.decode(raw)), "null")
    except (msgspec.MsgspecError, RecursionError):
        kind = "string"
    is_number = kind == "integer" and "number" in types
    is_json = kind != "string" and (kind in types or is_number or "string" not in types)
    return raw if is_json else msgspec.json.encode(text)


def types_of(schema: Any, root: Any) -> set[str]:
    """Return the JSON types that `schema` (of the document `root`) names; none if it allows any."""
    types, parts = set(), [schema]
    for part in parts:
        if not isinstance(part, dict):
            continue
        named, values = part.get("type"), part.get("enum") or [part[k] for k in ("const",) if k in part]
        types |= {t for t in (named if isinstance(named, list) else [named]) if isinstance(t, str)}
        types |= {_TYPES.get(type(value), "null") for value in values}
        branches = [b for keyword in ("anyOf", "oneOf", "allOf") for b in part.get(keyword) or ()]
        if isinstance(ref := part.get("$ref"), str):
            keys = ref.removeprefix("#/").split("/")
            branches.append(reduce(lambda node, key: node.get(key) if isinstance(node, dict) else None, keys, root))
        parts += branches[: MAX_PARTS - len(parts)]
    return types
