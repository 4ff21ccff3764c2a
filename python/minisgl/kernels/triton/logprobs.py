"""Log-probabilities of the sampled and the likeliest tokens: the TOP of each tile of a row, then the TOP of these.

A logit and its token are packed into one int64 key. Keys sort by logit, and among equal logits by token, the lowest
first. They are distinct, so removing the largest leaves the next.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.core.layout import Flag
from minisgl.core.plan import StepResult

BLOCK: Final = 4096  # logits of a tile
LOGPROBS = tl.constexpr(Flag.LOGPROBS)
TOP = tl.constexpr(StepResult.TOP)
LN_2 = tl.constexpr(0.6931471805599453)
LOG2_E = tl.constexpr(1.4426950408889634)
NO_KEY = tl.constexpr(-(2**63))  # below all keys
LOW_BITS = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _pack(x, token):
    i = x.to(tl.int32, bitcast=True)
    return ((i ^ ((i >> 31) & LOW_BITS)).to(tl.int64) << 32) | (token ^ LOW_BITS).to(tl.int64)


@triton.jit
def _logit(key):
    i = (key >> 32).to(tl.int32)
    return (i ^ ((i >> 31) & LOW_BITS)).to(tl.float32, bitcast=True)


@triton.jit
def _token(key):
    return (key & LOW_BITS).to(tl.int32) ^ LOW_BITS


@triton.jit(do_not_specialize=["num_tiles"])
def _tile_tops(logits_ptr, flags_ptr, tops_ptr, peaks_ptr, masses_ptr, vocab_size, num_tiles, BLOCK: tl.constexpr):
    """Find a tile's TOP keys, largest logit, and sum of exp(logit - largest); grid (S, V / BLOCK)."""
    seq, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if (tl.load(flags_ptr + seq) & LOGPROBS) != 0:
        offs = tile * BLOCK + tl.arange(0, BLOCK)
        mask = offs < vocab_size
        x = tl.load(logits_ptr + seq * vocab_size + offs, mask=mask, other=float("-inf")).to(tl.float32)
        peak = tl.max(x, 0)
        mass = tl.sum(tl.where(mask & (x > float("-inf")), tl.exp2((x - peak) * LOG2_E), 0.0), 0)
        part = seq * num_tiles + tile
        tl.store(peaks_ptr + part, peak)
        tl.store(masses_ptr + part, mass)
        remaining = tl.where(mask, _pack(x, offs), NO_KEY)
        for k in range(TOP):
            best = tl.max(remaining, 0)
            tl.store(tops_ptr + part * TOP + k, best)
            remaining = tl.where(remaining == best, NO_KEY, remaining)


@triton.jit(do_not_specialize=["num_tiles", "num_seqs"])
def _logprobs(
    logits_ptr, flags_ptr, tokens_ptr, tops_ptr, peaks_ptr, masses_ptr, out_ptr, vocab_size, num_tiles, num_seqs,
    BLOCK_TILES: tl.constexpr, BLOCK_TOPS: tl.constexpr,
):  # fmt: skip
    """Write a sequence's column of out [StepResult.WIDTH, S]; grid (S)."""
    seq = tl.program_id(0).to(tl.int64)
    is_wanted = (tl.load(flags_ptr + seq) & LOGPROBS) != 0
    logprob, log_sum = tl.full((), 0.0, tl.float32), tl.full((), 0.0, tl.float32)
    remaining = tl.full([BLOCK_TOPS], NO_KEY, tl.int64)
    if is_wanted:
        offs_t, offs_b = tl.arange(0, BLOCK_TILES), tl.arange(0, BLOCK_TOPS)
        peak = tl.load(peaks_ptr + seq * num_tiles + offs_t, mask=offs_t < num_tiles, other=float("-inf"))
        mass = tl.load(masses_ptr + seq * num_tiles + offs_t, mask=offs_t < num_tiles, other=0.0)
        highest = tl.max(peak, 0)
        total = tl.sum(tl.where(peak > float("-inf"), mass * tl.exp2((peak - highest) * LOG2_E), 0.0), 0)
        log_sum = highest + tl.log2(total) * LN_2
        logprob = tl.load(logits_ptr + seq * vocab_size + tl.load(tokens_ptr + seq)).to(tl.float32) - log_sum
        remaining = tl.load(tops_ptr + seq * num_tiles * TOP + offs_b, mask=offs_b < num_tiles * TOP, other=NO_KEY)
    tl.store(out_ptr + seq, logprob.to(tl.int32, bitcast=True))
    for k in range(TOP):
        best = tl.max(remaining, 0)
        is_token = best > NO_KEY
        top_logprob = (_logit(best) - log_sum).to(tl.int32, bitcast=True)
        tl.store(out_ptr + (1 + k) * num_seqs + seq, tl.where(is_token, _token(best), 0))
        tl.store(out_ptr + (1 + TOP + k) * num_seqs + seq, tl.where(is_token, top_logprob, 0))
        remaining = tl.where(remaining == best, NO_KEY, remaining)


def token_logprobs(logits: Tensor, tokens: Tensor, flags: Tensor) -> Tensor:
    """`ops.sampling.token_logprobs`; of equally likely tokens the lowest comes first."""
    logits = logits.contiguous()
    count, vocab = logits.shape
    device, tiles = logits.device, triton.cdiv(vocab, BLOCK)
    tops = torch.empty((count, tiles, TOP.value), dtype=torch.int64, device=device)
    peaks = torch.empty((count, tiles), dtype=torch.float32, device=device)
    masses, out = torch.empty_like(peaks), torch.empty((StepResult.WIDTH, count), dtype=torch.int32, device=device)
    _tile_tops[(count, tiles)](logits, flags, tops, peaks, masses, vocab, tiles, BLOCK=BLOCK)
    _logprobs[(count,)](
        logits, flags, tokens, tops, peaks, masses, out, vocab, tiles, count,
        BLOCK_TILES=triton.next_power_of_2(tiles), BLOCK_TOPS=triton.next_power_of_2(tiles * TOP.value),
    )  # fmt: skip
    return out
