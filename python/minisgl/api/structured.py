"""The fields that say what an answer must look like -> a `Grammar`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec

from minisgl.api.protocol import SamplingFields
from minisgl.errors import RequestError
from minisgl.params import Grammar

ANY_OBJECT: Final = '{"type": "object"}'


def grammar_of(fields: SamplingFields) -> Grammar | None:
    """The one grammar that a request asks for; raises `RequestError` for several, or a value that is none."""
    found = [
        (name, grammar)
        for name, read in _FIELDS.items()
        if (value := getattr(fields, name)) is not None and (grammar := read(value, name)) is not None
    ]
    if len(found) > 1:
        names = [name for name, _ in found]
        raise RequestError(f"{names[1]} and {names[0]} exclude each other", param=names[1])
    return found[0][1] if found else None


def _schema(value: Any, param: str) -> Grammar:
    """A JSON Schema, as it stands or as a string of JSON."""
    if not isinstance(value, dict | bool | str):
        raise RequestError(f"{param} must be a JSON Schema", param=param, code="invalid_type")
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value, type=dict[str, Any] | bool)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as e:
            raise RequestError(f"{param} is not a JSON Schema: {e}", param=param) from e
    if value is False:
        raise RequestError(f"{param} allows nothing", param=param)
    return Grammar("json_schema", to_text({} if value is True else value, param), param=param)


def to_text(value: Any, param: str) -> str:
    """JSON; raises `RequestError` for what has none."""
    try:
        return msgspec.json.encode(value).decode()
    except (msgspec.MsgspecError, ValueError, RecursionError) as e:
        raise RequestError(f"{param} is not usable: {e}", param=param) from e


def _text(kind: Any) -> Callable[[Any, str], Grammar]:
    def read(value: Any, param: str) -> Grammar:
        if not isinstance(value, str) or not value:
            raise RequestError(f"{param} must be a text that is not empty", param=param)
        return Grammar(kind, value, param=param)

    return read


def _choice(value: Any, param: str) -> Grammar:
    if not isinstance(value, list) or not value or not all(isinstance(v, str) and v for v in value):
        raise RequestError(f"{param} must be a list of texts that are not empty", param=param)
    return Grammar("choice", to_text(value, param), param=param)


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
    raise RequestError(
        f"{param} must have a type that is text, json_object or json_schema", param=param, code="unsupported_value"
    )


def _structured_outputs(value: dict[str, Any], param: str) -> Grammar | None:
    """vLLM's object: one of json, json_object, regex, choice, grammar."""
    given = {name: v for name, v in value.items() if v is not None and v is not False}
    if not given:
        return None
    if len(given) > 1 or not given.keys() <= _OUTPUTS.keys():
        raise RequestError(f"{param} must have one of {', '.join(_OUTPUTS)}", param=param, code="unsupported_value")
    ((name, wanted),) = given.items()
    return _OUTPUTS[name](wanted, param)


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
    "guided_json": _schema,
    "json_schema": _schema,
    "guided_regex": _text("regex"),
    "regex": _text("regex"),
    "guided_choice": _choice,
    "guided_grammar": _text("ebnf"),
    "ebnf": _text("ebnf"),
}
