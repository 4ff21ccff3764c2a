"""Structured output: turns the fields that constrain an answer into a `Grammar`, and interprets `tool_choice`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec

from minisgl.api.protocol import ChatCompletionRequest, SamplingFields
from minisgl.errors import RequestError, unsupported
from minisgl.params import Grammar, GrammarKind

ANY_OBJECT: Final = '{"type": "object"}'


def requested_grammar(fields: SamplingFields) -> Grammar | None:
    """Return the grammar of a request, or None. Raises `RequestError` for several, and for an invalid value."""
    found = [
        (name, grammar)
        for name, read in _FIELDS.items()
        if (value := getattr(fields, name)) is not None and (grammar := read(value, name)) is not None
    ]
    if len(found) > 1:
        names = [name for name, _ in found]
        raise RequestError(f"{names[1]} and {names[0]} exclude each other", param=names[1])
    return found[0][1] if found else None


def forced_functions(request: ChatCompletionRequest) -> list[dict[str, Any]] | None:
    """Return the functions one of which must be called; None if a call is optional or not allowed.

    Raises `RequestError` (400) for an invalid `tool_choice`.
    """
    choice = request.tool_choice
    if choice in (None, "auto", "none"):
        return None
    functions = [tool["function"] for tool in request.tools or ()]
    if choice == "required":
        forced = functions
    elif isinstance(choice, dict) and choice.get("type") == "function" and isinstance(choice.get("function"), dict):
        forced = [f for f in functions if f["name"] == choice["function"].get("name")]
    else:
        known = '"auto", "none", "required" or {"type": "function", "function": {"name": ...}}'
        raise unsupported(f"tool_choice must be {known}", "tool_choice")
    if not forced:
        raise RequestError("tool_choice names a tool that is not in tools", param="tool_choice")
    return forced


def json_text(value: Any, param: str) -> str:
    """Return `value` as JSON text. Raises `RequestError` for a value that JSON cannot represent."""
    try:
        return msgspec.json.encode(value).decode()
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as e:
        raise RequestError(f"{param} is not usable: {e}", param=param) from e


def _schema(value: Any, param: str) -> Grammar:
    """Return the grammar of a JSON Schema, given as an object or as JSON text."""
    if not isinstance(value, dict | bool | str):
        raise RequestError(f"{param} must be a JSON Schema", param=param, code="invalid_type")
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value, type=dict[str, Any] | bool)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as e:
            raise RequestError(f"{param} is not a JSON Schema: {e}", param=param) from e
    return Grammar("json_schema", json_text(value, param), param=param)


def _text(kind: GrammarKind) -> Callable[[Any, str], Grammar]:
    def read(value: Any, param: str) -> Grammar:
        if not isinstance(value, str) or not value:
            raise RequestError(f"{param} must be a non-empty string", param=param)
        return Grammar(kind, value, param=param)

    return read


def _choice(value: Any, param: str) -> Grammar:
    if not isinstance(value, list) or not value or not all(isinstance(v, str) and v for v in value):
        raise RequestError(f"{param} must be a list of non-empty strings", param=param)
    return Grammar("choice", json_text(value, param), param=param)


def _response_format(value: dict[str, Any], param: str) -> Grammar | None:
    match value.get("type"):
        case "text":
            return None
        case "json_object":
            return Grammar("json_schema", ANY_OBJECT, param=param)
        case "json_schema":
            described = value.get("json_schema")
            if not isinstance(described, dict) or not isinstance(described.get("schema"), dict | bool):
                raise RequestError(f'{param} must have {{"json_schema": {{"schema": {{...}}}}}}', param=param)
            return _schema(described["schema"], param)
    raise unsupported(f"{param} must have a type that is text, json_object or json_schema", param)


def _structured_outputs(value: dict[str, Any], param: str) -> Grammar | None:
    """Return the grammar of vLLM's object with one of json, json_object, regex, choice, grammar."""
    given = {name: v for name, v in value.items() if v is not None and v is not False}
    if not given:
        return None
    if len(given) > 1 or not given.keys() <= _OUTPUTS.keys():
        raise unsupported(f"{param} must have one of {', '.join(_OUTPUTS)}", param)
    ((name, constraint),) = given.items()
    return _OUTPUTS[name](constraint, param)


_OUTPUTS: Final[dict[str, Callable[[Any, str], Grammar | None]]] = {
    "json": _schema,
    "json_object": lambda _, param: Grammar("json_schema", ANY_OBJECT, param=param),
    "regex": _text("regex"),
    "choice": _choice,
    "grammar": _text("ebnf"),
}
_FIELDS: Final[dict[str, Callable[[Any, str], Grammar | None]]] = {
    "response_format": _response_format,
    "structured_outputs": _structured_outputs,
    **{f"guided_{name}": _OUTPUTS[name] for name in ("json", "regex", "choice", "grammar")},
    "json_schema": _schema,
    "regex": _text("regex"),
    "ebnf": _text("ebnf"),
}
