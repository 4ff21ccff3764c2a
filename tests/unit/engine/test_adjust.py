"""Penalties, biases and forbidden endings against a slow reference in numpy, and their effect on real text."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from minisgl import LLM, SamplingParams
from minisgl.core.layout import NO_MASKS, Flag
from minisgl.device.device import CpuDevice
from minisgl.engine.state import LogitPenalties
from minisgl.ops.sampling import apply_penalties, count_tokens
from minisgl.scheduler.req import Req
from minisgl.scheduler.writes import penalty_record

pytestmark = pytest.mark.usefixtures("fixed_costs")

VOCAB = 50
EOS = frozenset({0, 7})


def reference(logits: np.ndarray, p: SamplingParams, prompt: list[int], output: list[int]) -> np.ndarray:
    """Straight from the definitions, token by token."""
    x = logits.astype(np.float64).copy()
    for token, bias in p.logit_bias:
        x[token] += bias
    if len(output) < p.min_tokens:
        for token in [*p.stop_token_ids, *([] if p.ignore_eos else EOS)]:
            x[token] = -np.inf
    for token in range(len(x)):
        count = output.count(token)
        if count or token in prompt:
            x[token] = x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty
        x[token] -= p.frequency_penalty * count + p.presence_penalty * (count > 0)
    return x


def random_params(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        presence_penalty=rng.choice((0.0, 0.7, -1.0)),
        frequency_penalty=rng.choice((0.0, 0.5, -0.25)),
        repetition_penalty=rng.choice((1.0, 1.3, 0.8)),
        logit_bias=tuple((t, rng.uniform(-5, 5)) for t in rng.sample(range(VOCAB), rng.randrange(6))),
        min_tokens=rng.choice((0, 3, 8)),
        stop_token_ids=tuple(rng.sample(range(VOCAB), rng.randrange(3))),
        ignore_eos=rng.random() < 0.3,
    )


@pytest.mark.parametrize("seed", range(5))
def test_rows_of_a_mixed_batch_equal_the_reference(seed: int) -> None:
    """Rows come and go, with and without penalties, some re-admitted with tokens generated before."""
    rng = random.Random(seed)
    penalties = LogitPenalties(8, VOCAB, 16, CpuDevice(1))
    live: dict[int, tuple[SamplingParams, list[int], list[int]]] = {}
    for _ in range(60):
        row = rng.randrange(8)
        params = random_params(rng)
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 12))]
        output = [rng.randrange(VOCAB) for _ in range(rng.choice((0, 0, 4)))]
        req = Req(0, np.array(prompt, np.int32), params, 40, 0, 0)
        for token in output:
            req.append_sampled(token)
        live[row] = (params, prompt, output)
        penalties.apply(penalty_record(req, row, EOS), NO_MASKS)
        for _ in range(3):
            rows = list(live)
            rng.shuffle(rows)
            chosen = sorted(rng.sample(range(len(rows)), rng.randrange(1, len(rows) + 1)))
            logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(rng.randrange(10**6))) * 3
            before = logits.clone()
            positions = [len(live[r][1]) + len(live[r][2]) for r in rows]
            flags = torch.zeros(len(rows), dtype=torch.int32)
            flags[chosen] = Flag.PENALIZED
            at, places = torch.tensor(rows), torch.zeros(len(rows), dtype=torch.int32)
            logits = apply_penalties(logits, flags, places, at, torch.tensor(positions, dtype=torch.int32), penalties)
            for i, r in enumerate(rows):
                want = reference(before[i].numpy(), *live[r]) if i in chosen else before[i].numpy()
                np.testing.assert_allclose(logits[i].numpy(), want, rtol=1e-5, atol=1e-5)
            tokens = torch.tensor([rng.randrange(VOCAB) for _ in rows], dtype=torch.int32)
            count_tokens(tokens, flags, at, penalties)
            for i in chosen:
                live[rows[i]][2].append(int(tokens[i]))


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(threads=1, num_pages=400)


def generate(llm: LLM, **params: object) -> list[int]:
    sampling = SamplingParams(temperature=0, **params)  # type: ignore[arg-type]
    return llm.chat([{"role": "user", "content": "Tell me a story about a fox named Lily."}], sampling)[0].token_ids


def test_bias_forces_and_forbids(llm: LLM) -> None:
    assert generate(llm, max_tokens=5, logit_bias=((77, 100.0),)) == [77] * 5
    first = generate(llm, max_tokens=1)[0]
    assert generate(llm, max_tokens=1, logit_bias=((first, -100.0),)) != [first]


def test_min_tokens_holds_the_end_back(llm: LLM) -> None:
    usual = len(generate(llm, max_tokens=200))
    longer = generate(llm, max_tokens=usual + 30, min_tokens=usual + 20)
    assert len(longer) >= usual + 20
    assert not set(longer[: usual + 19]) & llm.scheduler.engine.eos_token_ids


def test_penalties_make_the_text_repeat_itself_less(llm: LLM) -> None:
    def repeated(tokens: list[int]) -> int:
        return len(tokens) - len(set(tokens))

    usual = repeated(generate(llm, max_tokens=160, ignore_eos=True))
    penalties = {"presence_penalty": 2.0, "frequency_penalty": 2.0, "repetition_penalty": 1.5}
    for name in ("frequency_penalty", "repetition_penalty"):  # presence alone is weaker than this model is sure
        assert repeated(generate(llm, max_tokens=160, ignore_eos=True, **{name: penalties[name]})) < usual
    assert repeated(generate(llm, max_tokens=160, ignore_eos=True, **penalties)) < usual // 2


def test_penalties_do_not_change_other_rows(llm: LLM) -> None:
    prompts = [f"Once upon a time there was a {a}" for a in ("cat", "dog", "fox", "owl")]
    plain = SamplingParams(temperature=0, max_tokens=20)
    heavy = SamplingParams(temperature=0, max_tokens=20, frequency_penalty=1.5, logit_bias=((9, 3.0),), min_tokens=20)
    params = [plain, heavy, plain, heavy]
    together = llm.generate(prompts, params)
    for prompt, p, done in zip(prompts, params, together, strict=True):
        assert llm.generate(prompt, p)[0].token_ids == done.token_ids
