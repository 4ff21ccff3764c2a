"""Low-rank adapters beside a projection, for any mix of slots: shrink to the ranks, then expand and add.

What costs is launches and latencies for few tokens, and to read and write y for many. Only T and the shapes decide the
grids, so that CUDA graphs capture them. A tile has tokens of one slot (`ops/adapters.py: TokenSlots`), so a token's
bits do not depend on the others. One token shrinks within the kernel of its projection. Letters are those of
`ops/adapters.py`; M is the most tiles that T tokens may have.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, lru_cache
from itertools import pairwise
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor, empty
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minisgl.core.rounding import ceil_div
from minisgl.kernels.triton.epilogue import gated
from minisgl.kernels.triton.launch import MAX_CHAINED, pdl_options
from minisgl.kernels.triton.linear import NUM_SMS, gemv
from minisgl.ops.adapters import AdapterWeights, ModuleRows, TokenSlots
from minisgl.ops.deferred import Result, finished
from minisgl.ops.quantized import Quantized

MAX_SPLITS: Final = 16
MIN_LENGTH: Final = 512  # inputs of a split: an expand reads as many bytes of sums as there are splits
WIDE: Final = 8192  # outputs from which 128 a program still fill half the SMs
SECTOR: Final = tl.constexpr(16)  # elements of 16 bits that one prefetch brings to L2


@triton.jit
def _tile(order_ptr, bounds_ptr, n_slots, tile, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr):
    """Return the slot of a tile, whether that is an adapter's, and places and tokens [BLOCK_T] and which are there."""
    slots = tl.arange(0, BLOCK_S)
    begins = tl.load(bounds_ptr + slots, mask=slots <= n_slots, other=0)
    ends = tl.load(bounds_ptr + slots + 1, mask=slots <= n_slots, other=0)
    tiles = tl.cdiv(ends - begins, BLOCK_T)
    stops = tl.cumsum(tiles, 0)
    slot = tl.sum((stops <= tile).to(tl.int32), 0)  # BLOCK_S beyond the last tile
    first = tl.sum(tl.where(slots == slot, begins + (tile - stops + tiles) * BLOCK_T, 0), 0)
    places = first + tl.arange(0, BLOCK_T)
    is_token = places < tl.sum(tl.where(slots == slot, ends, 0), 0)
    tokens = tl.load(order_ptr + places, mask=is_token, other=0)
    return slot, (slot > 0) & (slot <= n_slots), places.to(tl.int64), tokens, is_token


@triton.jit
def _prefetch(ptrs):
    """Bring the sectors at `ptrs` to L2."""
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [ptrs], tl.int32, False, 1)


@triton.jit(do_not_specialize=["tokens"])
def _shrink(
    x_ptr, order_ptr, bounds_ptr, a_ptr, shift_ptr, sums_ptr, tokens, n_slots, n_inner, n_in,
    stride_x, stride_a, stride_shift, SPLITS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """sums[split] = a x of the tokens by slot; grid (P r / BLOCK_R, SPLITS, M). The first split includes the shift.

    What tokens without an adapter have stays undefined. `norm.py: _embedding` lets TokenSlots be read before the wait.
    """
    slot, has_adapter, places, token, is_token = _tile(
        order_ptr, bounds_ptr, n_slots, tl.program_id(2), BLOCK_T, BLOCK_S
    )
    length = tl.cdiv(n_in, SPLITS * BLOCK_K) * BLOCK_K
    begin = tl.program_id(1) * length
    end = tl.where(has_adapter, tl.minimum(begin + length, n_in), begin)
    offs_r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    at = (slot - 1).to(tl.int64)
    a_ptrs = a_ptr + at * stride_a + tl.minimum(offs_r, n_inner - 1)[:, None] * n_in
    is_rank = has_adapter & (offs_r < n_inner)
    shift = tl.load(shift_ptr + at * stride_shift + offs_r, mask=is_rank & (begin == 0), other=0.0)
    if PDL:
        for start in tl.range(begin, end, BLOCK_K):
            sectors = start + tl.arange(0, BLOCK_K // SECTOR) * SECTOR
            _prefetch(a_ptrs + tl.minimum(sectors, n_in - 1)[None, :])
        gdc_wait()
        gdc_launch_dependents()  # the projection: see `pdl_options`
    x_ptrs = x_ptr + token[:, None] * stride_x
    acc = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
    for start in tl.range(begin, end, BLOCK_K):
        offs_k = (start + tl.arange(0, BLOCK_K))[None, :]
        x = tl.load(x_ptrs + offs_k, mask=is_token[:, None] & (offs_k < end), other=0.0)
        a = tl.load(a_ptrs + offs_k, mask=offs_k < end, other=0.0)
        acc = tl.dot(x, tl.trans(a), acc, input_precision="ieee")
    sums_ptrs = sums_ptr + ((tl.program_id(1) * tokens + places) * n_inner)[:, None] + offs_r[None, :]
    tl.store(sums_ptrs, acc + shift.to(tl.float32)[None, :], mask=is_token[:, None] & is_rank[None, :])


@triton.jit(do_not_specialize=["tokens"])
def _expand(
    y_ptr, out_ptr, sums_ptr, order_ptr, bounds_ptr, b_ptr, tiles_ptr, tokens, n_slots, n_inner, n_rows, stride_b,
    SPLITS: tl.constexpr, RANK: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr, ALIGNMENT: tl.constexpr, GATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[t] = y[t] + b[slots[t] - 1] (sums of all splits, in order); grid (tiles of N, M).

    With a GATE, activations follow, of all tokens; without, out is y, and tokens without an adapter stay. The ranks are
    rounded to the dtype of b, and out is rounded once.
    """
    HALVES: tl.constexpr = 2 if GATE != "" else 1
    slot, has_adapter, places, token, is_token = _tile(
        order_ptr, bounds_ptr, n_slots, tl.program_id(1), BLOCK_T, BLOCK_S
    )
    tiles_ptr += 4 * tl.program_id(0)
    offs_n = tl.multiple_of(tl.load(tiles_ptr), ALIGNMENT) + tl.arange(0, BLOCK_N)
    is_row = offs_n < tl.multiple_of(tl.load(tiles_ptr + 1), ALIGNMENT)
    n_out = n_rows // HALVES
    b_ptrs = b_ptr + (slot - 1).to(tl.int64) * stride_b + tl.minimum(offs_n, n_out - 1)[:, None] * RANK
    if PDL:
        if has_adapter:
            for half in tl.static_range(HALVES):
                for first in tl.static_range(0, RANK, SECTOR):
                    _prefetch(b_ptrs + half * n_out * RANK + first)
        gdc_wait()
        gdc_launch_dependents()  # of several tokens only now: see `pdl_options`
    mask = (is_token & (has_adapter | (HALVES == 2)))[:, None] & is_row[None, :]
    is_inner = (is_token & has_adapter)[:, None]
    result = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
    for half in tl.static_range(HALVES):
        y_ptrs = y_ptr + token[:, None] * n_rows + (half * n_out + offs_n)[None, :]
        y = tl.load(y_ptrs, mask=mask, other=0.0)
        acc = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
        column = tl.load(tiles_ptr + 2 + half) * RANK
        for first in tl.range(0, RANK, BLOCK_R):
            offs_r = (first + tl.arange(0, BLOCK_R))[None, :]
            b = tl.load(b_ptrs + half * n_out * RANK + offs_r, mask=has_adapter, other=0.0)
            inner = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
            for i in tl.static_range(SPLITS):
                sums_ptrs = sums_ptr + ((i * tokens + places) * n_inner)[:, None] + column + offs_r
                inner += tl.load(sums_ptrs, mask=is_inner, other=0.0)
            acc = tl.dot(inner.to(b.dtype), tl.trans(b), acc, input_precision="ieee")
        acc += y.to(tl.float32)
        result = gated(result, acc, GATE) if half == 1 else acc
    out_ptrs = out_ptr + token[:, None] * n_out + offs_n[None, :]
    tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _added(y_ptrs, sums_ptrs, b, is_row, is_rank, n_inner, PARTS: tl.constexpr):
    """y + b (sum of all parts)."""
    y = tl.load(y_ptrs, mask=is_row, other=0.0)
    inner = tl.load(sums_ptrs, mask=is_rank, other=0.0)
    for i in tl.static_range(1, PARTS):
        inner += tl.load(sums_ptrs + i * n_inner, mask=is_rank, other=0.0)
    return y.to(tl.float32) + tl.sum(b.to(tl.float32) * inner[None, :], 1)


@triton.jit
def _expand_one(
    y_ptr, out_ptr, sums_ptr, slot_ptr, b_ptr, tiles_ptr, n_inner, n_rows, stride_b, PARTS: tl.constexpr,
    RANK: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, GATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`_expand` of one token, without tensor cores; grid (tiles of N)."""
    if PDL:
        gdc_launch_dependents()
    slot = tl.load(slot_ptr)
    tiles_ptr += 4 * tl.program_id(0)
    offs_n, offs_r = tl.load(tiles_ptr) + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_R)
    is_row, is_rank = offs_n < tl.load(tiles_ptr + 1), (slot > 0) & (offs_r < RANK)
    n_out = n_rows // (2 if GATE != "" else 1)
    b_ptrs = b_ptr + (slot - 1).to(tl.int64) * stride_b + offs_n[:, None] * RANK + offs_r[None, :]
    mask = is_row[:, None] & is_rank[None, :]
    b = tl.load(b_ptrs, mask=mask, other=0.0)
    sums_ptrs = sums_ptr + tl.load(tiles_ptr + 2) * RANK + offs_r
    if GATE != "":
        b_up = tl.load(b_ptrs + n_out * RANK, mask=mask, other=0.0)
        sums_up_ptrs = sums_ptr + tl.load(tiles_ptr + 3) * RANK + offs_r
    if PDL:
        gdc_wait()
    result = _added(y_ptr + offs_n, sums_ptrs, b, is_row, is_rank, n_inner, PARTS)
    if GATE != "":
        up = _added(y_ptr + n_out + offs_n, sums_up_ptrs, b_up, is_row, is_rank, n_inner, PARTS)
        result = gated(result, up, GATE)
    tl.store(out_ptr + offs_n, result.to(out_ptr.dtype.element_ty), mask=is_row)


Options = dict[str, int]


@lru_cache(maxsize=4096)
def launch_options(
    tokens: int, n_slots: int, n_inner: int, n_in: int, rank: int, n_out: int, dtype: torch.dtype
) -> tuple[Options, Options]:
    """Return the tiles and warps of both kernels.

    More than MAX_CHAINED tokens are prompts, with long runs of one adapter.
    """
    if tokens == 1:
        block_r = triton.next_power_of_2(rank)
        return {}, {"RANK": rank, "BLOCK_R": block_r, "BLOCK_N": max(1, 1024 // block_r), "num_warps": 4}
    is_exact, is_few = dtype is torch.float32, tokens <= MAX_CHAINED  # exact: without tensor cores
    block_t = 16 if is_few or is_exact else 64
    block_r = 16 if is_few or is_exact else min(64, triton.next_power_of_2(n_inner))
    block_k = 64 if is_exact else 256 if is_few else 128
    block_n = 32 if is_exact else 128 if n_out >= WIDE else 64
    programs, splits = ceil_div(tokens, block_t) * ceil_div(n_inner, block_r), 1
    while splits < MAX_SPLITS and 2 * splits * programs <= NUM_SMS and 2 * splits * MIN_LENGTH <= n_in:
        splits *= 2
    common = {"BLOCK_S": triton.next_power_of_2(n_slots + 1), "BLOCK_T": block_t}
    shrink = common | {"SPLITS": splits, "BLOCK_R": block_r, "BLOCK_K": block_k, "num_warps": 4, "num_stages": 3}
    warps = 8 if block_t * block_n > 4096 else 4
    expand = common | {"RANK": rank, "BLOCK_R": math.gcd(rank, 64), "BLOCK_N": block_n, "num_warps": warps}
    return shrink, expand


@cache
def _tiles(rows: tuple[ModuleRows, ...], block_n: int, is_gated: bool, device: torch.device) -> tuple[Tensor, int]:
    """Return tiles of N [tiles, 4] int32 (begin, end, module, the module of `up`), and what divides all bounds.

    A tile has at most `block_n` outputs of one module; of a gated projection, of gate and up side by side. The first
    call, which is not captured, creates them.
    """
    modules = [r.module for r in rows for _ in range(r.start, r.stop)]
    n_out = len(modules) // 2 if is_gated else len(modules)
    bounds = [*sorted({0, *(r.start % n_out for r in rows)}), n_out]
    tiles = [  # `up` is the last half
        (first, min(first + block_n, end), modules[first], modules[first - n_out])
        for begin, end in pairwise(bounds)
        for first in range(begin, end, block_n)
    ]
    return torch.tensor(tiles, dtype=torch.int32, device=device), math.gcd(16, *bounds)


def _most_tiles(tokens: int, count: int, block_t: int) -> int:
    """M: each slot, and none, may end with a tile of one token."""
    return min(tokens, (tokens + (count + 1) * (block_t - 1)) // block_t)


def shrink(x: Tensor, tokens: TokenSlots, weights: AdapterWeights, options: Options) -> Tensor:
    """Return parts of a x + shift: float32 [SPLITS, T P r], tokens by slot; of several tokens."""
    a, shift, (num_slots, n_inner, n_in) = weights.a, weights.shift, weights.a.shape
    sums = empty((options["SPLITS"], len(x) * n_inner), dtype=torch.float32, device=x.device)
    most = _most_tiles(len(x), num_slots, options["BLOCK_T"])
    _shrink[(ceil_div(n_inner, options["BLOCK_R"]), options["SPLITS"], most)](
        x, tokens.order, tokens.bounds, a, shift, sums, len(x), num_slots, n_inner, n_in, x.stride(0), a.stride(0),
        shift.stride(0), **options, **pdl_options(x.device, len(x) <= MAX_CHAINED),
    )  # fmt: skip
    return sums


def expand(y: Tensor, sums: Tensor, tokens: TokenSlots, weights: AdapterWeights, gate: str, options: Options) -> Tensor:
    """Return y + b (sum of `sums`) [T, N], after the `gate` if there is one; else it overwrites y."""
    (count, n_rows), b, n_inner = y.shape, weights.b, weights.a.shape[1]
    out = empty((count, n_rows // 2), dtype=y.dtype, device=y.device) if gate else y
    tiles, alignment = _tiles(weights.rows, options["BLOCK_N"], bool(gate), y.device)
    more = {"GATE": gate, **pdl_options(y.device, count <= MAX_CHAINED)}
    if count == 1:
        _expand_one[(len(tiles),)](
            y, out, sums, tokens.slots, b, tiles, n_inner, n_rows, b.stride(0), PARTS=len(sums), **options, **more
        )
        return out
    _expand[(len(tiles), _most_tiles(count, len(b), options["BLOCK_T"]))](
        y, out, sums, tokens.order, tokens.bounds, b, tiles, count, len(b), n_inner, n_rows, b.stride(0),
        SPLITS=len(sums), ALIGNMENT=alignment, **options, **more,
    )  # fmt: skip
    return out


def adapted_linear(
    linear: Callable[..., Result],
    x: Result,
    weight: Tensor | Quantized,
    bias: Tensor | None,
    gate: str,
    tokens: TokenSlots,
    weights: AdapterWeights,
) -> Tensor:
    """`adapters.adapted_linear`, in float32 but for the ranks; one token shrinks within a projection in 16 bits."""
    x, n_out = finished(x), weights.rows[-1].stop // (2 if gate else 1)
    if not len(x):
        return finished(linear(x, weight, bias, gate))
    first, last = launch_options(len(x), *weights.a.shape, weights.rank, n_out, x.dtype)
    if len(x) == 1 and not isinstance(weight, Quantized):
        y, sums = gemv(x.contiguous(), weight, bias, slot=tokens.slots, adapters=weights)
        return expand(y, sums, tokens, weights, gate, last)
    if len(x) == 1:
        _, sums = gemv(x.contiguous(), x[:0], None, slot=tokens.slots, adapters=weights)  # without outputs
    elif gate:  # a wide projection starts while a shrink still runs, and loses more than the shrink takes (8 us)
        y = finished(linear(x, weight, bias))
        return expand(y, shrink(x, tokens, weights, first), tokens, weights, gate, last)
    else:
        sums = shrink(x, tokens, weights, first)
    return expand(finished(linear(x, weight, bias)), sums, tokens, weights, gate, last)
