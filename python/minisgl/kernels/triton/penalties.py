"""Penalties, logit bias, forbidden end tokens and token masks in one launch, without synchronisation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.core.layout import Flag

if TYPE_CHECKING:
    from minisgl.ops.sampling import PenaltyTables

BLOCK: Final = 2048
BLOCK_BIASES: Final = 128
PENALIZED = tl.constexpr(Flag.PENALIZED)
MASKED = tl.constexpr(Flag.MASKED)


@triton.jit
def _penalize(x, seen, penalties_ptr):
    """Apply repetition, frequency and presence penalties; `seen` is 2 x the token's count, + 1 if in the prompt."""
    presence, frequency = tl.load(penalties_ptr), tl.load(penalties_ptr + 1)
    repetition = tl.load(penalties_ptr + 2)
    count = seen >> 1
    x = tl.where(seen > 0, tl.where(x > 0, x / repetition, x * repetition), x)
    return x - (frequency * count.to(tl.float32) + tl.where(count > 0, presence, 0.0))


@triton.jit
def _seen(token, seen_ptr, mask, inputs_ptr, drafted):
    """Load entries of `seen`, and add the `drafted` tokens that end at `inputs_ptr`."""
    seen = tl.load(seen_ptr + token, mask=mask, other=0)
    for i in range(drafted):
        seen += tl.where(token == tl.load(inputs_ptr - i), 2, 0)
    return seen


@triton.jit
def _apply_mask(x, token, mask_ptr, mask):
    """Set tokens whose bit in the token mask is 0 to -inf."""
    word = tl.load(mask_ptr + token // 32, mask=mask, other=0)
    return tl.where(((word >> (token % 32)) & 1) != 0, x, float("-inf"))


@triton.jit(do_not_specialize=["stride_masks", "stride_biases"])
def _apply_penalties(
    logits_ptr, out_ptr, flags_ptr, mask_index_ptr, rows_ptr, positions_ptr,
    seen_ptr, penalties_ptr, first_end_ptr, num_biases_ptr, bias_ids_ptr, biases_ptr, masks_ptr,
    drafted_ptr, inputs_ptr, vocab_size, stride_masks, stride_biases,
    BLOCK: tl.constexpr, BLOCK_BIASES: tl.constexpr, HAS_DRAFTS: tl.constexpr,
):  # fmt: skip
    """Process a tile of BLOCK logits of a sequence; grid (S, V / BLOCK). Logits with a bias are computed twice."""
    seq, start = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    flags, row = tl.load(flags_ptr + seq), tl.load(rows_ptr + seq)
    offs = start + tl.arange(0, BLOCK)
    mask = offs < vocab_size
    x = tl.load(logits_ptr + seq * vocab_size + offs, mask=mask, other=0.0).to(tl.float32)
    is_penalized, is_masked = (flags & PENALIZED) != 0, (flags & MASKED) != 0
    seen_ptr += row * vocab_size
    penalties_ptr += row * 3
    mask_ptr = masks_ptr
    if is_masked:
        mask_ptr += tl.load(mask_index_ptr + seq).to(tl.int64) * stride_masks
    drafted = 0
    if HAS_DRAFTS:
        drafted = tl.load(drafted_ptr + seq)
    if is_penalized:
        x = _penalize(x, _seen(offs, seen_ptr, mask, inputs_ptr + seq, drafted), penalties_ptr)
    if is_masked:
        x = _apply_mask(x, offs, mask_ptr, mask)
    tl.store(out_ptr + seq * vocab_size + offs, x, mask=mask)
    if is_penalized:
        count = tl.load(num_biases_ptr + row)
        is_early = tl.load(positions_ptr + seq) < tl.load(first_end_ptr + row)
        tl.debug_barrier()  # other threads have stored the logits that are overwritten below
        for first in range(0, count, BLOCK_BIASES):
            offs_b = first + tl.arange(0, BLOCK_BIASES)
            code = tl.load(bias_ids_ptr + row * stride_biases + offs_b, mask=offs_b < count, other=0)
            token = tl.where(code < 0, ~code, code)
            hit = (offs_b < count) & (token >= start) & (token < start + BLOCK)
            y = tl.load(logits_ptr + seq * vocab_size + token, mask=hit, other=0.0).to(tl.float32)
            y += tl.load(biases_ptr + row * stride_biases + offs_b, mask=hit, other=0.0)
            y = tl.where((code < 0) & is_early, float("-inf"), y)
            y = _penalize(y, _seen(token, seen_ptr, hit, inputs_ptr + seq, drafted), penalties_ptr)
            if is_masked:
                y = _apply_mask(y, token, mask_ptr, hit)
            tl.store(out_ptr + seq * vocab_size + token, y, mask=hit)


def apply_penalties(
    logits: Tensor,
    flags: Tensor,
    mask_index: Tensor,
    rows: Tensor,
    positions: Tensor,
    tables: PenaltyTables,
    drafted: Tensor | None = None,
    inputs: Tensor | None = None,
) -> Tensor:
    """`ops.sampling.apply_penalties`."""
    logits = logits.contiguous()
    sampled, vocab = logits.shape
    out = torch.empty_like(logits, dtype=torch.float32)
    _apply_penalties[(sampled, triton.cdiv(vocab, BLOCK))](
        logits, out, flags, mask_index, rows, positions,
        tables.seen, tables.penalties, tables.first_end, tables.num_biases, tables.bias_ids, tables.biases,
        tables.masks, flags if drafted is None else drafted, flags if inputs is None else inputs,
        vocab, tables.masks.shape[1], tables.biases.shape[1],
        BLOCK=BLOCK, BLOCK_BIASES=BLOCK_BIASES, HAS_DRAFTS=drafted is not None,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_seqs"])
def _count_tokens(tokens_ptr, flags_ptr, rows_ptr, seen_ptr, vocab_size, num_seqs, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = (offs < num_seqs) & ((tl.load(flags_ptr + offs, mask=offs < num_seqs, other=0) & PENALIZED) != 0)
    row = tl.load(rows_ptr + offs, mask=mask, other=0)
    seen_ptrs = seen_ptr + row * vocab_size + tl.load(tokens_ptr + offs, mask=mask, other=0)
    tl.atomic_add(seen_ptrs, 2, mask=mask, sem="relaxed")


def count_tokens(tokens: Tensor, flags: Tensor, rows: Tensor, tables: PenaltyTables) -> None:
    """`ops.sampling.count_tokens`."""
    sampled = len(rows)
    _count_tokens[(triton.cdiv(sampled, 128),)](
        tokens, flags, rows, tables.seen, tables.seen.shape[1], sampled, BLOCK=128
    )
