"""`/v1/messages` over a socket: its answers are those of a chat completion, its stream has Anthropic's events."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from e2e.harness import ServerProcess, require_no_leak
from minisgl.api.anthropic import chat_messages
from minisgl.api.protocol import AnthropicMessage, ChatMessage, MessagesRequest, ToolCall, ToolFunction

SUM = "What is 12 + 30?"
QUESTION = "What is the weather in Paris?"
COMMON: dict[str, Any] = {"model": "minisgl-demo", "temperature": 0, "max_tokens": 100}
TOOL = {
    "name": "get_weather",
    "description": "Get the current weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
OUTPUT = '{"temperature": 21, "sky": "sunny"}'
HEADERS = {"x-api-key": "none", "anthropic-version": "2023-06-01"}


def post(http: httpx.Client, *contents: Any, path: str = "/v1/messages", **fields: Any) -> httpx.Response:
    """A conversation of `contents`, by turns the user's and the assistant's."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": c} for i, c in enumerate(contents)]
    return http.post(path, json=COMMON | {"messages": messages} | fields, headers=HEADERS)


def ask(http: httpx.Client, *contents: Any, **fields: Any) -> dict[str, Any]:
    response = post(http, *contents, **fields)
    assert response.status_code == 200, response.text
    result: dict[str, Any] = response.json()
    return result


def events(http: httpx.Client, *contents: Any, **fields: Any) -> list[dict[str, Any]]:
    """The data of a stream. Each event has its type as its name."""
    response = post(http, *contents, stream=True, **fields)
    assert response.headers["content-type"].startswith("text/event-stream") and response.text.endswith("\n\n")
    found = []
    for event in response.text.removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def added_up(stream: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client makes of the events, which must come in Anthropic's order."""
    stream = [e for e in stream if e["type"] != "ping"]
    assert stream[0]["type"] == "message_start" and [e["type"] for e in stream[-2:]] == [
        "message_delta",
        "message_stop",
    ]
    message: dict[str, Any] = stream[0]["message"]
    assert message["content"] == [] and message["stop_reason"] is None
    is_open, partial = False, ""
    for e in stream[1:-2]:
        assert e["index"] == len(message["content"]) - is_open
        match e["type"], e.get("delta"):
            case "content_block_start", _:
                assert not is_open
                message["content"].append(e["content_block"])
                is_open, partial = True, ""
            case "content_block_delta", {"type": "input_json_delta", "partial_json": text}:
                partial += text
            case "content_block_delta", delta:
                ((field, text),) = [(k, v) for k, v in delta.items() if k != "type"]
                assert delta["type"] == f"{field}_delta"
                message["content"][-1][field] += text
            case "content_block_stop", _:
                is_open = False
                if partial:
                    message["content"][-1]["input"] = json.loads(partial)
    assert not is_open
    return message | stream[-2]["delta"] | {"usage": stream[-2]["usage"]}


def test_a_message_is_the_answer_of_a_chat(http: httpx.Client, client: openai.OpenAI) -> None:
    story = "Tell me a story about a cat named Tom."
    sampling: dict[str, Any] = {"temperature": 1.5, "top_k": 20, "seed": 3, "max_tokens": 30}
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": story}]
    chat = http.post("/v1/chat/completions", json=sampling | {"messages": messages}).json()
    for system in ("Be brief.", [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]):
        answer = ask(http, story, system=system, **sampling, metadata={"user_id": "u"})
        assert answer["content"] == [{"type": "text", "text": chat["choices"][0]["message"]["content"]}]
        used = answer["usage"]
        assert used["input_tokens"] + used["cache_read_input_tokens"] == chat["usage"]["prompt_tokens"]
        assert used["output_tokens"] == chat["usage"]["completion_tokens"]
    first = {"role": "system", "content": "Be brief."}
    inside = http.post("/v1/messages", json=COMMON | sampling | {"messages": [first, messages[1]]}).json()
    assert inside["content"] == answer["content"]


@pytest.mark.parametrize(
    ("content", "fields", "reason"),
    [
        (SUM, {}, "end_turn"),
        (SUM, {"stop_sequences": ["zzz", "30"]}, "stop_sequence"),
        (SUM, {"max_tokens": 3}, "max_tokens"),
        (QUESTION, {"tools": [TOOL]}, "tool_use"),
    ],
)
def test_stream_adds_up_to_the_message(http: httpx.Client, content: str, fields: dict[str, Any], reason: str) -> None:
    whole, streamed = ask(http, content, **fields), added_up(events(http, content, **fields))
    assert whole["stop_reason"] == reason and whole["stop_sequence"] == ("30" if reason == "stop_sequence" else None)
    for message in (whole, streamed):
        del message["id"], message["usage"]["input_tokens"], message["usage"]["cache_read_input_tokens"]
        for block in message["content"]:
            block.pop("id", None)
    assert streamed == whole


def test_call_and_its_result(http: httpx.Client) -> None:
    """As coding agents send it, and the same tokens as those of a chat."""
    asked = ask(http, QUESTION, tools=[TOOL])
    (use,) = asked["content"]
    assert (use["type"], use["name"], use["input"]) == ("tool_use", "get_weather", {"city": "Paris"})
    for content in (OUTPUT, [{"type": "text", "text": OUTPUT}]):
        result = {"type": "tool_result", "tool_use_id": use["id"], "content": content, "is_error": False}
        answer = ask(http, QUESTION, asked["content"], [result], tools=[TOOL])
        assert "sunny" in answer["content"][0]["text"] and answer["stop_reason"] == "end_turn"


def test_pings_come_while_a_call_is_written(http: httpx.Client) -> None:
    assert {"type": "ping"} in events(http, QUESTION, tools=[TOOL])


def test_tool_choice(http: httpx.Client) -> None:
    named = {"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True}
    for choice in ({"type": "any", "disable_parallel_tool_use": True}, named):
        assert [b["type"] for b in ask(http, "Hello", tools=[TOOL], tool_choice=choice)["content"]] == ["tool_use"]
    assert ask(http, QUESTION, tools=[TOOL], tool_choice={"type": "none"})["content"][0]["type"] == "text"


def test_the_answer_may_be_begun(http: httpx.Client) -> None:
    assert "42" in ask(http, SUM, "12 + 30 =")["content"][0]["text"]


def test_max_tokens_may_be_more_than_the_context_has_left(http: httpx.Client, server: ServerProcess) -> None:
    limit = server.info()["max_model_len"]
    for max_tokens in (limit - 1, limit, 10 * limit):
        assert ask(http, SUM, max_tokens=max_tokens)["stop_reason"] == "end_turn"
    count = {"add_generation_prompt": True, "messages": [{"role": "user", "content": "a " * 3000}]}
    rest = limit - http.post("/tokenize", json=count).json()["count"]
    cut = ask(http, "a " * 3000, max_tokens=limit, ignore_eos=True)
    assert 0 < rest == cut["usage"]["output_tokens"] and cut["stop_reason"] == "max_tokens"


def test_tokens_are_counted(http: httpx.Client) -> None:
    fields: dict[str, Any] = {"system": "Be brief.", "tools": [TOOL]}
    counted = post(http, QUESTION, path="/v1/messages/count_tokens", **fields).json()
    used = ask(http, QUESTION, **fields)["usage"]
    assert counted == {"input_tokens": used["input_tokens"] + used["cache_read_input_tokens"]}


def test_structured_output(http: httpx.Client) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [7]}}, "required": ["a"], "additionalProperties": False}
    answer = ask(http, "Hello", output_config={"format": {"type": "json_schema", "schema": schema}})
    assert json.loads(answer["content"][0]["text"]) == {"a": 7}


def test_thinking_is_a_block(thinker: openai.OpenAI) -> None:
    """The template opens the reasoning if `thinking` is true, and the model never closes it."""
    with httpx.Client(base_url=str(thinker.base_url).removesuffix("/v1/"), timeout=60) as http:
        for thinking in ({"type": "enabled", "budget_tokens": 1024}, {"type": "adaptive"}):
            fields: dict[str, Any] = {"thinking": thinking, "max_tokens": 20}
            (block,) = ask(http, SUM, **fields)["content"]
            assert block["type"] == "thinking" and block["thinking"] and block["signature"] == ""
            assert added_up(events(http, SUM, **fields))["content"] == [block]
        answer = ask(http, SUM, thinking={"type": "enabled", "budget_tokens": 3}, max_tokens=20)
        assert [block["type"] for block in answer["content"]] == ["thinking", "text"]
        assert answer["usage"]["output_tokens_details"] == {"thinking_tokens": 3}
        for off in ({}, {"thinking": {"type": "disabled"}}):
            assert "42" in ask(http, SUM, **off)["content"][0]["text"]


def test_what_only_a_service_can_read_is_left_out_and_told(http: httpx.Client) -> None:
    kinds = ("web_search_20250305", "bash_20250124", "text_editor_20250728", "computer_20250124", "mcp_toolset")
    tools = [{"type": kind, "name": kind} for kind in kinds]
    unread = ["redacted_thinking", "server_tool_use", "web_search_tool_result", "mcp_tool_use", "container_upload"]
    said = [{"type": kind, "data": "x", "content": []} for kind in unread]
    said += [{"type": "text", "text": "Hi"}, {"type": "tool_use", "id": "1", "name": "f", "input": None}]
    found = [{"type": "tool_reference", "tool_name": "f"}, {"type": "text", "text": "done"}]
    result = {"type": "tool_result", "tool_use_id": "1", "content": found}
    asked = [result, {"type": "text", "text": SUM}]
    answer = post(http, "Hello", said, asked, tools=tools, mcp_servers=[{"name": "s"}], container="c")
    assert answer.status_code == 200 and answer.json()["content"][0]["type"] == "text"
    told = set(answer.headers["x-ignored-fields"].split(", "))
    expected = {*(f"messages.{kind}" for kind in (*unread, "tool_reference")), *(f"tools.{kind}" for kind in kinds)}
    assert told >= expected | {"mcp_servers", "container"}


def test_thinking_without_reasoning_is_told(http: httpx.Client) -> None:
    response = post(http, SUM, thinking={"type": "enabled", "budget_tokens": 1024})
    assert response.status_code == 200
    assert response.headers["x-ignored-fields"] == "thinking.budget_tokens, thinking.type"


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "'image'"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "'document'"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "'tool'"),
        ({"messages": []}, "messages is empty"),
        ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "'audio'"),
        (
            {"tools": [{"type": "bash_20250124", "name": "bash"}], "tool_choice": {"type": "tool", "name": "bash"}},
            "this server cannot run and leaves out tools.bash_20250124",
        ),
        ({"tools": [{"type": "web_search_20250305"}], "tool_choice": {"type": "any"}}, "tools.web_search_20250305"),
        ({"tools": [{"name": "f", "input_schema": "x"}]}, "tools"),
        ({"tool_choice": {"type": "some"}}, "'some'"),
        ({"tool_choice": {"type": "tool", "name": "g"}, "tools": [TOOL]}, "tool_choice"),
        ({"thinking": {"type": "deep"}}, "'deep'"),
        ({"output_config": {"format": {"type": "xml"}}}, "'xml'"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "?"}}}}, "output_config.format"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": 2}, "n=2"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(http: httpx.Client, fields: dict[str, Any], says: str) -> None:
    for stream in (False, True):
        response = post(http, SUM, stream=stream, **fields)
        error = response.json()
        assert (response.status_code, error["type"], error["error"]["type"]) == (400, "error", "invalid_request_error")
        assert says in error["error"]["message"] and error.keys() == {"type", "error"}


def test_errors_have_anthropics_types(http: httpx.Client) -> None:
    for response, status, kind in (
        (post(http, SUM, model="other"), 404, "not_found_error"),
        (http.post("/v1/messages/batches", json={}), 404, "not_found_error"),
        (http.post("/v1/messages", content=b"{}"), 415, "invalid_request_error"),
        (http.post("/v1/messages", json={"messages": "x" * 5_000_000}), 413, "request_too_large"),
    ):
        assert (response.status_code, response.json()["error"]["type"]) == (status, kind)


def test_messages_of_a_chat() -> None:
    """The results of tools come before the text of the same message."""

    def read() -> Iterator[AnthropicMessage]:
        yield AnthropicMessage("user", "a")
        thinking = {"type": "thinking", "thinking": "hm", "signature": ""}
        use = {"type": "tool_use", "id": "1", "name": "f", "input": {"x": 1}}
        yield AnthropicMessage("assistant", [thinking, {"type": "text", "text": "b"}, use])
        result = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "c"}]}
        yield AnthropicMessage("user", [result, {"type": "text", "text": "d"}])
        yield AnthropicMessage("user", [])

    calls = [ToolCall(ToolFunction("f", {"x": 1}), "1")]
    assert chat_messages(MessagesRequest(messages=list(read()), system="s"))[0] == [
        ChatMessage("system", "s"),
        ChatMessage("user", "a"),
        ChatMessage("assistant", "b", tool_calls=calls, reasoning_content="hm"),
        ChatMessage("tool", "c", tool_call_id="1"),
        ChatMessage("user", "d"),
        ChatMessage("user", ""),
    ]


def test_nothing_leaks(server: ServerProcess) -> None:
    require_no_leak(server)
