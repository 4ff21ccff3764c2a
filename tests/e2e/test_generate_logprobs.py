"""Log-probabilities of /generate in SGLang's shape, against those of text completions for the same tokens."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from e2e.harness import ServerProcess, require_no_leak
from e2e.test_choices import post_events

PROMPT = "Once upon a time, there was a little fox. Grüße 🙂"
GREEDY = {"temperature": 0, "max_new_tokens": 6}


@pytest.fixture
def prompt(http: httpx.Client) -> list[int]:
    tokens: list[int] = http.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]
    return tokens


def generate(http: httpx.Client, **fields: Any) -> Any:
    body = {"text": PROMPT, "sampling_params": GREEDY, "return_logprob": True, **fields}
    return http.post("/generate", json=body).raise_for_status().json()


def text_of(http: httpx.Client, tokens: list[int]) -> str:
    return str(http.post("/detokenize", json={"tokens": tokens}).json()["prompt"])


def test_logprobs_equal_those_of_text_completions(http: httpx.Client, prompt: list[int]) -> None:
    meta = generate(http, logprob_start_len=0, top_logprobs_num=3, return_text_in_logprobs=True)["meta_info"]
    body = {"prompt": PROMPT, "echo": True, "logprobs": 3, "max_tokens": 6, "temperature": 0}
    theirs = http.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
    scored = meta["input_token_logprobs"] + meta["output_token_logprobs"]
    assert [i for _, i, _ in meta["input_token_logprobs"]] == prompt
    assert scored[0][0] is None
    assert [p for p, *_ in scored[1:]] == pytest.approx(theirs["token_logprobs"][1:], abs=1e-3)
    tops = meta["input_top_logprobs"] + meta["output_top_logprobs"]
    assert tops[0] is None and all(len(top) == 3 for top in tops[1:])
    for top, wanted in zip(tops[1:], theirs["top_logprobs"][1:], strict=True):
        assert [p for p, *_ in top] == pytest.approx(sorted(wanted.values(), reverse=True)[:3], abs=1e-3)
    for (logprob, token, text), top in zip(meta["output_token_logprobs"], meta["output_top_logprobs"], strict=True):
        assert [logprob, token, text] == top[0]  # greedy
        assert text_of(http, [token]) == text


@pytest.mark.parametrize(("start", "shown"), [(None, 0), (-1, 0), (3, -3), (10_000, 0)])
def test_prompt_logprobs_begin_at_logprob_start_len(
    http: httpx.Client, prompt: list[int], start: int | None, shown: int
) -> None:
    answer = generate(http, logprob_start_len=start)
    plain = generate(http, return_logprob=False)
    meta = answer["meta_info"]
    given = meta["input_token_logprobs"]
    assert [i for _, i, _ in given] == (prompt[3:] if shown else [])
    assert [p is None for p, *_ in given] == [i == 0 for i in range(len(given))]
    assert {text for *_, text in given + meta["output_token_logprobs"]} == {None}
    assert "input_top_logprobs" not in meta and "output_top_logprobs" not in meta
    assert text_of(http, [i for _, i, _ in meta["output_token_logprobs"]]) == answer["text"] == plain["text"]
    assert [i for _, i, _ in meta["output_token_logprobs"]] == answer["output_ids"] == plain["output_ids"]
    assert "output_token_logprobs" not in plain["meta_info"]


def test_prompt_logprobs_without_generation(http: httpx.Client, prompt: list[int]) -> None:
    """As frontends choose among given answers, and fill the prefix cache."""
    body = {"text": None, "input_ids": [prompt, prompt[:4]], "sampling_params": {"max_new_tokens": 0}}
    for answer, ids in zip(generate(http, logprob_start_len=0, **body), body["input_ids"], strict=True):
        assert answer["text"] == "" and answer["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
        assert [i for _, i, _ in answer["meta_info"]["input_token_logprobs"]] == ids
        assert answer["meta_info"]["output_token_logprobs"] == answer["output_ids"] == []
    (first, _) = generate(http, return_logprob=False, **body)
    assert (first["text"], first["meta_info"]["completion_tokens"]) == ("", 0)


def test_stream_is_cumulative(http: httpx.Client) -> None:
    body = {"text": [PROMPT, "The"], "sampling_params": GREEDY | {"n": 2}, "return_logprob": True}
    body |= {"logprob_start_len": 1, "top_logprobs_num": 1}
    whole = http.post("/generate", json=body).json()
    last: dict[int, Any] = {}
    for event in post_events(http, "/generate", body):
        meta = event["meta_info"]
        assert len(meta["output_token_logprobs"]) == meta["completion_tokens"] == len(meta["output_top_logprobs"])
        assert len(event["output_ids"]) == meta["completion_tokens"]
        last[event.pop("index")] = event
    for i, wanted in enumerate(whole):
        for name in ("input_token_logprobs", "output_token_logprobs"):
            got = last[i]["meta_info"][name]
            assert [t for _, t, _ in got] == [t for _, t, _ in wanted["meta_info"][name]]
        assert last[i]["text"] == wanted["text"]


def test_nothing_leaks(server: ServerProcess) -> None:
    require_no_leak(server)
    assert "Traceback" not in server.log
