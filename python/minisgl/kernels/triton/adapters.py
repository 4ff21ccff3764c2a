"""Low-rank adapters beside a projection, for any mix of slots: shrink to the ranks, then expand and add.

What costs is launches and latencies for few tokens, and to read and write y for many. Only T and the shapes decide the
grids, so that CUDA graphs capture them. Slots beside each other are columns of one GEMM, of which a token keeps those
of its own. So a token's bits do not depend on the others, and a slot with NaN harms only its own. Letters are those of
`ops/adapters.py`; G slots are a group.
"""

from __future__ import annotations

import math
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
from minisgl.kernels.triton.linear import NUM_SMS
from minisgl.ops.adapters import AdapterWeights, ModuleRows

MAX_GROUP: Final = 8
MAX_SPLITS: Final = 32
MIN_LENGTH: Final = 256  # inputs of a split: an expand reads as many bytes of sums as there are splits
WIDE: Final = 8192  # outputs from which 128 a program still fill half the SMs
SECTOR: Final = tl.constexpr(16)  # elements of 16 bits that one prefetch brings to L2
NO_SLOT: Final = tl.constexpr(1 << 30)


@triton.jit
def _next_slot(slots, slot):
    """Return the smallest of `slots` that is larger than `slot`, or NO_SLOT."""
    return tl.min(tl.where(slots > slot, slots, NO_SLOT), 0)


@triton.jit
def _group(slots, first, G: tl.constexpr):
    """Return which of the slots from `first` on are a token's [T, G], and these slots [G]: `first` for absent ones."""
    group = first + tl.arange(0, G)
    is_own = slots[:, None] == group[None, :]
    return is_own, tl.where(tl.max(is_own.to(tl.int32), 0) > 0, group, first)


@triton.jit
def _rows_of_a(a_ptrs, slots, first, stride_a, G: tl.constexpr, BLOCK_R: tl.constexpr):
    """Return which of the slots from `first` on are a token's, and the pointers `a_ptrs` [G BLOCK_R] in these slots."""
    is_own, group = _group(slots, first, G)
    group = tl.reshape(tl.broadcast_to(group[:, None], [G, BLOCK_R]), [G * BLOCK_R])
    return is_own, a_ptrs + (group - 1).to(tl.int64) * stride_a


@triton.jit
def _prefetch(ptrs):
    """Bring the sectors at `ptrs` to L2."""
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [ptrs], tl.int32, False, 1)


@triton.jit(do_not_specialize=["tokens"])
def _shrink(
    x_ptr, slots_ptr, a_ptr, sums_ptr, tokens, n_inner, n_in, length, stride_x, stride_a,
    G: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """sums[split, t] = a[slots[t] - 1] x[t] over `length` inputs; grid (T / BLOCK_T, P r / BLOCK_R, SPLITS).

    The rows of tokens without an adapter stay undefined. `norm.py: _embedding` lets slots be read before `gdc_wait`.
    """
    if PDL:
        gdc_launch_dependents()
    first_t = tl.program_id(0).to(tl.int64) * BLOCK_T
    offs_t = tl.arange(0, BLOCK_T)
    is_token = first_t + offs_t < tokens
    slots = tl.load(slots_ptr + first_t + offs_t, mask=is_token, other=0)
    slot = _next_slot(slots, 0)
    begin = tl.program_id(2) * length
    end = tl.minimum(begin + length, n_in)
    first_r = tl.program_id(1) * BLOCK_R
    a_ptrs = a_ptr + tl.minimum(first_r + tl.arange(0, G * BLOCK_R) % BLOCK_R, n_inner - 1) * n_in
    if PDL:
        if (slot < NO_SLOT) & (begin + BLOCK_K <= end):
            _, row_ptrs = _rows_of_a(a_ptrs, slots, slot, stride_a, G, BLOCK_R)
            _prefetch(row_ptrs[:, None] + begin + (tl.arange(0, BLOCK_K // SECTOR) * SECTOR)[None, :])
        gdc_wait()
    x_ptrs = x_ptr + first_t * stride_x + offs_t[:, None] * stride_x
    while slot < NO_SLOT:
        is_own, row_ptrs = _rows_of_a(a_ptrs, slots, slot, stride_a, G, BLOCK_R)
        is_x = (slots >= slot) & (slots < slot + G)
        acc = tl.zeros([BLOCK_T, G * BLOCK_R], tl.float32)
        for start in tl.range(begin, end, BLOCK_K):
            offs_k = (start + tl.arange(0, BLOCK_K))[None, :]
            x = tl.load(x_ptrs + offs_k, mask=is_x[:, None] & (offs_k < end), other=0.0)
            a = tl.load(row_ptrs[:, None] + offs_k, mask=offs_k < end, other=0.0)
            acc = tl.dot(x, tl.trans(a), acc, input_precision="ieee")
        own = tl.where(is_own[:, :, None], tl.reshape(acc, [BLOCK_T, G, BLOCK_R]), 0.0)
        offs_r = first_r + tl.arange(0, BLOCK_R)[None, :]
        sums_ptrs = sums_ptr + (tl.program_id(2) * tokens + first_t) * n_inner + offs_t[:, None] * n_inner + offs_r
        tl.store(sums_ptrs, tl.sum(own, 1), mask=is_x[:, None] & (offs_r < n_inner))
        slot = _next_slot(slots, slot + G - 1)


@triton.jit(do_not_specialize=["tokens"])
def _expand(
    y_ptr, out_ptr, sums_ptr, slots_ptr, shift_ptr, b_ptr, tiles_ptr, tokens, n_inner, n_rows, stride_shift, stride_b,
    SPLITS: tl.constexpr, G: tl.constexpr, RANK: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr, ALIGNMENT: tl.constexpr, GATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[t] = y[t] + b[slots[t] - 1] (sums of all splits, in order, + shift); grid (tiles of N, T / BLOCK_T).

    With a GATE, activations follow, of all tokens; without, out is y, and tokens without an adapter stay. The ranks are
    rounded to the dtype of b, and out is rounded once. What is not finite in b counts as 0, or it would reach other
    tokens: what makes an adapter NaN is NaN in `a`.
    """
    HALVES: tl.constexpr = 2 if GATE != "" else 1
    if PDL and G == 1:
        gdc_launch_dependents()
    tiles_ptr += 4 * tl.program_id(0)
    offs_n = tl.multiple_of(tl.load(tiles_ptr), ALIGNMENT) + tl.arange(0, BLOCK_N)
    is_row = offs_n < tl.multiple_of(tl.load(tiles_ptr + 1), ALIGNMENT)
    first_t = tl.program_id(1).to(tl.int64) * BLOCK_T
    offs_t = tl.arange(0, BLOCK_T)
    is_token = first_t + offs_t < tokens
    slots = tl.load(slots_ptr + first_t + offs_t, mask=is_token, other=0)
    first_slot = _next_slot(slots, 0)
    n_out = n_rows // HALVES
    row_ptrs = b_ptr + tl.minimum(offs_n, n_out - 1)[:, None, None] * RANK
    if PDL:
        if first_slot < NO_SLOT:
            _, group = _group(slots, first_slot, G)
            sectors = tl.arange(0, BLOCK_R // SECTOR) * SECTOR
            slot_ptrs = row_ptrs + (group - 1).to(tl.int64)[None, :, None] * stride_b + sectors[None, None, :]
            for half in tl.static_range(HALVES):
                for first in tl.range(0, RANK, BLOCK_R):
                    _prefetch(slot_ptrs + half * n_out * RANK + first)
        gdc_wait()
        gdc_launch_dependents()  # of several tokens only now: see `pdl_options`
    has_adapter = slots > 0
    mask = (is_token if GATE != "" else has_adapter)[:, None] & is_row[None, :]
    result = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
    for half in tl.static_range(HALVES):
        y_ptrs = y_ptr + first_t * n_rows + offs_t[:, None] * n_rows + (half * n_out + offs_n)[None, :]
        y = tl.load(y_ptrs, mask=mask, other=0.0)
        acc = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
        column = tl.load(tiles_ptr + 2 + half) * RANK + tl.arange(0, BLOCK_R)[None, :]
        for first in tl.range(0, RANK, BLOCK_R):
            shift_ptrs = shift_ptr + (slots - 1).to(tl.int64)[:, None] * stride_shift + first + column
            inner = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
            for i in tl.static_range(SPLITS):
                sums_ptrs = sums_ptr + (i * tokens + first_t) * n_inner + offs_t[:, None] * n_inner + first + column
                inner += tl.load(sums_ptrs, mask=has_adapter[:, None], other=0.0)
            inner += tl.load(shift_ptrs, mask=has_adapter[:, None], other=0.0).to(tl.float32)
            slot = first_slot
            while slot < NO_SLOT:
                is_own, group = _group(slots, slot, G)
                slot_ptrs = row_ptrs + (group - 1).to(tl.int64)[None, :, None] * stride_b + half * n_out * RANK
                b = tl.load(slot_ptrs + first + tl.arange(0, BLOCK_R)[None, None, :])
                b = tl.reshape(tl.where(tl.abs(b.to(tl.float32)) < float("inf"), b, 0.0), [BLOCK_N, G * BLOCK_R])
                spread = tl.reshape(tl.where(is_own[:, :, None], inner[:, None, :], 0.0), [BLOCK_T, G * BLOCK_R])
                acc = tl.dot(spread.to(b.dtype), tl.trans(b), acc, input_precision="ieee")
                slot = _next_slot(slots, slot + G - 1)
        acc += y.to(tl.float32)
        result = gated(result, acc, GATE) if half == 1 else acc
    out_ptrs = out_ptr + first_t * n_out + offs_t[:, None] * n_out + offs_n[None, :]
    tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=mask)


@lru_cache(maxsize=4096)
def launch_options(
    tokens: int, n_slots: int, n_inner: int, n_in: int, rank: int, n_out: int, dtype: torch.dtype
) -> tuple[dict[str, int], dict[str, int]]:
    """Return the tiles and warps of both kernels. None was timed yet: they balance what a program reads of L2.

    Up to MAX_CHAINED tokens may have several adapters in a tile. More are prompts, with long runs of one adapter.
    """
    is_exact, is_few = dtype is torch.float32, tokens <= MAX_CHAINED  # exact: without tensor cores
    group = min(MAX_GROUP, triton.next_power_of_2(n_slots)) if is_few and tokens > 1 and not is_exact else 1
    block_t = 16 if is_exact else min(64, max(16, triton.next_power_of_2(tokens)))
    block_r = 16 if is_few or is_exact else min(64, triton.next_power_of_2(n_inner))
    block_k = 64 if is_exact else 256 if tokens == 1 else 128
    block_n = 32 if is_exact else 128 if n_out >= WIDE else 64
    programs, splits = ceil_div(tokens, block_t) * ceil_div(n_inner, block_r), 1
    while splits < MAX_SPLITS and 2 * splits * programs <= NUM_SMS and 2 * splits * MIN_LENGTH <= n_in:
        splits *= 2
    warps, more_warps = (8 if block_t * n > 4096 else 4 for n in (group * block_r, max(group * 16, block_n)))
    common, ranks = {"G": group, "BLOCK_T": block_t}, 16 if group > 1 else math.gcd(rank, 64)
    shrink = common | {"BLOCK_R": block_r, "BLOCK_K": block_k, "num_warps": warps, "num_stages": 3}
    expand = common | {"SPLITS": splits, "RANK": rank, "BLOCK_R": ranks, "BLOCK_N": block_n, "num_warps": more_warps}
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


def add_adapters(y: Tensor, x: Tensor, slots: Tensor, weights: AdapterWeights, gate: str = "") -> Tensor:
    """`adapters.add_adapters` by two kernels, in float32 but for the ranks; overwrites y unless there is a `gate`."""
    tokens, n_rows = y.shape
    out = empty((tokens, n_rows // 2), dtype=y.dtype, device=y.device) if gate else y
    if not tokens:
        return out
    (a, shift, b), n_inner, n_in = (weights.a, weights.shift, weights.b), *weights.a.shape[1:]
    shrink, expand = launch_options(tokens, len(a), n_inner, n_in, weights.rank, out.shape[1], y.dtype)
    tiles, alignment = _tiles(weights.rows, expand["BLOCK_N"], bool(gate), y.device)
    tiles_t, splits = ceil_div(tokens, shrink["BLOCK_T"]), expand["SPLITS"]
    chained = pdl_options(y.device, tokens <= MAX_CHAINED)
    sums = empty((splits, tokens, n_inner), dtype=torch.float32, device=y.device)
    length = ceil_div(n_in, shrink["BLOCK_K"] * splits) * shrink["BLOCK_K"]
    _shrink[(tiles_t, ceil_div(n_inner, shrink["BLOCK_R"]), splits)](
        x, slots, a, sums, tokens, n_inner, n_in, length, x.stride(0), a.stride(0), **shrink, **chained
    )
    _expand[(len(tiles), tiles_t)](
        y, out, sums, slots, shift, b, tiles, tokens, n_inner, n_rows, shift.stride(0), b.stride(0),
        GATE=gate, ALIGNMENT=alignment, **expand, **chained,
    )  # fmt: skip
    return out
