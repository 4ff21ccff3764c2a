"""Penalties, biases, forbidden endings and masks in one launch, without asking the device or the host for anything."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.layout import Flag

if TYPE_CHECKING:
    from minisgl.ops.penalties import PenaltyTables

BLOCK: Final = 2048
BIASES: Final = 128  # worked on at once
ADJUSTED = tl.constexpr(Flag.PENALIZED)
MASKED = tl.constexpr(Flag.MASKED)


@triton.jit
def _penalized(x, seen, penalties):
    presence, frequency, repetition = tl.load(penalties), tl.load(penalties + 1), tl.load(penalties + 2)
    count = seen >> 1
    x = tl.where(seen > 0, tl.where(x > 0, x / repetition, x * repetition), x)
    return x - (frequency * count.to(tl.float32) + tl.where(count > 0, presence, 0.0))


@triton.jit
def _masked(x, token, mask, here):
    word = tl.load(mask + token // 32, mask=here, other=0)
    return tl.where(((word >> (token % 32)) & 1) != 0, x, float("-inf"))


@triton.jit(do_not_specialize=["words", "width"])
def _penalize(
    logits, out, flags, mask_index, rows, positions,
    seen, penalties, first_end, num_biases, bias_ids, biases, masks,
    vocab, words, width, BLOCK: tl.constexpr, BIASES: tl.constexpr,
):  # fmt: skip
    """Program (sequence, tile of logits). Logits with a bias are worked out once more, from the start."""
    seq, start = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    flag, row = tl.load(flags + seq), tl.load(rows + seq)
    e = start + tl.arange(0, BLOCK)
    here = e < vocab
    x = tl.load(logits + seq * vocab + e, mask=here, other=0.0).to(tl.float32)
    has_penalties, is_masked = (flag & ADJUSTED) != 0, (flag & MASKED) != 0
    seen += row * vocab
    penalties += row * 3
    mask = masks
    if is_masked:
        mask += tl.load(mask_index + seq).to(tl.int64) * words
    if has_penalties:
        x = _penalized(x, tl.load(seen + e, mask=here, other=0), penalties)
    if is_masked:
        x = _masked(x, e, mask, here)
    tl.store(out + seq * vocab + e, x, mask=here)
    if has_penalties:
        count = tl.load(num_biases + row)
        is_early = tl.load(positions + seq) < tl.load(first_end + row)
        tl.debug_barrier()  # other threads have stored what is overwritten below
        for first in range(0, count, BIASES):
            i = first + tl.arange(0, BIASES)
            code = tl.load(bias_ids + row * width + i, mask=i < count, other=0)
            token = tl.where(code < 0, ~code, code)
            hit = (i < count) & (token >= start) & (token < start + BLOCK)
            y = tl.load(logits + seq * vocab + token, mask=hit, other=0.0).to(tl.float32)
            y += tl.load(biases + row * width + i, mask=hit, other=0.0)
            y = tl.where((code < 0) & is_early, float("-inf"), y)
            y = _penalized(y, tl.load(seen + token, mask=hit, other=0), penalties)
            if is_masked:
                y = _masked(y, token, mask, hit)
            tl.store(out + seq * vocab + token, y, mask=hit)


def apply_penalties(
    logits: Tensor, flags: Tensor, mask_index: Tensor, rows: Tensor, positions: Tensor, tables: PenaltyTables
) -> Tensor:
    """As `ops/penalties.py` says."""
    logits = logits.contiguous()
    sampled, vocab = logits.shape
    out = torch.empty_like(logits, dtype=torch.float32)
    _penalize[(sampled, triton.cdiv(vocab, BLOCK))](
        logits, out, flags, mask_index, rows, positions,
        tables.seen, tables.penalties, tables.first_end, tables.num_biases, tables.bias_ids, tables.biases,
        tables.masks, vocab, tables.masks.shape[1], tables.biases.shape[1], BLOCK=BLOCK, BIASES=BIASES,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["sampled"])
def _count(tokens, flags, rows, seen, vocab, sampled, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    here = (i < sampled) & ((tl.load(flags + i, mask=i < sampled, other=0) & ADJUSTED) != 0)
    own = seen + tl.load(rows + i, mask=here, other=0) * vocab + tl.load(tokens + i, mask=here, other=0)
    tl.store(own, tl.load(own, mask=here, other=0) + 2, mask=here)


def count_tokens(tokens: Tensor, flags: Tensor, rows: Tensor, tables: PenaltyTables) -> None:
    """As `ops/penalties.py` says; no row may be there twice."""
    sampled = len(rows)
    _count[(triton.cdiv(sampled, 128),)](tokens, flags, rows, tables.seen, tables.seen.shape[1], sampled, N=128)
