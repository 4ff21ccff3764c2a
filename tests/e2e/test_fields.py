"""Every field of every request with every kind of wrong value: an answer or a quick refusal, nothing else (T10)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec
import pytest

from e2e.harness import PATIENCE_S, ServerProcess, require_no_leak
from minisgl.api.protocol import (
    AnthropicMessage,
    AnthropicToolChoice,
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    CustomCall,
    DetokenizeRequest,
    EmbeddingRequest,
    GenerateRequest,
    GenerateSampling,
    InputItem,
    LoadAdapterRequest,
    MessagesRequest,
    OutputConfig,
    RerankRequest,
    ResponseReasoning,
    ResponsesRequest,
    ResponseText,
    ScoreRequest,
    StreamOptions,
    Thinking,
    TokenizeRequest,
    ToolCall,
    ToolFunction,
    UnloadAdapterRequest,
)

REFUSED_S = 0.6  # of the server's work; it takes up to 0.2 s
# Raw JSON, because some of it no encoder would write.
VALUES = [
    *("null", "true", "false", "-1", "0", "1", "-0.5", "NaN", "1e400", "1" + "0" * 400),
    *("2147483648", "9223372036854775808", "18446744073709551616"),
    *('""', '"x"', '"\\u0000"', '"\\ud800"', f'"{"x" * 100_000}"'),
    *("[]", "[[]]", "[null]", "[-1]", "[4096]", "[2147483648]", "[1e3]", '["", ""]', '[["a"]]', f"[{'1,' * 20_000}1]"),
    *("{}", '{"a": 1}', '{"type": "text"}', '{"' + "x" * 50_000 + '": 1}', "[" * 2000 + "]" * 2000),
]


@dataclass(frozen=True)
class Place:
    """Where objects of type `kind` stand: at the `%s` of `body`, with `rest` besides the field in question."""

    path: str
    kind: type[msgspec.Struct]
    rest: dict[str, Any]
    body: str = "%s"


SHORT: dict[str, Any] = {"max_tokens": 2, "stop": ["e", "a", " ", "\n"], "temperature": 0}  # even if one is missing
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "x"}
FUNCTION = {"name": "f", "arguments": "{}"}
ASSISTANT = '{"max_tokens": 2, "messages": [{"role": "assistant", "tool_calls": [%s]}]}'
MESSAGE = '{"max_tokens": 2, "messages": [{"role": "user", "content": "x"}], %s}'
PLACES = [
    Place(TEXT, CompletionRequest, {"prompt": "Once upon", **SHORT}),
    Place(CHAT, ChatCompletionRequest, {"messages": [USER], **SHORT}),
    Place("/v1/responses", ResponsesRequest, {"input": "x", "max_output_tokens": 2, "store": False}),
    Place("/v1/responses", InputItem, {"role": "user", "content": "x"}, '{"max_output_tokens": 2, "input": [%s]}'),
    Place("/v1/responses", ResponseText, {}, '{"max_output_tokens": 2, "input": "x", "text": %s}'),
    Place("/v1/responses", ResponseReasoning, {}, '{"max_output_tokens": 2, "input": "x", "reasoning": %s}'),
    Place("/v1/messages", MessagesRequest, {"messages": [USER], "max_tokens": 2}),
    Place("/v1/messages", AnthropicMessage, USER, '{"max_tokens": 2, "messages": [%s]}'),
    Place("/v1/messages", Thinking, {"type": "enabled"}, MESSAGE % '"thinking": %s'),
    Place("/v1/messages", AnthropicToolChoice, {"type": "auto"}, MESSAGE % '"tool_choice": %s'),
    Place("/v1/messages", OutputConfig, {}, MESSAGE % '"output_config": %s'),
    Place("/generate", GenerateRequest, {"text": "x", "sampling_params": {"max_new_tokens": 2}}),
    Place(
        "/generate",
        GenerateSampling,
        {"max_new_tokens": 2, "stop": SHORT["stop"]},
        '{"text": "x", "sampling_params": %s}',
    ),
    Place("/v1/embeddings", EmbeddingRequest, {"input": "x"}),
    Place("/v1/score", ScoreRequest, {"text_1": "x", "text_2": "y"}),
    Place("/v1/rerank", RerankRequest, {"query": "x", "documents": ["y"]}),
    Place("/tokenize", TokenizeRequest, {"prompt": "x"}),
    Place("/v1/load_lora_adapter", LoadAdapterRequest, {"lora_name": "x", "lora_path": "y"}),
    Place("/v1/unload_lora_adapter", UnloadAdapterRequest, {"lora_name": "x"}),
    Place("/detokenize", DetokenizeRequest, {"tokens": [1]}),
    Place(CHAT, ChatMessage, USER, '{"max_tokens": 2, "messages": [%s]}'),
    Place(CHAT, ToolCall, {"function": FUNCTION}, ASSISTANT),
    Place(CHAT, ToolFunction, FUNCTION, ASSISTANT.replace("%s", '{"function": %s}')),
    Place(CHAT, CustomCall, {"name": "f", "input": "x"}, ASSISTANT.replace("%s", '{"type": "custom", "custom": %s}')),
    Place(TEXT, StreamOptions, {}, '{"prompt": "x", "max_tokens": 2, "stream": true, "stream_options": %s}'),
]
CASES = [(place, f) for place in PLACES for f in (*place.kind.__struct_fields__, "made_up")]


def bodies(place: Place, field: str) -> Iterator[bytes]:
    """One body without the field, then one for each value."""
    rest = {k: v for k, v in place.rest.items() if k != field}
    yield (place.body % json.dumps(rest)).encode()
    head = json.dumps(rest)[:-1] + (", " if rest else "")
    for value in VALUES:
        yield (place.body % f'{head}"{field}": {value}}}').encode()


@pytest.fixture(scope="module")
def connection(server: ServerProcess) -> Iterator[HTTPConnection]:
    """The standard library's client: with thousands of requests a fuller one would take most of the time."""
    url = urlsplit(server.url)
    with closing(HTTPConnection(url.hostname or "", url.port, timeout=PATIENCE_S)) as connection:
        yield connection


@pytest.mark.parametrize(("place", "field"), CASES, ids=[f"{p.kind.__name__}-{f}" for p, f in CASES])
def test_any_value_gets_an_answer_or_a_quick_refusal(
    server: ServerProcess, connection: HTTPConnection, place: Place, field: str
) -> None:
    allowed = {200, 400} | ({404} if field in ("model", "lora_path") else set())
    allowed |= {403} if "lora" in place.path else set()  # the server was started without --lora-dynamic
    for body in bodies(place, field):
        before = server.cpu_seconds()
        connection.request("POST", place.path, body, {"content-type": "application/json"})
        response = connection.getresponse()
        answer = response.read()
        seconds = server.cpu_seconds() - before
        assert response.status in allowed, (body[:200], answer[:500])
        if response.status != 200:
            message = json.loads(answer)["error"]["message"]
            assert message and len(message) < 2000
            assert seconds < REFUSED_S, (body[:200], seconds)


def test_server_is_alive_and_leaks_nothing(server: ServerProcess, http: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "What is 12 + 30?"}], "temperature": 0}
    assert "42" in http.post(CHAT, json=body).json()["choices"][0]["message"]["content"]
    require_no_leak(server)
    assert "Traceback" not in server.log
