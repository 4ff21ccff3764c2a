"""Fields of three APIs -> one grammar."""

from __future__ import annotations

import json
from typing import Any

import pytest

from minisgl.api.fields import ALIASES
from minisgl.api.protocol import ChatCompletionRequest
from minisgl.api.structured import forced_functions, requested_grammar
from minisgl.core.errors import RequestError
from support.bodies import parse_body

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": n, "parameters": SCHEMA}} for n in ("f", "g")]


def request(**fields: Any) -> ChatCompletionRequest:
    return parse_body(json.dumps({"messages": [], **fields}).encode(), ChatCompletionRequest)


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"response_format": {"type": "json_object"}}, "json_schema", {"type": "object"}),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, "json_schema", SCHEMA),
        ({"guided_json": SCHEMA, "response_format": {"type": "text"}, "regex": None}, "json_schema", SCHEMA),
        ({"json_schema": json.dumps(SCHEMA)}, "json_schema", SCHEMA),
        ({"json_schema": True}, "json_schema", True),
        ({"guided_choice": ["a", "b"]}, "choice", ["a", "b"]),
        ({"structured_outputs": {"json": SCHEMA, "regex": None}}, "json_schema", SCHEMA),
        ({"structured_outputs": {"json_object": True}}, "json_schema", {"type": "object"}),
        ({"guided_regex": "[0-9]"}, "regex", None),
        ({"regex": "[0-9]"}, "regex", None),
        ({"ebnf": "[0-9]"}, "ebnf", None),
        ({"guided_grammar": "[0-9]"}, "ebnf", None),
        ({"structured_outputs": {"grammar": "[0-9]"}}, "ebnf", None),
    ],
)
def test_each_field_gives_its_grammar(fields: dict[str, Any], kind: Any, text: Any) -> None:
    grammar = requested_grammar(request(**fields))
    assert grammar is not None and grammar.kind == kind
    assert grammar.param in {ALIASES.get(name, name) for name in fields}
    assert grammar.text == "[0-9]" if text is None else json.loads(grammar.text) == text


def test_no_constraint_gives_no_grammar() -> None:
    for fields in ({}, {"response_format": {"type": "text"}}, {"structured_outputs": {}}, {"guided_json": None}):
        assert requested_grammar(request(**fields)) is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_json": SCHEMA, "regex": "a"}, "guided_regex"),
        ({"guided_json": "[1]"}, "guided_json"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", ""]}, "guided_choice"),
        ({"response_format": {}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": "x"}}}, "response_format"),
        ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"regex": 1}}, "structured_outputs"),
        ({"ebnf": ""}, "guided_grammar"),
    ],
)
def test_refusals_name_the_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as e:
        requested_grammar(request(**fields))
    assert (e.value.param, e.value.status) == (param, 400)


def test_tool_choice() -> None:
    def forced(choice: Any, tools: Any = TOOLS) -> list[str] | None:
        functions = forced_functions(request(tool_choice=choice, tools=tools))
        return None if functions is None else [f["name"] for f in functions]

    assert forced(None) is forced("auto") is forced("none") is None
    assert forced("required") == ["f", "g"]
    assert forced({"type": "function", "function": {"name": "g"}}) == ["g"]
    for choice, tools in (("required", None), ("maybe", TOOLS), ({"type": "function"}, TOOLS), ({"name": "f"}, TOOLS)):
        with pytest.raises(RequestError) as e:
            forced(choice, tools)
        assert e.value.param == "tool_choice"
