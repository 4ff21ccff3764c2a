"""The official client's Responses API: whole, streamed, parsed, with tools, and with kept responses."""

from __future__ import annotations

import json
from typing import Any

import openai
from checks import BASE, MODEL, PERSON, STORY, SUM, TOO_LONG, WEATHER, check, refused, run, user
from pydantic import BaseModel

client = openai.OpenAI(base_url=BASE, api_key="none", max_retries=0, timeout=60)
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0}
TOOL: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the current weather of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
RESULT = '{"temperature": 21, "sky": "sunny"}'


class Person(BaseModel):
    name: str
    age: int


def ask(given: Any, **fields: Any) -> Any:
    return client.responses.create(input=given, **GREEDY | fields)


@check
def whole() -> None:
    answer = ask(SUM, metadata={"a": "b"}, user="u")
    assert answer.object == "response" and answer.status == "completed" and answer.model == MODEL
    assert "42" in answer.output_text and answer.error is None and answer.incomplete_details is None
    (item,) = answer.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "completed")
    assert answer.metadata == {"a": "b"} and answer.temperature == 0 and answer.tools == []
    used = answer.usage
    assert used.total_tokens == used.input_tokens + used.output_tokens and used.output_tokens > 0
    assert ask(SUM).usage.input_tokens_details.cached_tokens >= 16


@check
def the_same_as_a_chat() -> None:
    chat = client.chat.completions.create(messages=user(STORY), **GREEDY).choices[0].message.content
    assert ask(STORY).output_text == chat
    items = [{"role": "user", "content": [{"type": "input_text", "text": STORY}]}]
    assert ask(items).output_text == chat


@check
def streamed() -> None:
    expected = ask(SUM).output_text
    events = list(ask(SUM, stream=True))
    assert [e.sequence_number for e in events] == list(range(len(events)))
    kinds = [e.type.removeprefix("response.") for e in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert "".join(e.delta for e in events[4:-4]) == events[-4].text == events[-1].response.output_text == expected


@check
def stream_helper() -> None:
    with client.responses.stream(input=SUM, **GREEDY) as stream:
        kinds = [event.type for event in stream]
        assert "42" in stream.get_final_response().output_text
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"


@check
def stream_helper_with_tools() -> None:
    with client.responses.stream(input=WEATHER, tools=[TOOL], **GREEDY) as stream:
        events = list(stream)
        (call,) = stream.get_final_response().output
    assert call.type == "function_call" and json.loads(call.arguments) == {"city": "Paris"}
    kinds = [e.type.removeprefix("response.") for e in events]
    added, delta, done = "output_item.added", "function_call_arguments.delta", "function_call_arguments.done"
    assert kinds == ["created", "in_progress", added, delta, done, "output_item.done", "completed"]


@check
def tools_round_trip() -> None:
    (call,) = ask(WEATHER, tools=[TOOL]).output
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "get_weather", {"city": "Paris"})
    result = {"type": "function_call_output", "call_id": call.call_id, "output": RESULT}
    answer = ask([*user(WEATHER), call, result], tools=[TOOL])  # the client's own object goes back
    assert "sunny" in answer.output_text


@check
def tools_and_a_kept_response() -> None:
    first = ask(WEATHER, tools=[TOOL])
    result = {"type": "function_call_output", "call_id": first.output[0].call_id, "output": RESULT}
    second = ask([result], tools=[TOOL], previous_response_id=first.id)
    assert "sunny" in second.output_text and second.previous_response_id == first.id


@check
def tool_choice() -> None:
    named = {"type": "function", "name": "get_weather"}
    for choice in ("required", named):
        (call,) = ask("Hello", tools=[TOOL], tool_choice=choice, max_output_tokens=100).output
        assert call.type == "function_call" and "city" in json.loads(call.arguments)
    assert ask(WEATHER, tools=[TOOL], tool_choice="none").output[0].type == "message"
    e = refused(openai.BadRequestError, lambda: ask(WEATHER, tools=[TOOL], tool_choice={"type": "web_search"}))
    assert e.param == "tool_choice" and "must be" in str(e)


@check
def tools_of_a_service_are_left_out() -> None:
    raw = client.responses.with_raw_response.create(input=SUM, tools=[{"type": "web_search"}, TOOL], **GREEDY)
    assert "tools.web_search" in raw.headers["x-ignored-fields"].split(", ")
    assert "42" in raw.parse().output_text


@check
def custom_tool_round_trip() -> None:
    tools = [{"type": "custom", "name": "get_weather", "description": "Get the weather of a city"}]
    (call,) = ask(WEATHER, tools=tools, tool_choice={"type": "custom", "name": "get_weather"}).output
    assert call.type == "custom_tool_call" and call.name == "get_weather" and call.input
    result = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": RESULT}
    assert ask([*user(WEATHER), call, result], tools=tools).output_text  # the client's own object goes back
    with client.responses.stream(input=WEATHER, tools=tools, tool_choice="required", **GREEDY) as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_response().output[0].type == "custom_tool_call"
    assert kinds[3:5] == ["response.custom_tool_call_input.delta", "response.custom_tool_call_input.done"]


@check
def parsed() -> None:
    answer = client.responses.parse(input=PERSON, text_format=Person, max_output_tokens=100, **GREEDY)
    assert answer.output_parsed == Person(name="Tom", age=9)
    with client.responses.stream(input=PERSON, text_format=Person, max_output_tokens=100, **GREEDY) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_parsed == Person(name="Tom", age=9)


@check
def parsed_calls() -> None:
    tools: Any = [openai.pydantic_function_tool(Person, name="save_person")]
    answer: Any = client.responses.parse(
        input=PERSON, tools=tools, tool_choice="required", max_output_tokens=100, **GREEDY
    )
    assert isinstance(answer.output[0].parsed_arguments, Person)


@check
def json_object() -> None:
    answer = ask(PERSON, text={"format": {"type": "json_object"}}, max_output_tokens=100)
    assert isinstance(json.loads(answer.output_text), dict)
    bad = {"type": "json_schema", "name": "x", "schema": {"type": "nonsense"}}
    assert refused(openai.BadRequestError, lambda: ask("x", text={"format": bad})).param == "text"


@check
def conversation_is_kept() -> None:
    first = ask("My name is Anna.", instructions="You are a helpful assistant.")
    second = ask("What is my name?", previous_response_id=first.id)
    assert "Anna" in second.output_text
    assert client.responses.retrieve(second.id).output_text == second.output_text
    with client.responses.stream(input="What is my name?", previous_response_id=second.id, **GREEDY) as stream:
        for _ in stream:
            pass
        third = stream.get_final_response()
    assert "Anna" in third.output_text and client.responses.retrieve(third.id).id == third.id
    client.responses.delete(first.id)
    refused(openai.NotFoundError, lambda: client.responses.retrieve(first.id))
    e = refused(openai.BadRequestError, lambda: ask("x", previous_response_id=first.id))
    assert (e.param, e.code) == ("previous_response_id", "previous_response_not_found")
    assert "Anna" in ask("What is my name?", previous_response_id=second.id).output_text


@check
def nothing_is_kept_without_store() -> None:
    answer = ask(SUM, store=False)
    assert answer.store is False
    refused(openai.NotFoundError, lambda: client.responses.retrieve(answer.id))


@check
def cut_off() -> None:
    answer = ask(STORY, max_output_tokens=3)
    assert answer.status == "incomplete" and answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage.output_tokens == 3 and answer.output[0].status == "incomplete"
    assert [*ask(STORY, max_output_tokens=3, stream=True)][-1].type == "response.incomplete"


@check
def what_is_not_supported_is_refused_by_name() -> None:
    for fields, param in (
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"truncation": "auto"}, "truncation"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"extra_body": {"max_tokens": 3}}, "max_tokens"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
    ):
        assert refused(openai.BadRequestError, lambda f=fields: ask("x", **f)).param == param
    image = [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]
    assert "input_image" in str(refused(openai.BadRequestError, lambda: ask(image)))
    assert refused(openai.BadRequestError, lambda: ask(TOO_LONG)).code == "context_length_exceeded"
    assert refused(openai.NotFoundError, lambda: ask("x", model="other")).code == "model_not_found"


run("openai")
