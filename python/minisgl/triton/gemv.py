"""Products of a weight matrix with one row, or a few, on the CUDA cores: the weights go straight to registers.

Bound by reading the weights; letters: N output features, K input features. Figures are microseconds on an H200
(`benchmark/kernels/ops.py --all`, 2026-11-21); floors there are bytes of weight over 4.55 TB/s.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor, empty, empty_like
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minisgl.triton.launch import chained
from minisgl.triton.norm import gated


@triton.jit
def _gemv(
    x, residual, total, norm_weight, weight, bias, out, n_out, n_in, eps,
    BN: tl.constexpr, BK: tl.constexpr, STEPS: tl.constexpr, NORM: tl.constexpr, ADD: tl.constexpr,
    GATE: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[N] = f(x)[K] weight[N, K]^T, BN outputs a program, the weights straight to registers.

    ADD: x + residual in place of x; the first program also stores it to `total`, another buffer, since the others may
    not have read yet. NORM: RMS norm; its scale is applied to the result, so one pass over x does. GATE: weight is
    [2N, K], gate above up, and out one of `reference.GATES` of both; "" is a plain product. K <= BK * STEPS.
    """
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k0 = tl.arange(0, BK)
    rows = weight + tl.minimum(n, n_out - 1).to(tl.int64)[:, None] * n_in
    up_rows = rows + n_out.to(tl.int64) * n_in
    if PDL:
        gdc_launch_dependents()
        first = tl.load(rows + k0[None, :], mask=(k0 < n_in)[None, :], other=0.0)
        if GATE != "":
            first_up = tl.load(up_rows + k0[None, :], mask=(k0 < n_in)[None, :], other=0.0)
        gdc_wait()
    acc = tl.zeros([BN, BK], tl.float32)
    acc_up = tl.zeros([BN, BK], tl.float32)
    squares = tl.zeros([BK], tl.float32)
    for i in tl.static_range(STEPS):
        k = i * BK + k0
        here = k < n_in
        if PDL and i == 0:
            w = first
        else:
            w = tl.load(rows + k[None, :], mask=here[None, :], other=0.0)
        if GATE != "":
            if PDL and i == 0:
                up = first_up
            else:
                up = tl.load(up_rows + k[None, :], mask=here[None, :], other=0.0)
        v = tl.load(x + k, mask=here, other=0.0)
        if ADD:
            r = tl.load(residual + k, mask=here, other=0.0)
            v = (v.to(tl.float32) + r.to(tl.float32)).to(v.dtype)
            if tl.program_id(0) == 0:
                tl.store(total + k, v, mask=here)
        v = v.to(tl.float32)
        if NORM:
            squares += v * v
            v *= tl.load(norm_weight + k, mask=here, other=0.0).to(tl.float32)
        acc += w.to(tl.float32) * v[None, :]
        if GATE != "":
            acc_up += up.to(tl.float32) * v[None, :]
    result = tl.sum(acc, 1)
    scale = 1.0
    if NORM:
        scale = tl.rsqrt(tl.sum(squares, 0) / n_in + eps)
        result *= scale
    if BIAS:
        result += tl.load(bias + n, mask=n < n_out, other=0.0).to(tl.float32)
    if GATE != "":
        result_up = tl.sum(acc_up, 1) * scale
        if BIAS:
            result_up += tl.load(bias + n_out + n, mask=n < n_out, other=0.0).to(tl.float32)
        result = gated(result, result_up, GATE)
    tl.store(out + n, result.to(out.dtype.element_ty), mask=n < n_out)


class GemvConfig(NamedTuple):
    """Outputs and inputs of a program's tile, and warps."""

    bn: int
    bk: int
    warps: int


def gemv_config(n_out: int, n_in: int) -> GemvConfig:
    """Tiles of 1,024 inputs (8 a thread) by 2 outputs; by 4 where one such tile is all of K and there are many.

    For 2 and 4 outputs: N x K = 151936 x 1024 92.6, 69.6; 4096 x 1024 3.51, 2.89; 1024 x 2048 2.39, 2.63; 6144 x 4096
    11.9, 13.1; 5120 x 17408 41.1, 41.3. A gated tile has twice the weights: 12288 x 4096 51.8, 55.7.
    """
    bk = min(1024, max(16, triton.next_power_of_2(n_in)))
    bn = 4 if n_in <= 1024 and n_out >= 4096 else 2
    return GemvConfig(bn, bk, max(1, min(4, bn * bk // 256)))


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
    """x [1, K] -> (out [1, N], x + residual [1, K], or x itself without a residual). weight [N or 2N, K]."""
    n_out, n_in = weight.shape[0] // (2 if gate else 1), weight.shape[1]
    out = empty((1, n_out), dtype=x.dtype, device=x.device)
    total = x if residual is None else empty_like(x)
    bn, bk, warps = config or gemv_config(n_out, n_in)
    _gemv[(triton.cdiv(n_out, bn),)](
        x, x if residual is None else residual, total, x if norm_weight is None else norm_weight,
        weight, out if bias is None else bias, out, n_out, n_in, eps,
        BN=bn, BK=bk, STEPS=triton.cdiv(n_in, bk), NORM=norm_weight is not None, ADD=residual is not None,
        GATE=gate, BIAS=bias is not None, num_warps=warps, **chained(x.device),
    )  # fmt: skip
    return out, total


@triton.jit(do_not_specialize=["rows"])
def _gemv_rows(
    x, weight, bias, out, rows, n_out, n_in,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STEPS: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """As `_gemv` for rows <= BM: the weights of BN outputs meet all rows in registers. Tiles are [BM, BN, BK]."""
    m3, k0 = tl.arange(0, BM)[:, None, None], tl.arange(0, BK)[None, None, :]
    n3 = tl.minimum(tl.program_id(0) * BN + tl.arange(0, BN), n_out - 1)[None, :, None]
    acc = tl.zeros([BM, BN, BK], tl.float32)
    for i in tl.static_range(STEPS):
        k = i * BK + k0
        w = tl.load(weight + n3.to(tl.int64) * n_in + k, mask=k < n_in, other=0.0)
        v = tl.load(x + m3 * n_in + k, mask=(m3 < rows) & (k < n_in), other=0.0)
        acc += w.to(tl.float32) * v.to(tl.float32)
    result = tl.sum(acc, 2)
    m = tl.arange(0, BM)[:, None]
    n = (tl.program_id(0) * BN + tl.arange(0, BN))[None, :]
    if BIAS:
        result += tl.load(bias + n, mask=n < n_out, other=0.0).to(tl.float32)
    tl.store(out + m * n_out + n, result.to(out.dtype.element_ty), mask=(m < rows) & (n < n_out))


def prefers_gemv_rows(rows: int, n_out: int, n_in: int) -> bool:
    """Whether the CUDA cores are faster for a few rows: small matrices only, since they read x again for each output.

    Against the best of `skinny` and cuBLAS, 2 rows and 4: N x K = 1024 x 2048 3.4 / 4.9, 4.1 / 5.0; 1024 x 3072 4.0 /
    5.6, 4.7 / 5.7; 4096 x 1024 4.8 / 5.0, 5.9 / 5.0.
    """
    return 2 <= rows <= 4 and n_out <= 2048 and n_in <= 4096


def gemv_rows(x: Tensor, weight: Tensor, bias: Tensor | None, bn: int = 2) -> Tensor:
    """x [rows, K], weight [N, K] -> [rows, N], bn outputs a program."""
    (rows, n_in), n_out = x.shape, len(weight)
    out = empty((rows, n_out), dtype=x.dtype, device=x.device)
    bk = min(1024, max(16, triton.next_power_of_2(n_in)))
    _gemv_rows[(triton.cdiv(n_out, bn),)](
        x, weight, out if bias is None else bias, out, rows, n_out, n_in,
        BM=triton.next_power_of_2(rows), BN=bn, BK=bk, STEPS=triton.cdiv(n_in, bk), BIAS=bias is not None, num_warps=4,
    )  # fmt: skip
    return out
