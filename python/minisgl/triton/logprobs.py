"""Log-probabilities of chosen tokens and of the likeliest ones: the best of each tile of a row, then the best of these.

A logit and its token are one int64, which orders them as they are to be listed: the larger logit first, the lower token
first among equals. So each is the largest once, and taking it away leaves the next.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.core import StepResult
from minisgl.layout import Flag

BLOCK: Final = 4096  # logits of a tile
LOGPROBS = tl.constexpr(Flag.LOGPROBS)
TOP = tl.constexpr(StepResult.TOP)
LN_2 = tl.constexpr(0.6931471805599453)
LOG2_E = tl.constexpr(1.4426950408889634)
NO_INTS = tl.constexpr(-(2**63))  # below any logit's
LOW = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _listed(x, token):
    i = x.to(tl.int32, bitcast=True)
    return ((i ^ ((i >> 31) & LOW)).to(tl.int64) << 32) | (token ^ LOW).to(tl.int64)


@triton.jit
def _logit(listed):
    i = (listed >> 32).to(tl.int32)
    return (i ^ ((i >> 31) & LOW)).to(tl.float32, bitcast=True)


@triton.jit
def _token(listed):
    return (listed & LOW).to(tl.int32) ^ LOW


@triton.jit(do_not_specialize=["tiles"])
def _tile_tops(logits, flags, tops, peaks, masses, vocab, tiles, BLOCK: tl.constexpr):
    """Program (sequence, tile): its TOP best, its largest logit, and its mass where that is 1."""
    seq, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if (tl.load(flags + seq) & LOGPROBS) != 0:
        e = tile * BLOCK + tl.arange(0, BLOCK)
        here = e < vocab
        x = tl.load(logits + seq * vocab + e, mask=here, other=float("-inf")).to(tl.float32)
        peak = tl.max(x, 0)
        mass = tl.sum(tl.where(here & (x > float("-inf")), tl.exp2((x - peak) * LOG2_E), 0.0), 0)
        part = seq * tiles + tile
        tl.store(peaks + part, peak)
        tl.store(masses + part, mass)
        left = tl.where(here, _listed(x, e), NO_INTS)
        for k in range(TOP):
            best = tl.max(left, 0)
            tl.store(tops + part * TOP + k, best)
            left = tl.where(left == best, NO_INTS, left)


@triton.jit(do_not_specialize=["tiles", "count"])
def _logprobs(
    logits, flags, tokens, tops, peaks, masses, out, vocab, tiles, count, TILES: tl.constexpr, BEST: tl.constexpr
):
    """Program (sequence): its column of `out` [StepResult.WIDTH, count]."""
    seq = tl.program_id(0).to(tl.int64)
    is_wanted = (tl.load(flags + seq) & LOGPROBS) != 0
    own, logarithm = tl.full((), 0.0, tl.float32), tl.full((), 0.0, tl.float32)
    left = tl.full([BEST], NO_INTS, tl.int64)
    if is_wanted:
        i, j = tl.arange(0, TILES), tl.arange(0, BEST)
        peak = tl.load(peaks + seq * tiles + i, mask=i < tiles, other=float("-inf"))
        mass = tl.load(masses + seq * tiles + i, mask=i < tiles, other=0.0)
        highest = tl.max(peak, 0)
        total = tl.sum(tl.where(peak > float("-inf"), mass * tl.exp2((peak - highest) * LOG2_E), 0.0), 0)
        logarithm = highest + tl.log2(total) * LN_2
        own = tl.load(logits + seq * vocab + tl.load(tokens + seq)).to(tl.float32) - logarithm
        left = tl.load(tops + seq * tiles * TOP + j, mask=j < tiles * TOP, other=NO_INTS)
    tl.store(out + seq, own.to(tl.int32, bitcast=True))
    for k in range(TOP):
        best = tl.max(left, 0)
        is_one = best > NO_INTS
        logprob = (_logit(best) - logarithm).to(tl.int32, bitcast=True)
        tl.store(out + (1 + k) * count + seq, tl.where(is_one, _token(best), 0))
        tl.store(out + (1 + TOP + k) * count + seq, tl.where(is_one, logprob, 0))
        left = tl.where(left == best, NO_INTS, left)


def token_logprobs(logits: Tensor, tokens: Tensor, flags: Tensor) -> Tensor:
    """As `ops/logprobs.py` says; the lowest of equally likely tokens comes first."""
    logits = logits.contiguous()
    count, vocab = logits.shape
    device, tiles = logits.device, triton.cdiv(vocab, BLOCK)
    tops = torch.empty((count, tiles, TOP.value), dtype=torch.int64, device=device)
    peaks = torch.empty((count, tiles), dtype=torch.float32, device=device)
    masses, out = torch.empty_like(peaks), torch.empty((StepResult.WIDTH, count), dtype=torch.int32, device=device)
    _tile_tops[(count, tiles)](logits, flags, tops, peaks, masses, vocab, tiles, BLOCK=BLOCK)
    _logprobs[(count,)](
        logits, flags, tokens, tops, peaks, masses, out, vocab, tiles, count,
        TILES=triton.next_power_of_2(tiles), BEST=triton.next_power_of_2(tiles * TOP.value),
    )  # fmt: skip
    return out
