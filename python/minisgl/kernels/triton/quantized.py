"""Linear layers with quantized weights for two or more rows, on the 8-bit tensor cores.

With few rows, each activation is split into two 8-bit values: the second holds the rounding error of the first, and
their sum is as exact as bfloat16. 4-bit weights are not dequantized: read as float8_e4m3fn, the bytes 0 to 15 are 0 to
15 times 2^-9, and E2M1, with its sign bit moved to the top, is 2^-6 times its value. With many rows, activations are
quantized to 8 bits (cuBLAS multiplies FP8 where our kernels do not), or 4-bit weights are dequantized to 16 bits.
Dimension letters are those of `linear.py`. Figures are microseconds on an H200 for the N x K of 8B.
"""

from __future__ import annotations

import math
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor, empty
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minisgl.core.rounding import ceil_div
from minisgl.kernels.triton.cublas import cublas_linear
from minisgl.kernels.triton.epilogue import Products, gate_and_mul, gated, load_finished
from minisgl.kernels.triton.gemm import GemmConfig, Split, gemm
from minisgl.kernels.triton.launch import MAX_CHAINED, pdl_options
from minisgl.kernels.triton.linear import NUM_SMS, normalised
from minisgl.kernels.triton.product import Norm, Product
from minisgl.ops.deferred import Deferred, Result, finished
from minisgl.ops.quantized import E4M3, Quantized

MAX_EXACT_ROWS: Final = {8: 32, 4: 16}  # up to this many rows, activations are split in two; by bits per weight
# Up to this many rows, cuBLAS with a per-tensor scale and a rescaling kernel is faster than cuBLAS with per-row scales.
MAX_ONE_SCALE: Final = 256
MAX_WIDE_ROWS: Final = 128  # rows that are quantized by 16 warps each
# Up to this many columns, activation and quantization are one kernel: more would not fit its registers. 8,192 rows of
# 12,288 columns take 130 us, by two kernels 219; of 25,600 columns 426 and 556.
MAX_GATED: Final = 25600
WIDE: Final = 8192  # rows of more columns are quantized faster in blocks of columns: 17,408 x 8,192 in 144 us, not 198


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
        amax = tl.maximum(tl.max(tl.abs(y), 1), 1e-30)
        tl.store(scale_ptr + offs_g * max_rows + row, amax / 448.0, mask=offs_g < n // SCALE_GROUP)
        y = tl.reshape(y * (448.0 / amax)[:, None], [BLOCK])
    else:
        # An integer cannot be NaN, so a row with NaN gets an infinite scale.
        amax = tl.maximum(tl.max(tl.where(y == y, tl.abs(y), float("inf")), 0), 1e-30)
        tl.store(scale_ptr + row, amax / MAX)
        y *= MAX / amax
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
    x: Result, norm: Norm | None, parts: int, *, dtype: torch.dtype = E4M3, scale_group: int = 0, sum_group: int = 0,
    order: Tensor | None = None,
) -> Split:  # fmt: skip
    """Quantize x [M, K] after `norm`.

    `scale_group` is the number of columns that share a scale (0: the whole row); `sum_group` likewise for `Split.sums`
    (0: no sums).
    """
    rows, n = x.shape
    if norm is None and parts == 1 and dtype == E4M3 and not scale_group and not sum_group and order is None:
        products = x.work if isinstance(x, Deferred) else None
        if n <= MAX_GATED and isinstance(products, Products) and products.gate:
            return split_whole_rows(products)
        if WIDE < n <= MAX_GATED:
            return split_whole_rows(Products(finished(x), rows, "", x.dtype, None, None))
    residual = None if norm is None else finished(norm.residual)
    products = x.work if isinstance(x, Deferred) and residual is not None else None
    if not isinstance(products, Products) or products.gate:
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
    # Of 256 unfinished rows of 4,096, 16 warps take 2.9 us and 8 take 3.8; with few rows, 16 save 0.2 us each.
    max_warps = 16 if scales or rows <= MAX_WIDE_ROWS else 8
    _split_rows[(rows,)](
        x, x_scale, column_scale, x if bias is None else bias, x if residual is None else residual,
        x if norm is None else norm.weight, x if order is None else order, found, scale, sums, max_rows, n,
        0.0 if norm is None else norm.eps,
        PARTS=parts, SCALE_GROUP=scale_group, SUM_GROUP=sum_group, HAS_SCALES=scales is not None,
        HAS_BIAS=bias is not None, HAS_NORM=norm is not None, HAS_RESIDUAL=residual is not None,
        HAS_ORDER=order is not None, BLOCK=block, num_warps=min(max_warps, max(1, block // 256)),
        **pdl_options(x.device, rows <= MAX_CHAINED),
    )  # fmt: skip
    return Split(found, scale, sums)


@triton.jit
def _max_or_nan(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _split_whole_rows(
    x_ptr, x_scale_ptr, column_scale_ptr, bias_ptr, parts_ptr, scale_ptr, n,
    GATE: tl.constexpr, HAS_SCALES: tl.constexpr, HAS_BIAS: tl.constexpr, NUM_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`_finish` and `_split_rows` in one part: products [T, 2 n with GATE, else n] -> FP8 [T, n], one row per program.

    The row stays in registers, in blocks of columns. EVEN: BLOCK divides n. NaN reaches the scale through the maximum.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * (2 * n if GATE != "" else n)
    x_scale_ptr += row
    blocks = tl.tuple(())
    amax = tl.full([BLOCK], 1e-30, tl.float32)
    for i in tl.static_range(NUM_BLOCKS):
        offs = i * BLOCK + tl.arange(0, BLOCK)
        mask = EVEN | (offs < n)
        y = load_finished(x_ptr, x_scale_ptr, column_scale_ptr, bias_ptr, offs, mask, HAS_SCALES, HAS_BIAS)
        if GATE != "":
            up = load_finished(x_ptr, x_scale_ptr, column_scale_ptr, bias_ptr, n + offs, mask, HAS_SCALES, HAS_BIAS)
            y = gated(y, up, GATE, True)
        amax = _max_or_nan(amax, tl.abs(y))
        blocks += (y,)
    greatest = tl.reduce(amax, 0, _max_or_nan)
    tl.store(scale_ptr + row, greatest / 448.0)
    factor = 448.0 / greatest
    for i in tl.static_range(NUM_BLOCKS):
        offs = i * BLOCK + tl.arange(0, BLOCK)
        tl.store(parts_ptr + row * n + offs, (blocks[i] * factor).to(tl.float8e4nv), mask=EVEN | (offs < n))


def split_whole_rows(products: Products) -> Split:
    """Finish products and quantize them to one part of FP8, with a scale for each row."""
    x, rows, gate, _, scales, bias = products
    n = products.shape[1]
    x_scale, scale = scales or (x, x)
    max_rows = triton.cdiv(rows, 16) * 16
    found = empty((max_rows, n), dtype=E4M3, device=x.device)
    found_scale = empty((1, max_rows), dtype=torch.float32, device=x.device)
    block = min(4096, triton.next_power_of_2(n))
    # Two programs of 16 warps fit on an SM, or one of 32. With 73 registers, 8,192 rows of 12,288 take 232 us, not 130.
    num_warps = max(1, block // 256) * (2 if n > 3 * block else 1)
    _split_whole_rows[(rows,)](
        x, x_scale, scale, x if bias is None else bias, found, found_scale, n, GATE=gate,
        HAS_SCALES=scales is not None, HAS_BIAS=bias is not None, NUM_BLOCKS=triton.cdiv(n, block), BLOCK=block,
        EVEN=n % block == 0, num_warps=num_warps, maxnreg=64, **pdl_options(x.device, rows <= MAX_CHAINED),
    )  # fmt: skip
    return Split(found, found_scale, found_scale)


def split_size(rows: int, parts: int) -> int:
    """Return the rows of x per program of `gemm`."""
    return min(128 // parts, max(16 // parts, triton.next_power_of_2(rows)))


def split_config(rows: int, parts: int, bits: int, n_rows: int, n_in: int, gate: str) -> GemmConfig:
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
            return GemmConfig(block_m, 64, block_k, split_k, 3, 4)
        if n_in > 2 * n_rows and n_in % 256 == 0:
            return GemmConfig(64, 128, 128, 2, 3, 8)  # down, 128 rows: 51 us; 57 without split-K
        return GemmConfig(block_m, 64, 128, 1, 3, 4)
    if rows > 128:
        return GemmConfig(128, 128, 128, 1, 3, 8)  # int8, gate_up at 8,192 rows: 1,350 us, cuBLAS 1,865
    if gate:
        return GemmConfig(block_m, 64, 128, 1, 3 if block_m == 128 else 4, 4)
    # If one wave of programs suffices, give each an SM of its own (many stages): copies from L2 bound an SM.
    is_one_wave = triton.cdiv(n_rows, 64) * triton.cdiv(rows, block_m) <= NUM_SMS
    return GemmConfig(block_m, 64, 128, 1, 8 if is_one_wave else 6, 4)


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


def refuses_rows(product: Product) -> str | None:
    """Return why cuBLAS is faster than Triton's kernel."""
    kind, max_rows = product.kind, math.inf
    assert kind is not None, "the weight of the product is not quantized"
    if kind.bits == 4:
        max_rows = 256  # gate_up at 256 rows: 79 us; 143 dequantized, by cuBLAS
    # Our int8 kernel is faster than cuBLAS's. cuBLAS reads block scales four at a time.
    elif not (kind.is_integer or (kind.group and ceil_div(product.n_in, kind.group) % 4)):
        # At 128 rows, a layer with attention takes 165 us by our kernel and 186 by cuBLAS. But down, which has a large
        # K, takes 24 at 64 rows, and 16 by cuBLAS.
        max_rows = 64 if kind.group else 32 if product.n_in > 2 * product.n_rows else 128
    return f"for up to {max_rows} rows" if product.rows > max_rows else None


def by_tensor_cores(
    x: Result, weight: Quantized, bias: Tensor | None, gate: str, norm: Norm | None
) -> tuple[Result, Result]:
    """Quantize the rows, and multiply by Triton's kernel."""
    split, parts = quantized_rows(x, weight, norm)
    return multiply_rows(split, parts, x, weight, bias, gate), total(x, norm)


def by_cublas_in_fp8(
    x: Result, weight: Quantized, bias: Tensor | None, gate: str, norm: Norm | None
) -> tuple[Result, Result]:
    """Quantize the rows to FP8, and multiply by cuBLAS. The result may be `Deferred`."""
    rows, kind = len(x), weight.format
    split = split_rows(x, norm, 1, scale_group=kind.group)
    if not kind.group and (gate or rows <= MAX_ONE_SCALE):
        out = cublas_linear.scaled(split.parts, weight.data, None, torch.bfloat16)
        result = Deferred(Products(out, rows, gate, x.dtype, (split.scale, weight.scale), bias))
        # Attention and sampling read what follows a norm without a gate; they would only have it finished.
        return (result if gate or norm is None else result.finished()), total(x, norm)
    out = cublas_linear.scaled(split.parts, weight.data, (split.scale, weight.scale), x.dtype)[:rows]
    out = out if bias is None else out.add_(bias)
    return (gate_and_mul(out, gate) if gate else out), total(x, norm)


def by_cublas_widened(
    x: Result, weight: Quantized, bias: Tensor | None, gate: str, norm: Norm | None
) -> tuple[Result, Result]:
    """Dequantize 4-bit weights, and multiply by cuBLAS."""
    x = finished(x)
    normed, total = normalised(x, norm)
    out = cublas_linear(normed, widen(weight, x.dtype), bias)
    return (gate_and_mul(out, gate) if gate else out), total


def quantized_rows(x: Result, weight: Quantized, norm: Norm | None) -> tuple[Split, int]:
    """Return the rows for our kernels, and their number of parts."""
    kind = weight.format
    parts = 2 if len(x) <= MAX_EXACT_ROWS[kind.bits] else 1
    dtype, sum_group = torch.int8 if kind.is_integer else E4M3, kind.group if kind.bits == 4 else 0
    return split_rows(x, norm, parts, dtype=dtype, sum_group=sum_group, order=weight.order), parts


def multiply_rows(split: Split, parts: int, x: Result, weight: Quantized, bias: Tensor | None, gate: str) -> Tensor:
    n_rows, n_in = weight.shape
    config = split_config(len(x), parts, weight.format.bits, n_rows, n_in, gate)
    return gemm(split, len(x), parts, weight, bias, x.dtype, gate, config)


def total(x: Result, norm: Norm | None) -> Result:
    return x if norm is None or norm.residual is None else norm.residual
