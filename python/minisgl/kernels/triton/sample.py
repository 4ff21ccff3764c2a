"""Sampling in one pass over the logits: Gumbel-max with the noise of `ops/sampling.py`, bit for bit.

Scores are in units of log2: logit / T * log2(e) - log2(-ln(1 - x)), x = (bits + 0.5) / 2^32, which orders tokens as
logit / T + Gumbel noise does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minisgl.kernels.triton.launch import COUNTERS, INTERPRETED, ROW_WORDS, counters, pdl_options
from minisgl.kernels.triton.top_k_top_p import find_cuts

if TYPE_CHECKING:
    from minisgl.ops.sampling import SamplingState

BLOCK: Final = 256  # logits per tile: one warp, 8 per thread
PROGRAMS: Final = 8192  # two waves; 256 rows at T = 0.6 take 55 us, and 63 with tiles of 512 and one wave (H200)
MAX_SPLITS: Final = 512
IDLE: Final = -(2**31)  # less than the key of every score

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
MAX_NOISE = tl.constexpr(33.1)  # in units of log2: x is at least 2^-33
ROUNDING = tl.constexpr(1e-3)  # bounds how much noise jumps where its two formulas meet
MAX_SCALE = tl.constexpr(1e30)  # for tiny temperatures; keeps finite scores finite
LINE = tl.constexpr(32)  # each leader has its own cache line: all programs of a row read it at every tile
APPROXIMATE = tl.constexpr(not INTERPRETED)  # the interpreter has no PTX


@triton.jit
def _mix(x):
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = (x ^ (x >> 15)) * 0x735A2D97
    return x ^ (x >> 15)


@triton.jit
def row_words(key, position):
    """`ops.sampling.row_words` for one int64 key and one int32 position, in uint32."""
    low, high = key.to(tl.uint32), (key >> 32).to(tl.uint32)
    step = position.to(tl.uint32)
    a = _mix(_mix(low + step * 0x9E3779B9) ^ high)
    b = _mix(_mix(high + step * 0x85EBCA6B) ^ low ^ 0x6A09E667)
    return a, b


@triton.jit
def noise_bits(token, a, b):
    """`ops.sampling.noise_bits` of int32 tokens, in uint32."""
    x = token.to(tl.uint32) ^ a
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = ((x ^ (x >> 15)) + b) * 0x735A2D97
    return x ^ (x >> 15)


@triton.jit
def _log2(x):
    """Return the hardware's logarithm; `tl.log2` is a polynomial of a dozen instructions."""
    if APPROXIMATE:
        return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    else:
        return tl.log2(x)


@triton.jit
def noise_log2(bits):
    """Gumbel noise in units of log2: -log2(e) with e = -ln(1 - x).

    Large noise comes from small x, where e is the series x + x^2/2 + x^3/3 (off by a 4e6th at 0.01), since the
    hardware's log2 near 1 has an absolute error of 2^-22.6. Beyond 0.01 the relative error of e is at most 1e-5.
    """
    x = tl.minimum(bits.to(tl.float32) * 2.0**-32 + 2.0**-33, 1.0 - 2.0**-24)
    series = x * (1.0 + x * (0.5 + x * 0.33333334))
    return -_log2(tl.where(x < 0.01, series, _log2(1.0 - x) * -LN_2))


@triton.jit
def _key(x):
    """Map float32 to int32 that sorts alike. On the bits the map is its own inverse, see `_score`."""
    i = x.to(tl.int32, bitcast=True)
    return i ^ ((i >> 31) & 0x7FFFFFFF)


@triton.jit
def _score(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["num_seqs", "steps", "splits", "first_token"])
def _sample(
    logits_ptr, rows_ptr, positions_ptr, temperature_ptr, noise_key_ptr, last_token_ptr, cuts_ptr, cut_indices_ptr,
    scores_ptr, tokens_ptr, counter_ptr, leader_ptr, out_ptr, vocab_size, num_seqs, steps, splits, first_token,
    BLOCK: tl.constexpr, MAX_SPLITS: tl.constexpr, IDLE: tl.constexpr, FILTERED: tl.constexpr, PARTIAL: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Find the argmax of a row's scores; grid (S, splits), `steps` tiles of BLOCK logits per program.

    The last program of a sequence to arrive compares the best of all splits. `leader` holds the key of the best score
    that any split has found. A tile that cannot reach the leader is skipped after its largest logit is known, or its
    largest logit and its largest noise. Such a tile cannot win, so the result does not depend on the order of programs.
    NaN and +Inf become +Inf, which nothing beats: a best score that is not finite means non-finite logits. PARTIAL: the
    logits are those of the tokens from `first_token` on, and the result is a candidate: its token and the bits of its
    score.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    seq, split = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows_ptr + seq)
    temperature = tl.load(temperature_ptr + row * ROW_WORDS)
    is_random = temperature > 0
    scale = tl.where(is_random, tl.minimum(1.0 / temperature, MAX_SCALE) * LOG2_E, 1.0)
    max_noise = tl.where(is_random, MAX_NOISE, 0.0)
    a, b = row_words(tl.load(noise_key_ptr + row * (ROW_WORDS // 2)), tl.load(positions_ptr + seq))
    if FILTERED:
        cut, cut_index = tl.load(cuts_ptr + seq), tl.load(cut_indices_ptr + seq)
    logits_ptr += seq.to(tl.int64) * vocab_size
    offs = split * steps * BLOCK + tl.arange(0, BLOCK)
    next_logits = tl.load(logits_ptr + offs, mask=offs < vocab_size, other=float("-inf"))
    own_leader_ptr = leader_ptr + seq * LINE
    leader = tl.load(own_leader_ptr, volatile=True)
    best = tl.full((), float("-inf"), tl.float32)
    token = tl.full((), 0, tl.int32)
    for i in range(steps):
        next_offs = offs + BLOCK
        x, known = next_logits.to(tl.float32), _score(leader)
        mask = (next_offs < vocab_size) & (i + 1 < steps)
        next_logits = tl.load(logits_ptr + next_offs, mask=mask, other=float("-inf"))
        if is_random:
            leader = tl.load(own_leader_ptr, volatile=True)
        known = tl.where(known > best, known, best)  # an idle leader's score is NaN
        x = tl.where(x < float("inf"), x, float("inf"))
        if FILTERED:
            x = tl.where((x > cut) | ((x == cut) & (offs <= cut_index)), x, float("-inf"))
        score = x * scale
        top = tl.max(score, 0)
        if (top + max_noise > best) & (top + max_noise >= known):
            if is_random:
                if PARTIAL:
                    bits = noise_bits(offs + first_token, a, b)
                else:
                    bits = noise_bits(offs, a, b)
                limit = top + noise_log2(tl.min(bits, 0)) + ROUNDING
                top = float("-inf")
                if (limit > best) & (limit >= known):
                    score += noise_log2(bits)
                    top = tl.max(score, 0)
            if top > best:
                best = top
                token = tl.min(tl.where(score == top, offs, vocab_size), 0)
                if is_random & (best > known):
                    tl.atomic_max(own_leader_ptr, _key(best), sem="relaxed")
        offs = next_offs
    part = seq * MAX_SPLITS + split
    tl.store(scores_ptr + part, best)
    tl.store(tokens_ptr + part, token)
    tl.debug_barrier()
    if tl.atomic_add(counter_ptr + seq, 1, sem="acq_rel") == splits - 1:
        tl.store(counter_ptr + seq, 0)
        tl.store(own_leader_ptr, IDLE)
        offs_s = tl.arange(0, MAX_SPLITS)
        mask = offs_s < splits
        score_ptrs = scores_ptr + seq * MAX_SPLITS + offs_s
        scores = tl.load(score_ptrs, mask=mask, other=float("-inf"), cache_modifier=".cg")
        token_ptrs = tokens_ptr + seq * MAX_SPLITS + offs_s
        tokens = tl.load(token_ptrs, mask=mask, other=0, cache_modifier=".cg")
        best = tl.max(scores, 0)
        token = tl.min(tl.where(scores == best, tokens, vocab_size), 0)
        if PARTIAL:
            tl.store(out_ptr + seq, token + first_token)
            tl.store(out_ptr + num_seqs + seq, best.to(tl.int32, bitcast=True))
        else:
            is_finite = (best > float("-inf")) & (best < float("inf"))
            token = tl.where(is_finite, token, 0)
            tl.store(last_token_ptr + row, token)
            tl.store(out_ptr + seq, token)
            tl.store(out_ptr + num_seqs + seq, is_finite.to(tl.int32))


def sample_rows(logits: Tensor, rows: Tensor, positions: Tensor, state: SamplingState, is_filtered: bool) -> Tensor:
    """`ops.sampling.sample_rows`; for one sequence, the last kernel of a one-row step."""
    cuts = None
    if is_filtered:
        logits = logits.contiguous()
        cuts = find_cuts(logits, rows, state)
    return _launch(logits, rows, positions, state, cuts, None)


def candidates(logits: Tensor, rows: Tensor, positions: Tensor, state: SamplingState, first: int) -> Tensor:
    """`ops.sampling.candidates`, except that scores of rows with a temperature are in units of log2."""
    return _launch(logits, rows, positions, state, None, first)


def _launch(
    logits: Tensor,
    rows: Tensor,
    positions: Tensor,
    state: SamplingState,
    cuts: tuple[Tensor, Tensor] | None,
    first: int | None,
) -> Tensor:
    """`cuts` are those of `find_cuts`; `first` is None if the logits are those of the whole vocabulary."""
    num_seqs, vocab_size = logits.shape
    device = logits.device
    assert num_seqs <= COUNTERS, f"the kernel cannot sample {num_seqs} sequences at once"
    logits = logits.contiguous()
    out = torch.empty((2, num_seqs), dtype=torch.int32, device=device)
    tiles = triton.cdiv(vocab_size, BLOCK)
    steps = triton.cdiv(tiles, max(1, min(tiles, MAX_SPLITS, PROGRAMS // max(1, num_seqs))))
    splits = triton.cdiv(tiles, steps)
    scores = torch.empty((num_seqs, MAX_SPLITS), dtype=torch.float32, device=device)
    _sample[(num_seqs, splits)](
        logits, rows, positions, state.temperature, state.noise_key, state.last_token, *(cuts or (out, out)),
        scores, torch.empty_like(scores, dtype=torch.int32), counters(device), counters(device, IDLE, LINE.value), out,
        vocab_size, num_seqs, steps, splits, first or 0,
        BLOCK=BLOCK, MAX_SPLITS=MAX_SPLITS, IDLE=IDLE, FILTERED=cuts is not None, PARTIAL=first is not None,
        num_warps=1, **pdl_options(device, num_seqs == 1 and cuts is None),
    )  # fmt: skip
    return out
