"""The two ends of a captured decode step: the plan is read from, and the tokens written to, the host's pinned memory.

Both read and write the host's memory directly. A copy of the plan in front of the graph would cost 10 us of GPU time a
step (H200); a kernel that fetches 2 KB over the bus, 3 us.

`turn` [1] int32 counts the captured steps on the device, as the runner does on the host: together they walk through the
rings. A slot of the input ring is [count, number of page writes, rows [capacity], stops [capacity], flags [capacity],
places of masks [capacity], page writes as triples (row, index, page)], int32; one of the output ring is
[2 + StepResult.WIDTH, capacity] int32, of which most steps write the first two lines only.
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
    from minisgl.core import BatchPlan, Ints

RING: Final = 4
HEAD: Final = 2
COLUMNS: Final = 4


@triton.jit(do_not_specialize=["size"])
def _begin(
    ring, turn, page_table, last_token, rows, rows32, kv_lens, positions, input_ids, out_loc, flags, mask_index,
    stride, capacity, width, idle_row, size, N: tl.constexpr, PAGE: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    t = tl.load(turn)
    slot = ring + (t % RING) * stride
    i = tl.arange(0, N)
    # No load of these waits for another: each is a round trip over the bus.
    count = tl.load(slot, volatile=True)
    writes = tl.load(slot + 1, volatile=True)
    row = tl.load(slot + 2 + i, mask=i < size, other=0, volatile=True)
    stop = tl.load(slot + 2 + capacity + i, mask=i < size, other=1, volatile=True)
    flag = tl.load(slot + 2 + 2 * capacity + i, mask=i < size, other=0, volatile=True)
    mask_slot = tl.load(slot + 2 + 3 * capacity + i, mask=i < size, other=0, volatile=True)
    row = tl.where(i < count, row, idle_row)
    stop = tl.where(i < count, stop, 1)
    for first in range(0, writes, N):
        j = first + i
        triple = slot + 2 + 4 * capacity + 3 * j
        target = tl.load(triple, mask=j < writes, other=0, volatile=True).to(tl.int64)
        index = tl.load(triple + 1, mask=j < writes, other=0, volatile=True)
        page = tl.load(triple + 2, mask=j < writes, other=0, volatile=True)
        tl.store(page_table + target * width + index, page, mask=j < writes)
    tl.debug_barrier()  # the pages just written are read below, by other threads
    position = stop - 1
    here = i < size
    page = tl.load(page_table + row.to(tl.int64) * width + position // PAGE, mask=here, other=0, cache_modifier=".cg")
    tl.store(rows + i, row.to(tl.int64), mask=here)
    tl.store(rows32 + i, row, mask=here)
    tl.store(kv_lens + i, stop, mask=here)
    tl.store(positions + i, position, mask=here)
    tl.store(input_ids + i, tl.load(last_token + row, mask=here, other=0), mask=here)
    tl.store(out_loc + i, page.to(tl.int64) * PAGE + position % PAGE, mask=here)
    tl.store(flags + i, tl.where(i < count, flag, 0), mask=here)
    tl.store(mask_index + i, mask_slot, mask=here)
    tl.store(turn, t + 1)


@triton.jit(do_not_specialize=["size"])
def _publish(out, ring, turn, stride, capacity, size, N: tl.constexpr, RING: tl.constexpr):
    line = tl.program_id(0)
    slot = ring + ((tl.load(turn) - 1) % RING) * stride
    i = tl.arange(0, N)
    tl.store(slot + line * capacity + i, tl.load(out + line * size + i, mask=i < size), mask=i < size)


def begin_decode(
    ring: Tensor,
    turn: Tensor,
    page_table: Tensor,
    last_token: Tensor,
    rows: Tensor,
    rows32: Tensor,
    kv_lens: Tensor,
    positions: Tensor,
    input_ids: Tensor,
    out_loc: Tensor,
    flags: Tensor,
    mask_index: Tensor,
    page_size: int,
    capacity: int,
) -> None:
    """Apply the page writes of this turn's slot and derive the inputs of a decode step of B rows.

    ring [RING, n] int32 on the host, pinned; turn [1] int32, counted up; page_table [rows, W] int32, whose last row is
    nobody's and pads the batch; last_token [rows] int32. Written: rows [B] int64 and rows32 [B] int32,
    kv_lens, positions, input_ids [B] int32, out_loc [B] int64, flags (0 for padding) and mask_index [B] int32.
    """
    size = len(rows)
    _begin[(1,)](
        ring, turn, page_table, last_token, rows, rows32, kv_lens, positions, input_ids, out_loc, flags, mask_index,
        ring.stride(0), capacity, page_table.stride(0), len(page_table) - 1, size,
        N=_width(size), PAGE=page_size, RING=RING,
    )  # fmt: skip


def publish(out: Tensor, ring: Tensor, turn: Tensor, capacity: int) -> None:
    """Put the lines of out [n, B] int32 into this turn's slot of `ring` (host, pinned)."""
    lines, size = out.shape
    _publish[(lines,)](out, ring, turn, ring.stride(0), capacity, size, N=_width(size), RING=RING)


def _width(size: int) -> int:
    """Lanes for `size` rows; the usual batch sizes share one kernel."""
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
    """The host's side of `begin_decode`: [RING, n] int32."""
    return torch.zeros(
        RING, HEAD + COLUMNS * capacity + words(PAGE_WRITE) * page_writes, dtype=torch.int32, pin_memory=pin
    )


def output_ring(capacity: int, pin: bool = True) -> Tensor:
    """The host's side of `publish`: [RING, 2 + StepResult.WIDTH, capacity] int32."""
    return torch.zeros(RING, 2 + StepResult.WIDTH, capacity, dtype=torch.int32, pin_memory=pin)
