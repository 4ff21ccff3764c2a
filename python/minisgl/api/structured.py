"""Structured output: turns the fields that constrain an answer into a `Grammar`, and interprets `tool_choice`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Final

import msgspec

from minisgl.api.protocol import ChatCompletionRequest, SamplingFields
from minisgl.core.errors import RequestError, unsupported
from minisgl.core.params import Grammar, GrammarKind

_Schema = dict[str, Any] | bool
_Text = Annotated[str, msgspec.Meta(min_length=1)]
# What vLLM's `structured_outputs` may have: the kind of grammar, and the type of the value, in words, too.
_OUTPUTS: Final[dict[str, tuple[GrammarKind, Any, str]]] = {
    "json": ("json_schema", _Schema | str, "a JSON Schema"),
    "json_object": ("json_schema", Any, "true"),
    "regex": ("regex", _Text, "a non-empty string"),
    "choice": ("choice", Annotated[list[_Text], msgspec.Meta(min_length=1)], "a list of non-empty strings"),
    "grammar": ("ebnf", _Text, "a non-empty string"),
}


def requested_grammar(fields: SamplingFields) -> Grammar | None:
    """Return the grammar of a request, or None. Raises `RequestError` for several, and for an invalid value."""
    found = [
        grammar
        for name, read in _FIELDS.items()
        if (value := getattr(fields, name)) is not None and (grammar := read(value, name)) is not None
    ]
    if len(found) > 1:
        raise RequestError(f"{found[1].param} and {found[0].param} exclude each other", param=found[1].param)
    return found[0] if found else None


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


def _constraint(name: str, value: Any, param: str) -> Grammar:
    """Return the grammar of one of `_OUTPUTS`. A JSON Schema may be given as JSON text."""
    kind, form, words = _OUTPUTS[name]
    try:
        value = {"type": "object"} if name == "json_object" else msgspec.convert(value, form)
        if kind == "json_schema" and isinstance(value, str):
            value = msgspec.json.decode(value, type=_Schema)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as e:
        raise RequestError(f"{param} must be {words}: {e}", param=param) from e
    return Grammar(kind, value if form is _Text else json_text(value, param), param=param)


def _response_format(value: dict[str, Any], param: str) -> Grammar | None:
    match value:
        case {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return _constraint("json_object", True, param)
        case {"type": "json_schema", "json_schema": {"schema": dict() | bool() as schema}}:
            return _constraint("json", schema, param)
        case {"type": "json_schema"}:
            raise RequestError(f'{param} must have {{"json_schema": {{"schema": {{...}}}}}}', param=param)
    raise unsupported(f"{param} must have a type that is text, json_object or json_schema", param)


def _structured_outputs(value: dict[str, Any], param: str) -> Grammar | None:
    """Return the grammar of vLLM's object with one of `_OUTPUTS`."""
    given = {name: v for name, v in value.items() if v is not None and v is not False}
    if not given:
        return None
    if len(given) > 1 or not given.keys() <= _OUTPUTS.keys():
        raise unsupported(f"{param} must have one of {', '.join(_OUTPUTS)}", param)
    ((name, constraint),) = given.items()
    return _constraint(name, constraint, param)


_FIELDS: Final[dict[str, Callable[[Any, str], Grammar | None]]] = {
    "response_format": _response_format,
    "structured_outputs": _structured_outputs,
    **{f"guided_{name}": partial(_constraint, name) for name in ("json", "regex", "choice", "grammar")},
}
