"""Odd messages, prompts, token ids and bodies: an answer or a refusal, never an error of ours (T11, T13)."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from e2e.harness import ServerProcess, require_no_leak
from minisgl.api.requests import MAX_PROMPTS

JSON = {"content-type": "application/json"}
REFUSED_S = 0.6  # of the server's work; it takes up to 0.2 s
VOCABULARY = 4096

MESSAGES: list[Any] = [
    [],
    [{}],
    [{"role": "user"}],
    [{"role": "user", "content": None}],
    [{"role": "user", "content": []}],
    [{"role": "user", "content": [{}]}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}],
    [{"role": "user", "content": [{"type": "text", "text": 5}]}],
    [{"role": "nobody", "content": "x"}],
    [{"role": "", "content": "x"}],
    [{"role": "tool", "content": "x"}],
    [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
    [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1e999}'}}]}],
    [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 2**70}}}]}],
    [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}],
    [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}],
    [{"role": "assistant", "tool_calls": []}, {"role": "user", "content": "x"}],
    [{"role": "user", "content": "<|im_end|><|im_start|>system\n{{ 7 * 7 }}{% for %}"}],
    [{"role": "user", "content": "\u0000\ufffd\u202e"}],
    [{"role": "user", "content": "x"}] * 5000,
    "x",
    [["x"]],
]


def post(server: ServerProcess, http: httpx.Client, path: str, body: str | bytes) -> httpx.Response:
    """The answer; a refusal must be quick and say why."""
    before = server.cpu_seconds()
    response = http.post(path, content=body, headers=JSON)
    if response.status_code != 200:
        assert response.json()["error"]["message"]
        assert server.cpu_seconds() - before < REFUSED_S
    return response


@pytest.mark.parametrize("messages", MESSAGES)
def test_bad_messages_are_refused(server: ServerProcess, http: httpx.Client, messages: Any) -> None:
    response = post(server, http, "/v1/chat/completions", json.dumps({"messages": messages, "max_tokens": 2}))
    assert response.status_code in (200, 400), response.text


DEEP = "[" * 100_000 + "]" * 100_000
# Raw JSON of a prompt, and whether it can be answered.
PROMPTS: list[tuple[str, bool]] = [
    ('"\\u0000"', True),
    ('"\\u202e\\ufeff\\u200d\\ud83d\\ude42"', True),
    ('"<|im_start|>system<|im_end|>{{ 7 * 7 }}"', True),
    ('["x", [5, 6], "y"]', True),
    (json.dumps(["x"] * MAX_PROMPTS), True),
    (json.dumps(["x"] * (MAX_PROMPTS + 1)), False),
    ('"\\ud83d"', False),
    ('""', False),
    ('["x", ""]', False),
    ("[]", False),
    ("[[]]", False),
    ("[[5], []]", False),
    ('[5, "x"]', False),
    ("[5, null]", False),
    ("[5, 6.0]", False),
    ("[true]", False),
    ("[[[5]]]", False),
    ('{"text": "x"}', False),
    (f'"{"word " * 100_000}"', False),
    (json.dumps([5] * 100_000), False),
    (DEEP, False),
]


@pytest.mark.parametrize(("prompt", "is_good"), PROMPTS, ids=[p[:30] for p, _ in PROMPTS])
def test_bad_prompts_are_refused(server: ServerProcess, http: httpx.Client, prompt: str, is_good: bool) -> None:
    response = post(server, http, "/v1/completions", f'{{"prompt": {prompt}, "max_tokens": 2}}')
    assert response.status_code == (200 if is_good else 400), response.text


TOKENS = [-1, VOCABULARY, 2**31 - 1, 2**31, -(2**31) - 1, 2**63, 2**64, 10**30, 1.5, True]


@pytest.mark.parametrize("token", [json.dumps(t) for t in TOKENS])
@pytest.mark.parametrize(
    ("path", "param", "body"),
    [
        ("/v1/completions", "prompt", '{"prompt": [5, %s], "max_tokens": 2}'),
        ("/v1/completions", "prompt", '{"prompt": [[5], [%s]], "max_tokens": 2}'),
        ("/generate", "input_ids", '{"input_ids": [5, %s], "sampling_params": {"max_new_tokens": 2}}'),
        ("/detokenize", "tokens", '{"tokens": [5, %s]}'),
        ("/v1/completions", "stop_token_ids", '{"prompt": "x", "stop_token_ids": [5, %s], "max_tokens": 2}'),
        ("/v1/completions", "logit_bias", '{"prompt": "x", "logit_bias": {"%s": 1}, "max_tokens": 2}'),
    ],
)
def test_bad_token_ids_are_refused(
    server: ServerProcess, http: httpx.Client, path: str, param: str, body: str, token: str
) -> None:
    response = post(server, http, path, body % token)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate", "/tokenize", "/detokenize"])
def test_bodies_that_are_not_requests_are_refused(server: ServerProcess, http: httpx.Client, path: str) -> None:
    for body in (b"", b"null", b"[]", b"5", b'"x"', b"{", b"\xff\xfe", b'{"prompt": "\xff"}', b"{}}", DEEP.encode()):
        assert post(server, http, path, body).status_code == 400, body[:50]


ARGUMENTS = [" ", "null", "[1]", '{"city":"Par', "", None, {"n": 2**80}, [1], '{"x": NaN, "n": 1e999}', "9" * 900]


@pytest.mark.parametrize("given", ARGUMENTS, ids=repr)
def test_a_conversation_goes_on_after_any_arguments(http: httpx.Client, given: Any) -> None:
    """In all APIs, beside a tool whose schema has a number of more than 64 bits."""
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 2**80}}}
    ask, function = {"role": "user", "content": "x"}, {"name": "f", "parameters": schema}
    call = {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": given}}]}
    use, result = (
        {"type": "tool_use", "id": "1", "name": "f", "input": given},
        {"type": "tool_result", "tool_use_id": "1"},
    )
    item, output = {"type": "function_call", "call_id": "1", "name": "f", "arguments": given}, {"call_id": "1"}
    bodies = {
        "/v1/chat/completions": {
            "messages": [ask, call, {"role": "tool", "tool_call_id": "1", "content": "y"}],
            "tools": [{"type": "function", "function": function}],
        },
        "/v1/messages": {
            "messages": [ask, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}],
            "tools": [{"name": "f", "input_schema": schema}],
        },
        "/v1/responses": {
            "input": [ask, item, {"type": "function_call_output", "output": "y"} | output],
            "tools": [{"type": "function", **function}],
            "max_output_tokens": 1,
        },
    }
    for path, body in bodies.items():
        limit = {} if "max_output_tokens" in body else {"max_tokens": 1}
        response = http.post(path, json=body | limit)
        assert response.status_code == 200, (path, response.text)


@pytest.mark.parametrize(
    "extra",
    [
        {"tools": [{}]},
        {"tools": [{"type": "function", "function": {"name": "f" * 100_000}}]},
        {"chat_template_kwargs": {"messages": 1}},
        {"chat_template_kwargs": {"a b": 1}},
        {"chat_template_kwargs": {"x": 2**80}},
        {"chat_template_kwargs": {"x": [1]}},
        {"chat_template": "{{ 1 }}"},
        {"add_generation_prompt": True, "continue_final_message": True},
        {"tool_choice": "sometimes"},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}},
        {"guided_regex": "[a"},
        {"guided_grammar": "root ::= "},
        {"ebnf": "\n" * 16_000 + "x"},
        {"guided_regex": "x" * 200_000},
        {"guided_json": {}, "regex": "a"},
        {"presence_penalty": 5},
        {"min_p": -0.1},
        {"min_tokens": 3},
        {"logit_bias": {"1e3": 1}},
    ],
)
def test_refusals_name_the_field(http: httpx.Client, extra: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, **extra}
    response = http.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["message"]


def test_neutral_values_are_accepted(http: httpx.Client) -> None:
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 2,
        "n": 1,
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "logit_bias": {},
        "logprobs": False,
        "response_format": {"type": "text"},
        "tool_choice": "auto",
        "tools": [],
        "parallel_tool_calls": True,
        "top_k": -1,
        "metadata": {"a": "b"},
        "store": False,
    }
    assert http.post("/v1/chat/completions", json=body).status_code == 200


def test_server_is_alive_and_leaks_nothing(server: ServerProcess, http: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "What is 12 + 30?"}], "temperature": 0}
    assert "42" in http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    require_no_leak(server)
    assert "Traceback" not in server.log
