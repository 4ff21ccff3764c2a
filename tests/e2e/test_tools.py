"""Tool calls through the official client: asked, called, answered; whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from e2e.harness import ServerProcess, require_no_leak
from e2e.test_matrix import TOOLS
from minisgl.checkpoint.hf import BUILTIN_MODEL

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
        ({"tool_choice": "required", "tools": [{"type": "function", "function": {}}]}, "tools"),
        ({"tool_choice": "required", "tools": [tool({"type": "x"})]}, "tools"),
        ({"tool_choice": "required", "tools": [tool({"type": "integer", "minimum": LOW, "maximum": LOW})]}, "tools"),
        ({"tool_choice": "required", "tools": TOOLS, "response_format": {"type": "json_object"}}, "tool_choice"),
    ],
)
def test_bad_tool_choice_is_refused(client: openai.OpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as e:
        ask(client, QUESTION, **fields)
    assert e.value.param == param


def test_nothing_leaks(server: ServerProcess) -> None:
    require_no_leak(server)


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    """The built-in model with a template that opens the reasoning; its tool calls are not parsed."""
    folder: Path = tmp_path_factory.mktemp("thinker")
    for file in BUILTIN_MODEL.iterdir():
        (folder / file.name).symlink_to(file)
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.jinja").write_text(
        template + "{%- if add_generation_prompt and thinking -%}<think>{%- endif -%}{#- </think> -#}"
    )
    with (
        ServerProcess(str(folder), "--tool-call-parser", "none", "--served-model-name", "minisgl-demo") as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def test_reasoning_is_separated(thinker: openai.OpenAI) -> None:
    """The model never closes the reasoning that the template has opened, so its whole output is reasoning."""
    question = {"role": "user", "content": "What is 12 + 30?"}
    fields: dict[str, Any] = {"extra_body": {"chat_template_kwargs": {"thinking": True}}, "max_tokens": 20}
    whole = ask(thinker, question, **fields).message
    assert whole.content is None and whole.reasoning_content
    stream = thinker.chat.completions.create(messages=[question], stream=True, **COMMON, **fields)
    deltas = [chunk.choices[0].delta for chunk in stream]
    assert "".join(getattr(d, "reasoning_content", None) or "" for d in deltas) == whole.reasoning_content
    assert not any(d.content for d in deltas)
    assert "42" in ask(thinker, question).message.content


def test_parser_can_be_disabled(thinker: openai.OpenAI) -> None:
    choice = ask(thinker, QUESTION, tools=TOOLS)
    assert choice.finish_reason == "stop" and choice.message.tool_calls is None
    assert choice.message.content.startswith("<tool_call>")
