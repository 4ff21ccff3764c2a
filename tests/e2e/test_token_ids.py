"""`return_token_ids`: the ids of prompt and answer beside the text; and `--stream-usage`."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from e2e.harness import ServerProcess
from e2e.test_matrix import TOOLS

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "What is 12 + 30?"}], "temperature": 0}
CALL = CHAT | {"messages": [{"role": "user", "content": "What is the weather in Paris?"}], "tools": TOOLS}
TEXT: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}


def chunks(http: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    *lines, done = [line for line in http.post(path, json=body | {"stream": True}).text.splitlines() if line]
    assert done == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


@pytest.mark.parametrize("body", [CHAT, CALL, CHAT | {"logprobs": True}])
def test_ids_of_a_chat(http: httpx.Client, body: dict[str, Any]) -> None:
    assert "token_ids" not in http.post("/v1/chat/completions", json=body).text
    body = body | {"return_token_ids": True}
    whole = http.post("/v1/chat/completions", json=body).json()
    tokens = {"messages": body["messages"], "tools": body.get("tools"), "add_generation_prompt": True}
    assert whole["prompt_token_ids"] == http.post("/tokenize", json=tokens).json()["tokens"]
    ids = whole["choices"][0]["token_ids"]
    assert len(ids) == whole["usage"]["completion_tokens"]
    if "tools" not in body:
        text = http.post("/detokenize", json={"tokens": ids, "skip_special_tokens": True}).json()["prompt"]
        assert text == whole["choices"][0]["message"]["content"]
    first, *rest = chunks(http, "/v1/chat/completions", body)
    assert first["prompt_token_ids"] == whole["prompt_token_ids"]
    assert [i for c in rest for i in c["choices"][0]["token_ids"]] == ids
    assert not any("prompt_token_ids" in c for c in rest)


@pytest.mark.parametrize("prompt", ["Once upon a time", [100, 101], ["Once", "The"]])
def test_ids_of_completions(http: httpx.Client, prompt: Any) -> None:
    body = TEXT | {"prompt": prompt, "return_token_ids": True, "n": 2, "echo": True}
    choices = http.post("/v1/completions", json=body).json()["choices"]
    streamed: dict[int, dict[str, Any]] = {}
    for chunk in chunks(http, "/v1/completions", body):
        (choice,) = chunk["choices"]
        ids = streamed.setdefault(choice["index"], {"token_ids": []})
        ids["token_ids"] += choice["token_ids"]
        if "prompt_token_ids" in choice:
            assert ids.setdefault("prompt_token_ids", choice["prompt_token_ids"]) is choice["prompt_token_ids"]
    for i, choice in enumerate(choices):
        if prompt == [100, 101]:
            assert choice["prompt_token_ids"] == prompt
        elif isinstance(prompt, list):
            counted = http.post("/tokenize", json={"prompt": prompt[i // 2]}).json()
            assert choice["prompt_token_ids"] == counted["tokens"]
        assert streamed[i] == {name: choice[name] for name in ("token_ids", "prompt_token_ids")}
        assert len(choice["token_ids"]) <= 8


def test_a_continued_prompt_has_the_ids_that_were_computed(http: httpx.Client) -> None:
    body = TEXT | {"return_token_ids": True, "add_special_tokens": False}
    answer = http.post("/v1/completions", json=body).json()
    assert len(answer["choices"][0]["prompt_token_ids"]) == answer["usage"]["prompt_tokens"]


def test_other_endpoints_refuse_it(http: httpx.Client) -> None:
    body = {"text": "x", "sampling_params": {"return_token_ids": True}}
    assert http.post("/generate", json=body).json()["error"]["param"] == "sampling_params.return_token_ids"


def test_every_stream_has_usage_with_the_option() -> None:
    with ServerProcess("--num-pages", "256", "--stream-usage") as server, server.client() as http:
        for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)):
            *_, last = chunks(http, path, body)
            assert last["choices"] == [] and last["usage"]["completion_tokens"] > 0
