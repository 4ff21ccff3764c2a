"""The end of a captured step with drafts: confirmation, and n-gram lookup.

Each is one launch instead of dozens of small ones. `engine/drafting.py` has the same in torch.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_DRAFTS: Final = 16  # more than the queries of a sequence
BLOCK_HISTORY: Final = 2048
BASE = tl.constexpr(1 << 16)  # larger than every position that is searched


@triton.jit(do_not_specialize=["num_samples", "stride_history"])
def _verify(
    out_ptr, ids_ptr, draft_index_ptr, rows_ptr, cu_query_lens_ptr, lengths_ptr, history_ptr, last_token_ptr,
    confirmed_ptr, num_samples, stride_history, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per sequence; column i of `out` is token i."""
    first = tl.load(cu_query_lens_ptr + tl.program_id(0))
    width = tl.load(cu_query_lens_ptr + tl.program_id(0) + 1) - first
    if (width > 0) & (tl.load(draft_index_ptr + tl.program_id(0)) >= 0):
        offs = tl.arange(0, BLOCK)
        row = tl.load(rows_ptr + tl.program_id(0)).to(tl.int64)
        length = tl.load(lengths_ptr + row)
        token = tl.load(out_ptr + first + offs, mask=offs < width, other=0)
        is_finite = tl.load(out_ptr + num_samples + first + offs, mask=offs < width, other=0) != 0
        draft = tl.load(ids_ptr + first + offs + 1, mask=offs + 1 < width, other=0)
        is_accepted = (token == draft) & is_finite & (offs + 1 < width)
        count = tl.min(tl.where(is_accepted, BLOCK, offs), 0) + 1
        tl.store(confirmed_ptr + first + offs, (offs < count).to(tl.int32), mask=offs < width)
        history_ptr += row * stride_history
        tl.store(history_ptr + length - 1, tl.load(ids_ptr + first))  # the host may not have known it
        tl.store(history_ptr + length + offs, token, mask=offs < count)
        tl.store(lengths_ptr + row, length + count)
        tl.store(last_token_ptr + row, tl.sum(tl.where(offs == count - 1, token, 0), 0))


def verify(
    out: Tensor,
    ids: Tensor,
    draft_index: Tensor,
    rows: Tensor,
    cu_query_lens: Tensor,
    lengths: Tensor,
    history: Tensor,
    last_token: Tensor,
    confirmed: Tensor,
) -> None:
    """Confirm the tokens of a step's first sequences as `Drafting.verify` does, without drafting.

    out [2 or more, S] int32 has, for each token of these sequences in order, the sampled token and whether its logits
    were finite. ids [T] and cu_query_lens [B + 1] are those of the step. rows and draft_index are [B] int32; the latter
    is negative where a row does not draft. For rows that do, it writes lengths, history, last_token, and their entries
    of `confirmed` [S].
    """
    _verify[(len(cu_query_lens) - 1,)](
        out, ids, draft_index, rows, cu_query_lens, lengths, history, last_token, confirmed,
        out.stride(0), history.stride(0), BLOCK=BLOCK_DRAFTS, num_warps=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["window", "stride_history"])
def _look_up(
    history_ptr, rows_ptr, lengths_ptr, drafts_ptr, counts_ptr, stride_history, window,
    MIN_MATCH: tl.constexpr, MAX_MATCH: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per row. COUNT is a power of two."""
    index = tl.program_id(0)
    ids_ptr = history_ptr + tl.load(rows_ptr + index) * stride_history
    length = tl.load(lengths_ptr + index)
    newest = tl.maximum(length - 1, 0)
    first = tl.maximum(length - window, 0)
    best = tl.zeros([BLOCK], tl.int32)  # the longest match, and its last position
    for start in range(first, newest, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        is_match = offs < newest
        matched = tl.zeros([BLOCK], tl.int32)
        for n in tl.static_range(MAX_MATCH):
            token = tl.load(ids_ptr + tl.maximum(newest - n, first))
            is_match = is_match & (offs - n >= first)
            is_match = is_match & (tl.load(ids_ptr + offs - n, mask=is_match, other=0) == token)
            matched += is_match.to(tl.int32)
        best = tl.maximum(best, matched * BASE + offs - first)
    found = tl.max(best, 0)
    is_found = found >= MIN_MATCH * BASE
    at = first + found % BASE
    following = at + 1 + tl.arange(0, COUNT) % tl.maximum(newest - at, 1)
    draft = tl.load(ids_ptr + following, mask=is_found & (following >= 0), other=0)
    tl.store(drafts_ptr + index * COUNT + tl.arange(0, COUNT), tl.maximum(draft, 0))
    tl.store(counts_ptr + index, tl.where(is_found, COUNT, 0))


def look_up(
    history: Tensor, rows: Tensor, lengths: Tensor, longest: int, window: int, matches: tuple[int, int], count: int
) -> tuple[Tensor, Tensor]:
    """`reference.look_up`."""
    assert window <= BASE.value and count & (count - 1) == 0, f"cannot search {window} tokens for {count} drafts"
    drafts = torch.empty(len(rows), count, dtype=torch.int32, device=rows.device)
    counts = torch.empty_like(lengths)
    _look_up[(len(rows),)](
        history, rows, lengths, drafts, counts, history.stride(0), window,
        MIN_MATCH=matches[0], MAX_MATCH=matches[1], COUNT=count, BLOCK=BLOCK_HISTORY, num_warps=8,
    )  # fmt: skip
    return drafts, counts
