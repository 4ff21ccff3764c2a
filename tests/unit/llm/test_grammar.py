"""Grammars with overlap, preemption and batch mates."""

from __future__ import annotations

import json

import pytest

from minisgl import LLM, Completion, Grammar, SamplingParams
from minisgl.core.errors import RequestError
from support.fake_grammar import AtOnce
from support.schemas import SCHEMAS

pytestmark = pytest.mark.usefixtures("fixed_costs")

PERSON = Grammar("json_schema", json.dumps(SCHEMAS["person"][1]))
LONG = Grammar("regex", "[a-z ]{500}")
PARAMS = (
    SamplingParams(temperature=1.0, seed=1, max_tokens=200, grammar=PERSON),
    SamplingParams(temperature=0, max_tokens=60, ignore_eos=True),
    SamplingParams(temperature=1.3, seed=2, max_tokens=200, grammar=LONG, presence_penalty=0.5, top_k=30),
    SamplingParams(temperature=0, max_tokens=200, grammar=LONG, logprobs=1),
    SamplingParams(temperature=1.0, seed=3, max_tokens=60, ignore_eos=True),
    SamplingParams(temperature=0.7, seed=4, max_tokens=200, grammar=PERSON, min_tokens=5),
)


def run(llm: LLM, which: list[int]) -> list[Completion]:
    return llm.generate([f"Once upon a time {i}" for i in which], [PARAMS[i] for i in which])


def test_overlap_batching_and_preemption_do_not_change_the_text() -> None:
    plain = LLM(threads=1, num_pages=400, overlap=False, speculate="off")
    want = [run(plain, [i])[0].token_ids for i in range(6)]
    overlapped = LLM(threads=1, num_pages=400, overlap=True)
    assert [c.token_ids for c in run(overlapped, list(range(6)))] == want
    tight = LLM(threads=1, num_pages=16, overlap=True, max_prefill_length=16, speculate="off")
    tight.scheduler.prefill.growth.fraction = 0.0  # admit every request
    # The requests meet only if all are ready at the start: a busy machine compiles some after others have ended.
    tight.scheduler.grammars._executor = tight.scheduler.grammars._known = AtOnce()
    assert [c.token_ids for c in run(tight, list(range(6)))] == want
    assert tight.scheduler.stats.preemptions > 0


def test_invalid_grammars_fail_the_call_and_the_engine_goes_on() -> None:
    llm = LLM(threads=1, num_pages=100)
    bad = SamplingParams(max_tokens=5, grammar=Grammar("regex", "[", param="guided_regex"))
    with pytest.raises(RequestError, match="guided_regex is not a usable grammar") as e:
        llm.generate(["a", "b"], [SamplingParams(max_tokens=5), bad])
    assert (e.value.param, e.value.status) == ("guided_regex", 400)
    (tilde,) = llm.tokenizer.tokenizer.encode("~").ids
    nothing = SamplingParams(grammar=Grammar("regex", "~{3}"), min_tokens=3, stop_token_ids=(tilde,), max_tokens=5)
    with pytest.raises(RequestError, match="leave no token"):
        llm.generate("x", nothing)
    assert len(llm.generate("x", SamplingParams(max_tokens=5, ignore_eos=True))[0].token_ids) == 5
