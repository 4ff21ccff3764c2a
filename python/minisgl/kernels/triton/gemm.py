"""GEMMs of few rows on the tensor cores, with weights in 16, 8 or 4 bits.

Letters: M rows, N output features, K input features. `linear.py` and `quantized.py` choose tiles and numbers of rows.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor, empty
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minisgl.kernels.triton.epilogue import gated
from minisgl.kernels.triton.launch import INTERPRETED, MAX_CHAINED, counters, pdl_options
from minisgl.ops.quantized import Quantized


class Split(NamedTuple):
    """Activations x [M, K] quantized to 8 bits, in one part or two.

    One part: x = scale * parts[m]. Two parts: x = scale * (parts[m] + parts[R + m] / 16); for int8 the divisor is 254.
    R is M rounded up; the contents of rows >= M are undefined.
    """

    parts: Tensor  # [R, K] or [2 R, K], float8_e4m3fn or int8
    scale: Tensor  # [1, R] float32; [K / 128, R] for block-scaled weights, which take one part
    sums: Tensor  # [groups, R] or [groups, 2 R] float32 for 4-bit weights, else unused


class GemmConfig(NamedTuple):
    """Tile (rows of x, rows of weights, inputs), programs per tile of outputs, pipeline stages, warps."""

    block_m: int
    block_n: int
    block_k: int
    split_k: int
    num_stages: int
    num_warps: int


@triton.jit
def half_as_fp8(packed, IS_HIGH: tl.constexpr, IS_E2M1: tl.constexpr, INTERPRETED: tl.constexpr):
    """Return the low or high nibbles of bytes as float8_e4m3fn, four bytes at a time.

    The bits of an E2M1 value, seem, become s00eem00.
    """
    if INTERPRETED:
        half = (packed >> 4) if IS_HIGH else (packed & 15)
        if IS_E2M1:
            half = ((half & 8) << 4) | ((half & 7) << 2)
    elif IS_E2M1:
        SIGN: tl.constexpr = "mov.b32 s, $1; shr.b32 t, $1, 2;" if IS_HIGH else "shl.b32 s, $1, 4; shl.b32 t, $1, 2;"
        half = tl.inline_asm_elementwise(
            "{ .reg .b32 s, t;" + SIGN + "and.b32 s, s, 0x80808080; and.b32 t, t, 0x1C1C1C1C; or.b32 $0, s, t; }",
            "=r,r", [packed], tl.uint8, True, 4,
        )  # fmt: skip
    elif IS_HIGH:
        half = tl.inline_asm_elementwise(
            "{ .reg .b32 t; shr.b32 t, $1, 4; and.b32 $0, t, 0x0F0F0F0F; }", "=r,r", [packed], tl.uint8, True, 4
        )
    else:
        half = tl.inline_asm_elementwise("and.b32 $0, $1, 0x0F0F0F0F;", "=r,r", [packed], tl.uint8, True, 4)
    return half.to(tl.float8e4nv, bitcast=True)


@triton.jit
def group_scales(ptrs, group, GROUPS: tl.constexpr):
    """Load the scales of GROUPS groups, starting at `group`."""
    found = tl.tuple(())
    for i in tl.static_range(GROUPS):
        found += (tl.load(ptrs + group + i),)
    return found


@triton.jit
def as_float(scale):
    """Convert a scale to float32. uint8 is E8M0, where 2^-127 becomes 0."""
    if scale.dtype == tl.uint8:
        return (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    else:
        return scale.to(tl.float32)


@triton.jit
def add_4bit_products(
    acc, weight_ptrs, x_ptrs, is_x, start, scales,
    BLOCK_K: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr, IS_E2M1: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Return acc [N, M] plus scale * q x over BLOCK_K columns from `start`, with q read as float8_e4m3fn.

    `weight_ptrs` and `x_ptrs` point to the beginnings of rows. The tensor cores accumulate FP8 with only 14 bits, so
    each of their sums covers at most 128 inputs.
    """
    WIDTH: tl.constexpr = HALF if GROUP > HALF else GROUP  # bytes whose low nibbles share a group
    for i in tl.static_range(BLOCK_K // 2 // WIDTH):
        packed = tl.load(weight_ptrs + (start // 2 + i * WIDTH + tl.arange(0, WIDTH))[None, :])
        offs_k = start + i * WIDTH // HALF * 2 * HALF + i * WIDTH % HALF + tl.arange(0, WIDTH)
        low = tl.load(x_ptrs + offs_k[None, :], mask=is_x[:, None], other=0.0)
        high = tl.load(x_ptrs + offs_k[None, :] + HALF, mask=is_x[:, None], other=0.0)
        for j in tl.static_range(2 if GROUP <= HALF else 1):
            part = tl.dot(half_as_fp8(packed, j == 1, IS_E2M1, INTERPRETED), tl.trans(high if j == 1 else low))
            if GROUP > HALF:
                part = tl.dot(half_as_fp8(packed, True, IS_E2M1, INTERPRETED), tl.trans(high), part)
            # Indexed by the group's number within this step.
            scale = scales[(i * WIDTH // HALF * 2 * HALF + i * WIDTH % HALF + j * HALF) // GROUP]
            acc += part * as_float(scale)[:, None]
    return acc


@triton.jit
def add_products(acc, w, x, SWAP_AB: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return acc plus w x^T with SWAP_AB, else x w^T, for tiles of weights and of x with BLOCK_K columns."""
    if SWAP_AB:
        a, b = w, tl.trans(x)
    else:
        a, b = x, tl.trans(w)
    if acc.dtype == tl.int32:
        return tl.dot(a, b, acc, out_dtype=tl.int32)
    elif w.dtype == tl.float8e4nv:
        return tl.dot(a, b, acc, max_num_imprecise_acc=BLOCK_K)
    else:
        return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def less_zeros(
    acc, scale_ptrs, zeros_ptrs, sums_ptrs, stride_sums, groups, is_x, HAS_ZEROS: tl.constexpr, IS_E2M1: tl.constexpr
):
    """Turn the sums of `add_4bit_products` into sums of (q - zero) scale x, with the sums of x over each group."""
    if IS_E2M1:
        acc *= 64.0
    else:
        acc *= 512.0
        for first in tl.range(0, groups, 16, num_stages=1):
            offs_g = first + tl.arange(0, 16)
            mask = (offs_g < groups)[None, :]
            zero = -tl.load(scale_ptrs[:, None] + offs_g[None, :], mask=mask, other=0.0).to(tl.float32)
            if HAS_ZEROS:
                zero *= tl.load(zeros_ptrs[:, None] + offs_g[None, :], mask=mask, other=0.0).to(tl.float32)
            else:
                zero *= 8.0
            mask = (offs_g < groups)[:, None] & is_x[None, :]
            total = tl.load(sums_ptrs[None, :] + offs_g[:, None] * stride_sums, mask=mask, other=0.0)
            # TF32 keeps 11 bits of a float: enough for a scale, but not for a sum, which is split in two.
            high = (total.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
            acc = tl.dot(zero, high, acc, input_precision="tf32")
            acc = tl.dot(zero, total - high, acc, input_precision="tf32")
    return acc


@triton.jit
def join_parts(acc, BLOCK_N: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr):
    """Add up the parts of x in a tile of sums: [N, PARTS * ROWS] -> [N, ROWS] float32."""
    if PARTS == 2:
        high, low = tl.split(tl.permute(tl.reshape(acc, [BLOCK_N, 2, ROWS]), (0, 2, 1)))
        return high.to(tl.float32) + low.to(tl.float32) * (1.0 / 254.0 if acc.dtype == tl.int32 else 1.0 / 16.0)
    else:
        return acc.to(tl.float32)


@triton.jit(do_not_specialize=["rows", "max_rows"])
def _gemm(
    x_ptr, x_scale_ptr, sums_ptr, weight_ptr, scale_ptr, zeros_ptr, bias_ptr, out_ptr, partial_ptr, counter_ptr,
    rows, max_rows, n_rows, n_in,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr, NUM_STAGES: tl.constexpr,
    PARTS: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr, GATE: tl.constexpr,
    HAS_BIAS: tl.constexpr, EVEN_K: tl.constexpr, INTERPRETED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[M, N] = x[M, K] weight[n_rows, K]^T with x in PARTS; grid (M / ROWS, SPLIT_K, n_rows / BLOCK_N).

    The weights are the tensor cores' M operand. GATE: the first half of the weights is gate, the second up, and a tile
    has the same number of rows of each. SPLIT_K programs share a tile of outputs, each with a part of K. The last one
    to finish adds the partial sums in order, so the result does not depend on which program is last. Counters are left
    at zero. EVEN_K: BLOCK_K divides K. Scales of 4-bit weights are loaded one step ahead. With BITS 16, x and weight
    have no scales.
    """
    IS_INT: tl.constexpr = weight_ptr.dtype.element_ty == tl.int8
    tile, split = tl.program_id(2), tl.program_id(1)
    OUT: tl.constexpr = BLOCK_N // 2 if GATE != "" else BLOCK_N
    n_out = n_rows // 2 if GATE != "" else n_rows
    row = tl.minimum(tile * OUT + tl.arange(0, BLOCK_N) % OUT, n_out - 1) + tl.arange(0, BLOCK_N) // OUT * n_out
    first = tl.program_id(0) * ROWS
    offs_x = first + tl.arange(0, PARTS * ROWS) % ROWS
    is_x = offs_x < rows
    offs_x += tl.arange(0, PARTS * ROWS) // ROWS * max_rows
    x_ptrs = x_ptr + offs_x.to(tl.int64)[:, None] * n_in
    # Written so that Triton sees the divisor 64, and copies 16 bytes at a time instead of 8.
    weight_ptrs = weight_ptr + row.to(tl.int64)[:, None] * (n_in // 128 * 64 if BITS == 4 else n_in)
    acc = tl.zeros([BLOCK_N, PARTS * ROWS], tl.int32 if IS_INT else tl.float32)
    length = n_in // (SPLIT_K * BLOCK_K) * BLOCK_K if EVEN_K else n_in  # aligned, for copies of 16 bytes
    begin = split * length
    if BITS == 4:
        GROUPS: tl.constexpr = BLOCK_K // GROUP
        offs_scale = row.to(tl.int64) * (n_in // GROUP)
        scales = group_scales(scale_ptr + offs_scale, begin // GROUP, GROUPS)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    for start in tl.range(begin, begin + length, BLOCK_K, num_stages=NUM_STAGES):
        if BITS >= 8:
            offs_k = start + tl.arange(0, BLOCK_K)
            x = tl.load(x_ptrs + offs_k[None, :], mask=is_x[:, None] & (EVEN_K | (offs_k < n_in)[None, :]), other=0.0)
            w = tl.load(weight_ptrs + offs_k[None, :], mask=EVEN_K | (offs_k < n_in)[None, :], other=0.0)
            if GROUP == 0:
                acc = add_products(acc, w, x, True, BLOCK_K)
            else:
                scale = tl.load(scale_ptr + row // GROUP * (n_in // GROUP) + start // GROUP)
                acc += tl.dot(w, tl.trans(x)) * scale[:, None]
        else:
            group = tl.minimum(start + BLOCK_K, n_in - BLOCK_K) // GROUP
            next_scales = group_scales(scale_ptr + offs_scale, group, GROUPS)
            acc = add_4bit_products(
                acc, weight_ptrs, x_ptrs, is_x, start, scales, BLOCK_K, GROUP, 64, False, INTERPRETED
            )  # fmt: skip
            scales = next_scales
    if BITS == 4:
        offs_scale += begin // GROUP
        sums_ptrs = sums_ptr + offs_x + begin // GROUP * PARTS * max_rows
        acc = less_zeros(
            acc, scale_ptr + offs_scale, zeros_ptr + offs_scale, sums_ptrs, PARTS * max_rows, length // GROUP, is_x,
            HAS_ZEROS, False,
        )  # fmt: skip
    offs_m = first + tl.arange(0, ROWS)
    result = join_parts(acc, BLOCK_N, ROWS, PARTS)
    is_last = True
    if SPLIT_K > 1:
        index = tl.program_id(0) * tl.num_programs(2) + tile
        offs = (index * BLOCK_N + tl.arange(0, BLOCK_N))[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
        size = tl.num_programs(0) * tl.num_programs(2) * BLOCK_N * ROWS
        tl.store(partial_ptr + split * size + offs, result)
        tl.debug_barrier()
        counter_ptr += index
        is_last = tl.atomic_add(counter_ptr, 1, sem="acq_rel") == SPLIT_K - 1
    if is_last:
        if SPLIT_K > 1:
            tl.store(counter_ptr, 0)
            result = tl.zeros([BLOCK_N, ROWS], tl.float32)
            for i in tl.static_range(SPLIT_K):
                result += tl.load(partial_ptr + i * size + offs, cache_modifier=".cg")
        if BITS < 16:
            result *= tl.load(x_scale_ptr + offs_m, mask=offs_m < rows, other=0.0)[None, :]
        if BITS == 8 and GROUP == 0:
            result *= tl.load(scale_ptr + row)[:, None]
        if HAS_BIAS:
            result += tl.load(bias_ptr + row).to(tl.float32)[:, None]
        values = result
        if GATE != "":
            gate, up = tl.split(tl.permute(tl.reshape(result, [2, OUT, ROWS]), (1, 2, 0)))
            values = gated(gate, up, GATE)
        offs_n = tile * OUT + tl.arange(0, OUT)
        out_ptrs = out_ptr + offs_m.to(tl.int64)[:, None] * n_out + offs_n[None, :]
        mask = (offs_m < rows)[:, None] & (offs_n < n_out)[None, :]
        tl.store(out_ptrs, tl.trans(values).to(out_ptr.dtype.element_ty), mask=mask)


def gemm(
    x: Split | Tensor, rows: int, parts: int, weight: Quantized | Tensor, bias: Tensor | None, dtype: torch.dtype,
    gate: str, config: GemmConfig,
) -> Tensor:  # fmt: skip
    """x [M, K], weight [N or 2N, K] -> [M, N] in `dtype`; `gate` as in `linear.py: gemv`.

    A weight in 16 bits takes a tensor x; a quantized one takes x in `parts` parts.
    """
    if isinstance(weight, Tensor):
        data, scale, zeros, bits, group = weight, weight, None, 16, 0
    else:
        kind = weight.format
        data, scale, zeros, bits, group = weight.data, weight.scale, weight.zeros, kind.bits, kind.group
    values, x_scale, sums = (x, x, x) if isinstance(x, Tensor) else x
    n_rows, n_in = weight.shape
    size, block_n, block_k, split_k, num_stages, num_warps = config
    out = empty((rows, n_rows // (2 if gate else 1)), dtype=dtype, device=data.device)
    partial_sums, counter = out, out
    grid = triton.cdiv(rows, size), split_k, triton.cdiv(n_rows, block_n)
    if split_k > 1:
        partial_sums = empty((math.prod(grid), block_n, size), dtype=torch.float32, device=out.device)
        counter = counters(out.device)
    _gemm[grid](
        values, x_scale, sums, data, scale, scale if zeros is None else zeros, out if bias is None else bias, out,
        partial_sums, counter, rows, len(values) // parts, n_rows, n_in,
        PARTS=parts, ROWS=size, BLOCK_N=block_n, BLOCK_K=block_k, SPLIT_K=split_k, NUM_STAGES=num_stages, BITS=bits,
        GROUP=group, HAS_ZEROS=zeros is not None, GATE=gate, HAS_BIAS=bias is not None,
        EVEN_K=n_in % (block_k * split_k) == 0, INTERPRETED=INTERPRETED, num_warps=num_warps,
        **pdl_options(out.device, rows <= MAX_CHAINED),
    )  # fmt: skip
    return out
