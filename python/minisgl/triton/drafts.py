"""The parts of a captured step with drafts around the forward pass: true positions before; confirmation, n-gram lookup.

Each is one launch instead of dozens of small ones. `engine/drafting.py` has the same in torch.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_TOKENS: Final = 1024
BLOCK_DRAFTS: Final = 16  # more than the queries of a sequence
BLOCK_HISTORY: Final = 2048
BASE = tl.constexpr(1 << 16)  # larger than every position that is searched


@triton.jit
def _place(t, mask, codes_ptr, planned_ptr, rows_ptr, lengths_ptr):
    """Return the code, row and true position of tokens."""
    code = tl.load(codes_ptr + t, mask=mask, other=0)
    position = tl.load(planned_ptr + t, mask=mask, other=0)
    row = tl.load(rows_ptr + t, mask=mask, other=0)
    length = tl.load(lengths_ptr + row, mask=mask & (code < -1), other=0)
    return code, row, tl.where(code < -1, length - 3 - code, position)


@triton.jit
def _id(code, row, mask, last_token_ptr, drafts_ptr, stride_drafts):
    """Return the token id that a code stands for."""
    newest = tl.load(last_token_ptr + row, mask=mask & (code < 0), other=0)
    draft = tl.load(drafts_ptr + row * stride_drafts - 3 - code, mask=mask & (code < -2), other=0)
    return tl.where(code >= 0, code, tl.where(code >= -2, newest, draft))


@triton.jit(
    do_not_specialize=[
        "num_writes", "num_tokens", "num_seqs", "num_samples", "num_rows", "stride_table", "stride_out_loc",
        "stride_drafts",
    ]
)  # fmt: skip
def _place_tokens(
    codes_ptr, planned_ptr, rows_ptr, cu_query_lens_ptr, logit_tokens_ptr, page_writes_ptr,
    page_table_ptr, last_token_ptr, lengths_ptr, drafts_ptr,
    ids_ptr, positions_ptr, out_loc_ptr, kv_lens_ptr, sample_positions_ptr, drafted_ptr, inputs_ptr,
    num_writes, num_tokens, num_seqs, num_samples, num_rows, stride_table, stride_out_loc, stride_drafts,
    PAGE_SIZE: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Runs as a single program, so that the page writes come first."""
    offs = tl.arange(0, BLOCK)
    for first in range(0, num_writes, BLOCK):
        mask = first + offs < num_writes
        write_ptrs = page_writes_ptr + 4 * (first + offs)
        target = tl.load(write_ptrs, mask=mask, other=0) * num_rows + tl.load(write_ptrs + 1, mask=mask, other=0)
        entry = target.to(tl.int64) * stride_table + tl.load(write_ptrs + 2, mask=mask, other=0)
        tl.store(page_table_ptr + entry, tl.load(write_ptrs + 3, mask=mask, other=0), mask=mask)
    tl.debug_barrier()  # other threads read the pages just written
    for first in range(0, num_tokens, BLOCK):
        t = first + offs
        mask = t < num_tokens
        code, row, position = _place(t, mask, codes_ptr, planned_ptr, rows_ptr, lengths_ptr)
        for group in tl.static_range(GROUPS):
            page_ptrs = page_table_ptr + (group * num_rows + row).to(tl.int64) * stride_table + position // PAGE_SIZE
            page = tl.load(page_ptrs, mask=mask, other=0, cache_modifier=".cg").to(tl.int64)
            tl.store(out_loc_ptr + group * stride_out_loc + t, page * PAGE_SIZE + position % PAGE_SIZE, mask=mask)
        tl.store(ids_ptr + t, _id(code, row, mask, last_token_ptr, drafts_ptr, stride_drafts), mask=mask)
        tl.store(positions_ptr + t, position, mask=mask)
    for first in range(0, num_seqs, BLOCK):
        mask = first + offs < num_seqs
        begin = tl.load(cu_query_lens_ptr + first + offs, mask=mask, other=0)
        end = tl.load(cu_query_lens_ptr + first + offs + 1, mask=mask, other=0)
        _, _, position = _place(end - 1, mask & (end > begin), codes_ptr, planned_ptr, rows_ptr, lengths_ptr)
        tl.store(kv_lens_ptr + first + offs, tl.where(end > begin, position + 1, 0), mask=mask)
    for first in range(0, num_samples, BLOCK):
        mask = first + offs < num_samples
        t = tl.load(logit_tokens_ptr + first + offs, mask=mask, other=0)
        code, row, position = _place(t, mask, codes_ptr, planned_ptr, rows_ptr, lengths_ptr)
        tl.store(sample_positions_ptr + first + offs, position + 1, mask=mask)
        tl.store(drafted_ptr + first + offs, tl.maximum(-2 - code, 0), mask=mask)
        input_id = _id(code, row, mask, last_token_ptr, drafts_ptr, stride_drafts)
        tl.store(inputs_ptr + first + offs, input_id, mask=mask)


class Placed(NamedTuple):
    """The results of `place_tokens` for T tokens, B sequences and S sampled tokens; int32, but `out_loc` is int64.

    Fields are those of `Batch` and `Sampling`. Buffers may be longer than T, B and S.
    """

    ids: Tensor  # [T]
    positions: Tensor  # [T]
    out_loc: Tensor  # [groups, T]
    kv_lens: Tensor  # [B]
    sample_positions: Tensor  # [S]
    drafted: Tensor  # [S]
    inputs: Tensor  # [S]


def place_tokens(
    tokens: Tensor,
    cu_query_lens: Tensor,
    logit_tokens: Tensor,
    page_writes: Tensor,
    page_tables: Tensor,
    last_token: Tensor,
    lengths: Tensor,
    drafts: Tensor,
    placed: Placed,
    page_size: int,
) -> None:
    """Apply page writes [P, 4], and compute `placed` from the host's inputs, all int32.

    These are `tokens` [3, T] (`Batch.input_ids`, planned positions, rows), cu_query_lens [B + 1] and logit_tokens [S].
    `lengths` and `drafts` are those of `Drafting`; they are not read without DRAFTS.
    """
    _place_tokens[(1,)](
        *tokens, cu_query_lens, logit_tokens, page_writes, page_tables, last_token, lengths, drafts, *placed,
        len(page_writes), tokens.shape[1], len(cu_query_lens) - 1, len(logit_tokens),
        len(last_token), page_tables.stride(1), placed.out_loc.stride(0), drafts.stride(0),
        PAGE_SIZE=page_size, GROUPS=len(page_tables), BLOCK=BLOCK_TOKENS, num_warps=8,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_samples", "stride_history"])
def _settle(
    out_ptr, ids_ptr, codes_ptr, rows_ptr, cu_query_lens_ptr, lengths_ptr, history_ptr, last_token_ptr, confirmed_ptr,
    num_samples, stride_history, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per sequence; column i of `out` is token i."""
    first = tl.load(cu_query_lens_ptr + tl.program_id(0))
    width = tl.load(cu_query_lens_ptr + tl.program_id(0) + 1) - first
    code = tl.load(codes_ptr + first, mask=width > 0, other=0)
    if code == -2:
        offs = tl.arange(0, BLOCK)
        row = tl.load(rows_ptr + tl.program_id(0)).to(tl.int64)
        length = tl.load(lengths_ptr + row)
        token = tl.load(out_ptr + first + offs, mask=offs < width, other=0)
        is_finite = tl.load(out_ptr + num_samples + first + offs, mask=offs < width, other=0) != 0
        draft = tl.load(ids_ptr + first + offs + 1, mask=offs + 1 < width, other=0)
        is_right = (token == draft) & is_finite & (offs + 1 < width)
        count = tl.min(tl.where(is_right, BLOCK, offs), 0) + 1
        tl.store(confirmed_ptr + first + offs, (offs < count).to(tl.int32), mask=offs < width)
        history_ptr += row * stride_history
        tl.store(history_ptr + length - 1, tl.load(ids_ptr + first))  # the host may not have known it
        tl.store(history_ptr + length + offs, token, mask=offs < count)
        tl.store(lengths_ptr + row, length + count)
        tl.store(last_token_ptr + row, tl.sum(tl.where(offs == count - 1, token, 0), 0))


def settle(
    out: Tensor,
    ids: Tensor,
    codes: Tensor,
    rows: Tensor,
    cu_query_lens: Tensor,
    lengths: Tensor,
    history: Tensor,
    last_token: Tensor,
    confirmed: Tensor,
) -> None:
    """Confirm the tokens of a step's first sequences as `Drafting.settle` does, without drafting.

    out [2 or more, S] int32 has, for each token of these sequences in order, the sampled token and whether its logits
    were finite. ids and codes [T] and cu_query_lens [B + 1] are those of `place_tokens`; rows [B] int32. For rows with
    DRAFTS it writes lengths, history, last_token, and their entries of `confirmed` [S].
    """
    _settle[(len(cu_query_lens) - 1,)](
        out, ids, codes, rows, cu_query_lens, lengths, history, last_token, confirmed, out.stride(0), history.stride(0),
        BLOCK=BLOCK_DRAFTS, num_warps=1,
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
    assert window <= BASE.value and count & (count - 1) == 0, f"a window of {window} tokens, or {count} drafts"
    drafts = torch.empty(len(rows), count, dtype=torch.int32, device=rows.device)
    counts = torch.empty_like(lengths)
    _look_up[(len(rows),)](
        history, rows, lengths, drafts, counts, history.stride(0), window,
        MIN_MATCH=matches[0], MAX_MATCH=matches[1], COUNT=count, BLOCK=BLOCK_HISTORY, num_warps=8,
    )  # fmt: skip
    return drafts, counts
