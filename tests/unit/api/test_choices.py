"""Several choices of one prompt (`n`), their usage, and the timing of a request."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import numpy as np
import pytest

from minisgl.api.frontend import Timeline
from minisgl.api.openai import OpenAIRenderer
from minisgl.api.protocol import CompletionRequest, StreamOptions
from minisgl.api.requests import MAX_ANSWER_BYTES, num_choices, require_answer_fits, with_choices
from minisgl.api.responses import DONE, usage_of
from minisgl.core.errors import RequestError
from minisgl.core.message import TokenizeMsg, UserReply
from minisgl.core.params import Limits, SamplingParams, choice_params
from minisgl.core.plan import FinishReason
from minisgl.scheduler.req import Req

MAX_CHOICES = 128


def asked(**fields: Any) -> int:
    return num_choices(CompletionRequest(prompt="x", **fields), MAX_CHOICES)


def test_n_and_best_of() -> None:
    assert asked() == 1
    assert asked(n=MAX_CHOICES) == MAX_CHOICES
    assert asked(n=3, best_of=3) == 3
    assert asked(best_of=1) == 1
    refused: list[tuple[dict[str, int], str]] = [({"n": 0}, "n"), ({"n": -1}, "n"), ({"n": MAX_CHOICES + 1}, "n")]
    refused += [({"n": 2, "best_of": 3}, "best_of"), ({"best_of": 2}, "best_of"), ({"n": 2, "best_of": 1}, "best_of")]
    for fields, param in refused:
        with pytest.raises(RequestError) as e:
            asked(**fields)
        assert (e.value.param, e.value.status) == (param, 400)


def test_choices_of_a_prompt_are_adjacent_with_seeds_of_their_own() -> None:
    prompts = [TokenizeMsg(uid=0, sampling_params=SamplingParams(seed=7), text=t) for t in ("a", "b")]
    messages = with_choices(prompts, 3)
    assert [m.text for m in messages] == ["a", "a", "a", "b", "b", "b"]
    seeds = [m.sampling_params.seed for m in messages]
    assert seeds[:3] == seeds[3:]
    assert seeds[0] == 7
    unseeded = TokenizeMsg(uid=0, sampling_params=SamplingParams(), text="a")
    assert with_choices([unseeded], 2) == [unseeded, unseeded]
    with pytest.raises(RequestError, match="n=128 for 9 prompts"):
        with_choices([unseeded] * 9, 128)


def test_neighbouring_seeds_share_no_choices() -> None:
    bound = 2**63
    given = [SamplingParams(seed=seed) for seed in (-bound, -2, 0, 1, bound - 1)]
    seeds = [choice_params(params, i).seed or 0 for params in given for i in range(MAX_CHOICES)]
    assert len(set(seeds)) == len(seeds)
    assert all(-bound <= seed < bound for seed in seeds)


def replies() -> list[UserReply]:
    """Two choices to each of two prompts of 10 and 20 tokens; the second ones found the prompt in the cache."""
    sizes = [(1, 10, 0), (2, 10, 9), (3, 20, 4), (4, 20, 19)]
    return [
        UserReply(
            uid=i,
            text="x",
            completion_tokens=completion,
            prompt_tokens=prompt,
            cached_tokens=cached,
            finish_reason=FinishReason.LENGTH,
        )
        for i, (completion, prompt, cached) in enumerate(sizes)
    ]


TIMELINE = Timeline(100.0, first=101.0, last=107.0, queue_seconds=0.75, prefill_chunks=8, num_started=4)
TIMING = {"queue_ms": 750.0, "ttft_ms": 1000.0, "cached_tokens": 4, "prefill_chunks": 8, "tokens_per_s": 1.0}


def test_usage_counts_each_prompt_once() -> None:
    body = json.loads(OpenAIRenderer("m", False, StreamOptions(), n=2, with_timing=True).body(replies(), TIMELINE))
    assert [c["index"] for c in body["choices"]] == [0, 1, 2, 3]
    usage = body["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (30, 10, 40)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 4
    assert body["timing"] == TIMING


@pytest.mark.parametrize("with_usage", [False, True])
@pytest.mark.parametrize("with_timing", [False, True])
def test_last_chunk_has_usage_and_timing_on_request(with_usage: bool, with_timing: bool) -> None:
    renderer = OpenAIRenderer("m", True, StreamOptions(include_usage=with_usage), n=2, with_timing=with_timing)
    *events, done = renderer.last_events(replies(), TIMELINE)
    assert len(events) == (with_usage or with_timing) and done == DONE
    for event in events:
        chunk = json.loads(event.removeprefix(b"data: "))
        assert chunk["choices"] == []
        assert ("usage" in chunk, "timing" in chunk) == (with_usage, with_timing)
        assert chunk.get("timing", TIMING) == TIMING


def test_timing_without_tokens() -> None:
    timing = msgspec.to_builtins(Timeline(1.0).timing(usage_of([])))
    assert timing == {"queue_ms": 0.0, "ttft_ms": None, "cached_tokens": 0, "prefill_chunks": 0, "tokens_per_s": None}


def test_queue_time_ends_with_the_first_chunk() -> None:
    req = Req(1, np.arange(8, dtype=np.int32), SamplingParams(), 1, 1, 0)
    req.accepted_at = 10.0
    req.note_chunk(11.0)
    req.note_chunk(12.0)
    assert (req.queue_seconds, req.prefill_chunks) == (1.0, 2)


@pytest.mark.parametrize(
    ("params", "count", "fits"),
    [
        ({"max_tokens": 100}, 1024, True),
        ({"max_tokens": None}, 128, True),
        ({"max_tokens": None}, 1024, False),
        ({"max_tokens": 100, "logprobs": 5}, 128, True),
        ({"max_tokens": 100, "logprobs": 20}, 1024, False),
        ({"max_tokens": 0, "logprobs": 20, "echo": True}, 1, True),
        ({"max_tokens": 0, "logprobs": 20, "echo": True}, 16, False),
    ],
)
def test_answers_in_one_piece_are_bounded(params: dict[str, Any], count: int, fits: bool) -> None:
    limits = Limits(max_model_len=32_768, vocab_size=1000)
    message = TokenizeMsg(uid=0, sampling_params=SamplingParams(**params), text="word " * 5000)
    if fits:
        require_answer_fits([message] * count, limits)
        return
    with pytest.raises(RequestError, match=f"at most {MAX_ANSWER_BYTES >> 20} are sent in one piece") as e:
        require_answer_fits([message] * count, limits)
    assert (e.value.status, e.value.param) == (400, "max_tokens")
