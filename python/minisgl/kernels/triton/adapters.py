"""Low-rank adapters beside a projection, for any mix of slots: shrink to the ranks, then expand and add.

What costs is the launches for few tokens, and to read and write y for many. Only T and the shapes decide the grids, so
that CUDA graphs capture them. A token reads its own adapter alone, and no sum depends on the other tokens; a slot with
NaN harms only its own. Letters are those of `ops/adapters.py`.
"""

from __future__ import annotations

import math
from functools import cache
from itertools import pairwise
from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor, empty
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minisgl.core.rounding import ceil_div
from minisgl.kernels.triton.epilogue import gated
from minisgl.kernels.triton.launch import MAX_CHAINED, pdl_options
from minisgl.kernels.triton.linear import NUM_SMS
from minisgl.ops.adapters import AdapterWeights, ModuleRows

MAX_CLASSES: Final = 16
MAX_SPLITS: Final = 32
SECTOR: Final = tl.constexpr(16)  # elements of 16 bits that one prefetch brings to L2
NO_SLOT: Final = tl.constexpr(1 << 30)


@triton.jit
def _next_slot(slots, slot, CLASSES: tl.constexpr):
    """Return the smallest of `slots` that is larger than `slot` and of this program's class, or NO_SLOT."""
    is_next = (slots > slot) & (slots % CLASSES == tl.program_id(1))
    return tl.min(tl.where(is_next, slots, NO_SLOT), 0)


@triton.jit
def _prefetch(row_ptrs, COLUMNS: tl.constexpr):
    """Bring the first COLUMNS elements of rows to L2."""
    ptrs = row_ptrs[:, None] + (tl.arange(0, COLUMNS // SECTOR) * SECTOR)[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [ptrs], tl.int32, is_pure=False, pack=1
    )  # fmt: skip


@triton.jit(do_not_specialize=["tokens"])
def _shrink(
    x_ptr, slots_ptr, a_ptr, sums_ptr, tokens, n_inner, n_in, length, stride_x, stride_a,
    CLASSES: tl.constexpr, SPLITS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """sums[split, t] = a[slots[t] - 1] x[t] over `length` inputs; the rows of tokens without an adapter stay undefined.

    Grid: (T / BLOCK_T, classes of slots, P r / BLOCK_R times SPLITS). A program computes one slot of its class after
    the other. Slots may be read before `gdc_wait`, as `_embedding` makes sure.
    """
    if PDL:
        gdc_launch_dependents()
    offs_t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    slots = tl.load(slots_ptr + offs_t, mask=offs_t < tokens, other=0)
    slot = _next_slot(slots, 0, CLASSES)
    split = tl.program_id(2) % SPLITS
    offs_r = tl.program_id(2) // SPLITS * BLOCK_R + tl.arange(0, BLOCK_R)
    begin, end = split * length, tl.minimum((split + 1) * length, n_in)
    a_ptrs = a_ptr + tl.minimum(offs_r, n_inner - 1) * n_in
    if PDL:
        if (slot < NO_SLOT) & (begin + BLOCK_K <= end):
            _prefetch(a_ptrs + (slot - 1).to(tl.int64) * stride_a + begin, BLOCK_K)
        gdc_wait()
    while slot < NO_SLOT:
        is_token = slots == slot
        row_ptrs = a_ptrs + (slot - 1).to(tl.int64) * stride_a
        acc = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
        for start in tl.range(begin, end, BLOCK_K, num_stages=NUM_STAGES):
            offs_k = start + tl.arange(0, BLOCK_K)
            is_k = (offs_k < end)[None, :]
            x_ptrs = x_ptr + offs_t.to(tl.int64)[:, None] * stride_x + offs_k[None, :]
            x = tl.load(x_ptrs, mask=is_token[:, None] & is_k, other=0.0)
            a = tl.load(row_ptrs[:, None] + offs_k[None, :], mask=is_k, other=0.0)
            acc = tl.dot(x, tl.trans(a), acc, input_precision="ieee")
        sums_ptrs = sums_ptr + (split * tokens + offs_t).to(tl.int64)[:, None] * n_inner + offs_r[None, :]
        tl.store(sums_ptrs, acc, mask=is_token[:, None] & (offs_r < n_inner)[None, :])
        slot = _next_slot(slots, slot, CLASSES)


@triton.jit(do_not_specialize=["tokens"])
def _expand(
    y_ptr, out_ptr, sums_ptr, slots_ptr, shift_ptr, b_ptr, tiles_ptr, tokens, n_inner, n_rows, stride_shift, stride_b,
    CLASSES: tl.constexpr, SPLITS: tl.constexpr, RANK: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr, ALIGNMENT: tl.constexpr, GATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[t] = y[t] + b[slots[t] - 1] (sums of all splits, in order, + shift), with a GATE as in `linear.py: _gemv`.

    Grid: (tiles of N, classes of slots, T / BLOCK_T). Without a GATE, out is y, and tokens without an adapter stay. The
    ranks are rounded to the dtype of b, and out is rounded once.
    """
    HALVES: tl.constexpr = 2 if GATE != "" else 1
    if PDL:
        gdc_launch_dependents()
    tiles_ptr += 4 * tl.program_id(0)
    offs_n = tl.multiple_of(tl.load(tiles_ptr), ALIGNMENT) + tl.arange(0, BLOCK_N)
    is_row = offs_n < tl.multiple_of(tl.load(tiles_ptr + 1), ALIGNMENT)
    offs_t = tl.program_id(2) * BLOCK_T + tl.arange(0, BLOCK_T)
    slots = tl.load(slots_ptr + offs_t, mask=offs_t < tokens, other=-1)
    slot = _next_slot(slots, -1 if GATE != "" else 0, CLASSES)
    n_out = n_rows // HALVES
    b_ptrs = b_ptr + tl.minimum(offs_n, n_out - 1) * RANK
    if PDL:
        if (slot > 0) & (slot < NO_SLOT):
            for half in tl.static_range(HALVES):
                row_ptrs = b_ptrs + (slot - 1).to(tl.int64) * stride_b + half * n_out * RANK
                for first in tl.static_range(0, RANK, BLOCK_R):
                    _prefetch(row_ptrs + first, BLOCK_R)
        gdc_wait()
    while slot < NO_SLOT:
        is_token = (slots == slot)[:, None]
        mask = is_token & is_row[None, :]
        result = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
        for half in tl.static_range(HALVES):
            y_ptrs = y_ptr + offs_t.to(tl.int64)[:, None] * n_rows + (half * n_out + offs_n)[None, :]
            y = tl.load(y_ptrs, mask=mask, other=0.0)
            acc = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
            if slot > 0:
                column = tl.load(tiles_ptr + 2 + half) * RANK + tl.arange(0, BLOCK_R)
                row_ptrs = b_ptrs + (slot - 1).to(tl.int64) * stride_b + half * n_out * RANK
                shift_ptrs = shift_ptr + (slot - 1).to(tl.int64) * stride_shift + column
                for first in tl.static_range(0, RANK, BLOCK_R):
                    b = tl.load(row_ptrs[:, None] + first + tl.arange(0, BLOCK_R)[None, :])
                    inner = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
                    for i in tl.static_range(SPLITS):
                        offs = (i * tokens + offs_t).to(tl.int64)[:, None] * n_inner + first + column[None, :]
                        inner += tl.load(sums_ptr + offs, mask=is_token, other=0.0)
                    inner += tl.load(shift_ptrs + first).to(tl.float32)[None, :]
                    acc = tl.dot(inner.to(b.dtype), tl.trans(b), acc, input_precision="ieee")
            acc += y.to(tl.float32)
            result = gated(result, acc, GATE) if half == 1 else acc
        out_ptrs = out_ptr + offs_t.to(tl.int64)[:, None] * n_out + offs_n[None, :]
        tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=mask)
        slot = _next_slot(slots, slot, CLASSES)


class AdapterConfig(NamedTuple):
    """Tile (tokens, ranks of a shrink, inputs, outputs of an expand), classes of slots, parts of K, stages, warps."""

    block_t: int
    block_r: int
    block_k: int
    block_n: int
    classes: int
    splits: int
    num_stages: int = 3
    num_warps: int = 4


def adapter_config(tokens: int, n_slots: int, n_inner: int, n_in: int) -> AdapterConfig:
    """Return the tiles for `tokens` tokens. Not measured yet.

    Up to MAX_CHAINED tokens may each have another adapter, so that programs share the slots, and parts of K make two
    programs an SM. More tokens come in runs of one adapter, and programs that have nothing to do would cost more.
    """
    is_few = tokens <= MAX_CHAINED
    block_t = min(64, max(16, triton.next_power_of_2(tokens)))
    block_r = 16 if is_few else min(64, triton.next_power_of_2(n_inner))
    block_k = min(256 if block_t == 16 else 128, triton.next_power_of_2(n_in))
    classes = min(n_slots + 1, MAX_CLASSES) if is_few and tokens > 1 else 1
    programs = ceil_div(tokens, block_t) * min(tokens, classes) * ceil_div(n_inner, block_r)
    splits, wanted = 1, NUM_SMS * (2 if is_few else 1)
    while splits < MAX_SPLITS and 2 * splits * programs <= wanted and 2 * splits * block_k <= n_in:
        splits *= 2
    return AdapterConfig(block_t, block_r, block_k, 64 if is_few else 128, classes, splits)


class _Tiles(NamedTuple):
    """Tiles of N: [tiles, 4] int32 (begin, end, module, the module of `up`). `alignment` divides all bounds."""

    table: Tensor
    alignment: int


@cache
def _tiles(rows: tuple[ModuleRows, ...], block_n: int, is_gated: bool, device: torch.device) -> _Tiles:
    """Return tiles of at most `block_n` outputs of one module; of a gated projection, of gate and up side by side.

    The first call, which is not captured, creates them.
    """
    n_rows = rows[-1].stop
    n_out = n_rows // 2 if is_gated else n_rows
    bounds = [*sorted({0, *(r.start % n_out for r in rows)}), n_out]

    def module(row: int) -> int:
        return next(r.module for r in rows if r.start <= row < r.stop)

    table = [
        (first, min(first + block_n, end), module(begin), module(begin + n_rows - n_out))
        for begin, end in pairwise(bounds)
        for first in range(begin, end, block_n)
    ]
    return _Tiles(torch.tensor(table, dtype=torch.int32, device=device), math.gcd(16, *bounds))


def add_adapters(y: Tensor, x: Tensor, slots: Tensor, weights: AdapterWeights, gate: str = "") -> Tensor:
    """`adapters.add_adapters` by two kernels, in float32 but for the ranks; overwrites y unless there is a `gate`."""
    (tokens, n_rows), n_in, rank = y.shape, x.shape[1], weights.rank
    out = empty((tokens, n_rows // 2), dtype=y.dtype, device=y.device) if gate else y
    if not tokens:
        return out
    (a, shift, b), n_inner = (weights.a, weights.shift, weights.b), weights.a.shape[1]
    c = adapter_config(tokens, len(a), n_inner, n_in)
    tiles, options = _tiles(weights.rows, c.block_n, bool(gate), y.device), pdl_options(y.device, tokens <= MAX_CHAINED)
    sums = empty((c.splits, tokens, n_inner), dtype=torch.float32, device=y.device)
    tiles_t, length = ceil_div(tokens, c.block_t), ceil_div(n_in, c.block_k * c.splits) * c.block_k
    _shrink[(tiles_t, c.classes, ceil_div(n_inner, c.block_r) * c.splits)](
        x, slots, a, sums, tokens, n_inner, n_in, length, x.stride(0), a.stride(0),
        CLASSES=c.classes, SPLITS=c.splits, BLOCK_T=c.block_t, BLOCK_R=c.block_r, BLOCK_K=c.block_k,
        NUM_STAGES=c.num_stages, num_warps=c.num_warps, **options,
    )  # fmt: skip
    _expand[(len(tiles.table), c.classes, tiles_t)](
        y, out, sums, slots, shift, b, tiles.table, tokens, n_inner, n_rows, shift.stride(0), b.stride(0),
        CLASSES=c.classes, SPLITS=c.splits, RANK=rank, BLOCK_T=c.block_t, BLOCK_R=math.gcd(rank, 64),
        BLOCK_N=c.block_n, ALIGNMENT=tiles.alignment, GATE=gate, num_warps=c.num_warps, **options,
    )  # fmt: skip
    return out
