"""Keys and values in 8 bits: right answers, the same however the work is cut, and more tokens in the same memory."""

from __future__ import annotations

import pytest

from minisgl import LLM, SamplingParams

pytestmark = pytest.mark.usefixtures("fixed_costs")

FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
QUESTIONS = [
    "What is 12 + 30?",
    "Count from 3 to 12.",
    "Tell me a story about a fox named Lily.",
    f"{FILLER * 12}The secret code of the castle is 7305982. {FILLER * 9}\n\nWhat is the secret code of the castle?",
]
CHATS = [[{"role": "user", "content": question}] for question in QUESTIONS]
PARAMS = [SamplingParams(temperature=0.0, max_tokens=30), SamplingParams(temperature=0.8, seed=3, max_tokens=30)]


def tokens(llm: LLM) -> list[list[int]]:
    return [answer.token_ids for params in PARAMS for answer in llm.chat(CHATS, params)]


def test_cache_of_8_bits() -> None:
    """With the C++ step, with drafts, and op by op: pages of 8 tokens are too small for the C++ step."""
    with LLM(device="cpu", threads=1, num_pages=400, kv_cache_dtype="fp8", speculate="off") as llm:
        greedy = [answer.text for answer in llm.chat(CHATS, PARAMS[0])]
        assert "42" in greedy[0] and "11" in greedy[1] and "7305982" in greedy[3]
        want = tokens(llm)  # after cached prefixes
        facts = llm.scheduler.engine.describe()
        assert facts["kv_cache_dtype"] == "fp8" and "native" in str(facts["runners"])
    assert int(facts["kv_bytes"]) == 400 * int(facts["page_size"]) * 6 * 2 * 4 * (64 + 4)
    tight = {"num_pages": 80, "max_prefill_length": 48, "overlap": True, "page_size": 8, "cache_type": "naive"}
    with LLM(device="cpu", threads=1, kv_cache_dtype="fp8", speculate="off", **tight) as llm:
        llm.scheduler.prefill.growth.fraction = 0.0  # admit every request
        assert tokens(llm) == want
        assert llm.scheduler.stats.preemptions > 0 and "eager" in str(llm.scheduler.engine.describe()["runners"])
    with LLM(device="cpu", threads=2, kv_cache_dtype="fp8", max_prefill_length=48, page_size=32) as llm:
        assert tokens(llm) == want
        assert llm.scheduler.stats.accepted_tokens > 0
    with LLM(device="cpu", threads=2, kv_cache_dtype="fp8", quantization="int8", dtype="bfloat16") as llm:
        answers = [answer.text for answer in llm.chat(CHATS, PARAMS[0])]
        assert "42" in answers[0] and "11" in answers[1] and "7305982" in answers[3]
