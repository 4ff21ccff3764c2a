"""Choosing tokens in one pass over the logits: Gumbel-max with the noise of `ops/sample.py`, bit for bit.

Scores are in units of log2: logit / T * log2(e) - log2(-ln(1 - x)), x = (bits + 0.5) / 2^32, which orders tokens as
logit / T + Gumbel noise does.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minisgl.ops.sample import SamplingState
from minisgl.triton.filter import find_cuts
from minisgl.triton.launch import COUNTERS, INTERPRETED, chained, counters

BLOCK: Final = 256  # logits of a tile: one warp, 8 a thread
PROGRAMS: Final = 8192  # two waves; 256 rows at T = 0.6 take 55 us, and 63 with tiles of 512 and one wave (H200)
MAX_SPLITS: Final = 512
IDLE: Final = -(2**31)  # less than the key of any score

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
MAX_NOISE = tl.constexpr(33.1)  # in units of log2: x is at least 2^-33
ROUNDING = tl.constexpr(1e-3)  # a bound on what noise gains where its two formulas meet
MAX_SCALE = tl.constexpr(1e30)  # of a tiny temperature; keeps finite scores finite
LINE = tl.constexpr(32)  # leaders stand in cache lines of their own: all programs of a row read one at every tile
APPROXIMATE = tl.constexpr(not INTERPRETED)  # the interpreter has no PTX


@triton.jit
def _mix(x):
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = (x ^ (x >> 15)) * 0x735A2D97
    return x ^ (x >> 15)


@triton.jit
def row_words(key, position):
    """`ops/sample.py: row_words` for one int64 key and one int32 position, in uint32."""
    low, high, step = key.to(tl.uint32), (key >> 32).to(tl.uint32), position.to(tl.uint32)
    a = _mix(_mix(low + step * 0x9E3779B9) ^ high)
    b = _mix(_mix(high + step * 0x85EBCA6B) ^ low ^ 0x6A09E667)
    return a, b


@triton.jit
def noise_bits(token, a, b):
    """`ops/sample.py: noise_bits` of int32 tokens, in uint32."""
    x = token.to(tl.uint32) ^ a
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = ((x ^ (x >> 15)) + b) * 0x735A2D97
    return x ^ (x >> 15)


@triton.jit
def _log2(x):
    """The hardware's logarithm; `tl.log2` is a polynomial of a dozen instructions."""
    if APPROXIMATE:
        return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    else:
        return tl.log2(x)


@triton.jit
def noise_log2(bits):
    """Gumbel noise in units of log2: -log2(e) with e = -ln(1 - x).

    Large noise comes from small x, where e is the series x + x^2/2 + x^3/3 (off by a 4e6th at 0.01), since the
    hardware's log2 near 1 has an absolute error of 2^-22.6. Beyond 0.01 that makes an error of 1e-5 of e at most.
    """
    x = tl.minimum(bits.to(tl.float32) * 2.0**-32 + 2.0**-33, 1.0 - 2.0**-24)
    series = x * (1.0 + x * (0.5 + x * 0.33333334))
    return -_log2(tl.where(x < 0.01, series, _log2(1.0 - x) * -LN_2))


@triton.jit
def _key(x):
    """float32 -> int32 in the same order; its own inverse on the bits, see `_score`."""
    i = x.to(tl.int32, bitcast=True)
    return i ^ ((i >> 31) & 0x7FFFFFFF)


@triton.jit
def _score(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["sampled", "steps", "splits", "first"])
def _choose(
    logits, rows, positions, temperature, noise_key, last_token, cuts, lasts, scores, tokens, count, leader, out,
    vocab, sampled, steps, splits, first,
    BLOCK: tl.constexpr, MAX_SPLITS: tl.constexpr, IDLE: tl.constexpr, FILTERED: tl.constexpr, PART: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (sequence, split) takes `steps` tiles; the last of a sequence to arrive compares the splits' best.

    `leader` holds the key of the best score that any split has found; a tile that cannot reach it is skipped: after a
    look at its largest logit, or at that and its largest noise. What is skipped cannot win, so the result does not
    depend on who leads when. NaN and +Inf become +Inf, which nothing beats: a best score that is not finite means a
    non-finite row. With PART the logits are those of the tokens from `first` on, and the result is a candidate: its
    token and the bits of its score.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    seq, split = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows + seq)
    t = tl.load(temperature + row)
    is_drawn = t > 0
    scale = tl.where(is_drawn, tl.minimum(1.0 / t, MAX_SCALE) * LOG2_E, 1.0)
    reach = tl.where(is_drawn, MAX_NOISE, 0.0)
    a, b = row_words(tl.load(noise_key + row), tl.load(positions + seq))
    if FILTERED:
        cut, last = tl.load(cuts + seq), tl.load(lasts + seq)
    base = logits + seq.to(tl.int64) * vocab
    e = split * steps * BLOCK + tl.arange(0, BLOCK)
    ahead = tl.load(base + e, mask=e < vocab, other=float("-inf"))
    own_leader = leader + seq * LINE
    led = tl.load(own_leader, volatile=True)
    best = tl.full((), float("-inf"), tl.float32)
    token = tl.full((), 0, tl.int32)
    for i in range(steps):
        following = e + BLOCK
        x, known = ahead.to(tl.float32), _score(led)
        ahead = tl.load(base + following, mask=(following < vocab) & (i + 1 < steps), other=float("-inf"))
        if is_drawn:
            led = tl.load(own_leader, volatile=True)
        known = tl.where(known > best, known, best)  # an idle leader's is NaN
        x = tl.where(x < float("inf"), x, float("inf"))
        if FILTERED:
            x = tl.where((x > cut) | ((x == cut) & (e <= last)), x, float("-inf"))
        s = x * scale
        top = tl.max(s, 0)
        if (top + reach > best) & (top + reach >= known):
            if is_drawn:
                if PART:
                    bits = noise_bits(e + first, a, b)
                else:
                    bits = noise_bits(e, a, b)
                limit = top + noise_log2(tl.min(bits, 0)) + ROUNDING
                top = float("-inf")
                if (limit > best) & (limit >= known):
                    s += noise_log2(bits)
                    top = tl.max(s, 0)
            if top > best:
                best = top
                token = tl.min(tl.where(s == top, e, vocab), 0)
                if is_drawn & (best > known):
                    tl.atomic_max(own_leader, _key(best), sem="relaxed")
        e = following
    part = seq * MAX_SPLITS + split
    tl.store(scores + part, best)
    tl.store(tokens + part, token)
    tl.debug_barrier()
    if tl.atomic_add(count + seq, 1, sem="acq_rel") == splits - 1:
        tl.store(count + seq, 0)
        tl.store(own_leader, IDLE)
        o = tl.arange(0, MAX_SPLITS)
        found = tl.load(scores + seq * MAX_SPLITS + o, mask=o < splits, other=float("-inf"), cache_modifier=".cg")
        which = tl.load(tokens + seq * MAX_SPLITS + o, mask=o < splits, other=0, cache_modifier=".cg")
        best = tl.max(found, 0)
        token = tl.min(tl.where(found == best, which, vocab), 0)
        if PART:
            tl.store(out + seq, token + first)
            tl.store(out + sampled + seq, best.to(tl.int32, bitcast=True))
        else:
            is_sound = (best > float("-inf")) & (best < float("inf"))
            token = tl.where(is_sound, token, 0)
            tl.store(last_token + row, token)
            tl.store(out + seq, token)
            tl.store(out + sampled + seq, is_sound.to(tl.int32))


def sample_rows(logits: Tensor, rows: Tensor, positions: Tensor, state: SamplingState, is_filtered: bool) -> Tensor:
    """As `sample.sample_rows`; for one sequence the last kernel of a one-row step."""
    cuts = None
    if is_filtered:
        logits = logits.contiguous()
        cuts = find_cuts(logits, rows, state)
    return _run(logits, rows, positions, state, cuts, None)


def candidates(logits: Tensor, rows: Tensor, positions: Tensor, state: SamplingState, first: int) -> Tensor:
    """As `sample.candidates`, but the scores of drawn rows are in units of log2."""
    return _run(logits, rows, positions, state, None, first)


def _run(
    logits: Tensor,
    rows: Tensor,
    positions: Tensor,
    state: SamplingState,
    filters: tuple[Tensor, Tensor] | None,
    first: int | None,
) -> Tensor:
    """`filters` are those of `find_cuts`; `first` is None when the logits are those of the whole vocabulary."""
    sampled, vocab = logits.shape
    device = logits.device
    assert sampled <= COUNTERS, f"{sampled} sequences sampled at once"
    logits = logits.contiguous()
    out = torch.empty((2, sampled), dtype=torch.int32, device=device)
    cuts, lasts = filters or (out, out)
    tiles = triton.cdiv(vocab, BLOCK)
    steps = triton.cdiv(tiles, max(1, min(tiles, MAX_SPLITS, PROGRAMS // max(1, sampled))))
    splits = triton.cdiv(tiles, steps)
    scores = torch.empty((sampled, MAX_SPLITS), dtype=torch.float32, device=device)
    options = chained(device) if sampled == 1 and filters is None else {"PDL": False}
    _choose[(sampled, splits)](
        logits, rows, positions, state.temperature, state.noise_key, state.last_token, cuts, lasts,
        scores, torch.empty_like(scores, dtype=torch.int32), counters(device), counters(device, IDLE, LINE.value), out,
        vocab, sampled, steps, splits, first or 0,
        BLOCK=BLOCK, MAX_SPLITS=MAX_SPLITS, IDLE=IDLE, FILTERED=filters is not None, PART=first is not None,
        num_warps=1, **options,
    )  # fmt: skip
    return out
