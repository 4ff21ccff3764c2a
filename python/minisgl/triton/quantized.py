"""Linear layers with quantized weights for two or more rows, on the 8-bit tensor cores.

With few rows, each activation is split into two 8-bit values: the second holds the rounding error of the first, and
their sum is as exact as bfloat16. 4-bit weights are not dequantized: read as float8_e4m3fn, the bytes 0 to 15 are 0 to
15 times 2^-9, and E2M1, with its sign bit moved to the top, is 2^-6 times its value. With many rows, activations are
quantized to 8 bits (FP8 by cuBLAS, int8 by our kernel), or 4-bit weights are dequantized to 16 bits. Dimension letters
are those of `linear.py`. Figures are microseconds on an H200 for the N x K of 8B.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor, empty
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minisgl.ops.quantized import E4M3, Quantized
from minisgl.triton.cublas import cublas_linear
from minisgl.triton.cuda_gemv import cuda_gemv
from minisgl.triton.epilogue import Products, Unfinished, finished, gate_and_mul, gated, load_finished
from minisgl.triton.launch import INTERPRETED, MAX_CHAINED, counters, pdl_options
from minisgl.triton.linear import NUM_SMS, Norm
from minisgl.triton.norm import add_rms_norm, rms_norm
from minisgl.triton.quantized_gemv import quantized_gemv

MAX_EXACT_ROWS: Final = {8: 32, 4: 16}  # up to this many rows, activations are split in two; by bits per weight
# Up to this many rows, cuBLAS with a per-tensor scale and a rescaling kernel is faster than cuBLAS with per-row scales.
MAX_ONE_SCALE: Final = 256
# Up to this many columns, activation and quantization are one kernel: more would not fit its registers. 8,192 rows of
# 12,288 columns take 141 us, by two kernels 215.
MAX_GATED: Final = 12288


class Split(NamedTuple):
    """Activations x [M, K] quantized to 8 bits, in one part or two.

    One part: x = scale * parts[m]. Two parts: x = scale * (parts[m] + parts[R + m] / 16); for int8 the divisor is 254.
    R is M rounded up; the contents of rows >= M are undefined.
    """

    parts: Tensor  # [R, K] or [2 R, K], float8_e4m3fn or int8
    scale: Tensor  # [1, R] float32; [K / 128, R] for block-scaled weights, which take one part
    sums: Tensor  # [groups, R] or [groups, 2 R] float32 for 4-bit weights, else unused


@triton.jit
def _split_rows(
    x_ptr, x_scale_ptr, column_scale_ptr, bias_ptr, residual_ptr, norm_weight_ptr, order_ptr, parts_ptr, scale_ptr,
    sums_ptr, max_rows, n, eps,
    PARTS: tl.constexpr, SCALE_GROUP: tl.constexpr, SUM_GROUP: tl.constexpr, HAS_SCALES: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_NORM: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_ORDER: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Quantize one row per program: residual += x and the RMS norm as in `norm.py`, then the parts, scales and sums.

    HAS_SCALES: x is a GEMM's result, which is finished and rounded to the residual's dtype first. HAS_ORDER: columns
    are read in the order that `order_ptr` gives (GPTQ's `desc_act`).
    """
    IS_INT: tl.constexpr = parts_ptr.dtype.element_ty == tl.int8
    MAX: tl.constexpr = 127.0 if IS_INT else 448.0
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    mask = offs < n
    offs_x = offs
    if HAS_ORDER:
        offs_x = tl.load(order_ptr + offs, mask=mask, other=0)
    if HAS_SCALES:
        x_ptr += row * n
        x = load_finished(x_ptr, x_scale_ptr + row, column_scale_ptr, bias_ptr, offs_x, mask, True, HAS_BIAS)
        x = x.to(residual_ptr.dtype.element_ty)
    else:
        x = tl.load(x_ptr + row * n + offs_x, mask=mask, other=0.0)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + row * n + offs_x, mask=mask, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(residual_ptr + row * n + offs_x, x, mask=mask)
    if HAS_NORM:
        w = tl.load(norm_weight_ptr + offs_x, mask=mask, other=0.0).to(tl.float32)
        y = x.to(tl.float32)
        y *= tl.rsqrt(tl.sum(y * y, 0) / n + eps)
        x = (y.to(norm_weight_ptr.dtype.element_ty).to(tl.float32) * w).to(x.dtype)
    y = x.to(tl.float32)
    if SCALE_GROUP > 0:
        offs_g = tl.arange(0, BLOCK // SCALE_GROUP)
        y = tl.reshape(y, [BLOCK // SCALE_GROUP, SCALE_GROUP])
        most = tl.maximum(tl.max(tl.abs(y), 1), 1e-30)
        tl.store(scale_ptr + offs_g * max_rows + row, most / 448.0, mask=offs_g < n // SCALE_GROUP)
        y = tl.reshape(y * (448.0 / most)[:, None], [BLOCK])
    else:
        # An integer cannot be NaN, so a row with NaN gets an infinite scale.
        most = tl.maximum(tl.max(tl.where(y == y, tl.abs(y), float("inf")), 0), 1e-30)
        tl.store(scale_ptr + row, most / MAX)
        y *= MAX / most
    for i in tl.static_range(PARTS):
        if IS_INT:
            part = (y + tl.where(y < 0, -0.5, 0.5)).to(tl.int8)
        else:
            part = y.to(tl.float8e4nv)
        tl.store(parts_ptr + (i * max_rows + row) * n + offs, part, mask=mask)
        if SUM_GROUP > 0:
            offs_g = tl.arange(0, BLOCK // SUM_GROUP)
            total = tl.sum(tl.reshape(part.to(tl.float32), [BLOCK // SUM_GROUP, SUM_GROUP]), 1)
            tl.store(sums_ptr + (offs_g * PARTS + i) * max_rows + row, total, mask=offs_g < n // SUM_GROUP)
        y = (y - part.to(tl.float32)) * (254.0 if IS_INT else 16.0)


def split_rows(
    x: Tensor, norm: Norm | None, parts: int, *, dtype: torch.dtype = E4M3, scale_group: int = 0, sum_group: int = 0,
    order: Tensor | None = None,
) -> Split:  # fmt: skip
    """Quantize x [M, K] after `norm`.

    `scale_group` is the number of columns that share a scale (0: the whole row); `sum_group` likewise for `Split.sums`
    (0: no sums).
    """
    rows, n = x.shape
    residual = None if norm is None else norm.residual
    products = x.products if isinstance(x, Unfinished) and residual is not None else None
    if products is None or products.gate:
        x, scales, bias = finished(x), None, None
    else:
        x, scales, bias = products.x, products.scales, products.bias
    x_scale, column_scale = scales or (x, x)
    # cuBLAS needs a multiple of 16 rows.
    max_rows = (
        triton.cdiv(rows, 16) * 16 if parts == 1 else split_size(rows, 2) * triton.cdiv(rows, split_size(rows, 2))
    )
    block = triton.next_power_of_2(n)
    found = empty((max_rows * parts, n), dtype=dtype, device=x.device)
    scale = empty((n // scale_group if scale_group else 1, max_rows), dtype=torch.float32, device=x.device)
    sums = empty((n // sum_group, parts * max_rows), dtype=torch.float32, device=x.device) if sum_group else scale
    # An unfinished row of 4,096 takes 2.9 us with 16 warps, 3.8 with 8 (256 rows).
    _split_rows[(rows,)](
        x, x_scale, column_scale, x if bias is None else bias, x if residual is None else residual,
        x if norm is None else norm.weight, x if order is None else order, found, scale, sums, max_rows, n,
        0.0 if norm is None else norm.eps,
        PARTS=parts, SCALE_GROUP=scale_group, SUM_GROUP=sum_group, HAS_SCALES=scales is not None,
        HAS_BIAS=bias is not None, HAS_NORM=norm is not None, HAS_RESIDUAL=residual is not None,
        HAS_ORDER=order is not None, BLOCK=block, num_warps=min(16 if scales else 8, max(1, block // 256)),
        **pdl_options(x.device, rows <= MAX_CHAINED),
    )  # fmt: skip
    return Split(found, scale, sums)


@triton.jit
def _max_or_nan(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _split_gated_rows(
    x_ptr, x_scale_ptr, column_scale_ptr, bias_ptr, parts_ptr, scale_ptr, n,
    GATE: tl.constexpr, HAS_BIAS: tl.constexpr, NUM_BLOCKS: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """`_finish` with GATE and `_split_rows` in one part: products [T, 2 n] -> FP8 [T, n], one row per program.

    The row stays in registers, in blocks of columns. EVEN: BLOCK divides n. NaN reaches the scale through the maximum.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * 2 * n
    x_scale_ptr += row
    blocks = tl.tuple(())
    most = tl.full([BLOCK], 1e-30, tl.float32)
    for i in tl.static_range(NUM_BLOCKS):
        offs = i * BLOCK + tl.arange(0, BLOCK)
        mask = EVEN | (offs < n)
        gate = load_finished(x_ptr, x_scale_ptr, column_scale_ptr, bias_ptr, offs, mask, True, HAS_BIAS)
        up = load_finished(x_ptr, x_scale_ptr, column_scale_ptr, bias_ptr, n + offs, mask, True, HAS_BIAS)
        y = gated(gate, up, GATE)
        most = _max_or_nan(most, tl.abs(y))
        blocks += (y,)
    greatest = tl.reduce(most, 0, _max_or_nan)
    tl.store(scale_ptr + row, greatest / 448.0)
    factor = 448.0 / greatest
    for i in tl.static_range(NUM_BLOCKS):
        offs = i * BLOCK + tl.arange(0, BLOCK)
        tl.store(parts_ptr + row * n + offs, (blocks[i] * factor).to(tl.float8e4nv), mask=EVEN | (offs < n))


def split_gated_rows(products: Products) -> Split:
    """Finish products with an activation and quantize them to one part of FP8, with a scale for each row."""
    x, rows, gate, _, (x_scale, scale), bias = products
    n = x.shape[1] // 2
    max_rows = triton.cdiv(rows, 16) * 16
    found = empty((max_rows, n), dtype=E4M3, device=x.device)
    found_scale = empty((1, max_rows), dtype=torch.float32, device=x.device)
    block = min(4096, triton.next_power_of_2(n))
    # 16 warps with 64 registers are two programs on an SM; with 73, 8,192 rows take 232 us instead of 141.
    _split_gated_rows[(rows,)](
        x, x_scale, scale, x if bias is None else bias, found, found_scale, n, GATE=gate, HAS_BIAS=bias is not None,
        NUM_BLOCKS=triton.cdiv(n, block), BLOCK=block, EVEN=n % block == 0, num_warps=max(1, block // 256), maxnreg=64,
        **pdl_options(x.device, rows <= MAX_CHAINED),
    )  # fmt: skip
    return Split(found, found_scale, found_scale)


def split_size(rows: int, parts: int) -> int:
    """Return the rows of x per program of `_split_gemm`."""
    return min(128 // parts, max(16 // parts, triton.next_power_of_2(rows)))


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
def _split_gemm(
    x_ptr, x_scale_ptr, sums_ptr, weight_ptr, scale_ptr, zeros_ptr, bias_ptr, out_ptr, partial_ptr, counter_ptr,
    rows, max_rows, n_rows, n_in,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr, NUM_STAGES: tl.constexpr,
    PARTS: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr, GATE: tl.constexpr,
    HAS_BIAS: tl.constexpr, EVEN_K: tl.constexpr, INTERPRETED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[M, N] = x[M, K] weight[n_rows, K]^T with x in PARTS; grid (M / ROWS, SPLIT_K, n_rows / BLOCK_N).

    GATE: the first half of the weights is gate, the second up, and a tile has the same number of rows of each. K is
    split as in `_skinny_gemm`. EVEN_K: BLOCK_K divides K. Scales of 4-bit weights are loaded one step ahead.
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
        if BITS == 8:
            offs_k = start + tl.arange(0, BLOCK_K)
            x = tl.load(x_ptrs + offs_k[None, :], mask=is_x[:, None] & (EVEN_K | (offs_k < n_in)[None, :]), other=0.0)
            w = tl.load(weight_ptrs + offs_k[None, :], mask=EVEN_K | (offs_k < n_in)[None, :], other=0.0)
            if IS_INT:
                acc = tl.dot(w, tl.trans(x), acc, out_dtype=tl.int32)
            elif GROUP == 0:
                acc = tl.dot(w, tl.trans(x), acc, max_num_imprecise_acc=128)
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
        place = tl.program_id(0) * tl.num_programs(2) + tile
        offs = (place * BLOCK_N + tl.arange(0, BLOCK_N))[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
        size = tl.num_programs(0) * tl.num_programs(2) * BLOCK_N * ROWS
        tl.store(partial_ptr + split * size + offs, result)
        tl.debug_barrier()
        counter_ptr += place
        is_last = tl.atomic_add(counter_ptr, 1, sem="acq_rel") == SPLIT_K - 1
    if is_last:
        if SPLIT_K > 1:
            tl.store(counter_ptr, 0)
            result = tl.zeros([BLOCK_N, ROWS], tl.float32)
            for i in tl.static_range(SPLIT_K):
                result += tl.load(partial_ptr + i * size + offs, cache_modifier=".cg")
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


class SplitConfig(NamedTuple):
    """Tile (rows of x, rows of weights, inputs), programs per tile of outputs, pipeline stages, warps."""

    block_m: int
    block_n: int
    block_k: int
    split_k: int
    num_stages: int
    num_warps: int


def split_config(rows: int, parts: int, bits: int, n_rows: int, n_in: int, gate: str) -> SplitConfig:
    """Return the tile for these sizes.

    Each is the fastest, or nearly so, of 16 to 60 tiles for the projections of 8B at 2, 16, 32, 64, 96, 128 and 256
    rows.
    """
    if parts == 2 or rows <= 64:
        block_m = split_size(rows, parts)
    else:
        block_m = 128 if bits == 4 or gate or rows > 128 else 64
    if bits == 4:
        if parts == 2:
            split_k = 1 if gate or n_in % 256 else 2
            block_k = 256 if block_m <= 16 and n_in % (256 * split_k) == 0 else 128
            return SplitConfig(block_m, 64, block_k, split_k, 3, 4)
        if n_in > 2 * n_rows and n_in % 256 == 0:
            return SplitConfig(64, 128, 128, 2, 3, 8)  # down, 128 rows: 51 us; 57 without split-K
        return SplitConfig(block_m, 64, 128, 1, 3, 4)
    if rows > 128:
        return SplitConfig(128, 128, 128, 1, 3, 8)  # int8, gate_up at 8,192 rows: 1,350 us, cuBLAS 1,865
    if gate:
        return SplitConfig(block_m, 64, 128, 1, 3 if block_m == 128 else 4, 4)
    # If one wave of programs suffices, give each an SM of its own (many stages): copies from L2 bound an SM.
    is_one_wave = triton.cdiv(n_rows, 64) * triton.cdiv(rows, block_m) <= NUM_SMS
    return SplitConfig(block_m, 64, 128, 1, 8 if is_one_wave else 6, 4)


def split_gemm(
    x: Split, rows: int, parts: int, weight: Quantized, bias: Tensor | None, dtype: torch.dtype, gate: str = "",
    config: SplitConfig | None = None,
) -> Tensor:  # fmt: skip
    """x [M, K] in `parts` parts, weight [N or 2N, K] -> [M, N] in `dtype`; `gate` as in `linear.py: gemv`."""
    n_rows, n_in = weight.shape
    if config is None:
        config = split_config(rows, parts, weight.format.bits, n_rows, n_in, gate)
    size, block_n, block_k, split_k, num_stages, num_warps = config
    out = empty((rows, n_rows // (2 if gate else 1)), dtype=dtype, device=x.parts.device)
    partial_sums, counter = out, out
    grid = triton.cdiv(rows, size), split_k, triton.cdiv(n_rows, block_n)
    if split_k > 1:
        partial_sums = empty((math.prod(grid), block_n, size), dtype=torch.float32, device=out.device)
        counter = counters(out.device)
    _split_gemm[grid](
        x.parts, x.scale, x.sums, weight.data, weight.scale, weight.scale if weight.zeros is None else weight.zeros,
        out if bias is None else bias, out, partial_sums, counter, rows, len(x.parts) // parts, n_rows, n_in,
        PARTS=parts, ROWS=size, BLOCK_N=block_n, BLOCK_K=block_k, SPLIT_K=split_k, NUM_STAGES=num_stages,
        BITS=weight.format.bits, GROUP=weight.format.group, HAS_ZEROS=weight.zeros is not None, GATE=gate,
        HAS_BIAS=bias is not None, EVEN_K=n_in % (block_k * split_k) == 0, INTERPRETED=INTERPRETED,
        num_warps=num_warps, **pdl_options(out.device, rows <= MAX_CHAINED),
    )  # fmt: skip
    return out


@triton.jit
def _widen(
    data_ptr, scale_ptr, zeros_ptr, order_ptr, out_ptr, n_out, n_in,
    GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_ORDER: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """out[N, K] = (q - zero) scale of 4-bit weights; grid (K / 128, N / BLOCK_N)."""
    row = tl.minimum(tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N), n_out - 1).to(tl.int64)
    WIDTH: tl.constexpr = GROUP if GROUP < 64 else 64  # bytes whose low nibbles share a group
    for start in tl.static_range(0, 64, WIDTH):
        offs_b = tl.program_id(0) * 64 + start + tl.arange(0, WIDTH)
        packed = tl.load(data_ptr + row[:, None] * (n_in // 128 * 64) + offs_b[None, :])
        for i in tl.static_range(2):
            first = tl.program_id(0) * 128 + i * 64 + start
            offs_g = row * (n_in // GROUP) + first // GROUP
            zeros = tl.full([BLOCK_N], 8.0, tl.float32)
            if HAS_ZEROS:
                zeros = tl.load(zeros_ptr + offs_g).to(tl.float32)
            w = ((packed >> (4 * i)) & 15).to(tl.float32) - zeros[:, None]
            w *= tl.load(scale_ptr + offs_g).to(tl.float32)[:, None]
            offs_k = first + tl.arange(0, WIDTH)
            if HAS_ORDER:
                offs_k = tl.load(order_ptr + offs_k)
            tl.store(out_ptr + row[:, None] * n_in + offs_k[None, :], w.to(out_ptr.dtype.element_ty))


def widen(weight: Quantized, dtype: torch.dtype) -> Tensor:
    """Dequantize a 4-bit matrix to [N, K] in `dtype`."""
    rows, columns = weight.shape
    out = empty((rows, columns), dtype=dtype, device=weight.data.device)
    zeros = weight.scale if weight.zeros is None else weight.zeros
    _widen[(columns // weight.format.chunk, triton.cdiv(rows, 64))](
        weight.data, weight.scale, zeros, out if weight.order is None else weight.order, out, rows, columns,
        GROUP=weight.format.group, HAS_ZEROS=weight.zeros is not None, HAS_ORDER=weight.order is not None, BLOCK_N=64,
    )  # fmt: skip
    return out


def max_rows(weight: Quantized) -> float:
    """Return the largest number of rows for which our kernel is used instead of cuBLAS."""
    kind, (n_rows, n_in) = weight.format, weight.shape
    if kind.bits == 4:
        return 256  # gate_up at 256 rows: 79 us; 143 dequantized, by cuBLAS
    # Our int8 kernel is faster than cuBLAS's. cuBLAS reads block scales four at a time.
    if kind.is_integer or (kind.group and weight.scale.shape[1] % 4):
        return math.inf
    if kind.group:
        return 64
    # At 128 rows, a layer with attention takes 165 us by our kernel and 186 by cuBLAS. But down, which has a large K,
    # takes 24 at 64 rows, and 16 by cuBLAS.
    return 32 if n_in > 2 * n_rows else 128


def quantized_linear(
    x: Tensor, weight: Quantized, bias: Tensor | None, gate: str, norm: Norm | None = None
) -> tuple[Tensor, Tensor]:
    """x [M, K] -> (`reference.linear` after `norm`, x + residual); overwrites the residual unless M is 1.

    The result may be `Unfinished`.
    """
    rows, kind = len(x), weight.format
    x = x if isinstance(x, Unfinished) else x.contiguous()
    if rows == 1:
        return cuda_gemv(x, weight, bias, gate, norm) or quantized_gemv(x, weight, bias, gate, norm)
    total = x if norm is None or norm.residual is None else norm.residual
    if rows <= max_rows(weight):
        parts = 2 if rows <= MAX_EXACT_ROWS[kind.bits] else 1
        dtype, sum_group = torch.int8 if kind.is_integer else E4M3, kind.group if kind.bits == 4 else 0
        split = split_rows(x, norm, parts, dtype=dtype, sum_group=sum_group, order=weight.order)
        return split_gemm(split, rows, parts, weight, bias, x.dtype, gate), total
    if kind.bits == 8:
        is_plain = norm is None and not kind.group and x.shape[1] <= MAX_GATED
        products = x.products if is_plain and isinstance(x, Unfinished) else None
        if products is not None and products.gate:
            split = split_gated_rows(products)
        else:
            split = split_rows(x, norm, 1, scale_group=kind.group)
        if not kind.group and (gate or rows <= MAX_ONE_SCALE):
            out = cublas_linear.scaled(split.parts, weight.data, None, torch.bfloat16)
            result = Unfinished(Products(out, rows, gate, x.dtype, (split.scale, weight.scale), bias))
            # Attention and sampling read what follows a norm without a gate; they would only have it finished.
            return (result if gate or norm is None else result.finished()), total
        out = cublas_linear.scaled(split.parts, weight.data, (split.scale, weight.scale), x.dtype)[:rows]
        out = out if bias is None else out.add_(bias)
    else:
        if norm is not None:
            residual, w, eps = norm
            x = rms_norm(x, w, eps) if residual is None else add_rms_norm(x, residual, w, eps)[0]
        out = cublas_linear(x, widen(weight, x.dtype), bias)
    return (gate_and_mul(out, gate) if gate else out), total
