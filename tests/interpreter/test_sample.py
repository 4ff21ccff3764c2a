"""The sampler's kernels: bit-exact noise, the right token, exact cuts on the fast path and on the slow one."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from contract.sampling import (
    adversarial_logits,
    check_candidates,
    check_cuts,
    check_logprobs,
    check_penalties,
    check_samples,
    make_state,
    mixed_state,
)
from minisgl.kernels.triton import sample, top_k_top_p
from minisgl.kernels.triton.launch import counters
from minisgl.ops.sampling import gumbel_noise, noise_bits
from minisgl.ops.table import load_ops

OPS = load_ops("triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy warns of NaN, a GPU does not


@triton.jit
def _noise(keys, positions, bits, noise, vocab, BLOCK: tl.constexpr):
    row, e = tl.program_id(0), tl.arange(0, BLOCK)
    a, b = sample.row_words(tl.load(keys + row), tl.load(positions + row))
    x = sample.noise_bits(e, a, b)
    tl.store(bits + row * vocab + e, x.to(tl.int64), mask=e < vocab)
    tl.store(noise + row * vocab + e, sample.noise_log2(x), mask=e < vocab)


def test_noise_is_the_specification_s():
    keys = torch.tensor([0, 123456789012345, -1, -(2**63), 2**63 - 1])
    positions = torch.tensor([0, 77, 2**31 - 1, 5, 4096], dtype=torch.int32)
    bits, noise = torch.zeros(5, 700, dtype=torch.int64), torch.zeros(5, 700)
    _noise[(5,)](keys, positions, bits, noise, 700, BLOCK=1024)
    assert torch.equal(bits, noise_bits(keys, positions, 700))
    assert (noise * 0.6931471805599453 - gumbel_noise(keys, positions, 700)).abs().max() < 2e-5


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("is_filtered", [False, True])
def test_tokens(dtype: torch.dtype, is_filtered: bool):
    torch.manual_seed(0)
    logits = (torch.randn(12, 1300) * 3).to(dtype)
    logits[3, 7], logits[4, 0], logits[5] = float("nan"), float("inf"), float("-inf")
    rows = torch.randperm(20)[:12]
    check_samples(OPS, logits, mixed_state(20, "cpu"), torch.arange(12, dtype=torch.int32), rows, is_filtered)
    assert not counters(logits.device).any()


def test_greedy_takes_the_lowest_of_equals():
    logits = torch.zeros(2, 1300)
    logits[0, [600, 601, 1200]] = 1
    state = make_state(2, "cpu", temperature=0.0)
    tokens, ok = OPS.sample_rows(logits, torch.arange(2), torch.zeros(2, dtype=torch.int32), state, False)
    assert tokens.tolist() == [600, 0] and ok.tolist() == [1, 1]


@pytest.mark.parametrize("parts", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_candidates_of_parts(parts: int):
    torch.manual_seed(1)
    logits = torch.randn(14, 1301) * 3
    logits[3, 7], logits[4, 0], logits[5] = float("nan"), float("inf"), float("-inf")
    logits[6, :1000] = float("-inf")  # all that some rank has
    logits[7:9, [4, 700, 1300]] = 50.0  # equals in different parts
    state = make_state(20, "cpu", torch.tensor([0.0, 0.3, 1.0, 1.7]).repeat(5))
    check_candidates(OPS, logits, state, torch.arange(14, dtype=torch.int32) + 5, torch.randperm(20)[:14], parts)


def test_no_rows():
    state = make_state(1, "cpu")
    none = torch.zeros(0, dtype=torch.int64)
    assert OPS.sample_rows(torch.zeros(0, 30), none, none.int(), state, True).shape == (2, 0)


@pytest.mark.parametrize(
    ("block", "dtype"), [pytest.param(64, torch.float32, marks=pytest.mark.slow), (512, torch.float16)]
)
def test_cuts(dtype: torch.dtype, block: int, monkeypatch: pytest.MonkeyPatch):
    """With tiles of 64, many rows have more candidates than fit, or too few."""
    monkeypatch.setattr(top_k_top_p, "BLOCK", block)
    monkeypatch.setattr(top_k_top_p, "WANTED", block // 4)
    monkeypatch.setattr(top_k_top_p, "MAX_WANTED", block // 2)
    torch.manual_seed(1)
    rows = torch.cat([adversarial_logits(260, torch.float32), torch.randn(4, 260), torch.randn(4, 260) * 5])
    logits = rows[torch.arange(36) % 18].to(torch.float16).to(dtype)
    state = mixed_state(36, "cpu", seed=block)
    state.temperature.clamp_(min=0.3)
    cuts, lasts = top_k_top_p.find_cuts(logits, torch.arange(36), state)
    check_cuts(cuts, lasts, logits, state)


@pytest.mark.parametrize("vocab", [33, 5000])
def test_penalties_match_their_formula(vocab: int):
    check_penalties("cpu", vocab)


@pytest.mark.parametrize("vocab", [7, 300, 9001])
def test_log_probabilities(vocab: int):
    check_logprobs("cpu", vocab)
