"""Log-probabilities of the built-in model, compared with transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from minisgl import LLM, Completion, SamplingParams
from minisgl.api.openai import token_text
from minisgl.checkpoint.hf import BUILTIN_MODEL
from minisgl.tokenizer.text import TokenBytes

pytestmark = pytest.mark.usefixtures("fixed_costs")

PROMPT = "Once upon a time, there was a little fox named Lily. She said: grün 東京 🙂!"


@pytest.fixture(scope="module")
def llm() -> LLM:
    # Prompts come in chunks, and the next step is planned before the last one's result is known.
    return LLM(threads=1, num_pages=600, max_prefill_length=16, overlap=True)


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(BUILTIN_MODEL, dtype=torch.float32).eval()


def want(model: Any, ids: list[int]) -> torch.Tensor:
    """[n - 1, V]: how likely each token is to follow those before it."""
    with torch.inference_mode():
        return torch.log_softmax(model(torch.tensor([ids])).logits[0].float(), -1)[:-1]


def prompt_ids(llm: LLM, text: str = PROMPT) -> list[int]:
    return llm.tokenizer.tokenizer.encode(text).ids


def check(llm: LLM, model: Any, ids: list[int], done: Completion, top: int, first: int) -> None:
    """The log-probabilities of `done`, of prompt and answer, are those of `ids` from index `first` on."""
    logprobs = want(model, ids)
    names = TokenBytes(llm.tokenizer.tokenizer)
    found = done.prompt_logprobs + done.logprobs
    assert len(done.logprobs) == len(done.token_ids) and len(found) == len(ids) - first
    for i, got in enumerate(found, first):
        assert (got.id, got.data) == (ids[i], names[ids[i]])
        if i == 0:
            assert got.logprob is None and got.top == []
            continue
        assert got.logprob == pytest.approx(float(logprobs[i - 1, ids[i]]), abs=2e-3)
        best = logprobs[i - 1].topk(top)
        assert [v for *_, v in got.top] == pytest.approx(best.values.tolist(), abs=2e-3)
        if top:
            assert got.top[0][:2] == (int(best.indices[0]), names[int(best.indices[0])])


@pytest.mark.parametrize("top", [0, 3, 20])
def test_logprobs_of_generated_tokens(llm: LLM, model: Any, top: int) -> None:
    done = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=12, logprobs=top))[0]
    check(llm, model, prompt_ids(llm) + done.token_ids, done, top, len(prompt_ids(llm)))


def test_logprobs_ignore_temperature_filters_and_penalties(llm: LLM, model: Any) -> None:
    odd = SamplingParams(
        temperature=1.7, top_k=40, seed=3, frequency_penalty=1.5, logit_bias=((77, 5.0),), max_tokens=12, logprobs=2
    )
    done = llm.generate(PROMPT, odd)[0]
    check(llm, model, prompt_ids(llm) + done.token_ids, done, 2, len(prompt_ids(llm)))


@pytest.mark.parametrize("max_tokens", [0, 1, 9])
def test_echo_gives_logprobs_of_a_cached_prompt(llm: LLM, model: Any, max_tokens: int) -> None:
    llm.generate(PROMPT, SamplingParams(max_tokens=1))
    done = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=max_tokens, logprobs=1, echo=True))[0]
    assert len(done.token_ids) == max_tokens
    check(llm, model, prompt_ids(llm) + done.token_ids, done, 1, 0)
    assert done.text.startswith(PROMPT)
    for token in done.prompt_logprobs + done.logprobs:
        if (text := token_text(token.data)).startswith("bytes:"):
            assert done.text.encode().count(token.data)
        else:
            assert done.text[token.offset :].startswith(text)


def test_prompt_logprobs_without_echo(llm: LLM, model: Any) -> None:
    half = prompt_ids(llm, "a 🙂")[:-1]  # it ends within the character: the answer's text must not begin with its rest
    wanted = SamplingParams(temperature=0, max_tokens=4, logprobs=1, prompt_logprobs=True)
    done = llm.generate([half], wanted)[0]
    check(llm, model, half + done.token_ids, done, 1, 0)
    assert done.text == llm.generate([half], SamplingParams(temperature=0, max_tokens=4))[0].text


def test_echo_without_logprobs_gives_text_only(llm: LLM) -> None:
    done = llm.generate(PROMPT, SamplingParams(max_tokens=0, echo=True))[0]
    assert (done.text, done.token_ids, done.logprobs) == (PROMPT, [], [])


def test_logprobs_do_not_depend_on_the_batch(llm: LLM) -> None:
    mine = SamplingParams(temperature=0, max_tokens=10, logprobs=4, echo=True)
    alone = llm.generate(PROMPT, mine)[0]
    others = [SamplingParams(max_tokens=n, logprobs=top, seed=n) for n, top in ((5, None), (9, 20), (12, 0))]
    together = llm.generate([PROMPT, "The", PROMPT[:40], PROMPT], [*others, mine])[3]
    assert together.token_ids == alone.token_ids
    pairs = [(c.prompt_logprobs, c.logprobs) for c in (together, alone)]
    for a, b in zip(*(prompt + answer for prompt, answer in pairs), strict=True):
        assert (a.data, a.offset) == (b.data, b.offset)
        assert a.logprob == (None if b.logprob is None else pytest.approx(b.logprob, abs=1e-4))


def test_a_preempted_request_keeps_its_logprobs(model: Any) -> None:
    """Too few pages for all: some are computed again."""
    llm = LLM(threads=1, num_pages=24, overlap=True, max_prefill_length=32)
    mine = SamplingParams(temperature=0, max_tokens=90, logprobs=1, echo=True, ignore_eos=True)
    done = llm.generate([PROMPT] * 4, mine)
    assert llm.scheduler.stats.preemptions > 0
    for one in done:
        assert one.token_ids == done[0].token_ids
        check(llm, model, prompt_ids(llm) + one.token_ids, one, 1, 0)
