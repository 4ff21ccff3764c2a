"""The first and last kernels of a captured decode step: they read the plan from, and write tokens to, pinned memory.

Both access host memory directly. Copying the plan before the graph would cost 10 us of GPU time per step (H200); a
kernel that fetches 2 KB over the bus costs 3 us.

`step` [1] int32 counts the captured steps on the device. The runner counts them on the host, and both use the count to
index the rings. A slot of the input ring, int32, is [count, number of page writes, rows [capacity], stops [capacity],
flags [capacity], indices of masks [capacity], page writes (group, row, index, page)]; a slot of the output ring is
[2 + StepResult.WIDTH, capacity], of which most steps write the first two lines only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.core import StepResult
from minisgl.layout import PAGE_WRITE, Flag, words

if TYPE_CHECKING:
    from minisgl.core import Batch, BatchPlan, Ints

RING: Final = 4
HEAD: Final = 2
COLUMNS: Final = 4


@triton.jit(do_not_specialize=["size"])
def _begin_decode(
    ring_ptr, step_ptr, page_table_ptr, last_token_ptr, rows_ptr, rows32_ptr, kv_lens_ptr, positions_ptr, input_ids_ptr,
    out_loc_ptr, flags_ptr, mask_index_ptr, stride_ring, capacity, num_rows, stride_table, stride_out_loc, size,
    BLOCK: tl.constexpr, PAGE_SIZE: tl.constexpr, GROUPS: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    """One program; lane i is sequence i of `size`. Padding lanes get the dummy row and length 1."""
    step = tl.load(step_ptr)
    slot_ptr = ring_ptr + (step % RING) * stride_ring
    offs = tl.arange(0, BLOCK)
    # Independent loads, since each is a round trip over the bus.
    count = tl.load(slot_ptr, volatile=True)
    num_writes = tl.load(slot_ptr + 1, volatile=True)
    mask = offs < size
    row = tl.load(slot_ptr + 2 + offs, mask=mask, other=0, volatile=True)
    stop = tl.load(slot_ptr + 2 + capacity + offs, mask=mask, other=1, volatile=True)
    flags = tl.load(slot_ptr + 2 + 2 * capacity + offs, mask=mask, other=0, volatile=True)
    mask_index = tl.load(slot_ptr + 2 + 3 * capacity + offs, mask=mask, other=0, volatile=True)
    row = tl.where(offs < count, row, num_rows - 1)
    stop = tl.where(offs < count, stop, 1)
    for first in range(0, num_writes, BLOCK):
        offs_w = first + offs
        write_ptrs = slot_ptr + 2 + 4 * capacity + 4 * offs_w
        group = tl.load(write_ptrs, mask=offs_w < num_writes, other=0, volatile=True)
        target = tl.load(write_ptrs + 1, mask=offs_w < num_writes, other=0, volatile=True)
        index = tl.load(write_ptrs + 2, mask=offs_w < num_writes, other=0, volatile=True)
        page = tl.load(write_ptrs + 3, mask=offs_w < num_writes, other=0, volatile=True)
        target = (group * num_rows + target).to(tl.int64)
        tl.store(page_table_ptr + target * stride_table + index, page, mask=offs_w < num_writes)
    tl.debug_barrier()  # other threads read the pages just written
    position = stop - 1
    for group in tl.static_range(GROUPS):
        page_ptrs = page_table_ptr + (group * num_rows + row).to(tl.int64) * stride_table + position // PAGE_SIZE
        page = tl.load(page_ptrs, mask=mask, other=0, cache_modifier=".cg").to(tl.int64)
        tl.store(out_loc_ptr + group * stride_out_loc + offs, page * PAGE_SIZE + position % PAGE_SIZE, mask=mask)
    tl.store(rows_ptr + offs, row.to(tl.int64), mask=mask)
    tl.store(rows32_ptr + offs, row, mask=mask)
    tl.store(kv_lens_ptr + offs, stop, mask=mask)
    tl.store(positions_ptr + offs, position, mask=mask)
    tl.store(input_ids_ptr + offs, tl.load(last_token_ptr + row, mask=mask, other=0), mask=mask)
    tl.store(flags_ptr + offs, tl.where(offs < count, flags, 0), mask=mask)
    tl.store(mask_index_ptr + offs, mask_index, mask=mask)
    tl.store(step_ptr, step + 1)


@triton.jit(do_not_specialize=["size"])
def _publish(out_ptr, ring_ptr, step_ptr, stride_ring, capacity, size, BLOCK: tl.constexpr, RING: tl.constexpr):
    """Copy one line of `out` per program to the slot of the step that has just begun."""
    line = tl.program_id(0)
    slot_ptr = ring_ptr + ((tl.load(step_ptr) - 1) % RING) * stride_ring
    offs = tl.arange(0, BLOCK)
    tl.store(
        slot_ptr + line * capacity + offs, tl.load(out_ptr + line * size + offs, mask=offs < size), mask=offs < size
    )


def begin_decode(
    ring: Tensor,
    step: Tensor,
    page_tables: Tensor,
    last_token: Tensor,
    batch: Batch,
    out_loc: Tensor,
    page_size: int,
    capacity: int,
) -> None:
    """Apply the page writes of this step's slot, derive the inputs of a decode step of B rows, and count the step.

    ring [RING, n] int32 on the host, pinned; step [1] int32; page_tables [groups, rows, W] int32, whose last row is
    the dummy row that pads the batch; last_token [rows] int32. Written: out_loc [groups, B] int64, and of `batch` the
    rows, lengths, positions, input ids, flags (0 for padding) and mask indices.
    """
    size = batch.num_tokens
    layout = batch.layout
    sampling = batch.sampling
    _begin_decode[(1,)](
        ring, step, page_tables, last_token, sampling.rows, layout.rows, layout.kv_lens, batch.positions,
        batch.input_ids, out_loc, sampling.row_flags, sampling.mask_index,
        ring.stride(0), capacity, len(last_token), page_tables.stride(1), out_loc.stride(0), size,
        BLOCK=_block(size), PAGE_SIZE=page_size, GROUPS=len(page_tables), RING=RING,
    )  # fmt: skip


def publish(out: Tensor, ring: Tensor, step: Tensor, capacity: int) -> None:
    """Copy the lines of out [n, B] int32 to this step's slot of `ring` (host, pinned)."""
    lines, size = out.shape
    _publish[(lines,)](out, ring, step, ring.stride(0), capacity, size, BLOCK=_block(size), RING=RING)


def _block(size: int) -> int:
    """Return the lanes for `size` rows; common batch sizes share one kernel."""
    return max(256, triton.next_power_of_2(size))


def write_input(slot: Ints, plan: BatchPlan, capacity: int) -> None:
    """Fill a slot [n] of the input ring with a plan of decode slots and page writes."""
    count, writes = len(plan.slots), len(plan.page_writes)
    slot[0] = count
    slot[1] = writes
    pages = HEAD + COLUMNS * capacity
    rows, stops, flags, mask_index = slot[HEAD:pages].reshape(COLUMNS, capacity)
    rows[:count] = plan.slots["row"]
    stops[:count] = plan.slots["stop"]
    flags[:count] = plan.slots["flags"]
    np.cumsum((flags[:count] & Flag.MASKED) != 0, out=mask_index[:count])
    mask_index[:count] -= 1
    if writes:
        slot[pages : pages + plan.page_writes.nbytes // 4] = plan.page_writes.view(np.int32)


def input_ring(capacity: int, page_writes: int, pin: bool = True) -> Tensor:
    """Allocate the host's side of `begin_decode`: [RING, n] int32."""
    width = HEAD + COLUMNS * capacity + words(PAGE_WRITE) * page_writes
    return torch.zeros(RING, width, dtype=torch.int32, pin_memory=pin)


def output_ring(capacity: int, pin: bool = True) -> Tensor:
    """Allocate the host's side of `publish`: [RING, 2 + StepResult.WIDTH, capacity] int32."""
    return torch.zeros(RING, 2 + StepResult.WIDTH, capacity, dtype=torch.int32, pin_memory=pin)
