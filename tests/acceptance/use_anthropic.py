"""Anthropic's client: messages whole and streamed, tools in a loop, counted tokens, errors."""

from __future__ import annotations

import json
from typing import Any

import anthropic
from checks import MODEL, PERSON, STORY, SUM, TOO_LONG, URL, WEATHER, check, refused, run, user
from pydantic import BaseModel

client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0, timeout=60)
COMMON: dict[str, Any] = {"model": MODEL, "max_tokens": 1024, "extra_body": {"temperature": 0}}
TOOL: Any = {
    "name": "get_weather",
    "description": "Get the current weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
RESULT = '{"temperature": 21, "sky": "sunny"}'


class Person(BaseModel):
    name: str
    age: int


def ask(content: Any, **fields: Any) -> Any:
    return client.messages.create(messages=user(content), **COMMON | fields)


@check
def whole() -> None:
    answer = ask(SUM, metadata={"user_id": "u"})
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", MODEL)
    (block,) = answer.content
    assert block.type == "text" and "42" in block.text
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    used = ask(SUM).usage
    assert used.output_tokens == answer.usage.output_tokens > 0 and used.cache_read_input_tokens >= 16
    counted = client.messages.count_tokens(model=MODEL, messages=user(SUM))
    assert counted.input_tokens == used.input_tokens + used.cache_read_input_tokens


@check
def streamed() -> None:
    expected = ask(STORY).content[0].text
    events = list(ask(STORY, stream=True))
    kinds = [e.type for e in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"} and len(kinds) > 8
    assert "".join(e.delta.text for e in events[2:-3]) == expected
    assert events[-2].delta.stop_reason == "end_turn" and events[-2].usage.output_tokens > 0


@check
def stream_helper() -> None:
    with client.messages.stream(messages=user(SUM), **COMMON) as stream:
        text = "".join(stream.text_stream)
        assert "42" in text and stream.get_final_text() == text
        assert stream.get_final_message().stop_reason == "end_turn"


@check
def system_and_blocks() -> None:
    system = [{"type": "text", "text": "You are helpful.", "cache_control": {"type": "ephemeral"}}]
    text = ask([{"type": "text", "text": SUM}], system=system).content[0].text
    assert text == ask(SUM, system="You are helpful.").content[0].text and "42" in text
    messages: Any = [*user("My name is Anna."), {"role": "assistant", "content": "Hi!"}, *user("What is my name?")]
    assert "Anna" in client.messages.create(messages=messages, **COMMON).content[0].text


@check
def the_answer_is_begun() -> None:
    begun: Any = [*user(SUM), {"role": "assistant", "content": "12 + 30 ="}]
    assert "42" in client.messages.create(messages=begun, **COMMON).content[0].text


@check
def stop_sequences() -> None:
    answer = ask(SUM, stop_sequences=["zzz", "30"])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "30")
    assert "30" not in answer.content[0].text
    assert ask(STORY, max_tokens=3).stop_reason == "max_tokens"
    assert ask(SUM, max_tokens=64_000).stop_reason == "end_turn"


@check
def agent_loop() -> None:
    """As coding agents do: stream, run the tools, send everything back, until nothing is called."""
    messages: Any = user([{"type": "text", "text": WEATHER, "cache_control": {"type": "ephemeral"}}])
    calls = []
    for _ in range(3):
        with client.messages.stream(messages=messages, tools=[TOOL], system="You are helpful.", **COMMON) as stream:
            for _ in stream:
                pass
            answer = stream.get_final_message()
        messages.append({"role": "assistant", "content": answer.content})  # the client's own objects go back
        uses = [block for block in answer.content if block.type == "tool_use"]
        if answer.stop_reason != "tool_use":
            break
        results = [{"type": "tool_result", "tool_use_id": use.id, "content": RESULT} for use in uses]
        calls += [(use.name, use.input) for use in uses]
        messages.append({"role": "user", "content": results})
    assert calls == [("get_weather", {"city": "Paris"})]
    assert answer.stop_reason == "end_turn" and "sunny" in answer.content[0].text


@check
def tool_runner() -> None:
    asked = []

    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """Get the current weather of a city"""
        asked.append(city)
        return RESULT

    runner = client.beta.messages.tool_runner(tools=[get_weather], messages=user(WEATHER), **COMMON)
    assert "sunny" in runner.until_done().content[0].text and asked == ["Paris"]


@check
def tool_choice() -> None:
    for choice in ({"type": "any"}, {"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True}):
        answer = ask("Hello", tools=[TOOL], tool_choice=choice, max_tokens=100)
        assert answer.stop_reason == "tool_use" and "city" in answer.content[0].input
    assert ask(WEATHER, tools=[TOOL], tool_choice={"type": "none"}).content[0].type == "text"


@check
def parsed() -> None:
    answer = client.messages.parse(messages=user(PERSON), output_format=Person, **COMMON)
    assert answer.parsed_output == Person(name="Tom", age=9)
    schema = Person.model_json_schema()
    answer = ask(PERSON, output_config={"format": {"type": "json_schema", "schema": schema}})
    assert json.loads(answer.content[0].text) == {"name": "Tom", "age": 9}


@check
def thinking_is_accepted() -> None:
    """The built-in model has none, so there is only text."""
    raw = client.messages.with_raw_response.create(
        messages=user(SUM), thinking={"type": "enabled", "budget_tokens": 1024}, **COMMON
    )
    assert raw.headers["x-ignored-fields"] == "thinking.budget_tokens, thinking.type"
    assert "42" in raw.parse().content[0].text


@check
def errors_have_their_types() -> None:
    e = refused(anthropic.BadRequestError, lambda: ask(SUM, extra_body={"top_p": 2}))
    assert e.body["type"] == "error" and e.body["error"]["type"] == "invalid_request_error" and "top_p" in str(e)
    assert "too long" in str(refused(anthropic.BadRequestError, lambda: ask(TOO_LONG)))
    refused(anthropic.NotFoundError, lambda: ask(SUM, model="claude-opus-5-5"))
    image = {"type": "image", "source": {"type": "url", "url": "https://example.com/x.png"}}
    assert "image" in str(refused(anthropic.BadRequestError, lambda: ask([image])))
    search = {"type": "web_search_20250305", "name": "web_search"}
    any_tool = {"tools": [search], "tool_choice": {"type": "any"}}
    assert "web_search" in str(refused(anthropic.BadRequestError, lambda: ask(SUM, **any_tool)))
    assert ask(SUM, tools=[search]).content[0].type == "text"
    assert "stop_sequences" in str(refused(anthropic.BadRequestError, lambda: ask(SUM, stop_sequences=[""])))


run("anthropic")
