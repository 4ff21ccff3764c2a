"""The first and last kernels of a captured step: they find what only the device knows, and write results to the host.

The plan is a ring of slots [RING, words] int32, to which the host copies ahead of the step. A slot has HEAD words (the
number of page writes, and the words of the row states), entries [4, E], more columns of the first entries [3, samples +
sequences], the PAGE_WRITEs and the ROW_STATEs. The E entries are what is sampled, then the sequences, then the tokens.
`step` [1] int32 counts the captured steps on the device. The runner counts them on the host, and both use the count to
index the rings.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import triton
import triton.language as tl

from minisgl.core.layout import PAGE_WRITE, ROW_STATE, words

if TYPE_CHECKING:
    from torch import Tensor

RING: Final = 4
HEAD: Final = 4  # words
# The columns of an entry. The position of a token that drafts is not read: only the device knows it.
ROW, ID, DRAFT_INDEX, POSITION = range(4)
FLAGS, MASK_INDEX, TOKEN = range(4, 7)  # of what is sampled; TOKEN is its index into the step's tokens
FIRST: Final = 4  # of a sequence: the index of its first token
END: Final = 7  # of an entry: the position after it
INPUTS: Final = 8  # columns
MAX_BLOCK: Final = 1024

_WRITE_WORDS, _STATE_WORDS = tl.constexpr(words(PAGE_WRITE)), tl.constexpr(words(ROW_STATE))


class Counts(NamedTuple):
    """The numbers of entries of a step, or the numbers for which there is room."""

    samples: int
    sequences: int
    tokens: int

    @property
    def words(self) -> int:
        """The words of a slot before the page writes."""
        return HEAD + 4 * sum(self) + 3 * (self.samples + self.sequences)


@triton.jit(
    do_not_specialize=[
        "stride_ring", "samples", "sequences", "tokens", "at_sequences", "at_tokens", "stride", "num_rows",
        "stride_table", "stride_out_loc", "stride_drafts",
    ]
)  # fmt: skip
def _prepare_inputs(
    ring_ptr, step_ptr, page_table_ptr, row_table_ptr, last_token_ptr, lengths_ptr, drafts_ptr,
    inputs_ptr, rows_ptr, out_loc_ptr,
    stride_ring, samples, sequences, tokens, at_sequences, at_tokens, stride, num_rows, stride_table, stride_out_loc,
    stride_drafts,
    HEAD: tl.constexpr, PAGE_SIZE: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    """Runs as a single program, so that the page writes come first."""
    step = tl.load(step_ptr)
    slot_ptr = ring_ptr + (step % RING) * stride_ring
    num_writes, num_state_words = tl.load(slot_ptr), tl.load(slot_ptr + 1)
    first_token = samples + sequences
    total = first_token + tokens
    entries_ptr = slot_ptr + HEAD
    more_ptr = entries_ptr + 4 * total
    writes_ptr = more_ptr + 3 * first_token
    states_ptr = writes_ptr + _WRITE_WORDS * num_writes
    offs = tl.arange(0, BLOCK)
    for begin in range(0, num_writes, BLOCK):
        mask = begin + offs < num_writes
        ptrs = writes_ptr + _WRITE_WORDS * (begin + offs)
        table = tl.load(ptrs, mask=mask, other=0) * num_rows + tl.load(ptrs + 1, mask=mask, other=0)
        entry = table.to(tl.int64) * stride_table + tl.load(ptrs + 2, mask=mask, other=0)
        tl.store(page_table_ptr + entry, tl.load(ptrs + 3, mask=mask, other=0), mask=mask)
    for begin in range(0, num_state_words, BLOCK):
        i = begin + offs
        field = i % _STATE_WORDS - 1  # -1: the row
        mask = (i < num_state_words) & (field >= 0)
        row = tl.load(states_ptr + i - field - 1, mask=mask, other=0)
        value = tl.load(states_ptr + i, mask=mask, other=0)
        tl.store(row_table_ptr + row * (_STATE_WORDS - 1) + field, value, mask=mask)
    tl.debug_barrier()  # other threads read the pages just written
    for begin in range(0, total, BLOCK):
        i = begin + offs
        mask = i < total
        row = tl.load(entries_ptr + i, mask=mask, other=0)
        token = tl.load(entries_ptr + total + i, mask=mask, other=0)
        draft_index = tl.load(entries_ptr + 2 * total + i, mask=mask, other=-1)
        position = tl.load(entries_ptr + 3 * total + i, mask=mask, other=0)
        length = tl.load(lengths_ptr + row, mask=draft_index >= 0, other=0)
        position = tl.where(draft_index >= 0, length - 1 + draft_index, position)
        newest = tl.load(last_token_ptr + row, mask=mask & (token < 0), other=0)
        draft = tl.load(drafts_ptr + row * stride_drafts + draft_index - 1, mask=draft_index > 0, other=0)
        at = tl.where(
            i < samples, i, tl.where(i < first_token, i - samples + at_sequences, i - first_token + at_tokens)
        )
        ptrs = inputs_ptr + at
        tl.store(ptrs, row, mask=mask)
        tl.store(ptrs + stride, tl.where(token >= 0, token, tl.where(draft_index > 0, draft, newest)), mask=mask)
        tl.store(ptrs + 2 * stride, draft_index, mask=mask)
        tl.store(ptrs + 3 * stride, position, mask=mask)
        for column in tl.static_range(3):
            value = tl.load(more_ptr + column * first_token + i, mask=i < first_token, other=0)
            tl.store(ptrs + (4 + column) * stride, value, mask=i < first_token)
        tl.store(ptrs + 7 * stride, position + 1, mask=mask)
        tl.store(rows_ptr + i, row.to(tl.int64), mask=i < samples)
        is_token = mask & (i >= first_token)
        for group in tl.static_range(GROUPS):
            page_ptrs = page_table_ptr + (group * num_rows + row).to(tl.int64) * stride_table + position // PAGE_SIZE
            page = tl.load(page_ptrs, mask=is_token, other=0, cache_modifier=".cg").to(tl.int64)
            slot = page * PAGE_SIZE + position % PAGE_SIZE
            tl.store(out_loc_ptr + group * stride_out_loc + i - first_token, slot, mask=is_token)
    tl.store(step_ptr, step + 1)


def prepare_inputs(
    ring: Tensor,
    step: Tensor,
    page_tables: Tensor,
    row_table: Tensor,
    last_token: Tensor,
    lengths: Tensor,
    drafts: Tensor,
    inputs: Tensor,
    sample_rows: Tensor,
    out_loc: Tensor,
    counts: Counts,
    room: Counts,
    page_size: int,
) -> None:
    """Apply the page writes and row states of this step's slot, derive its inputs, and count the step.

    ring [RING, n] int32; step [1] int32; page_tables [groups, rows, W], row_table [rows, words of ROW], last_token
    [rows], int32. `lengths` [rows] and `drafts` [rows, D] are those of `Drafting`; they are read for entries with
    drafts. Written: inputs [INPUTS, sum of room] int32, the entries with their true positions and tokens; sample_rows
    [S] int64; out_loc [groups, T] int64.
    """
    _prepare_inputs[(1,)](
        ring, step, page_tables, row_table, last_token, lengths, drafts, inputs, sample_rows, out_loc,
        ring.stride(0), *counts, room.samples, room.samples + room.sequences, inputs.stride(0), len(last_token),
        page_tables.stride(1), out_loc.stride(0), drafts.stride(0),
        HEAD=HEAD, PAGE_SIZE=page_size, GROUPS=len(page_tables), BLOCK=_block(sum(counts), MAX_BLOCK), RING=RING,
        num_warps=8,
    )  # fmt: skip


@triton.jit(do_not_specialize=["size"])
def _publish(out_ptr, ring_ptr, step_ptr, stride_ring, stride_line, size, BLOCK: tl.constexpr, RING: tl.constexpr):
    """Copy one line of `out` per program to the slot of the step that has just begun."""
    line = tl.program_id(0)
    slot_ptr = ring_ptr + ((tl.load(step_ptr) - 1) % RING) * stride_ring
    offs = tl.arange(0, BLOCK)
    values = tl.load(out_ptr + line * size + offs, mask=offs < size)
    tl.store(slot_ptr + line * stride_line + offs, values, mask=offs < size)


def publish(out: Tensor, ring: Tensor, step: Tensor) -> None:
    """Copy the lines of out [n, S] int32 to this step's slot of `ring` [RING, n or more, S or more] (host, pinned)."""
    lines, size = out.shape
    _publish[(lines,)](out, ring, step, ring.stride(0), ring.stride(1), size, BLOCK=_block(size), RING=RING)


def _block(size: int, limit: int = 1 << 16) -> int:
    """Return the lanes for `size` entries; common sizes share one kernel."""
    return min(limit, max(256, triton.next_power_of_2(size)))
