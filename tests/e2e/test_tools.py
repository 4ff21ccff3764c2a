"""Tool calls through the official client: asked, called, answered; whole and streamed."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from e2e.harness import ServerProcess, require_no_leak
from e2e.test_matrix import TOOLS

QUESTION: dict[str, Any] = {"role": "user", "content": "What is the weather in Paris?"}
COMMON: dict[str, Any] = {"model": "minisgl-demo", "temperature": 0}


def ask(client: openai.OpenAI, *messages: Any, **fields: Any) -> Any:
    return client.chat.completions.create(messages=messages, **COMMON, **fields).choices[0]


def require_weather_call(choice: Any) -> None:
    assert choice.finish_reason == "tool_calls"
    assert not choice.message.content  # null; "" when added up from a stream, which begins with it
    (call,) = choice.message.tool_calls
    assert call.id.startswith("call_") and call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris"})


def test_call_and_its_result(client: openai.OpenAI) -> None:
    choice = ask(client, QUESTION, tools=TOOLS)
    require_weather_call(choice)
    (call,) = choice.message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"temperature": 21, "sky": "sunny"}'}
    answer = ask(client, QUESTION, choice.message, result, tools=TOOLS)  # the client's own object goes back
    assert answer.finish_reason == "stop"
    assert answer.message.tool_calls is None
    assert "sunny" in answer.message.content and "21" in answer.message.content


def test_stream_equals_the_body(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(messages=[QUESTION], tools=TOOLS, **COMMON) as stream:
        for _ in stream:
            pass
        require_weather_call(stream.get_final_completion().choices[0])


def test_each_choice_has_its_call(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(messages=[QUESTION], tools=TOOLS, n=2, **COMMON)  # type: ignore[call-overload]
    assert [c.index for c in answer.choices] == [0, 1]
    for choice in answer.choices:
        require_weather_call(choice)
    with client.chat.completions.stream(messages=[QUESTION], tools=TOOLS, n=2, **COMMON) as stream:
        for _ in stream:
            pass
        for final in stream.get_final_completion().choices:
            require_weather_call(final)


def test_streamed_call_begins_with_the_name(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(messages=[QUESTION], tools=TOOLS, stream=True, **COMMON))  # type: ignore[call-overload]
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == ""
    first, *rest = [call for c in chunks for call in c.choices[0].delta.tool_calls or ()]
    assert (first.index, first.type, first.function.name, first.function.arguments) == (
        0,
        "function",
        "get_weather",
        "",
    )
    assert all(r.index == 0 and r.id is None and r.function.name is None for r in rest)
    assert json.loads("".join(r.function.arguments for r in rest)) == {"city": "Paris"}
    assert [c.choices[0].finish_reason for c in chunks][-1] == "tool_calls"


def test_tool_choice_and_parallel_tool_calls(client: openai.OpenAI) -> None:
    require_weather_call(ask(client, QUESTION, tools=TOOLS, parallel_tool_calls=False))
    require_weather_call(ask(client, QUESTION, tools=TOOLS, tool_choice="auto"))
    silent = ask(client, QUESTION, tools=TOOLS, tool_choice="none")
    assert silent.message.tool_calls is None and silent.message.content
    cut_off = ask(client, QUESTION, tools=TOOLS, max_tokens=12)
    assert cut_off.finish_reason == "length"
    assert cut_off.message.tool_calls is None
    assert cut_off.message.content.startswith("<tool_call>")
    ordinary = ask(client, {"role": "user", "content": "What is 12 + 30?"}, tools=TOOLS)
    assert ordinary.finish_reason == "stop" and "42" in ordinary.message.content


NAMED: Any = {"type": "function", "function": {"name": "set_timer"}}
TIMER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "set_timer",
        "parameters": {
            "type": "object",
            "properties": {"minutes": {"$ref": "#/$defs/Minutes"}, "loud": {"type": "boolean"}},
            "required": ["minutes", "loud"],
            "additionalProperties": False,
            "$defs": {"Minutes": {"type": "integer", "minimum": 1, "maximum": 90}},
        },
    },
}


@pytest.mark.parametrize("choice", ["required", NAMED])
@pytest.mark.parametrize("question", ["What is the weather in Paris?", "Hello!", "Tell me a story."])
def test_forced_call(client: openai.OpenAI, choice: Any, question: str) -> None:
    """Whatever is asked; whole and streamed."""
    tools = [TIMER] if choice == "required" else [*TOOLS, TIMER]
    fields: dict[str, Any] = {"tools": tools, "tool_choice": choice, "parallel_tool_calls": False}
    message: dict[str, Any] = {"role": "user", "content": question}
    done = ask(client, message, **fields)
    assert done.finish_reason == "tool_calls" and not done.message.content
    (call,) = done.message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert call.function.name == "set_timer" and arguments.keys() == {"minutes", "loud"}
    assert 1 <= arguments["minutes"] <= 90 and arguments["loud"] in (True, False)
    with client.chat.completions.stream(messages=[message], **COMMON, **fields) as stream:  # type: ignore[list-item]
        final: Any = stream.get_final_completion().choices[0]
    assert final.message.tool_calls[0].function.arguments == call.function.arguments


def test_several_forced_calls(client: openai.OpenAI) -> None:
    """With a call, the text may end: EOS is forbidden before, and after each another call is possible."""
    done = ask(client, QUESTION, tools=TOOLS, tool_choice="required")
    require_weather_call(done)
    more = ask(
        client, QUESTION, tools=[TIMER], tool_choice="required", logit_bias={"0": -100, "2": -100}, max_tokens=120
    )
    assert len(more.message.tool_calls) > 1


def test_custom_tool(client: openai.OpenAI) -> None:
    """Forced, whole and streamed, for each choice; the client's own object goes back."""
    tool = {"type": "custom", "custom": {"name": "get_weather", "description": "Get the weather of a city"}}
    named = {"type": "custom", "custom": {"name": "get_weather"}}
    fields: dict[str, Any] = {"tools": [tool], "tool_choice": named, "n": 2, "logprobs": True, **COMMON}
    whole: Any = client.chat.completions.create(messages=[QUESTION], **fields)
    texts = ["", ""]
    for chunk in client.chat.completions.create(messages=[QUESTION], stream=True, **fields):
        for choice in chunk.choices:
            for call in choice.delta.tool_calls or ():
                assert call.type in ("custom", None) and call.function is None
                texts[choice.index] += call.model_extra["custom"]["input"]
    for choice, text in zip(whole.choices, texts, strict=True):
        (call,) = choice.message.tool_calls
        assert (choice.finish_reason, call.type, call.custom.name) == ("tool_calls", "custom", "get_weather")
        assert call.custom.input == text and choice.logprobs.content
        result = {"role": "tool", "tool_call_id": call.id, "content": '{"temperature": 21, "sky": "sunny"}'}
        assert ask(client, QUESTION, choice.message, result, tools=[tool]).message.content


LOW = -(2**63)  # a bound that crashes the grammar library


def tool(parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": NAMED, "tools": TOOLS}, "tool_choice"),
        ({"tool_choice": "sometimes", "tools": TOOLS}, "tool_choice"),
        ({"tool_choice": "required", "tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tool_choice": "required", "tools": [tool({"type": "x"})]}, "tools"),
        ({"tool_choice": "required", "tools": [tool({"type": "integer", "minimum": LOW, "maximum": LOW})]}, "tools"),
        ({"tool_choice": "auto", "tools": TOOLS, "extra_body": {"guided_regex": "[a"}}, "guided_regex"),
    ],
)
def test_bad_tool_choice_is_refused(client: openai.OpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as e:
        ask(client, QUESTION, **fields)
    assert e.value.param == param


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"answer": {"type": "string", "maxLength": 30}},
    "required": ["answer"],
    "additionalProperties": False,
}
NO_CALL = {"3": -100}  # the token of <tool_call>
FORMAT: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}


@pytest.mark.parametrize(
    "choice", [None, "auto", "required", {"type": "function", "function": {"name": "get_weather"}}]
)
def test_the_model_may_call_before_it_answers_by_the_schema(client: openai.OpenAI, choice: Any) -> None:
    fields: dict[str, Any] = {"tools": TOOLS, "response_format": FORMAT}
    if choice is not None:
        fields["tool_choice"] = choice
    done = ask(client, QUESTION, **fields)
    require_weather_call(done)
    with client.chat.completions.stream(messages=[QUESTION], **COMMON, **fields) as stream:
        require_weather_call(stream.get_final_completion().choices[0])
    del fields["tool_choice" if choice else "tools"]
    result = {"role": "tool", "tool_call_id": done.message.tool_calls[0].id, "content": '{"sky": "sunny"}'}
    answer = ask(client, QUESTION, done.message, result, **fields)
    assert answer.finish_reason == "stop" and json.loads(answer.message.content).keys() == {"answer"}


def test_no_call_is_made_where_none_is_allowed(client: openai.OpenAI) -> None:
    silent = ask(client, QUESTION, tools=TOOLS, tool_choice="none", response_format=FORMAT)
    assert silent.message.tool_calls is None and json.loads(silent.message.content).keys() == {"answer"}


@pytest.mark.parametrize(
    "constraint",
    [{"response_format": {"type": "json_object"}}, {"guided_regex": "[a-z]+"}, {"guided_choice": ["yes", "no"]}],
)
def test_every_constraint_leaves_calls_possible(client: openai.OpenAI, constraint: dict[str, Any]) -> None:
    require_weather_call(ask(client, QUESTION, tools=TOOLS, extra_body=constraint))
    other = ask(client, QUESTION, tools=TOOLS, logit_bias=NO_CALL, max_tokens=20, extra_body=constraint)
    assert other.message.tool_calls is None and other.message.content[0] in "{yn" + "abcdefghijklmnopqrstuvwxyz"


@pytest.mark.parametrize("bias", [{}, NO_CALL])
@pytest.mark.parametrize("fixture", ["server", "special"])
def test_calls_beside_a_schema_in_other_apis(
    fixture: str, bias: dict[str, float], request: pytest.FixtureRequest
) -> None:
    function = TOOLS[0]["function"]
    messages = {
        "messages": [QUESTION],
        "tools": [{"name": function["name"], "input_schema": function["parameters"]}],
        "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
    }
    responses = {
        "input": QUESTION["content"],
        "tools": [{"type": "function", **function}],
        "text": {"format": {"type": "json_schema", "name": "answer", "schema": SCHEMA}},
    }
    common = COMMON | {"logit_bias": bias}
    with request.getfixturevalue(fixture).client() as http:
        block = http.post("/v1/messages", json=messages | common | {"max_tokens": 100}).json()["content"][0]
        item = http.post("/v1/responses", json=responses | common).json()["output"][0]
    if bias:
        assert json.loads(block["text"]).keys() == json.loads(item["content"][0]["text"]).keys() == {"answer"}
    else:
        assert (block["type"], block["name"], block["input"]) == ("tool_use", "get_weather", {"city": "Paris"})
        assert (item["type"], item["name"], json.loads(item["arguments"])) == (
            "function_call",
            "get_weather",
            {"city": "Paris"},
        )


def test_nothing_leaks(server: ServerProcess) -> None:
    require_no_leak(server)


def test_parsers_are_named_at_the_start(special: ServerProcess) -> None:
    assert "tool calls hermes · reasoning think" in special.log


THINKING: dict[str, Any] = {"extra_body": {"chat_template_kwargs": {"thinking": True}}}
END = 6  # of reasoning
END_OF_REASONING = {str(END): 100}


def test_reasoning_is_separated(thinker: openai.OpenAI) -> None:
    """The model never closes the reasoning that the template has opened, so its whole output is reasoning."""
    question = {"role": "user", "content": "What is 12 + 30?"}
    whole = ask(thinker, question, max_tokens=20, **THINKING).message
    assert whole.content is None and whole.reasoning_content
    stream = thinker.chat.completions.create(messages=[question], stream=True, max_tokens=20, **COMMON, **THINKING)
    deltas = [chunk.choices[0].delta for chunk in stream]
    assert "".join(getattr(d, "reasoning_content", None) or "" for d in deltas) == whole.reasoning_content
    assert not any(d.content for d in deltas)
    assert "42" in ask(thinker, question).message.content


@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "get_weather"}}])
def test_markers_may_be_special_tokens(thinker: openai.OpenAI, choice: Any, skips: bool) -> None:
    fields: dict[str, Any] = {"tools": TOOLS, "tool_choice": choice, "extra_body": {"skip_special_tokens": skips}}
    answer = thinker.chat.completions.create(messages=[QUESTION], n=2, logprobs=True, **COMMON, **fields)  # type: ignore[call-overload]
    for each in answer.choices:
        require_weather_call(each)
        assert each.logprobs.content[0].token == "<tool_call>"
    with thinker.chat.completions.stream(messages=[QUESTION], **COMMON, **fields) as stream:
        require_weather_call(stream.get_final_completion().choices[0])
    require_weather_call(ask(thinker, QUESTION, response_format=FORMAT, **fields))


@pytest.mark.parametrize("budget", [0, 1, 5, 19])
def test_reasoning_is_cut_at_its_budget(thinker: openai.OpenAI, budget: int) -> None:
    """What follows is an answer, a schema's text or a forced call, whole and streamed."""
    common = COMMON | {"messages": [QUESTION], "max_tokens": 60}
    extra = THINKING["extra_body"] | {"return_token_ids": True}
    free = thinker.chat.completions.create(**common, extra_body=extra).choices[0].token_ids
    limited = common | {"extra_body": extra | {"thinking_token_budget": budget}}
    forced: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required"}
    for fields in ({}, {"n": 2, "logprobs": True}, {"response_format": FORMAT}, forced):
        answer: Any = thinker.chat.completions.create(**limited, **fields)
        for choice in answer.choices:
            ids, content = choice.token_ids, choice.message.content
            assert ids.index(END) == budget and (fields or ids[:budget] == free[:budget])
            assert "think>" not in (content or "")
            if "tools" in fields:
                require_weather_call(choice)
            elif "response_format" in fields:
                assert json.loads(content).keys() == {"answer"}
        details = answer.usage.completion_tokens_details
        assert (details.reasoning_tokens if details else 0) == budget * len(answer.choices)
        with thinker.chat.completions.stream(**limited, **fields) as stream:
            assert stream.get_final_completion().choices[0].message.content == (content or "")


@pytest.mark.parametrize("tools", [[], TOOLS])
def test_schema_and_calls_follow_reasoning_that_a_special_token_ends(thinker: openai.OpenAI, tools: Any) -> None:
    fields: dict[str, Any] = {"response_format": FORMAT, "logit_bias": END_OF_REASONING, **THINKING}
    if tools:
        require_weather_call(ask(thinker, QUESTION, tools=tools, **fields))
    else:
        assert json.loads(ask(thinker, QUESTION, **fields).message.content).keys() == {"answer"}
