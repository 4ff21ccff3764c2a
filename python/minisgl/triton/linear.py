"""Linear layers for up to 16 rows: GEMV on the CUDA cores for one row or a few, GEMM on the tensor cores for 2 to 16.

All are bound by reading the weights. Letters: M rows, N output features, K input features. Figures are microseconds on
an H200 (`benchmark/kernels/ops.py --all`, 2026-11-21); its floors are bytes of weight over 4.55 TB/s.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor, empty, empty_like
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minisgl.triton.epilogue import gated
from minisgl.triton.launch import counters, pdl_options

MAX_GEMM_ROWS: Final = 16
NUM_SMS: Final = 132  # of an H100 or H200


class Norm(NamedTuple):
    """What precedes a GEMM: `residual` += x, if there is a residual, and an RMS norm."""

    residual: Tensor | None
    weight: Tensor
    eps: float


# -- GEMV


@triton.jit
def _gemv(
    x_ptr, residual_ptr, total_ptr, norm_weight_ptr, weight_ptr, bias_ptr, out_ptr, n_out, n_in, eps,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NUM_BLOCKS_K: tl.constexpr, HAS_NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, GATE: tl.constexpr, HAS_BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[N] = f(x)[K] weight[N, K]^T; grid (N / BLOCK_N). The weights go straight to registers.

    HAS_RESIDUAL: x + residual replaces x. The first program stores the sum to `total`, a separate buffer, since other
    programs may not have read `residual` yet. HAS_NORM: RMS norm of x; the result is multiplied by its scale, so one
    pass over x is enough. GATE: weight is [2N, K], gate before up, and out is one of `reference.GATES` of both; "" is a
    plain GEMV. K <= BLOCK_K * NUM_BLOCKS_K.
    """
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    first_k = tl.arange(0, BLOCK_K)
    weight_ptrs = weight_ptr + tl.minimum(offs_n, n_out - 1).to(tl.int64)[:, None] * n_in
    up_ptrs = weight_ptrs + n_out.to(tl.int64) * n_in
    if PDL:
        gdc_launch_dependents()
        first = tl.load(weight_ptrs + first_k[None, :], mask=(first_k < n_in)[None, :], other=0.0)
        if GATE != "":
            first_up = tl.load(up_ptrs + first_k[None, :], mask=(first_k < n_in)[None, :], other=0.0)
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
        acc += w.to(tl.float32) * x[None, :]
        if GATE != "":
            acc_up += up.to(tl.float32) * x[None, :]
    result = tl.sum(acc, 1)
    scale = 1.0
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(squares, 0) / n_in + eps)
        result *= scale
    if HAS_BIAS:
        result += tl.load(bias_ptr + offs_n, mask=offs_n < n_out, other=0.0).to(tl.float32)
    if GATE != "":
        result_up = tl.sum(acc_up, 1) * scale
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
) -> tuple[Tensor, Tensor]:
    """x [1, K] -> (out [1, N], x + residual [1, K], or x itself without a residual).

    weight [N or 2N, K] in the dtype of x.
    """
    n_out, n_in = weight.shape[0] // (2 if gate else 1), weight.shape[1]
    out = empty((1, n_out), dtype=x.dtype, device=x.device)
    total = x if residual is None else empty_like(x)
    block_n, block_k, num_warps = config or gemv_config(n_out, n_in)
    _gemv[(triton.cdiv(n_out, block_n),)](
        x, x if residual is None else residual, total, x if norm_weight is None else norm_weight,
        weight, out if bias is None else bias, out, n_out, n_in, eps,
        BLOCK_N=block_n, BLOCK_K=block_k, NUM_BLOCKS_K=triton.cdiv(n_in, block_k), HAS_NORM=norm_weight is not None,
        HAS_RESIDUAL=residual is not None, GATE=gate, HAS_BIAS=bias is not None, num_warps=num_warps,
        **pdl_options(x.device),
    )  # fmt: skip
    return out, total


@triton.jit(do_not_specialize=["rows"])
def _gemv_rows(
    x_ptr, weight_ptr, bias_ptr, out_ptr, rows, n_out, n_in,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NUM_BLOCKS_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """`_gemv` for up to BLOCK_M rows, with tiles [BLOCK_M, BLOCK_N, BLOCK_K] in registers."""
    m3, k0 = tl.arange(0, BLOCK_M)[:, None, None], tl.arange(0, BLOCK_K)[None, None, :]
    n3 = tl.minimum(tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), n_out - 1)[None, :, None]
    acc = tl.zeros([BLOCK_M, BLOCK_N, BLOCK_K], tl.float32)
    for i in tl.static_range(NUM_BLOCKS_K):
        k3 = i * BLOCK_K + k0
        w = tl.load(weight_ptr + n3.to(tl.int64) * n_in + k3, mask=k3 < n_in, other=0.0)
        x = tl.load(x_ptr + m3 * n_in + k3, mask=(m3 < rows) & (k3 < n_in), other=0.0)
        acc += w.to(tl.float32) * x.to(tl.float32)
    result = tl.sum(acc, 2)
    offs_m = tl.arange(0, BLOCK_M)[:, None]
    offs_n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    if HAS_BIAS:
        result += tl.load(bias_ptr + offs_n, mask=offs_n < n_out, other=0.0).to(tl.float32)
    mask = (offs_m < rows) & (offs_n < n_out)
    tl.store(out_ptr + offs_m * n_out + offs_n, result.to(out_ptr.dtype.element_ty), mask=mask)


def prefers_gemv_rows(rows: int, n_out: int, n_in: int) -> bool:
    """Whether the CUDA cores are faster for a few rows, as for small matrices: every program reads all of x.

    `gemv_rows` / the best of `skinny_gemm` and cuBLAS, for 2 rows and for 4: N x K = 1024 x 2048 3.4 / 4.9, 4.1 / 5.0;
    1024 x 3072 4.0 / 5.6, 4.7 / 5.7; 4096 x 1024 4.8 / 5.0, 5.9 / 5.0.
    """
    return 2 <= rows <= 4 and n_out <= 2048 and n_in <= 4096


def gemv_rows(x: Tensor, weight: Tensor, bias: Tensor | None, block_n: int = 2) -> Tensor:
    """x [M, K], weight [N, K] -> [M, N], with `block_n` outputs per program."""
    (rows, n_in), n_out = x.shape, len(weight)
    out = empty((rows, n_out), dtype=x.dtype, device=x.device)
    block_k = min(1024, max(16, triton.next_power_of_2(n_in)))
    _gemv_rows[(triton.cdiv(n_out, block_n),)](
        x, weight, out if bias is None else bias, out, rows, n_out, n_in,
        BLOCK_M=triton.next_power_of_2(rows), BLOCK_N=block_n, BLOCK_K=block_k,
        NUM_BLOCKS_K=triton.cdiv(n_in, block_k), HAS_BIAS=bias is not None, num_warps=4,
    )  # fmt: skip
    return out


# -- GEMM


@triton.jit(do_not_specialize=["rows"])
def _skinny_gemm(
    x_ptr, weight_ptr, bias_ptr, out_ptr, partial_ptr, counter_ptr, rows, n_out, n_in,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr,
    NUM_STAGES: tl.constexpr, GATE: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """out[M, N] = x[M, K] weight[N, K]^T; grid (N / BLOCK_N, SPLIT_K). The weights are the tensor cores' M operand.

    SPLIT_K programs share a tile of outputs, each with a part of K. The last one to finish adds the partial sums in
    order, so the result does not depend on which program is last. Counters are left at zero. K is a multiple of
    BLOCK_K * SPLIT_K.
    """
    tile, split = tl.program_id(0), tl.program_id(1)
    offs_n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_m = tl.arange(0, BLOCK_M)
    weight_ptrs = weight_ptr + tl.minimum(offs_n, n_out - 1).to(tl.int64)[:, None] * n_in
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    acc_up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    length = n_in // (SPLIT_K * BLOCK_K) * BLOCK_K  # aligned, for copies of 16 bytes
    for start in tl.range(split * length, split * length + length, BLOCK_K, num_stages=NUM_STAGES):
        offs_k = start + tl.arange(0, BLOCK_K)
        x = tl.load(x_ptr + offs_m[:, None] * n_in + offs_k[None, :], mask=(offs_m < rows)[:, None], other=0.0)
        acc = tl.dot(tl.load(weight_ptrs + offs_k[None, :]), tl.trans(x), acc)
        if GATE != "":
            up = tl.load(weight_ptrs + n_out.to(tl.int64) * n_in + offs_k[None, :])
            acc_up = tl.dot(up, tl.trans(x), acc_up)
    result = tl.trans(acc)
    offs_out = offs_m[:, None] * n_out + offs_n[None, :]
    mask = (offs_m < rows)[:, None] & (offs_n < n_out)[None, :]
    is_last = True
    if SPLIT_K > 1:
        tl.store(partial_ptr + split * rows * n_out + offs_out, result, mask=mask)
        tl.debug_barrier()
        is_last = tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel") == SPLIT_K - 1
    if is_last:
        if SPLIT_K > 1:
            tl.store(counter_ptr + tile, 0)
            result = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for i in tl.static_range(SPLIT_K):
                partial_ptrs = partial_ptr + i * rows * n_out + offs_out
                result += tl.load(partial_ptrs, mask=mask, other=0.0, cache_modifier=".cg")
        if HAS_BIAS:
            result += tl.load(bias_ptr + offs_n, mask=offs_n < n_out, other=0.0).to(tl.float32)[None, :]
        if GATE != "":
            up = tl.trans(acc_up)
            if HAS_BIAS:
                up += tl.load(bias_ptr + n_out + offs_n, mask=offs_n < n_out, other=0.0).to(tl.float32)[None, :]
            result = gated(result, up, GATE)
        tl.store(out_ptr + offs_out, result.to(out_ptr.dtype.element_ty), mask=mask)


class SkinnyConfig(NamedTuple):
    """Tile (outputs, inputs), programs per tile of outputs, pipeline stages, warps."""

    block_n: int
    block_k: int
    split_k: int
    num_stages: int
    num_warps: int


def skinny_config(rows: int, n_out: int, n_in: int, dtype: torch.dtype, is_gated: bool = False) -> SkinnyConfig | None:
    """Return the tile for `rows` rows, or None if cuBLAS is as fast or the shape does not fit.

    Tiles of 64 outputs are the smallest that wgmma takes. K is split so that there are up to NUM_SMS programs, unless
    parts become too short to pay. A partial last wave costs more than split-K gains, unless waves are many or long.
    Ours / cuBLAS at 4 rows: N x K = 4096 x 1024 5.0 / 5.3, 4096 x 4096 11.2 / 13.0, 4096 x 12288 27.2 / 30.0, 5120 x
    17408 44.4 / 48.9, 151936 x 4096 275 / 287; cuBLAS wins 5120 x 5120 with 15.5 / 16.0. Gated, ours / cuBLAS plus the
    activation: 3072 x 1024 6.4 / 7.1, 12288 x 4096 48.5 / 49.2; cuBLAS wins 17408 x 5120 (136 tiles) with 88 / 93.
    """
    if not 2 <= rows <= MAX_GEMM_ROWS or dtype not in (torch.bfloat16, torch.float16):
        return None
    if is_gated:
        is_small = triton.cdiv(n_out, 64) <= NUM_SMS
        config = SkinnyConfig(64, 128, 1, 4, 4) if is_small else SkinnyConfig(128, 128, 1, 3, 8)
    else:
        split_k = 8 if n_out <= 1024 else 4 if n_out <= 2048 else 2 if n_out < 6144 and n_in > 1024 else 1
        config = SkinnyConfig(64, 64 if split_k == 8 else 128, split_k, 4, 4)
    programs = triton.cdiv(n_out, config.block_n) * config.split_k
    is_one_wave = programs <= NUM_SMS
    is_long = not is_gated and (n_in >= 8192 or programs > 8 * NUM_SMS)
    fits = n_in % (config.block_k * config.split_k) == 0
    return config if fits and (is_one_wave or is_long) else None


def skinny_gemm(x: Tensor, weight: Tensor, bias: Tensor | None, config: SkinnyConfig, *, gate: str = "") -> Tensor:
    """x [M, K] with 2 <= M <= 16, weight [N or 2N, K] -> [M, N]; gated as in `gemv` (then K is not split)."""
    rows, n_in = x.shape
    n_out = weight.shape[0] // (2 if gate else 1)
    block_n, block_k, split_k, num_stages, num_warps = config
    assert split_k == 1 or not gate, "the activation needs whole sums"
    out = empty((rows, n_out), dtype=x.dtype, device=x.device)
    partial_sums, counter = out, out
    if split_k > 1:
        partial_sums = empty((split_k, rows, n_out), dtype=torch.float32, device=x.device)
        counter = counters(x.device)
    _skinny_gemm[(triton.cdiv(n_out, block_n), split_k)](
        x, weight, out if bias is None else bias, out, partial_sums, counter, rows, n_out, n_in,
        BLOCK_M=16, BLOCK_N=block_n, BLOCK_K=block_k, SPLIT_K=split_k, NUM_STAGES=num_stages, GATE=gate,
        HAS_BIAS=bias is not None, num_warps=num_warps,
    )  # fmt: skip
    return out
