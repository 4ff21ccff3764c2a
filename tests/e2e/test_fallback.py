"""A server with a decoder that transformers computes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from contract.test_fallback import save_with_tokenizer
from e2e.harness import ServerProcess
from e2e.test_doctor import run

IMPL = ("--model-impl", "transformers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_with_tokenizer(tmp_path_factory.mktemp("neox")).folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    with ServerProcess(str(folder), *IMPL, "--num-pages", "200", "--device", "cpu") as server:
        yield server


def test_a_completion_and_its_repetition_from_the_cache(server: ServerProcess):
    body = {"prompt": "Once upon a time, there was a fox. " * 3, "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    with server.client() as http:
        first, second = (http.post("/v1/completions", json=body).json() for _ in range(2))
    assert first["choices"][0]["text"] == second["choices"][0]["text"]
    assert first["usage"]["completion_tokens"] == 20
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_a_grammar(server: ServerProcess):
    body = {"prompt": "It is", "max_tokens": 40, "temperature": 1, "seed": 1, "guided_regex": "[0-9]{3}-[a-f]{2}"}
    schema = {"type": "object", "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}}}
    chat = {
        "messages": [{"role": "user", "content": "Who?"}],
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": {**schema, "required": ["age"], "additionalProperties": False}},
        },
        "max_tokens": 100,
    }
    with server.client() as http:
        text = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
        answer = http.post("/v1/chat/completions", json=chat).json()["choices"][0]["message"]["content"]
    assert re.fullmatch("[0-9]{3}-[a-f]{2}", text)
    assert 0 <= json.loads(answer)["age"] <= 99


def test_doctor(folder: Path):
    code, facts = run("doctor", "--model", str(folder), *IMPL, "--device", "cpu", "--num-pages", "200")
    assert code == 0, facts
    assert "GPTNeoXForCausalLM" in facts["model"]
    assert facts["its layers"] == "are known once transformers has loaded the model"


def test_the_error_without_it_advises_it(folder: Path):
    facts = run("doctor", "--model", str(folder), "--device", "cpu")[1]
    assert "try --model-impl transformers" in facts["model"]
