"""GEMV with quantized weights: persistent programs stream the weights through shared memory.

A program loads the weights of its next tiles while it computes, and those of its first tiles before the preceding
kernel has ended. 8-bit weights are multiplied by x in float32. For 4-bit weights, x is rounded to int8 with a scale for
each chunk of 128 columns, and one instruction does four multiplications. Dimension letters are those of `linear.py`.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor, empty, empty_like
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minisgl.kernels.triton.epilogue import gated
from minisgl.kernels.triton.launch import INTERPRETED, pdl_options
from minisgl.kernels.triton.linear import NUM_SMS, read_x
from minisgl.kernels.triton.product import Norm
from minisgl.ops.deferred import Result, finished
from minisgl.ops.quantized import Quantized

SHARED_MEMORY: Final = 220 << 10  # bytes on an SM for the tiles in flight


@triton.jit
def _dot(words, x, start, IS_HIGH: tl.constexpr, INTERPRETED: tl.constexpr):
    """Return start + the dot product of 8 signed bytes with the low or high nibbles of a 64-bit word."""
    if INTERPRETED:
        for i in tl.static_range(8):
            byte = ((x >> (8 * i)) & 255).to(tl.int32)
            start += ((words >> (8 * i + 4 * IS_HIGH)) & 15).to(tl.int32) * ((byte ^ 128) - 128)
        return start
    SHIFT: tl.constexpr = "shr.u32 a, a, 4; shr.u32 b, b, 4;" if IS_HIGH else ""
    return tl.inline_asm_elementwise(
        "{ .reg .b32 a, b, p, q; mov.b64 {a, b}, $1; mov.b64 {p, q}, $2;"
        + SHIFT
        + "and.b32 a, a, 0x0F0F0F0F; and.b32 b, b, 0x0F0F0F0F;"
        "dp4a.u32.s32 p, a, p, $3; dp4a.u32.s32 $0, b, q, p; }",
        "=r,l,l,r", [words, x, start], tl.int32, True, 1,
    )  # fmt: skip


@triton.jit
def numbers_as_float(w, INTERPRETED: tl.constexpr):
    """Convert weights to float32.

    An int8 w becomes the bits of 2^23 + 128 + w, since the conversion instruction is slower than the loads.
    """
    if INTERPRETED or w.dtype != tl.int8:
        return w.to(tl.float32)
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t; xor.b32 t, $4, 0x80808080;"
            "prmt.b32 $0, t, 0x4B000000, 0x7540; add.f32 $0, $0, 0fCB000080;"
            "prmt.b32 $1, t, 0x4B000000, 0x7541; add.f32 $1, $1, 0fCB000080;"
            "prmt.b32 $2, t, 0x4B000000, 0x7542; add.f32 $2, $2, 0fCB000080;"
            "prmt.b32 $3, t, 0x4B000000, 0x7543; add.f32 $3, $3, 0fCB000080; }",
            "=f,=f,=f,=f,r", [w], tl.float32, True, 4,
        )  # fmt: skip


@triton.jit
def _words(x, CHUNKS: tl.constexpr, PARTS: tl.constexpr):
    """Quantize x [CHUNKS * 128] to int8.

    Returns words of 8 bytes for the low and for the high nibbles of the weights, the sums of these bytes for each of
    PARTS parts of a half chunk [CHUNKS * PARTS], and the scales [CHUNKS * PARTS].
    """
    x = tl.reshape(x, [CHUNKS, 128])
    amax = tl.maximum(tl.max(tl.where(x == x, tl.abs(x), float("inf")), 1), 1e-30)  # no integer is NaN, so its scale is
    q = x * (127.0 / amax)[:, None]
    q = (q + tl.where(q < 0, -0.5, 0.5)).to(tl.int32)
    shift = (tl.arange(0, 128) % 8 * 8).to(tl.int64)
    words = tl.sum(tl.reshape((q & 255).to(tl.int64) << shift[None, :], [CHUNKS, 2, 8, 8]), 3)
    low, high = tl.split(tl.permute(words, (0, 2, 1)))
    sums = tl.sum(tl.reshape(q, [CHUNKS, 2, PARTS, 64 // PARTS]), 3).to(tl.float32)
    low_sums, high_sums = tl.split(tl.permute(sums, (0, 2, 1)))
    scale = tl.broadcast_to((amax / 127.0)[:, None], [CHUNKS, PARTS])
    SIZE: tl.constexpr = CHUNKS * PARTS
    low, high = tl.reshape(low, [CHUNKS * 8]), tl.reshape(high, [CHUNKS * 8])
    return low, high, tl.reshape(low_sums, [SIZE]), tl.reshape(high_sums, [SIZE]), tl.reshape(scale, [SIZE])


@triton.jit
def _read(
    x_ptr, residual_ptr, total_ptr, norm_weight_ptr, order_ptr, n_in, eps,
    BITS: tl.constexpr, PARTS: tl.constexpr, BLOCK_K: tl.constexpr, NUM_BLOCKS_K: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_ORDER: tl.constexpr,
):  # fmt: skip
    """Return the norm's factor for the result, and x as a tuple of blocks that can be multiplied by the weights."""
    squares = tl.zeros([BLOCK_K], tl.float32)
    blocks = tl.tuple(())
    for i in tl.static_range(NUM_BLOCKS_K):
        offs_k = i * BLOCK_K + tl.arange(0, BLOCK_K)
        mask = offs_k < n_in
        if HAS_ORDER:
            offs_k = tl.load(order_ptr + offs_k, mask=mask, other=0)
        x, squares = read_x(
            x_ptr, residual_ptr, total_ptr, norm_weight_ptr, squares, offs_k, mask, HAS_NORM, HAS_RESIDUAL
        )
        if BITS == 4:
            blocks += _words(x, BLOCK_K // 128, PARTS)
        else:
            blocks += (x,)
    factor = tl.full([], 1.0, tl.float32)
    if HAS_NORM:
        factor = tl.rsqrt(tl.sum(squares, 0) / n_in + eps)
    return factor, blocks


@triton.jit
def _zeros(BITS: tl.constexpr, PARTS: tl.constexpr, BLOCK_K: tl.constexpr, NUM_BLOCKS_K: tl.constexpr):
    """Return zeros with the types and shapes of what `_read` returns."""
    blocks = tl.tuple(())
    for _ in tl.static_range(NUM_BLOCKS_K):
        if BITS == 4:
            words = tl.zeros([BLOCK_K // 16], tl.int64)
            groups = tl.zeros([BLOCK_K // 128 * PARTS], tl.float32)
            blocks += (words, words, groups, groups, groups)
        else:
            blocks += (tl.zeros([BLOCK_K], tl.float32),)
    return blocks


@triton.jit
def _rows(tile, n_out, BLOCK_N: tl.constexpr, OUT: tl.constexpr):
    """Return the rows of a tile. If OUT is half of BLOCK_N, rows of gate come first, then those of up."""
    offs = tl.minimum(tile * OUT + tl.arange(0, BLOCK_N) % OUT, n_out - 1)
    return (offs + tl.arange(0, BLOCK_N) // OUT * n_out).to(tl.int64)


@triton.jit
def _scales(
    ptr, rows, num_groups, GROUP: tl.constexpr, PARTS: tl.constexpr, CHUNKS: tl.constexpr, NUM_BLOCKS_K: tl.constexpr,
    FIRST: tl.constexpr,
):  # fmt: skip
    """Load the scales or zero points [rows, CHUNKS * PARTS] of each block: PARTS groups per chunk, from FIRST on."""
    offs = tl.arange(0, CHUNKS * PARTS)
    found = tl.tuple(())
    for i in tl.static_range(NUM_BLOCKS_K):
        group = (i * CHUNKS + offs // PARTS) * (128 // GROUP) + FIRST + offs % PARTS
        ptrs = ptr + rows[:, None] * num_groups + group[None, :]
        found += (tl.load(ptrs, mask=(group < num_groups)[None, :], other=0.0),)
    return found


@triton.jit
def _all_scales(
    scale_ptr, zeros_ptr, rows, num_groups, BITS: tl.constexpr, GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr,
    PARTS: tl.constexpr, CHUNKS: tl.constexpr, NUM_BLOCKS_K: tl.constexpr,
):  # fmt: skip
    """Load scales and zero points for the low nibbles, and for the high ones if these are in other groups."""
    found = tl.tuple(())
    if GROUP > 0:
        rows = rows // GROUP if BITS == 8 else rows
        for half in tl.static_range(2 if GROUP < 128 else 1):
            found += _scales(scale_ptr, rows, num_groups, GROUP, PARTS, CHUNKS, NUM_BLOCKS_K, 64 // GROUP * half)
            if HAS_ZEROS:
                found += _scales(zeros_ptr, rows, num_groups, GROUP, PARTS, CHUNKS, NUM_BLOCKS_K, 64 // GROUP * half)
    return found


@triton.jit
def _quantized_gemv(
    x_ptr, residual_ptr, total_ptr, norm_weight_ptr, order_ptr, weight_ptr, scale_ptr, zeros_ptr, bias_ptr, out_ptr,
    n_out, width, num_groups, eps,
    BITS: tl.constexpr, GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    NUM_BLOCKS_K: tl.constexpr, NUM_STAGES: tl.constexpr, HAS_NORM: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    HAS_ORDER: tl.constexpr, GATE: tl.constexpr, HAS_BIAS: tl.constexpr, INTERPRETED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[N] = f(x)[K] weight[N, K]^T as `_gemv`, with any number of programs.

    HAS_ORDER: columns of x are read in the order that `order_ptr` gives. A row of weights has `width` elements: bytes,
    or 64-bit words with 16 columns of 4 bits each.
    """
    OUT: tl.constexpr = BLOCK_N // 2 if GATE != "" else BLOCK_N
    CHUNKS: tl.constexpr = BLOCK_K // 128
    PARTS: tl.constexpr = 2 if GROUP == 32 else 1  # groups per half chunk
    WIDTH: tl.constexpr = BLOCK_K // 16 if BITS == 4 else BLOCK_K
    tiles = tl.cdiv(n_out, OUT)
    first = tl.program_id(0) * tiles // tl.num_programs(0)
    last = (tl.program_id(0) + 1) * tiles // tl.num_programs(0)
    if PDL:
        gdc_launch_dependents()
    factor = tl.full([], 1.0, tl.float32)
    x = _zeros(BITS, PARTS, BLOCK_K, NUM_BLOCKS_K)
    rows = _rows(first, n_out, BLOCK_N, OUT)
    scales = _all_scales(
        scale_ptr, zeros_ptr, rows, num_groups, BITS, GROUP, HAS_ZEROS, PARTS, CHUNKS, NUM_BLOCKS_K
    )  # fmt: skip
    for tile in tl.range(first, last, num_stages=NUM_STAGES):
        if tile == first:  # inside the loop, whose prefetch of weights has begun by now
            if PDL:
                gdc_wait()
            factor, x = _read(
                x_ptr, residual_ptr, total_ptr, norm_weight_ptr, order_ptr, width * (16 if BITS == 4 else 1), eps,
                BITS, PARTS, BLOCK_K, NUM_BLOCKS_K, HAS_NORM, HAS_RESIDUAL, HAS_ORDER,
            )  # fmt: skip
        rows = _rows(tile + 1, n_out, BLOCK_N, OUT)
        following = _all_scales(
            scale_ptr, zeros_ptr, rows, num_groups, BITS, GROUP, HAS_ZEROS, PARTS, CHUNKS, NUM_BLOCKS_K
        )  # fmt: skip
        rows = _rows(tile, n_out, BLOCK_N, OUT)
        acc = tl.zeros([BLOCK_N, CHUNKS * PARTS if GROUP > 0 else BLOCK_K], tl.float32)
        for i in tl.static_range(NUM_BLOCKS_K):
            offs = i * WIDTH + tl.arange(0, WIDTH)
            w = tl.load(
                weight_ptr + rows[:, None] * width + offs[None, :],
                mask=(offs < width)[None, :],
                other=0 if BITS == 4 else 0.0,
            )
            if BITS == 4:
                part = tl.zeros([BLOCK_N, WIDTH], tl.int32)
                for half in tl.static_range(2):
                    meets = tl.broadcast_to(x[5 * i + half][None, :], [BLOCK_N, WIDTH])
                    part = _dot(w, meets, part, half == 1, INTERPRETED)
                    if half == 1 or GROUP < 128:
                        total = tl.sum(tl.reshape(part, [BLOCK_N, CHUNKS * PARTS, 8 // PARTS]), 2).to(tl.float32)
                        sums = x[5 * i + 2 + half]
                        if GROUP == 128:
                            sums += x[5 * i + 2]
                        # `scales`: those of all blocks, then the zero points; low nibbles first.
                        zero = tl.full([BLOCK_N, CHUNKS * PARTS], 8.0, tl.float32)
                        if HAS_ZEROS:
                            zero = scales[(half * 2 * (GROUP < 128) + 1) * NUM_BLOCKS_K + i].to(tl.float32)
                        scale = scales[half * (1 + HAS_ZEROS) * (GROUP < 128) * NUM_BLOCKS_K + i].to(tl.float32)
                        scale *= x[5 * i + 4][None, :]
                        acc += (total - zero * sums[None, :]) * scale
                        part = tl.zeros([BLOCK_N, WIDTH], tl.int32)
            elif GROUP > 0:
                part = tl.reshape(numbers_as_float(w, INTERPRETED) * x[i][None, :], [BLOCK_N, CHUNKS, 128])
                acc += tl.sum(part, 2) * scales[i]
            else:
                acc += numbers_as_float(w, INTERPRETED) * x[i][None, :]
        scales = following
        result = tl.sum(acc, 1) * factor
        if GROUP == 0:
            result *= tl.load(scale_ptr + rows)
        if HAS_BIAS:
            result += tl.load(bias_ptr + rows).to(tl.float32)
        if GATE != "":
            gate, up = tl.split(tl.permute(tl.reshape(result, [2, OUT]), (1, 0)))
            result = gated(gate, up, GATE)
        offs_n = tile * OUT + tl.arange(0, OUT)
        tl.store(out_ptr + offs_n, result.to(out_ptr.dtype.element_ty), mask=offs_n < n_out)


class StreamConfig(NamedTuple):
    """Rows per tile, columns per block, programs per SM, pipeline stages, warps."""

    block_n: int
    block_k: int
    programs: int
    num_stages: int
    num_warps: int


def stream_config(bits: int, n_in: int, gate: str) -> StreamConfig:
    """Return the fastest, or nearly so, of 10 tiles in a chain of the layers of 8B.

    A layer takes 56 us with 8-bit and 36 with 4-bit weights (floors at 4.55 TB/s: 42.4 and 21.9). With `_gemv` and
    separate norms it takes 60 with 8-bit and 93 with 16-bit weights.
    """
    block_k = next((b for b in (4096, 2048) if triton.cdiv(n_in, b) * b <= 1.2 * n_in), 1024)
    if bits == 8:
        config = StreamConfig(4, block_k, 2, 3, 8) if n_in > 8192 else StreamConfig(4, block_k, 4, 4, 4)
    elif n_in > 8192:
        config = StreamConfig(16, block_k, 1, 3, 8)
    else:
        config = StreamConfig(16, block_k, 2, 3, 8) if gate else StreamConfig(4, block_k, 4, 3, 4)
    row = triton.cdiv(n_in, block_k) * block_k * bits // 8 * (config.num_stages - 1)
    block_n = min(config.block_n, 1 << (SHARED_MEMORY // row).bit_length() - 1)
    return config._replace(block_n=block_n, programs=min(config.programs, SHARED_MEMORY // (row * block_n)))


def quantized_gemv(
    x: Result, weight: Quantized, bias: Tensor | None, gate: str = "", norm: Norm | None = None,
    config: StreamConfig | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """x [1, K] -> (out [1, N], x + residual [1, K], or x itself without a residual)."""
    x, kind = finished(x), weight.format
    n_out, n_in = weight.shape[0] // (2 if gate else 1), weight.shape[1]
    out = empty((1, n_out), dtype=x.dtype, device=x.device)
    deferred, norm_weight, eps = norm or (None, None, 0.0)
    residual = finished(deferred)
    total = x if residual is None else empty_like(x)
    data = weight.data.view(torch.int64) if kind.bits == 4 else weight.data
    block_n, block_k, programs, num_stages, num_warps = config or stream_config(kind.bits, n_in, gate)
    tiles = triton.cdiv(n_out, block_n // (2 if gate else 1))
    _quantized_gemv[(min(tiles, programs * NUM_SMS),)](
        x, x if residual is None else residual, total, x if norm_weight is None else norm_weight,
        x if weight.order is None else weight.order, data, weight.scale,
        weight.scale if weight.zeros is None else weight.zeros, out if bias is None else bias, out, n_out,
        data.shape[1], weight.scale.shape[1], eps, BITS=kind.bits, GROUP=kind.group, HAS_ZEROS=weight.zeros is not None,
        BLOCK_N=block_n, BLOCK_K=block_k, NUM_BLOCKS_K=triton.cdiv(n_in, block_k), NUM_STAGES=num_stages,
        HAS_NORM=norm is not None, HAS_RESIDUAL=residual is not None, HAS_ORDER=weight.order is not None, GATE=gate,
        HAS_BIAS=bias is not None, INTERPRETED=INTERPRETED,
        num_warps=num_warps, **pdl_options(x.device),
    )  # fmt: skip
    return out, total
