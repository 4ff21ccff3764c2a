"""Drafts in the whole server: the same texts, counts in usage and metrics, the field that switches them off."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from e2e.harness import ServerProcess, eventually, require_no_leak
from minisgl.checkpoint.hf import BUILTIN_MODEL

STORY = "Once upon a time, a robin called Skia lived in a warm nest. Skia had never seen the sea. "
BODIES: list[dict[str, Any]] = [
    {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 200, "ignore_eos": True},
    {"prompt": STORY * 3, "temperature": 0, "max_tokens": 60, "stop": ["sea"]},
    {"prompt": STORY, "temperature": 1.0, "seed": 4, "max_tokens": 40, "n": 3},
    {"prompt": STORY * 2, "temperature": 0, "max_tokens": 30, "logprobs": 3},
    {"prompt": STORY, "temperature": 0, "max_tokens": 30, "guided_regex": "Skia flew to the (old|warm) tree[.]"},
]


@pytest.fixture(scope="module")
def drafting() -> Iterator[ServerProcess]:
    with ServerProcess("--speculate", "ngram", "--num-draft-tokens", "6", "--num-pages", "300") as server:
        server.wait_ready()
        yield server
        require_no_leak(server)


def post(http: httpx.Client, body: dict[str, Any]) -> dict[str, Any]:
    response = http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


@pytest.mark.parametrize("body", BODIES)
def test_answers_are_those_without_drafts(drafting: ServerProcess, body: dict[str, Any]) -> None:
    with drafting.client() as http:
        drafted, plain = post(http, body), post(http, body | {"speculate": False})
    assert drafted["choices"] == plain["choices"]
    details = drafted["usage"].pop("completion_tokens_details", None)
    assert drafted["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"]
    assert "completion_tokens_details" not in plain["usage"]
    if "guided_regex" in body:
        assert details["accepted_prediction_tokens"] > 0, "the grammar forces most of the text"


def test_drafts_are_counted(drafting: ServerProcess) -> None:
    def counted() -> tuple[float, float]:
        metrics = drafting.metrics()
        return metrics["drafted_tokens_total"], metrics["accepted_tokens_total"]

    before = counted()
    with drafting.client() as http:
        details = post(http, BODIES[0])["usage"]["completion_tokens_details"]
        accepted, rejected = details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]
        assert 0 < accepted < 200
        assert eventually(lambda: counted()[0] > before[0] and counted()[1] >= before[1] + accepted)
        assert counted()[0] >= before[0] + accepted + rejected
        body = BODIES[0] | {"stream": True, "stream_options": {"include_usage": True}}
        with http.stream("POST", "/v1/completions", json=body) as response:
            lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
        assert json.loads(lines[-2])["usage"]["completion_tokens_details"] == details
        wrong = http.post("/v1/completions", json=BODIES[0] | {"speculate": "yes"})
        assert wrong.status_code == 400 and "speculate" in wrong.json()["error"]["message"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--num-draft-tokens", "9"), "--num-draft-tokens 9 must be at most 8"),
        (("--speculate", "crystal-ball"), "--speculate 'crystal-ball' is not one of off, auto, ngram, tree"),
        (("--speculate", "draft:nowhere"), "--speculate draft: nowhere is not a folder with a config.json"),
        (("--speculate", f"eagle3:{BUILTIN_MODEL}"), "['Qwen3ForCausalLM'], not LlamaForCausalLMEagle3"),
    ],
)
def test_bad_flags_end_the_start_with_a_sentence(flags: tuple[str, ...], message: str) -> None:
    server = ServerProcess(*flags)
    assert server.wait() == 2
    assert message in server.log
