"""`/v1/responses` through the official client: its answers are those of a chat completion, in other words."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import openai
import pytest

from e2e.harness import ServerProcess, require_no_leak
from minisgl.api.items import KeptResponses, _namespaces, chat_messages
from minisgl.api.protocol import ChatMessage, InputItem, ResponseObject, ResponseReasoning, ToolCall, ToolFunction

QUESTION = "What is the weather in Paris?"
GREEDY: dict[str, Any] = {"model": "minisgl-demo", "temperature": 0}
TOOL: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the current weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
OUTPUT = '{"temperature": 21, "sky": "sunny"}'


def ask(client: openai.OpenAI, given: Any, **fields: Any) -> Any:
    return client.responses.create(input=given, **GREEDY | fields)


def test_a_response_is_the_answer_of_a_chat(client: openai.OpenAI) -> None:
    """With the same sampling, and the tokens counted in the same way."""
    story = "Tell me a story about a cat named Tom."
    messages: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": story}]
    sampling: dict[str, Any] = {"model": "minisgl-demo", "temperature": 1.5, "top_p": 0.9}
    extra = {"seed": 3, "top_k": 20}
    chat = client.chat.completions.create(messages=messages, max_tokens=30, extra_body=extra, **sampling)
    fields: dict[str, Any] = {"instructions": "Be brief.", "max_output_tokens": 30, "extra_body": extra}
    answer = client.responses.create(input=story, **sampling, **fields)
    assert answer.output_text == chat.choices[0].message.content
    assert answer.instructions == "Be brief." and answer.max_output_tokens == 30 and answer.top_p == 0.9
    used, counted = answer.usage, chat.usage
    assert used is not None and counted is not None
    assert (used.input_tokens, used.output_tokens) == (counted.prompt_tokens, counted.completion_tokens)


def test_stream_has_the_events_of_a_text_in_order(client: openai.OpenAI) -> None:
    whole = ask(client, "What is 12 + 30?")
    events = list(ask(client, "What is 12 + 30?", stream=True, stream_options={"include_obfuscation": False}))
    assert [e.sequence_number for e in events] == list(range(len(events)))
    kinds = [e.type.removeprefix("response.") for e in events]
    deltas = kinds.count("output_text.delta")
    assert kinds == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *["output_text.delta"] * deltas,
        *("output_text.done", "content_part.done", "output_item.done", "completed"),
    ]
    final = events[-1].response
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == final.output_text
    assert final.output_text == whole.output_text and "42" in final.output_text
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert {e.item_id for e in events if hasattr(e, "item_id")} == {final.output[0].id}


@pytest.mark.parametrize("stream", [False, True])
def test_call_and_its_result(client: openai.OpenAI, stream: bool) -> None:
    if stream:
        with client.responses.stream(input=QUESTION, tools=[TOOL], **GREEDY) as events:
            kinds = [e.type for e in events]
            first: Any = events.get_final_response()
        assert kinds[2:-1] == [
            "response.output_item.added",
            "response.function_call_arguments.delta",
            "response.function_call_arguments.done",
            "response.output_item.done",
        ]
    else:
        first = ask(client, QUESTION, tools=[TOOL])
    (call,) = first.output
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "get_weather", {"city": "Paris"})
    result = {"type": "function_call_output", "call_id": call.call_id, "output": OUTPUT}
    user = {"role": "user", "content": QUESTION}
    reference = {"type": "item_reference", "id": call.id}
    own = {"type": "function_call", "call_id": call.call_id, "name": call.name, "arguments": call.arguments}
    answers = {
        ask(client, [user, own, result], tools=[TOOL]).output_text,
        ask(client, [user, reference, result], tools=[TOOL]).output_text,
        ask(client, [result], tools=[TOOL], previous_response_id=first.id).output_text,
    }
    assert len(answers) == 1 and "sunny" in answers.pop()


def test_tool_choice_and_parallel_tool_calls(client: openai.OpenAI) -> None:
    named = {"type": "function", "name": "get_weather"}
    for choice in ("required", named):
        answer = ask(client, "Hello", tools=[TOOL], tool_choice=choice, parallel_tool_calls=False)
        assert [item.type for item in answer.output] == ["function_call"]
    assert ask(client, QUESTION, tools=[TOOL], tool_choice="none").output[0].type == "message"


def test_structured_output(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [7]}}, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "name": "x", "schema": schema}
    answer = ask(client, "Hello", text={"format": form, "verbosity": "medium"})
    assert json.loads(answer.output_text) == {"a": 7}
    assert answer.text.format.type == "json_schema"
    person = "Extract name and age as JSON: Tom is 9 years old."
    assert isinstance(json.loads(ask(client, person, text={"format": {"type": "json_object"}}).output_text), dict)


def test_previous_response_id_continues_the_conversation(client: openai.OpenAI) -> None:
    first = ask(client, "My name is Anna.", metadata={"a": "b"}, user="u", max_tool_calls=1)
    second = ask(client, "What is my name?", previous_response_id=first.id)
    assert "Anna" in second.output_text and second.previous_response_id == first.id
    assert client.responses.retrieve(first.id) == first and first.metadata == {"a": "b"}
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    assert "Anna" in ask(client, "What is my name?", previous_response_id=second.id).output_text
    unkept = ask(client, "Hello", store=False)
    with pytest.raises(openai.BadRequestError, match="is not stored") as e:
        ask(client, "Hello", previous_response_id=unkept.id)
    assert (e.value.param, e.value.code) == ("previous_response_id", "previous_response_not_found")


def test_answer_that_is_cut_off_is_incomplete(client: openai.OpenAI) -> None:
    for answer in (
        ask(client, QUESTION, max_output_tokens=2),
        list(ask(client, QUESTION, max_output_tokens=2, stream=True))[-1].response,
    ):
        assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert answer.output[0].status == "incomplete" and answer.usage.output_tokens == 2


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].function.name", "must be a non-empty string"),
        ({"tool_choice": {"type": "web_search"}, "tools": [TOOL]}, "tool_choice", "tool_choice must be"),
        ({"include": ["message.output_text.logprobs"]}, "include", "logprobs"),
        (
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "?"}}}},
            "text",
            "text is not a usable grammar",
        ),
        ({"text": {"format": {"type": "xml"}}}, "text", "text must have a type"),
        ({"max_output_tokens": -9}, "max_output_tokens", "max_output_tokens must be"),
        ({"input": [{"type": "computer_call_output", "output": {}}]}, "input", "input is empty"),
        ({"input": [{"type": "custom_tool_call_output", "output": [{"type": "input_image"}]}]}, "input", "input_image"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", "input_image"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input", "msg_1"),
        ({"input": [{"role": "chief", "content": "x"}]}, "input", "chief"),
        ({"input": []}, "input", "input is empty"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    client: openai.OpenAI, fields: dict[str, Any], param: str, says: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=says) as e:
        ask(client, fields.pop("input", "x"), **fields)
    assert e.value.param == param


def test_what_has_no_effect_is_told(http: httpx.Client) -> None:
    """Also a service's tools, and what these have left in the conversation: any order and any number of them."""
    kinds = ("web_search", "file_search", "code_interpreter", "image_generation", "mcp", "local_shell", "shell")
    kinds += ("computer_use_preview", "tool_search", "apply_patch", "namespace", "odd\r\nset-cookie: x")
    left = ("web_search_call", "local_shell_call", "mcp_list_tools", "tool_search_call", "compaction", "ghost_snapshot")
    items: list[dict[str, Any]] = [
        {"type": kind, "action": {}, "arguments": {}, "status": "completed"} for kind in left
    ]
    items.append({"type": "reasoning", "summary": [], "encrypted_content": "abc"})
    question = {"role": "user", "content": "What is 12 + 30?"}
    refusal = {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}
    include = ["reasoning.encrypted_content", "web_search_call.action.sources"]
    fields = {"include": include, "reasoning": {"effort": "low", "summary": "auto"}, "text": {"verbosity": "low"}}
    body = {"input": [refusal, *items, question], "tools": [{"type": k, "name": k} for k in kinds], "temperature": 0}
    answer = http.post("/v1/responses", json=body | fields)
    assert answer.status_code == 200 and "42" in answer.json()["output"][0]["content"][0]["text"]
    told = answer.headers["x-ignored-fields"].split(", ")
    assert {f"input.{kind}" for kind in (*left, "reasoning")} <= set(told) >= {f"tools.{k}" for k in kinds[:-1]}
    assert {"include.web_search_call.action.sources", "text.verbosity", "tools.odd??set-cookie: x"} <= set(told)
    assert {"reasoning.summary", "reasoning.effort"} <= set(told) and "set-cookie" not in answer.headers


def test_input_may_be_empty_beside_instructions_or_a_kept_response(client: openai.OpenAI) -> None:
    first = ask(client, "What is 12 + 30?")
    for given in ([], None):
        assert ask(client, given, previous_response_id=first.id).status == "completed"
        assert ask(client, given, instructions="Be brief.").status == "completed"


PATCH: Any = {"type": "custom", "name": "get_weather", "description": "Get the weather of a city"}


@pytest.mark.parametrize("tool", [PATCH, {"type": "namespace", "name": "n", "tools": [TOOL]}])
@pytest.mark.parametrize("named", [False, True])
def test_other_tools_than_functions_are_called_and_answered(http: httpx.Client, tool: Any, named: bool) -> None:
    """A custom tool, and a function in a namespace: whole, streamed, and as a part of the conversation."""
    is_custom = tool["type"] == "custom"
    choice = {"type": "custom" if is_custom else "function", "name": "get_weather"}
    choice |= {} if is_custom else {"namespace": "n"}
    user = {"role": "user", "content": QUESTION}
    body = {"input": [user], "tools": [tool], "tool_choice": choice if named else "required", "temperature": 0}
    whole = http.post("/v1/responses", json=body).json()["output"]
    stream = http.post("/v1/responses", json=body | {"stream": True}).text
    events = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: ")]
    (call,) = whole
    kind, field = ("custom_tool_call", "input") if is_custom else ("function_call", "arguments")
    assert (call["type"], call["name"], call.get("namespace")) == (kind, "get_weather", None if is_custom else "n")
    assert call[field] and (is_custom or json.loads(call[field]).keys() == {"city"})
    final = events[-1]["response"]["output"][0]
    assert {k: v for k, v in final.items() if "id" not in k} == {k: v for k, v in call.items() if "id" not in k}
    kinds = [e["type"].removeprefix("response.") for e in events[2:-1]]
    deltas = [f"{kind}_{field}.delta", f"{kind}_{field}.done"]
    assert kinds == ["output_item.added", *deltas, "output_item.done"]
    assert events[3]["delta"] == events[4][field] == final[field] and events[2]["item"][field] == ""
    result = {"type": kind + "_output", "call_id": call["call_id"], "output": OUTPUT}
    answer = http.post("/v1/responses", json=body | {"input": [user, call, result], "tool_choice": "auto"}).json()
    assert answer["status"] == "completed" and answer["output"][0]["type"] == "message"


def test_model_may_leave_out_a_namespace() -> None:
    tools = [{"type": "namespace", "name": n, "tools": [{"name": f}]} for n, f in (("a", "f"), ("a", "g"), ("b", "g"))]
    names = _namespaces([*tools, {"type": "function", "name": "h"}, {"type": "namespace", "name": "c", "tools": []}])
    assert names["f"] == names["a__f"] == names["a__g"] == "a" and names["b__g"] == "b"
    assert names["g"] is names["h"] is None


def test_reasoning_is_an_item(thinker: openai.OpenAI) -> None:
    """The template opens the reasoning, which the model never closes."""
    whole = ask(thinker, "What is 12 + 30?", max_output_tokens=20, extra_body=THINKING)
    (item,) = whole.output
    assert item.type == "reasoning" and item.content[0].type == "reasoning_text" and item.content[0].text
    events = list(ask(thinker, "What is 12 + 30?", max_output_tokens=20, extra_body=THINKING, stream=True))
    deltas = [e.delta for e in events if e.type == "response.reasoning_text.delta"]
    assert "".join(deltas) == item.content[0].text
    limited = ask(thinker, "What is 12 + 30?", extra_body=THINKING | {"thinking_budget": 7})
    assert [item.type for item in limited.output] == ["reasoning", "message"]
    assert limited.usage.output_tokens_details.reasoning_tokens == 7
    assert whole.usage.output_tokens_details.reasoning_tokens == whole.usage.output_tokens
    for off in ({}, {"reasoning": {"effort": "none"}}, {"extra_body": {"enable_thinking": False}}):
        assert "42" in ask(thinker, "What is 12 + 30?", **off).output_text


THINKING = {"chat_template_kwargs": {"thinking": True}}


def test_items_of_one_turn_are_one_message() -> None:
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    items = [
        InputItem(role="user", content=[{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]),
        InputItem("reasoning", content=[{"type": "reasoning_text", "text": "hm"}]),
        InputItem("message", role="assistant", content=[{"type": "output_text", "text": "c"}]),
        InputItem(**call),
        InputItem(**call | {"call_id": "2"}),
        InputItem("function_call_output", call_id="1", output="x"),
        InputItem("reasoning", summary=[{"type": "summary_text", "text": "so"}]),
        InputItem(role="assistant", content="d"),
        InputItem(role="assistant", content="e"),
    ]
    calls = [ToolCall(ToolFunction("f", "{}"), i) for i in ("1", "2")]
    assert chat_messages(items)[0] == [
        ChatMessage("user", "ab"),
        ChatMessage("assistant", "c", tool_calls=calls, reasoning_content="hm"),
        ChatMessage("tool", "x", tool_call_id="1"),
        ChatMessage("assistant", "d", reasoning_content="so"),
        ChatMessage("assistant", "e"),
    ]


def responses() -> Iterator[ResponseObject]:
    for i in range(100):
        yield ResponseObject(
            id=f"r{i}",
            output=[{"id": f"m{i}", "type": "message", "role": "assistant", "content": "x" * 100}],
            created_at=0,
            model="m",
            instructions=None,
            max_output_tokens=None,
            metadata={},
            parallel_tool_calls=True,
            previous_response_id=None,
            reasoning=ResponseReasoning(),
            store=True,
            temperature=1,
            text={},
            tool_choice="auto",
            tools=[],
            top_p=1,
            user=None,
        )


def test_memory_of_kept_responses_is_bounded() -> None:
    for kept, most in ((KeptResponses(max_count=3), 3), (KeptResponses(max_bytes=5000), 6)):
        for n, response in enumerate(responses()):
            kept.keep(response, msgspec.json.encode(response), [InputItem(content="y")])
            if n > 2:
                kept.item("m2") if n == 3 else None
        sizes = [sum(map(len, entry)) for entry in kept._kept.values()]
        assert 2 <= len(sizes) <= most and sum(sizes) == kept._bytes and len(kept._owners) == len(sizes)
        assert list(kept._kept)[-1] == "r99"
        kept.body("r98")
        assert list(kept._kept)[-1] == "r98"
        for name in list(kept._kept):
            kept.drop(name)
        assert (kept._bytes, kept._owners) == (0, {})


def test_nothing_leaks(server: ServerProcess) -> None:
    require_no_leak(server)
