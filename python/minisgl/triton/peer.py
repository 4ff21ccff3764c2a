"""All-reduce between GPUs that can write into each other's memory, with add + RMSNorm behind it: one kernel.

Every rank owns an inbox that the others write into. Words need no flags beside them, because a word shows by itself
that it has arrived: an idle inbox holds EMPTY everywhere, nobody sends EMPTY, and who takes a word puts EMPTY back. So
a kernel sends, waits for what it needs, and ends: no fences, no barriers between the ranks, and one crossing of the
link instead of one for the data and another for a flag behind it. (Collectives call it the Lamport protocol.)

An inbox has two slots, used in turn by successive calls. That is enough: a rank sends for call i + 2 only after it has
ended call i + 1, hence has received from every peer in i + 1, hence all of them had ended call i, in which they emptied
the slot. The turn is kept on the device, so a captured call can be replayed any number of times. All ranks make the
same calls in the same order, each in one stream.

- One shot: each row goes to every rank, and all ranks sum all rows. (R - 1) S bytes leave a GPU, in one hop.
- Two shots: row i goes to rank i mod R, which sums it and sends the sum to every rank. 2 (R - 1) / R S bytes leave it,
  in two hops.

Both add in float32, rank 0 first, and round once, so all ranks and both ways agree bit for bit. Activations are of 16
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

from minisgl.triton.launch import INTERPRETED, chained

EMPTY: Final = -1  # as two numbers: the NaNs with all bits set
PATIENCE: Final = 1 << 26  # polls before a kernel gives up: half a minute or more if a poll takes 0.5 us (estimated)
MAX_RANKS: Final = 8

_EMPTY = tl.constexpr(EMPTY)
_NANS = tl.constexpr(0x7FFF7FFF)  # sent in the place of EMPTY: two other NaNs, of bfloat16 and of float16
DTYPES: Final = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
# Assertions stay in the compiled kernel (the one on patience), those on integer overflow do not.
_ASSERTING: Final[dict[str, Any]] = {} if INTERPRETED else {"debug": True, "sanitize_overflow": False}


@dataclass(frozen=True, slots=True)
class Inbox:
    """Where the ranks of a group leave words for this one.

    words: int32 [2 slots, ranks * part_rows + max_rows, hidden / 2]; of a slot the first rows are the parts by sender,
    the last ones the sums that their owners send. peers: int64 [ranks], the addresses of all inboxes, in this process.
    state: int32 [2], the slot of the next call and how many programs of this one have begun.
    """

    words: Tensor
    peers: Tensor
    state: Tensor
    rank: int
    part_rows: int

    @staticmethod
    def empty(ranks: int, part_rows: int, max_rows: int, hidden: int, device: torch.device) -> Tensor:
        """`words` of an idle inbox, for one shot of up to `part_rows` and two shots of up to `max_rows` rows."""
        assert ranks * part_rows >= max_rows, "an owner's rows have no place"
        shape = (2, ranks * part_rows + max_rows, hidden // 2)
        return torch.full(shape, EMPTY, dtype=torch.int32, device=device)

    @property
    def max_rows(self) -> int:
        return self.words.shape[1] - len(self.peers) * self.part_rows


@triton.jit
def _numbers(words, DTYPE: tl.constexpr):
    """The two numbers in each word, as float32."""
    low = words.to(tl.int16).to(DTYPE, bitcast=True)
    high = (words >> 16).to(tl.int16).to(DTYPE, bitcast=True)
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def _words(low, high, DTYPE: tl.constexpr):
    """Rounded to DTYPE, two to a word."""
    low16 = low.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32)
    high16 = high.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32)
    return (low16 & 0xFFFF) | (high16 << 16)


@triton.jit
def _send(peers, peer, offset, words, N: tl.constexpr, BLOCK: tl.constexpr):
    k = tl.arange(0, BLOCK)
    inbox = tl.multiple_of(tl.load(peers + peer).to(tl.pointer_type(tl.int32)), 16)
    tl.store(inbox + offset + k, tl.where(words == _EMPTY, _NANS, words), mask=k < N)


@triton.jit
def _receive(row, stride, patience, N: tl.constexpr, PARTS: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    """The sum of PARTS rows of the inbox, once all have arrived; they are empty afterwards."""
    k = tl.arange(0, BLOCK)
    here = k < N
    low = tl.zeros([BLOCK], tl.float32)
    high = tl.zeros([BLOCK], tl.float32)
    missing, polls = 1, 0
    while (missing != 0) & (polls < patience):
        low = tl.zeros([BLOCK], tl.float32)
        high = tl.zeros([BLOCK], tl.float32)
        is_empty = tl.zeros([BLOCK], tl.int32)
        for part in tl.static_range(PARTS):
            words = tl.load(row + part * stride + k, mask=here, other=0, volatile=True)
            is_empty |= (words == _EMPTY).to(tl.int32)
            part_low, part_high = _numbers(words, DTYPE)
            low += part_low
            high += part_high
        missing = tl.max(is_empty, 0)
        polls += 1
    tl.device_assert(missing == 0, "all-reduce: another rank did not send its part in time")
    for part in tl.static_range(PARTS):
        tl.store(row + part * stride + k, tl.full([BLOCK], _EMPTY, tl.int32), mask=here)
    return low, high


@triton.jit(do_not_specialize=["rank", "rows", "part_rows", "slot_rows", "patience"])
def _all_reduce(
    x, residual, weight, out, inbox, peers, state, rank, rows, part_rows, slot_rows, eps, patience,
    N: tl.constexpr, RANKS: tl.constexpr, TWO_SHOT: tl.constexpr, NORM: tl.constexpr, DTYPE: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Each program takes every `programs`-th row; all of the grid is resident at once. N words a row.

    NORM: residual += sum, out = rms_norm(residual) * weight; else out = sum. A program first sends all it has, without
    waiting for anybody, so there is no circle of waiting ranks.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    k = tl.arange(0, BLOCK)
    here = k < N
    if PDL:
        gdc_launch_dependents()
    if NORM:
        w_low, w_high = _numbers(tl.load(weight + k, mask=here, other=0), DTYPE)
    if PDL:
        gdc_wait()
    slot = tl.load(state, volatile=True)
    wide = tl.full([], N, tl.int64)  # words a row, for products beyond 31 bits
    base = slot * slot_rows * wide

    for row in range(program, rows, programs):
        words = tl.load(x + row * wide + k, mask=here, other=0)
        if TWO_SHOT:
            to = base + (rank * part_rows + row // RANKS) * wide
            _send(peers, row % RANKS, to, words, N, BLOCK)
        else:
            to = base + (rank * part_rows + row) * wide
            for peer in tl.static_range(RANKS):
                _send(peers, peer, to, words, N, BLOCK)

    # The last program to come here turns the slot for the next call. A fence would wait for what was sent: relaxed.
    tl.debug_barrier()  # all threads have read `state`
    if tl.atomic_add(state + 1, 1, sem="relaxed") == programs - 1:
        tl.store(state + 1, 0)
        tl.store(state, 1 - slot)

    stride = part_rows * wide
    sums = base + RANKS * stride
    if TWO_SHOT:
        for own in range(program, tl.cdiv(rows - rank, RANKS), programs):
            low, high = _receive(inbox + base + own * wide, stride, patience, N, RANKS, DTYPE, BLOCK)
            words = _words(low, high, DTYPE)
            to = sums + (own * RANKS + rank) * wide
            for peer in tl.static_range(RANKS):
                _send(peers, peer, to, words, N, BLOCK)

    for row in range(program, rows, programs):
        at = row * wide
        if NORM:  # loaded while the parts are on their way
            r_low, r_high = _numbers(tl.load(residual + at + k, mask=here, other=0), DTYPE)
        if TWO_SHOT:
            low, high = _receive(inbox + sums + at, stride, patience, N, 1, DTYPE, BLOCK)
        else:
            low, high = _receive(inbox + base + at, stride, patience, N, RANKS, DTYPE, BLOCK)
        words = _words(low, high, DTYPE)
        if NORM:
            low, high = _numbers(words, DTYPE)
            total = _words(low + r_low, high + r_high, DTYPE)
            tl.store(residual + at + k, total, mask=here)
            low, high = _numbers(total, DTYPE)
            scale = tl.rsqrt(tl.sum(low * low + high * high, 0) / (2 * N) + eps)
            low, high = _numbers(_words(low * scale, high * scale, DTYPE), DTYPE)
            words = _words(low * w_low, high * w_high, DTYPE)
        tl.store(out + at + k, words, mask=here)


@cache
def _resident_programs(device: torch.device) -> int:
    """One a multiprocessor, so that all run at once, as programs that wait for other ones must."""
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
    """The sum of all ranks' x [T, H] (bfloat16 or float16); all ranks call it with the same shapes and options.

    With norm = (residual [T, H], weight [H], eps): adds the sum to `residual`, which is overwritten and the same on all
    ranks, and returns rms_norm(residual) * weight, as `reference.add_rms_norm`. A rank that waits for more than
    `patience` polls stops with a device assertion. `programs` is at most the number of multiprocessors.
    """
    rows, n = len(x), x.shape[1] // 2
    assert x.is_contiguous() and n == inbox.words.shape[2], "rows of the inbox's length"
    ranks, limit = len(inbox.peers), inbox.max_rows if two_shot else inbox.part_rows
    assert rows <= limit, f"an all-reduce of {rows} rows in an inbox for {limit}"
    out = empty_like(x)
    if not rows:
        return out
    x_words = x.view(torch.int32)
    residual, weight, eps = norm if norm is not None else (x, x, 0.0)
    block = triton.next_power_of_2(n)
    programs = min(rows, programs or _resident_programs(x.device))
    options = chained(x.device) if rows == 1 else {"PDL": False}
    _all_reduce[(programs,)](
        x_words, residual.view(torch.int32), weight.view(torch.int32), out.view(torch.int32),
        inbox.words, inbox.peers, inbox.state, inbox.rank, rows, inbox.part_rows, inbox.words.shape[1], eps, patience,
        N=n, RANKS=ranks, TWO_SHOT=two_shot, NORM=norm is not None, DTYPE=DTYPES[x.dtype], BLOCK=block,
        num_warps=num_warps or min(8, max(1, block // 128)), **_ASSERTING, **options,
    )  # fmt: skip
    return out
