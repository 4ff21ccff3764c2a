"""Linear layers with weights in 16 bits: GEMV on the CUDA cores for one row, and the tiles of GEMMs of few rows.

All are bound by reading the weights. Letters: M rows, N output features, K input features. Figures are microseconds on
an H200 (`benchmark/kernels/ops.py --all`, 2026-11-21); its floors are bytes of weight over 4.55 TB/s.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor, empty, empty_like
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minisgl.kernels.triton.epilogue import gated
from minisgl.kernels.triton.gemm import GemmConfig
from minisgl.kernels.triton.launch import pdl_options
from minisgl.kernels.triton.norm import add_rms_norm, rms_norm
from minisgl.kernels.triton.product import Norm
from minisgl.ops.adapters import AdapterWeights
from minisgl.ops.deferred import finished

MAX_GEMM_ROWS: Final = 64
MAX_PARTS: Final = 4  # of the inputs of an adapter
NUM_SMS: Final = 132  # of an H100 or H200
FULL_WAVE: Final = 88  # programs of `gemm`: fewer leave too many SMs idle for a large K


# -- GEMV


@triton.jit
def read_x(
    x_ptr, residual_ptr, total_ptr, norm_weight_ptr, squares, offs_k, mask,
    HAS_NORM: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Return the inputs `offs_k` of a GEMV in float32, and `squares` with theirs; HAS_* as in `_gemv`."""
    x = tl.load(x_ptr + offs_k, mask=mask, other=0.0)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + offs_k, mask=mask, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        if tl.program_id(0) == 0:
            tl.store(total_ptr + offs_k, x, mask=mask)
    x = x.to(tl.float32)
    if HAS_NORM:
        squares += x * x
        x *= tl.load(norm_weight_ptr + offs_k, mask=mask, other=0.0).to(tl.float32)
    return x, squares


@triton.jit
def _shrink_part(
    x_ptr, slot_ptr, a_ptr, shift_ptr, sums_ptr, program, n_inner, n_in, stride_a, stride_shift,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCKS: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """sums[part] = a x over BLOCKS blocks of inputs, of BLOCK_N ranks; the first part includes the shift."""
    part, offs_r = program % PARTS, program // PARTS * BLOCK_N + tl.arange(0, BLOCK_N)
    first_k = part * BLOCKS * BLOCK_K + tl.arange(0, BLOCK_K)
    slot = tl.load(slot_ptr)  # `norm.py: _embedding` lets slots be read before the wait
    is_rank, at = (slot > 0) & (offs_r < n_inner), (slot - 1).to(tl.int64)
    a_ptrs = a_ptr + at * stride_a + offs_r.to(tl.int64)[:, None] * n_in
    shift = tl.load(shift_ptr + at * stride_shift + offs_r, mask=is_rank & (part == 0), other=0.0)
    if PDL:
        gdc_wait()
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for i in tl.static_range(BLOCKS):
        offs_k = first_k + i * BLOCK_K
        a = tl.load(a_ptrs + offs_k[None, :], mask=is_rank[:, None] & (offs_k < n_in)[None, :], other=0.0)
        x = tl.load(x_ptr + offs_k, mask=offs_k < n_in, other=0.0)
        acc += a.to(tl.float32) * x.to(tl.float32)[None, :]
    tl.store(sums_ptr + part * n_inner + offs_r, tl.sum(acc, 1) + shift.to(tl.float32), mask=is_rank)


@triton.jit
def _gemv(
    x_ptr, residual_ptr, total_ptr, norm_weight_ptr, weight_ptr, bias_ptr, out_ptr, n_out, n_in, eps,
    slot_ptr, a_ptr, shift_ptr, n_inner, stride_a, stride_shift,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NUM_BLOCKS_K: tl.constexpr, HAS_NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, GATE: tl.constexpr, HAS_BIAS: tl.constexpr, PDL: tl.constexpr,
    BLOCKS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """out[N] = f(x)[K] weight[N, K]^T; grid (N / BLOCK_N). The weights go straight to registers.

    HAS_RESIDUAL: x + residual replaces x. The first program stores the sum to `total`, a separate buffer, since other
    programs may not have read `residual` yet. HAS_NORM: RMS norm of x; the result is multiplied by its scale, so one
    pass over x is enough. GATE: weight is [2N, K], gate before up, and out is one of `reference.GATES` of both; "" is a
    plain GEMV. K <= BLOCK_K * NUM_BLOCKS_K.

    With PARTS, the first programs shrink x, alone, to the ranks of an adapter: `total` is [PARTS, n_inner] float32.
    """
    program = tl.program_id(0)
    if PARTS:
        shrinks = tl.cdiv(n_inner, BLOCK_N) * PARTS
        if program < shrinks:
            if PDL:
                gdc_launch_dependents()
            _shrink_part(
                x_ptr, slot_ptr, a_ptr, shift_ptr, total_ptr, program, n_inner, n_in, stride_a, stride_shift,
                BLOCK_N, BLOCK_K, BLOCKS, PARTS, PDL,
            )  # fmt: skip
            return
        program -= shrinks
    offs_n = program * BLOCK_N + tl.arange(0, BLOCK_N)
    first_k = tl.arange(0, BLOCK_K)
    weight_ptrs = weight_ptr + tl.minimum(offs_n, n_out - 1).to(tl.int64)[:, None] * n_in
    up_ptrs = weight_ptrs + n_in.to(tl.int64) * n_out  # n_out may be a constant 1
    if PDL:
        gdc_launch_dependents()
        first = tl.load(weight_ptrs + first_k[None, :], mask=(first_k < n_in)[None, :], other=0.0)
        if GATE != "":
            first_up = tl.load(up_ptrs + first_k[None, :], mask=(first_k < n_in)[None, :], other=0.0)
    if PDL:
        gdc_wait()
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    acc_up = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    squares = tl.zeros([BLOCK_K], tl.float32)
    for i in tl.static_range(NUM_BLOCKS_K):
        offs_k = i * BLOCK_K + first_k
        mask = offs_k < n_in
        if PDL and i == 0:
            w = first
        else:
            w = tl.load(weight_ptrs + offs_k[None, :], mask=mask[None, :], other=0.0)
        if GATE != "":
            if PDL and i == 0:
                up = first_up
            else:
                up = tl.load(up_ptrs + offs_k[None, :], mask=mask[None, :], other=0.0)
        x, squares = read_x(
            x_ptr, residual_ptr, total_ptr, norm_weight_ptr, squares, offs_k, mask, HAS_NORM, HAS_RESIDUAL
        )
        acc += w.to(tl.float32) * x[None, :]
        if GATE != "":
            acc_up += up.to(tl.float32) * x[None, :]
    result = tl.sum(acc, 1)
    scale = 1.0
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(squares, 0) / n_in + eps)
        result *= scale
    if GATE != "":
        result_up = tl.sum(acc_up, 1) * scale
    if HAS_BIAS:
        result += tl.load(bias_ptr + offs_n, mask=offs_n < n_out, other=0.0).to(tl.float32)
    if GATE != "":
        if HAS_BIAS:
            result_up += tl.load(bias_ptr + n_out + offs_n, mask=offs_n < n_out, other=0.0).to(tl.float32)
        result = gated(result, result_up, GATE)
    tl.store(out_ptr + offs_n, result.to(out_ptr.dtype.element_ty), mask=offs_n < n_out)


class GemvConfig(NamedTuple):
    """Tile (outputs, inputs) and warps."""

    block_n: int
    block_k: int
    num_warps: int


def gemv_config(n_out: int, n_in: int) -> GemvConfig:
    """Return the tile: 1,024 inputs (8 per thread) by 2 outputs; by 4 if it covers K and there are many outputs.

    Times with 2 and 4 outputs: N x K = 151936 x 1024 92.6, 69.6; 4096 x 1024 3.51, 2.89; 1024 x 2048 2.39, 2.63; 6144 x
    4096 11.9, 13.1; 5120 x 17408 41.1, 41.3. A gated tile has twice the weights: 12288 x 4096 51.8, 55.7.
    """
    block_k = min(1024, max(16, triton.next_power_of_2(n_in)))
    block_n = 4 if n_in <= 1024 and n_out >= 4096 else 2
    return GemvConfig(block_n, block_k, max(1, min(4, block_n * block_k // 256)))


def gemv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    residual: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    gate: str = "",
    config: GemvConfig | None = None,
    slot: Tensor | None = None,
    adapters: AdapterWeights | None = None,
) -> tuple[Tensor, Tensor]:
    """x [1, K] -> (out [1, N], x + residual [1, K], or x itself without a residual).

    weight [N or 2N, K] in the dtype of x. With `adapters`, `slot` [1] int32 is that of the row, and the second result
    are parts of a x + shift, [parts, P r] float32.
    """
    halves = 2 if gate else 1
    n_out, n_in = weight.shape[0] // halves, weight.shape[1]
    out = empty((1, n_out), dtype=x.dtype, device=x.device)
    total = x if residual is None else empty_like(x)
    block_n, block_k, num_warps = config or gemv_config(n_out, n_in)
    num_blocks = triton.cdiv(n_in, block_k)
    added: tuple[Tensor | int, ...] = (x, x, x, 1, 1, 1)
    programs, parts = triton.cdiv(n_out, block_n), 0
    if adapters is not None:
        assert slot is not None and residual is norm_weight is None, "the row has no slot, or a norm"
        a, shift, n_inner, parts = adapters.a, adapters.shift, adapters.a.shape[1], min(MAX_PARTS, num_blocks)
        total = empty((parts, n_inner), dtype=torch.float32, device=x.device)
        added = (slot, a, shift, n_inner, a.stride(0), shift.stride(0))
        programs += triton.cdiv(n_inner, block_n) * parts
    _gemv[(programs,)](
        x, x if residual is None else residual, total, x if norm_weight is None else norm_weight,
        weight, out if bias is None else bias, out, n_out, n_in, eps, *added,
        BLOCK_N=block_n, BLOCK_K=block_k, NUM_BLOCKS_K=num_blocks, HAS_NORM=norm_weight is not None,
        HAS_RESIDUAL=residual is not None, GATE=gate, HAS_BIAS=bias is not None,
        BLOCKS=triton.cdiv(num_blocks, max(1, parts)), PARTS=parts, num_warps=num_warps, **pdl_options(x.device),
    )  # fmt: skip
    return out, total


# -- GEMM


@lru_cache(maxsize=4096)
def gemm_config(rows: int, n_rows: int, n_in: int, dtype: torch.dtype, gate: str = "") -> GemmConfig | None:
    """Return the tile for weights [n_rows, n_in] in 16 bits, or None if cuBLAS is faster or the shape does not fit.

    Tiles of 64 weight rows are the smallest that wgmma takes. Smaller tiles of x and split-K make a full wave of small
    matrices. Ours / cuBLAS, N x K at 8 rows: 4096 x 1024 4.0 / 5.2, 1024 x 2048 4.1 / 5.7, 4096 x 4096 10.1 / 13.0,
    7168 x 5120 21.7 / 25.9, 4096 x 12288 25.8 / 30.2, 151936 x 4096 275 / 289, gated 24576 x 4096 46.9 / 54.3; cuBLAS
    wins 5120 x 5120 (80 tiles) with 15.5 / 18.5. At 64 rows: 4096 x 1024 4.2 / 5.3, 4096 x 12288 28.7 / 31.5, gated
    24576 x 4096 51.1 / 52.6, 6144 x 4096 16.6 / 16.0. From 96 rows on, cuBLAS wins.
    """
    if not 2 <= rows <= MAX_GEMM_ROWS or dtype not in (torch.bfloat16, torch.float16) or n_in % 128:
        return None
    tiles, block_m, split_k = triton.cdiv(n_rows, 64), max(16, triton.next_power_of_2(rows)), 1
    if block_m == 64 and 2 * tiles <= NUM_SMS and n_in < 4096:
        block_m = 32
    programs = tiles * triton.cdiv(rows, block_m)
    if not gate:
        is_long = n_in >= 8192 and block_m < 64  # then parts of K pay beyond one wave
        while split_k < 4 and n_in >= max(2048, 1024 * split_k) and n_in % (256 * split_k) == 0:
            if 2 * split_k * programs > NUM_SMS and not (is_long and split_k * programs < FULL_WAVE):
                break
            split_k *= 2
        programs *= split_k
        is_wave_part = programs < FULL_WAVE and n_in >= 4096
        if is_wave_part or (NUM_SMS < programs <= 8 * NUM_SMS and not is_long):
            return None
    if programs <= NUM_SMS:
        return GemmConfig(block_m, 64, 128, split_k, 6, 4)
    return GemmConfig(block_m, 64, 64, split_k, 4, 4) if block_m == 64 else GemmConfig(block_m, 64, 128, split_k, 3, 4)


def normalised(x: Tensor, norm: Norm | None) -> tuple[Tensor, Tensor]:
    """Return x after `norm`, and x + residual, which overwrites the residual."""
    if norm is None:
        return x, x
    residual = finished(norm.residual)
    if residual is None:
        return rms_norm(x, norm.weight, norm.eps), x
    return add_rms_norm(x, residual, norm.weight, norm.eps)
