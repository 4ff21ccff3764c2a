"""Drafts on a GPU: in float32 the built-in model's answers are those of a CPU without drafts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gpu.test_engine_gpu import engine
from minisgl import LLM, Grammar, SamplingParams
from minisgl.checkpoint.hf import BUILTIN_MODEL
from minisgl.core.layout import Flag
from minisgl.core.plan import BatchPlan
from support.next_tokens import write_glm

COPY = "Repeat exactly: The lighthouse keeper wrote down the weather every evening. The weather was fine."
SCHEMA = '{"type": "object", "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer"}}}'
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    (COPY, {"temperature": 0.0}),
    (COPY, {"temperature": 1.0, "seed": 1}),
    (COPY, {"temperature": 1.0, "seed": 2, "top_k": 20, "top_p": 0.9}),
    (COPY, {"temperature": 0.0, "logprobs": 3}),
    (COPY, {"temperature": 0.5, "seed": 3, "frequency_penalty": 0.2, "repetition_penalty": 1.1, "min_p": 0.02}),
    (COPY, {"temperature": 0.0, "logit_bias": ((70, 3.0), (2, 5.0)), "min_tokens": 40}),
    ("Say hello and hello and hello and hello.", {"temperature": 0.0, "frequency_penalty": 0.3, "logprobs": 1}),
    ("Who is Anna, 34 years old?", {"temperature": 0.0, "grammar": Grammar("json_schema", SCHEMA)}),
    ("Colors?", {"temperature": 1.0, "seed": 4, "grammar": Grammar("regex", "(red, blue, ){3}red, (blue|green)")}),
    ("Tell me a story about a fox named Lily.", {"temperature": 0.0}),
    ("Tell me a story about a fox named Lily.", {"temperature": 0.8, "seed": 5, "speculate": False}),
]
Answers = list[tuple[list[int], list[float]]]


def answers(llm: LLM) -> Answers:
    chats = [[{"role": "user", "content": text}] for text, _ in REQUESTS]
    done = llm.chat(chats, [SamplingParams(max_tokens=60, **given) for _, given in REQUESTS])
    return [(c.token_ids, [t.logprob for t in c.logprobs or ()]) for c in done]


def check(got: Answers, want: Answers) -> None:
    for i, ((tokens, logprobs), (their_tokens, theirs)) in enumerate(zip(got, want, strict=True)):
        assert tokens == their_tokens, REQUESTS[min(i, len(REQUESTS) - 1)]
        assert logprobs == pytest.approx(theirs, abs=1e-3)


@pytest.fixture(scope="module")
def on_cpu() -> Answers:
    return answers(LLM(device="cpu", dtype="float32", num_pages=2000, speculate="off"))


@contextmanager
def watched(llm: LLM) -> Iterator[set[str]]:
    """Collect the runners of steps with drafts."""
    watched_engine, seen = llm.scheduler.engine, set()
    launch = watched_engine.launch

    def watching(plan: BatchPlan) -> Any:
        if (plan.sequences["flags"] & Flag.DRAFTS).any():
            seen.add(next(r for r in watched_engine.runners if r.fits(plan)).name)
        return launch(plan)

    watched_engine.launch = watching
    yield seen
    del watched_engine.launch  # the method again


GRAPHS, EAGER = {"cuda graph"}, {"eager"}
VARIANTS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "ngram": ({"speculate": "ngram"}, GRAPHS),
    "no overlap": ({"speculate": "ngram", "overlap": False}, GRAPHS),
    "op by op": ({"speculate": "ngram", "cuda_graph_max_bs": 0}, EAGER),
    "8 drafts": ({"speculate": "ngram", "num_draft_tokens": 8, "page_size": 16, "max_prefill_length": 96}, GRAPHS),
    "auto": ({"speculate": "auto", "cache_type": "naive"}, GRAPHS),
    "tree": ({"speculate": "tree"}, GRAPHS),
    "dry pool": ({"speculate": "ngram", "num_pages": 40, "page_size": 16}, GRAPHS),
    "model": ({"speculate": f"draft:{BUILTIN_MODEL}"}, GRAPHS),
    "head": ({"speculate": f"eagle3:{BUILTIN_MODEL}/head"}, GRAPHS),
    "head, op by op": ({"speculate": f"eagle3:{BUILTIN_MODEL}/head", "cuda_graph_max_bs": 0}, EAGER),
}


@pytest.mark.parametrize("kind", ["head", "model"])
def test_drafts_are_right_as_often_as_op_by_op(kind: str) -> None:
    right = []
    for options in ({}, {"cuda_graph_max_bs": 0}):
        with engine(**VARIANTS[kind][0] | options) as llm:
            answers(llm)
            right.append((llm.scheduler.stats.accepted_tokens, llm.scheduler.stats.drafted_tokens))
    print(f"\n{kind}: {right}")
    assert right[0] == pytest.approx(right[1], rel=0.05)  # grammars come later or sooner


@pytest.mark.parametrize("name", VARIANTS)
def test_answers_are_those_of_a_cpu_without_drafts(on_cpu: Answers, name: str):
    options, runners = VARIANTS[name]
    with engine(**options) as llm, watched(llm) as seen:
        for _ in range(2):  # cold, then with a warm prefix cache
            check(answers(llm), on_cpu)
        stats = llm.scheduler.stats
        print(f"\n{name}: {stats.accepted_tokens} of {stats.drafted_tokens} drafts are right, {sorted(seen)}")
        # With auto, drafts must pay by the times that were measured, which other work on the GPU may change.
        assert stats.accepted_tokens > 10 or name == "auto"
        assert seen == runners or (name == "auto" and not seen)


@pytest.mark.parametrize("name", ["head", "head, op by op"])
def test_a_layer_of_the_checkpoint_drafts(name: str, tmp_path: Path):
    """In captured and other steps; of random weights, hardly any draft is right."""
    options, runners = VARIANTS[name]
    options = options | {"model": str(write_glm(tmp_path)), "dummy_weight": True}
    with engine(**options | {"speculate": "off"}) as llm:
        plain = answers(llm)
    with engine(**options | {"speculate": "mtp"}) as llm, watched(llm) as seen:
        for _ in range(2):  # cold, then with a warm prefix cache
            check(answers(llm), plain)
        assert llm.scheduler.stats.drafted_tokens > 100 and seen == runners


def test_bfloat16_answers_are_the_same_every_time():
    """Small steps are chained kernels, which start before the one before has ended."""
    chats = [[{"role": "user", "content": text}] for text, given in REQUESTS if "grammar" not in given]
    params = [SamplingParams(max_tokens=60, **given) for _, given in REQUESTS if "grammar" not in given]
    with engine(dtype="bfloat16", speculate="ngram", cache_type="naive") as llm:
        for count in (1, 3, len(chats)):
            first, second = ([c.token_ids for c in llm.chat(chats[:count], params[:count])] for _ in range(2))
            assert first == second
        assert llm.scheduler.stats.accepted_tokens > 10


def test_attention_that_needs_lengths_leaves_decoding_to_another():
    """In bfloat16, where texts may differ."""
    pytest.importorskip("fa3_fwd")
    with engine(dtype="bfloat16", speculate="ngram", attention_backend="fa3", page_size=128) as llm:
        assert len(answers(llm)) > len(REQUESTS) - 1
        assert llm.scheduler.stats.accepted_tokens > 10
        assert llm.scheduler.describe()["attention"] == "fa3,triton"
