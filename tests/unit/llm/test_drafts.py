"""Drafts change no answer of the built-in model: real grammars, stop strings, choices, a shared prefix, small pools."""

from __future__ import annotations

import json
import random
from dataclasses import fields
from typing import Any

import pytest

from minisgl import LLM, Completion, Grammar, SamplingParams
from minisgl.checkpoint.hf import BUILTIN_MODEL
from support.schemas import SCHEMAS

pytestmark = pytest.mark.usefixtures("fixed_costs")

STORY = "Once upon a time, a robin called Skia lived in a warm nest. Skia had never seen the sea. "
GRAMMARS = [
    *(Grammar("json_schema", json.dumps(schema), param="schema") for _, schema, *_ in list(SCHEMAS.values())[:4]),
    Grammar("regex", "[a-z ]{5,40}[.]", param="regex"),
    Grammar("regex", "Skia lived in a (warm|cold) nest[.]", param="regex"),
    Grammar("choice", '["Skia had never seen the sea", "Skia had never seen a cat"]', param="choice"),
]
LAYOUTS: list[dict[str, Any]] = [
    {"page_size": 1, "num_pages": 900, "max_prefill_length": 40},
    {"page_size": 16, "num_pages": 24, "max_prefill_length": 64},
    {"page_size": 128, "num_pages": 12},
]


def make_requests(rng: random.Random, count: int) -> tuple[list[str], list[SamplingParams]]:
    prompts, params = [], []
    for _ in range(count):
        given: dict[str, Any] = {"temperature": rng.choice((0.0, 0.6, 1.0)), "max_tokens": rng.randrange(1, 50)}
        for likely, more in (
            (0.5, {"grammar": rng.choice(GRAMMARS)}),
            (0.3, {"stop": ("sea", "e ")}),
            (0.2, {"n": 2}),
            (0.2, {"logprobs": 2}),
            (0.1, {"logprobs": 1, "echo": True}),
            (0.2, {"presence_penalty": 0.3, "frequency_penalty": 0.2, "repetition_penalty": 1.1}),
            (0.2, {"logit_bias": ((300, 2.0),), "min_tokens": min(4, given["max_tokens"])}),
            (0.2, {"top_k": 20, "top_p": 0.9}),
            (0.3, {"ignore_eos": True}),
            (0.1, {"speculate": False}),
            (0.1, {"cache_salt": "a"}),
        ):
            if rng.random() < likely:
                given |= more
        prompts.append(STORY * rng.randrange(1, 4) + rng.choice(("", "Once", "Skia", '{"name": "Skia", "')))
        params.append(SamplingParams(seed=rng.randrange(5), **given))
    return prompts, params


def facts(done: Completion) -> dict[str, Any]:
    """All that a client sees, but for what the engine found or drafted."""
    seen = {f.name: getattr(done, f.name) for f in fields(done)}
    del seen["num_cached_tokens"], seen["accepted_tokens"], seen["request_id"], seen["others"]
    return seen


def check_equal(seed: int, count: int, speculate: str) -> None:
    rng = random.Random(seed)
    layout = LAYOUTS[seed % 3]
    prompts, params = make_requests(rng, count)
    want = LLM(threads=1, speculate="off", **layout).generate(prompts, params)
    llm = LLM(threads=1, speculate=speculate, num_draft_tokens=rng.randrange(1, 9), **layout)
    llm.scheduler.depth = seed % 2
    for _ in range(2):  # for the second time with the answers in the radix tree
        got = llm.generate(prompts, params)
        for i, (one, other) in enumerate(zip(want, got, strict=True)):
            assert list(map(facts, one.outputs)) == list(map(facts, other.outputs)), f"{prompts[i]!r} {params[i]}"
    assert 0 < llm.scheduler.stats.accepted_tokens <= llm.scheduler.stats.drafted_tokens


@pytest.mark.parametrize(("seed", "speculate"), [(0, "ngram"), (1, "auto"), (2, "tree"), (3, f"draft:{BUILTIN_MODEL}")])
def test_answers_of_every_kind_are_equal_with_and_without_drafts(seed: int, speculate: str) -> None:
    check_equal(seed, 16, speculate)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(36))
def test_a_thousand_answers_are_equal(seed: int) -> None:
    check_equal(100 + seed, 30, ("ngram", "auto", "tree")[seed // 3 % 3])


def test_forced_tokens_of_a_schema_are_drafted_and_right() -> None:
    text = "Skia lived in a nest that was warm, and had never seen the sea."
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=60, grammar=Grammar("regex", text, param="regex"))
    llm = LLM(threads=1, speculate="tree", num_draft_tokens=8)
    (done,) = llm.generate("Once upon a time", params)
    assert done.text == text
    assert llm.scheduler.stats.accepted_tokens == llm.scheduler.stats.drafted_tokens > len(done.token_ids) // 2
