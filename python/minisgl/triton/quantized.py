"""Linear layers with quantized weights, on the FP8 tensor cores: no weight is converted.

For few rows, an activation is the sum of two numbers of 8 bits, the second for what the first rounds away; together
they are as exact as bfloat16. Weights of 4 bits need no conversion either: as float8_e4m3fn, the bytes 0 to 15 are 0 to
15 times 2^-9. For many rows, activations are rounded to 8 bits (cuBLAS), or weights of 4 bits widened to 16. Letters
are those of `linear.py`. Figures are microseconds on an H200 for N x K of 8B.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor, empty

from minisgl.ops.quantized import CHUNK, E4M3, Quantized
from minisgl.triton.cublas import cublas_linear
from minisgl.triton.launch import INTERPRETED, counters
from minisgl.triton.norm import add_rms_norm, gate_and_mul, gated, rms_norm

# The most rows that our kernel multiplies with weights of so many bits, and of these the most that are split in two.
MAX_ROWS: Final = {8: 64, 4: 512}
MAX_EXACT_ROWS: Final = {8: 32, 4: 512}


class Split(NamedTuple):
    """Rows x [M, K] in 8 bits: in two parts, scale (parts[m] + parts[R + m] / 16); or in one, scale parts[m]."""

    parts: Tensor  # [2 R, K] float8_e4m3fn, or [R, K]; R is M rounded up, and rows from M on hold anything
    scale: Tensor  # float32: of two parts [R]; of one [1, R], or [K / 128, R] for each 128 columns
    sums: Tensor  # [2 R, groups] float32 of two parts, where weights have 4 bits; else anything


@triton.jit
def _split_rows(
    x_ptr, residual_ptr, norm_weight_ptr, parts_ptr, scale_ptr, sums_ptr, max_rows, n, eps,
    GROUP: tl.constexpr, HAS_NORM: tl.constexpr, HAS_RESIDUAL: tl.constexpr, IS_WHOLE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One row a program: residual += x and the RMS norm as in `norm.py`, then one part (IS_WHOLE) or two."""
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    mask = offs < n
    x = tl.load(x_ptr + row * n + offs, mask=mask, other=0.0)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + row * n + offs, mask=mask, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(residual_ptr + row * n + offs, x, mask=mask)
    if HAS_NORM:
        w = tl.load(norm_weight_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        y = x.to(tl.float32)
        y *= tl.rsqrt(tl.sum(y * y, 0) / n + eps)
        x = (y.to(norm_weight_ptr.dtype.element_ty).to(tl.float32) * w).to(x.dtype)
    y = x.to(tl.float32)
    if GROUP > 0:
        groups = n // GROUP
        offs_g = tl.arange(0, BLOCK // GROUP)
    if IS_WHOLE and GROUP > 0:
        y = tl.reshape(y, [BLOCK // GROUP, GROUP])
        most = tl.maximum(tl.max(tl.abs(y), 1), 1e-30)
        tl.store(scale_ptr + offs_g * max_rows + row, most / 448.0, mask=offs_g < groups)
        high = tl.reshape((y * (448.0 / most)[:, None]).to(tl.float8e4nv), [BLOCK])
    else:
        most = tl.maximum(tl.max(tl.abs(y), 0), 1e-30)
        tl.store(scale_ptr + row, most / 448.0)
        y *= 448.0 / most
        high = y.to(tl.float8e4nv)
    tl.store(parts_ptr + row * n + offs, high, mask=mask)
    if not IS_WHOLE:
        low = ((y - high.to(tl.float32)) * 16.0).to(tl.float8e4nv)
        tl.store(parts_ptr + (max_rows + row) * n + offs, low, mask=mask)
        if GROUP > 0:
            total = tl.sum(tl.reshape(high.to(tl.float32), [BLOCK // GROUP, GROUP]), 1)
            tl.store(sums_ptr + row * groups + offs_g, total, mask=offs_g < groups)
            total = tl.sum(tl.reshape(low.to(tl.float32), [BLOCK // GROUP, GROUP]), 1)
            tl.store(sums_ptr + (max_rows + row) * groups + offs_g, total, mask=offs_g < groups)


class Norm(NamedTuple):
    """What precedes a product: `residual` += x, if there is one, and an RMS norm."""

    residual: Tensor | None
    weight: Tensor
    eps: float


def split_rows(x: Tensor, group: int, norm: Norm | None, *, is_whole: bool) -> Split:
    """x [M, K], after `norm`, in one part or two; `group` columns share a scale, or for two parts a sum."""
    rows, n = x.shape
    max_rows = triton.cdiv(rows, 16) * 16 if is_whole else split_size(rows, 2) * triton.cdiv(rows, split_size(rows, 2))
    block = triton.next_power_of_2(n)
    parts = empty((max_rows * (1 if is_whole else 2), n), dtype=E4M3, device=x.device)
    groups = n // group if group else 1
    scale = empty((groups, max_rows) if is_whole else (max_rows,), dtype=torch.float32, device=x.device)
    sums = empty((2 * max_rows, groups), dtype=torch.float32, device=x.device) if group and not is_whole else scale
    residual = None if norm is None else norm.residual
    _split_rows[(rows,)](
        x, x if residual is None else residual, x if norm is None else norm.weight, parts, scale, sums,
        max_rows, n, 0.0 if norm is None else norm.eps, GROUP=group, HAS_NORM=norm is not None,
        HAS_RESIDUAL=residual is not None, IS_WHOLE=is_whole, BLOCK=block, num_warps=min(8, max(1, block // 256)),
    )  # fmt: skip
    return Split(parts, scale, sums)


def split_size(rows: int, parts: int) -> int:
    """The rows of x that a program of `_split_gemm` has."""
    return min(128 // parts, max(16 // parts, triton.next_power_of_2(rows)))


@triton.jit
def _half(packed, IS_HIGH: tl.constexpr, INTERPRETED: tl.constexpr):
    """The low or high halves of bytes, as float8_e4m3fn; four bytes an instruction."""
    if INTERPRETED:
        half = (packed >> 4) if IS_HIGH else (packed & 15)
    elif IS_HIGH:
        half = tl.inline_asm_elementwise(
            "{ .reg .b32 t; shr.b32 t, $1, 4; and.b32 $0, t, 0x0F0F0F0F; }", "=r,r", [packed], tl.uint8, True, 4
        )
    else:
        half = tl.inline_asm_elementwise("and.b32 $0, $1, 0x0F0F0F0F;", "=r,r", [packed], tl.uint8, True, 4)
    return half.to(tl.float8e4nv, bitcast=True)


@triton.jit(do_not_specialize=["rows", "max_rows"])
def _split_gemm(
    x_ptr, x_scale_ptr, sums_ptr, weight_ptr, scale_ptr, zeros_ptr, bias_ptr, out_ptr, partial_ptr, counter_ptr,
    rows, max_rows, n_rows, n_in,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr, NUM_STAGES: tl.constexpr,
    PARTS: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr, GATE: tl.constexpr,
    HAS_BIAS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """out[M, N] = x[M, K] weight[n_rows, K]^T for x in PARTS; grid (n_rows / BLOCK_N, SPLIT_K, M / ROWS).

    GATE: the weights are gate above up, read alternately, so that both halves of an output are neighbours. K is split
    as in `_skinny_gemm`. Sums on the tensor cores end after 128 inputs at most, as they have only 14 bits there.
    """
    tile, split = tl.program_id(0), tl.program_id(1)
    row = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row = row < n_rows
    if GATE != "":
        row = row // 2 + row % 2 * (n_rows // 2)
    row = tl.where(is_row, row, 0)
    first = tl.program_id(2) * ROWS
    offs_x = first + tl.arange(0, PARTS * ROWS) % ROWS
    is_x = (offs_x < rows)[:, None]
    offs_x += tl.arange(0, PARTS * ROWS) // ROWS * max_rows
    x_ptrs = x_ptr + offs_x.to(tl.int64)[:, None] * n_in
    acc = tl.zeros([BLOCK_N, PARTS * ROWS], tl.float32)
    length = n_in // SPLIT_K
    for start in tl.range(split * length, split * length + length, BLOCK_K, num_stages=NUM_STAGES):
        if BITS == 8:
            offs_k = start + tl.arange(0, BLOCK_K)
            x = tl.load(x_ptrs + offs_k[None, :], mask=is_x, other=0.0)
            w = tl.load(weight_ptr + row.to(tl.int64)[:, None] * n_in + offs_k[None, :])
            if GROUP == 0:
                acc = tl.dot(w, tl.trans(x), acc, max_num_imprecise_acc=128)
            else:
                scale = tl.load(scale_ptr + row // GROUP * (n_in // GROUP) + start // GROUP)
                acc += tl.dot(w, tl.trans(x)) * scale[:, None]
        else:
            WIDTH: tl.constexpr = 64 if GROUP > 64 else GROUP  # bytes, whose low halves belong to one group
            for i in tl.static_range(BLOCK_K // 2 // WIDTH):
                offs_b = start // 2 + i * WIDTH + tl.arange(0, WIDTH)
                packed = tl.load(weight_ptr + row.to(tl.int64)[:, None] * (n_in // 2) + offs_b[None, :])
                column = start + i * WIDTH // 64 * 128 + i * WIDTH % 64
                offs_k = column + tl.arange(0, WIDTH)
                low = tl.load(x_ptrs + offs_k[None, :], mask=is_x, other=0.0)
                high = tl.load(x_ptrs + offs_k[None, :] + 64, mask=is_x, other=0.0)
                part = tl.dot(_half(packed, False, INTERPRETED), tl.trans(low))
                part_high = tl.dot(_half(packed, True, INTERPRETED), tl.trans(high))
                groups = n_in // GROUP
                if GROUP == 128:
                    part += part_high
                else:
                    group = (column + 64) // GROUP
                    acc += _scaled(
                        part_high, row, group, offs_x, sums_ptr, scale_ptr, zeros_ptr, is_x, groups, HAS_ZEROS
                    )
                group = column // GROUP
                acc += _scaled(part, row, group, offs_x, sums_ptr, scale_ptr, zeros_ptr, is_x, groups, HAS_ZEROS)
    offs_m = first + tl.arange(0, ROWS)
    is_m = (offs_m < rows)[None, :]
    if PARTS == 2:
        high, low = tl.split(tl.permute(tl.reshape(acc, [BLOCK_N, 2, ROWS]), (0, 2, 1)))
        result = high + low * 0.0625  # [BLOCK_N, ROWS]
    else:
        result = acc
    is_last = True
    if SPLIT_K > 1:
        offs = (tile * BLOCK_N + tl.arange(0, BLOCK_N))[:, None] * rows + offs_m[None, :]
        size = tl.num_programs(0) * BLOCK_N * rows
        tl.store(partial_ptr + split * size + offs, result, mask=is_m)
        tl.debug_barrier()
        counter_ptr += tl.program_id(2) * tl.num_programs(0) + tile
        is_last = tl.atomic_add(counter_ptr, 1, sem="acq_rel") == SPLIT_K - 1
    if is_last:
        if SPLIT_K > 1:
            tl.store(counter_ptr, 0)
            result = tl.zeros([BLOCK_N, ROWS], tl.float32)
            for i in tl.static_range(SPLIT_K):
                result += tl.load(partial_ptr + i * size + offs, mask=is_m, other=0.0, cache_modifier=".cg")
        result *= tl.load(x_scale_ptr + offs_m, mask=offs_m < rows, other=0.0)[None, :]
        if BITS == 8 and GROUP == 0:
            result *= tl.load(scale_ptr + row)[:, None]
        if HAS_BIAS:
            result += tl.load(bias_ptr + row).to(tl.float32)[:, None]
        OUT: tl.constexpr = BLOCK_N // 2 if GATE != "" else BLOCK_N
        if GATE != "":
            n_out = n_rows // 2
            gate, up = tl.split(tl.permute(tl.reshape(result, [OUT, 2, ROWS]), (0, 2, 1)))
            values = gated(gate, up, GATE)
        else:
            n_out = n_rows
            values = result
        offs_n = tile * OUT + tl.arange(0, OUT)
        out_ptrs = out_ptr + offs_m.to(tl.int64)[:, None] * n_out + offs_n[None, :]
        mask = (offs_m < rows)[:, None] & (offs_n < n_out)[None, :]
        tl.store(out_ptrs, tl.trans(values).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _scaled(part, row, group, offs_x, sums_ptr, scale_ptr, zeros_ptr, is_x, groups, HAS_ZEROS: tl.constexpr):
    """(q - zero) scale, from the products with q 2^-9 of one group, [BLOCK_N, 2 ROWS]."""
    sums = tl.load(sums_ptr + offs_x.to(tl.int64)[:, None] * groups + group, mask=is_x, other=0.0)
    at = row.to(tl.int64) * groups + group
    zeros = tl.full([row.shape[0]], 8.0, tl.float32)
    if HAS_ZEROS:
        zeros = tl.load(zeros_ptr + at).to(tl.float32)
    scale = tl.load(scale_ptr + at).to(tl.float32)
    return (part * 512.0 - zeros[:, None] * tl.trans(sums)) * scale[:, None]


class SplitConfig(NamedTuple):
    """Tile (rows of weights by inputs), programs per tile, pipeline stages, warps."""

    block_n: int
    block_k: int
    split_k: int
    num_stages: int
    num_warps: int


def split_config(rows: int, parts: int, bits: int, n_in: int, gate: str) -> SplitConfig:
    """The best or nearly so of 60 tiles for the projections of 8B, at 2, 16, 32 and 64 rows."""
    is_wide = parts * split_size(rows, parts) == 128
    split_k = 2 if bits == 4 and not gate and n_in % 256 == 0 else 1
    stages = 4 if bits == 4 else 8
    if gate or is_wide:
        stages = 3 if gate and is_wide else 4
    return SplitConfig(64, 128, split_k, stages, 4)


def split_gemm(
    x: Split, rows: int, weight: Quantized, bias: Tensor | None, dtype: torch.dtype, gate: str = "",
    config: SplitConfig | None = None,
) -> Tensor:  # fmt: skip
    """x [M, K] in one part or two, weight [N or 2N, K] -> [M, N] in `dtype`; gated as in `linear.py: gemv`."""
    n_rows, n_in = weight.shape
    parts = 1 if x.scale.dim() == 2 else 2
    if config is None:
        config = split_config(rows, parts, weight.format.bits, n_in, gate)
    block_n, block_k, split_k, num_stages, num_warps = config
    out = empty((rows, n_rows // (2 if gate else 1)), dtype=dtype, device=x.parts.device)
    partial_sums, counter = out, out
    tiles, size = triton.cdiv(n_rows, block_n), split_size(rows, parts)
    if split_k > 1:
        partial_sums = empty((split_k, tiles * block_n, rows), dtype=torch.float32, device=out.device)
        counter = counters(out.device)
    _split_gemm[(tiles, split_k, triton.cdiv(rows, size))](
        x.parts, x.scale, x.sums, weight.data, weight.scale, weight.scale if weight.zeros is None else weight.zeros,
        out if bias is None else bias, out, partial_sums, counter, rows, len(x.parts) // parts, n_rows, n_in,
        PARTS=parts, ROWS=size, BLOCK_N=block_n, BLOCK_K=block_k, SPLIT_K=split_k, NUM_STAGES=num_stages,
        BITS=weight.format.bits, GROUP=weight.format.group, HAS_ZEROS=weight.zeros is not None, GATE=gate,
        HAS_BIAS=bias is not None, INTERPRETED=INTERPRETED, num_warps=num_warps,
    )  # fmt: skip
    return out


@triton.jit
def _widen(data_ptr, scale_ptr, zeros_ptr, out_ptr, n_in, GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr):
    """out[N, K] = (q - zero) scale of 4-bit numbers; grid (N, K / 128)."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    packed = tl.load(data_ptr + row * (n_in // 2) + chunk * 64 + tl.arange(0, 64))
    for i in tl.static_range(2):
        offs_k = chunk * 128 + i * 64 + tl.arange(0, 64)
        at = row * (n_in // GROUP) + offs_k // GROUP
        q = ((packed >> (4 * i)) & 15).to(tl.float32)
        zeros = 8.0
        if HAS_ZEROS:
            zeros = tl.load(zeros_ptr + at).to(tl.float32)
        w = (q - zeros) * tl.load(scale_ptr + at).to(tl.float32)
        tl.store(out_ptr + row * n_in + offs_k, w.to(out_ptr.dtype.element_ty))


def widen(weight: Quantized, dtype: torch.dtype) -> Tensor:
    """A matrix of 4 bits -> [N, K] in `dtype`."""
    rows, columns = weight.shape
    out = empty((rows, columns), dtype=dtype, device=weight.data.device)
    zeros = weight.scale if weight.zeros is None else weight.zeros
    _widen[(rows, columns // CHUNK)](
        weight.data, weight.scale, zeros, out, columns, GROUP=weight.format.group, HAS_ZEROS=weight.zeros is not None,
        num_warps=1,
    )  # fmt: skip
    return out


def quantized_linear(x: Tensor, weight: Quantized, bias: Tensor | None, gate: str, norm: Norm | None = None) -> Tensor:
    """As `reference.linear`, after `norm`; overwrites its residual."""
    rows, kind = len(x), weight.format
    x = x.contiguous()
    # cuBLAS reads the scales of blocks four at a time.
    if rows <= MAX_ROWS[kind.bits] or (kind.bits == 8 and kind.group and weight.scale.shape[1] % 4):
        is_whole = rows > MAX_EXACT_ROWS[kind.bits]
        parts = split_rows(x, kind.group if kind.bits == 4 else 0, norm, is_whole=is_whole)
        return split_gemm(parts, rows, weight, bias, x.dtype, gate)
    if kind.bits == 8:
        parts = split_rows(x, kind.group, norm, is_whole=True)
        out = cublas_linear.scaled(parts.parts, weight.data, parts.scale, weight.scale, x.dtype)[:rows]
        out = out if bias is None else out.add_(bias)
    else:
        if norm is not None:
            residual, w, eps = norm
            x = rms_norm(x, w, eps) if residual is None else add_rms_norm(x, residual, w, eps)[0]
        out = cublas_linear(x, widen(weight, x.dtype), bias)
    return gate_and_mul(out, gate) if gate else out
