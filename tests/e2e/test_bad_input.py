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
    [{"role": "narrator", "content": "x"}],
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
    ("[5, 6.0]", True),
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


DIALECTS: list[tuple[str, str, dict[str, Any], str]] = [  # path, field of the prompt, the rest, field of the limit
    ("/v1/completions", "prompt", {}, "max_tokens"),
    ("/v1/chat/completions", "messages", {}, "max_tokens"),
    ("/v1/chat/completions", "messages", {"n": 2}, "max_completion_tokens"),
    ("/v1/chat/completions", "messages", {"return_token_ids": True}, "num_predict"),
    ("/v1/responses", "input", {"instructions": "x"}, "max_output_tokens"),
    ("/v1/messages", "messages", {"system": "x"}, "max_tokens"),
    ("/generate", "text", {}, "max_tokens"),
    ("/generate", "prompt", {}, "max_new_tokens"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "field", "rest", "limit"), DIALECTS)
def test_all_apis_cut_the_answer_to_the_context_and_name_a_prompt_that_is_too_long(
    server: ServerProcess, http: httpx.Client, path: str, field: str, rest: dict[str, Any], limit: str, stream: bool
) -> None:
    def ask(prompt: str, most: Any) -> httpx.Response:
        given: Any = [{"role": "user", "content": prompt}] if field == "messages" else prompt
        fields = {field: given, "stream": stream, limit: most} | rest
        return post(server, http, path, json.dumps(fields))

    for most in (32_000, -1, 10**12, 2.0):
        assert ask("What is 12 + 30?", most).status_code == 200
    for prompt, most in (("word " * 8000, 2), ("word " * 8000, 32_000), ("word " * 100_000, 2)):
        response = ask(prompt, most)
        error = response.json()["error"]
        assert response.status_code == 400
        assert "prompt is too long" in error["message"] and field in error["message"]
        assert path == "/v1/messages" or (error["param"], error["code"]) == (field, "context_length_exceeded")
    error = ask("x", "?").json()["error"]
    assert limit in error["message"] and error.get("param", limit) == limit


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {}, "messages"),
        ("/v1/chat/completions", {"messages": []}, "messages"),
        ("/v1/chat/completions", {"messages": "x"}, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "?"}]}, "messages[0].role"),
        ("/v1/completions", {}, "prompt"),
        ("/v1/completions", {"prompt": ["x", ""]}, "prompt"),
        ("/v1/completions", {"prompt": "x", "random_seed": 2**63}, "random_seed"),
        ("/v1/completions", {"prompt": "x", "stop_words": [""]}, "stop_words"),
        ("/v1/completions", {"prompt": "x", "grammar": "root ::= "}, "grammar"),
        ("/v1/completions", {"prompt": "x", "model": ""}, "model"),
        ("/v1/responses", {"input": [{"role": "?", "content": "x"}]}, "input"),
        ("/v1/responses", {"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
        ("/v1/responses", {"input": "x", "min_tokens": 3, "max_output_tokens": 2}, "min_tokens"),
        ("/v1/responses", {"input": "x", "tools": [{"type": "function"}]}, "tools[0].function.name"),
        ("/v1/messages", {}, "messages"),
        ("/v1/messages", {"messages": [{"role": "user"}]}, "messages[0].content"),
        ("/v1/messages", {"messages": [], "max_tokens": 0}, "max_tokens"),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "stop_sequences": [""]}, "stop_sequences"),
        ("/generate", {}, "text"),
        ("/generate", {"text": "x", "sampling_params": {"top_p": 2}}, "sampling_params.top_p"),
        ("/generate", {"input_ids": [], "sampling_params": {}}, "input_ids"),
        ("/tokenize", {}, "prompt"),
        ("/detokenize", {}, "tokens"),
    ],
)
def test_missing_and_empty_parts_are_named(http: httpx.Client, path: str, body: dict[str, Any], param: str) -> None:
    response = http.post(path, json=body)
    error = response.json()["error"]
    assert response.status_code == (404 if param == "model" else 400)
    assert param in error["message"] and error.get("param", param) == param


def test_nested_names_without_an_effect_are_told(http: httpx.Client) -> None:
    body = {
        "messages": [{"role": "user", "content": "x", "foo": 1}],
        "max_tokens": 2.0,
        "models": ["x"],
        "n_predict": None,
    }
    assert http.post("/v1/chat/completions", json=body).headers["x-ignored-fields"] == "messages.foo, models"


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
        "top_p": 0,
        "seed": 42.0,
        "functions": [],
        "function_call": "auto",
        "prediction": None,
        "stop": "",
        "metadata": {"a": "b"},
        "store": False,
    }
    assert http.post("/v1/chat/completions", json=body).status_code == 200


def test_server_is_alive_and_leaks_nothing(server: ServerProcess, http: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "What is 12 + 30?"}], "temperature": 0}
    assert "42" in http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    require_no_leak(server)
    assert "Traceback" not in server.log
