"""All-reduce between GPUs that can write into each other's memory, followed by add + RMSNorm: one kernel.

Every rank owns an inbox that the other ranks write into. Words need no flags: an idle inbox holds EMPTY everywhere, no
rank sends EMPTY, and the reader of a word puts EMPTY back, so a word other than EMPTY has arrived. A kernel sends,
waits for what it needs, and ends: no fences, no barriers between the ranks, and one crossing of the link instead of one
for the data and another for a flag. (Collectives call it the Lamport protocol.)

Successive calls alternate between the two slots of an inbox. Two are enough: a rank sends for call i + 2 only after its
call i + 1 has ended, so it has received from every peer in call i + 1, so all peers had ended call i, in which they
emptied the slot. The slot's number is kept on the device, so a captured call can be replayed any number of times. All
ranks make the same calls in the same order, each in one stream.

- One shot: each row goes to every rank, and all ranks sum all rows. (R - 1) S bytes leave each GPU, in one hop.
- Two shots: row i goes to rank i mod R, which sums it and sends the sum to every rank. 2 (R - 1) / R S bytes leave
  each GPU, in two hops.

Both add in float32, rank 0 first, and round once, so all ranks and both ways agree bit for bit. Activations have 16
bits, two in a word.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor, empty_like
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minisgl.kernels.triton.launch import INTERPRETED, pdl_options

EMPTY: Final = -1  # two NaNs with all bits set
PATIENCE: Final = 1 << 26  # polls before a kernel gives up: half a minute or more if a poll takes 0.5 us (estimated)
MAX_RANKS: Final = 8

_EMPTY = tl.constexpr(EMPTY)
_NANS = tl.constexpr(0x7FFF7FFF)  # sent instead of EMPTY: two other NaNs, of bfloat16 and of float16
DTYPES: Final = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
# Keep device_assert (of `patience`) in the compiled kernel, but not the checks of integer overflow.
_ASSERTING: Final[dict[str, Any]] = {} if INTERPRETED else {"debug": True, "sanitize_overflow": False}


@dataclass(frozen=True, slots=True)
class Inbox:
    """The memory that the other ranks of a group write into for this one.

    words: int32 [2 slots, ranks * part_rows + max_rows, hidden / 2]; the first rows of a slot are the parts by sender,
    the last ones the sums that their owners send. peers: int64 [ranks], the addresses of all inboxes, in this process.
    state: int32 [2], the slot of the next call and how many programs of this call have begun.
    """

    words: Tensor
    peers: Tensor
    state: Tensor
    rank: int
    part_rows: int

    @staticmethod
    def empty(ranks: int, part_rows: int, max_rows: int, hidden: int, device: torch.device) -> Tensor:
        """`words` of an idle inbox, for one shot of up to `part_rows` and two shots of up to `max_rows` rows."""
        assert ranks * part_rows >= max_rows, "the parts that owners sum have too few rows"
        shape = (2, ranks * part_rows + max_rows, hidden // 2)
        return torch.full(shape, EMPTY, dtype=torch.int32, device=device)

    @property
    def max_rows(self) -> int:
        return self.words.shape[1] - len(self.peers) * self.part_rows


@triton.jit
def _unpack(words, DTYPE: tl.constexpr):
    """Unpack the two values in each word to float32."""
    low = words.to(tl.int16).to(DTYPE, bitcast=True)
    high = (words >> 16).to(tl.int16).to(DTYPE, bitcast=True)
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def _pack(low, high, DTYPE: tl.constexpr):
    """Pack two values, rounded to DTYPE, into a word."""
    low16 = low.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32)
    high16 = high.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32)
    return (low16 & 0xFFFF) | (high16 << 16)


@triton.jit
def _send(peers_ptr, peer, offset, words, N: tl.constexpr, BLOCK: tl.constexpr):
    """Store a row of words at `offset` of a peer's inbox."""
    offs = tl.arange(0, BLOCK)
    inbox_ptr = tl.multiple_of(tl.load(peers_ptr + peer).to(tl.pointer_type(tl.int32)), 16)
    tl.store(inbox_ptr + offset + offs, tl.where(words == _EMPTY, _NANS, words), mask=offs < N)


@triton.jit
def _receive(
    row_ptr, stride_part, patience, N: tl.constexpr, PARTS: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr
):
    """Wait for PARTS rows of the inbox, set them to EMPTY, and return their sum."""
    offs = tl.arange(0, BLOCK)
    mask = offs < N
    low = tl.zeros([BLOCK], tl.float32)
    high = tl.zeros([BLOCK], tl.float32)
    missing, polls = 1, 0
    while (missing != 0) & (polls < patience):
        low = tl.zeros([BLOCK], tl.float32)
        high = tl.zeros([BLOCK], tl.float32)
        is_empty = tl.zeros([BLOCK], tl.int32)
        for part in tl.static_range(PARTS):
            words = tl.load(row_ptr + part * stride_part + offs, mask=mask, other=0, volatile=True)
            is_empty |= (words == _EMPTY).to(tl.int32)
            part_low, part_high = _unpack(words, DTYPE)
            low += part_low
            high += part_high
        missing = tl.max(is_empty, 0)
        polls += 1
    tl.device_assert(missing == 0, "all-reduce: another rank did not send its part in time")
    for part in tl.static_range(PARTS):
        tl.store(row_ptr + part * stride_part + offs, tl.full([BLOCK], _EMPTY, tl.int32), mask=mask)
    return low, high


@triton.jit(do_not_specialize=["rank", "rows", "part_rows", "slot_rows", "patience"])
def _all_reduce(
    x_ptr, residual_ptr, weight_ptr, out_ptr, inbox_ptr, peers_ptr, state_ptr,
    rank, rows, part_rows, slot_rows, eps, patience,
    N: tl.constexpr, RANKS: tl.constexpr, TWO_SHOT: tl.constexpr, HAS_NORM: tl.constexpr, DTYPE: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Each program processes every `programs`-th row of N words; all programs of the grid are resident at once.

    HAS_NORM: residual += sum, out = rms_norm(residual) * weight; else out = sum. A program sends all its rows before it
    waits, so ranks cannot wait for each other in a circle.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    offs = tl.arange(0, BLOCK)
    mask = offs < N
    if PDL:
        gdc_launch_dependents()
    if HAS_NORM:
        w_low, w_high = _unpack(tl.load(weight_ptr + offs, mask=mask, other=0), DTYPE)
    if PDL:
        gdc_wait()
    slot = tl.load(state_ptr, volatile=True)
    n = tl.full([], N, tl.int64)  # words per row, for offsets beyond 31 bits
    base = slot * slot_rows * n

    for row in range(program, rows, programs):
        words = tl.load(x_ptr + row * n + offs, mask=mask, other=0)
        if TWO_SHOT:
            offset = base + (rank * part_rows + row // RANKS) * n
            _send(peers_ptr, row % RANKS, offset, words, N, BLOCK)
        else:
            offset = base + (rank * part_rows + row) * n
            for peer in tl.static_range(RANKS):
                _send(peers_ptr, peer, offset, words, N, BLOCK)

    # The last program to arrive switches the slot for the next call. Relaxed: a fence would wait for what was sent.
    tl.debug_barrier()  # all threads have read `state`
    if tl.atomic_add(state_ptr + 1, 1, sem="relaxed") == programs - 1:
        tl.store(state_ptr + 1, 0)
        tl.store(state_ptr, 1 - slot)

    stride_part = part_rows * n
    sums = base + RANKS * stride_part
    if TWO_SHOT:
        for own in range(program, tl.cdiv(rows - rank, RANKS), programs):
            low, high = _receive(inbox_ptr + base + own * n, stride_part, patience, N, RANKS, DTYPE, BLOCK)
            words = _pack(low, high, DTYPE)
            offset = sums + (own * RANKS + rank) * n
            for peer in tl.static_range(RANKS):
                _send(peers_ptr, peer, offset, words, N, BLOCK)

    for row in range(program, rows, programs):
        offset = row * n
        if HAS_NORM:  # loaded while the parts arrive
            r_low, r_high = _unpack(tl.load(residual_ptr + offset + offs, mask=mask, other=0), DTYPE)
        if TWO_SHOT:
            low, high = _receive(inbox_ptr + sums + offset, stride_part, patience, N, 1, DTYPE, BLOCK)
        else:
            low, high = _receive(inbox_ptr + base + offset, stride_part, patience, N, RANKS, DTYPE, BLOCK)
        words = _pack(low, high, DTYPE)
        if HAS_NORM:
            low, high = _unpack(words, DTYPE)
            total = _pack(low + r_low, high + r_high, DTYPE)
            tl.store(residual_ptr + offset + offs, total, mask=mask)
            low, high = _unpack(total, DTYPE)
            scale = tl.rsqrt(tl.sum(low * low + high * high, 0) / (2 * N) + eps)
            low, high = _unpack(_pack(low * scale, high * scale, DTYPE), DTYPE)
            words = _pack(low * w_low, high * w_high, DTYPE)
        tl.store(out_ptr + offset + offs, words, mask=mask)


@cache
def _resident_programs(device: torch.device) -> int:
    """Return one program per SM, so that all are resident at once: they wait for each other across ranks."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def all_reduce(
    x: Tensor,
    inbox: Inbox,
    *,
    two_shot: bool,
    norm: tuple[Tensor, Tensor, float] | None = None,
    programs: int | None = None,
    num_warps: int | None = None,
    patience: int = PATIENCE,
) -> Tensor:
    """Sum x [T, H] (bfloat16 or float16) over the ranks; all ranks call it with the same shapes and options.

    With norm = (residual [T, H], weight [H], eps): adds the sum to `residual`, which is overwritten and the same on all
    ranks, and returns rms_norm(residual) * weight, as `reference.add_rms_norm`. A rank that waits for more than
    `patience` polls stops with a device assertion. `programs` is at most the number of SMs.
    """
    rows, n = len(x), x.shape[1] // 2
    assert x.is_contiguous() and n == inbox.words.shape[2], "x must be contiguous, and as wide as the rows of the inbox"
    ranks, limit = len(inbox.peers), inbox.max_rows if two_shot else inbox.part_rows
    assert rows <= limit, f"an all-reduce of {rows} rows in an inbox for {limit}"
    out = empty_like(x)
    if not rows:
        return out
    x_words = x.view(torch.int32)
    residual, weight, eps = norm if norm is not None else (x, x, 0.0)
    block = triton.next_power_of_2(n)
    programs = min(rows, programs or _resident_programs(x.device))
    _all_reduce[(programs,)](
        x_words, residual.view(torch.int32), weight.view(torch.int32), out.view(torch.int32),
        inbox.words, inbox.peers, inbox.state, inbox.rank, rows, inbox.part_rows, inbox.words.shape[1], eps, patience,
        N=n, RANKS=ranks, TWO_SHOT=two_shot, HAS_NORM=norm is not None, DTYPE=DTYPES[x.dtype], BLOCK=block,
        num_warps=num_warps or min(8, max(1, block // 128)), **_ASSERTING,
        **pdl_options(x.device, rows == 1),
    )  # fmt: skip
    return out
