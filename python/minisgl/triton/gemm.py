"""Products of a weight matrix with 2 to 16 rows on the tensor cores.

Bound by reading the weights; letters: N output features, K input features. Figures are microseconds on an H200
(`benchmark/kernels/ops.py --all`, 2026-11-21).
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor, empty

from minisgl.triton.launch import counters
from minisgl.triton.norm import gated

MAX_ROWS: Final = 16
PROCESSORS: Final = 132  # of an H100 or H200


@triton.jit(do_not_specialize=["rows"])
def _skinny(
    x, weight, bias, out, parts, count, rows, n_out, n_in,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
    GATE: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """out[rows, N] = x[rows, K] weight[N, K]^T; grid (N / BN, SPLITS). The weights are the M side of the product.

    SPLITS programs share a tile of outputs, each a part of K; the last to arrive adds up the parts, in order, so the
    result does not depend on who that is. `count` is left at zero. K is a multiple of BK * SPLITS.
    """
    tile, split = tl.program_id(0), tl.program_id(1)
    n = tile * BN + tl.arange(0, BN)
    m = tl.arange(0, BM)
    rows_w = weight + tl.minimum(n, n_out - 1).to(tl.int64)[:, None] * n_in
    acc = tl.zeros([BN, BM], tl.float32)
    acc_up = tl.zeros([BN, BM], tl.float32)
    length = n_in // SPLITS
    for start in tl.range(split * length, split * length + length, BK, num_stages=STAGES):
        k = start + tl.arange(0, BK)
        v = tl.load(x + m[:, None] * n_in + k[None, :], mask=(m < rows)[:, None], other=0.0)
        acc = tl.dot(tl.load(rows_w + k[None, :]), tl.trans(v), acc)
        if GATE != "":
            up = tl.load(rows_w + n_out.to(tl.int64) * n_in + k[None, :])
            acc_up = tl.dot(up, tl.trans(v), acc_up)
    result = tl.trans(acc)
    at = m[:, None] * n_out + n[None, :]
    here = (m < rows)[:, None] & (n < n_out)[None, :]
    is_last = True
    if SPLITS > 1:
        tl.store(parts + split * rows * n_out + at, result, mask=here)
        tl.debug_barrier()
        is_last = tl.atomic_add(count + tile, 1, sem="acq_rel") == SPLITS - 1
    if is_last:
        if SPLITS > 1:
            tl.store(count + tile, 0)
            result = tl.zeros([BM, BN], tl.float32)
            for i in tl.static_range(SPLITS):
                result += tl.load(parts + i * rows * n_out + at, mask=here, other=0.0, cache_modifier=".cg")
        if BIAS:
            result += tl.load(bias + n, mask=n < n_out, other=0.0).to(tl.float32)[None, :]
        if GATE != "":
            up = tl.trans(acc_up)
            if BIAS:
                up += tl.load(bias + n_out + n, mask=n < n_out, other=0.0).to(tl.float32)[None, :]
            result = gated(result, up, GATE)
        tl.store(out + at, result.to(out.dtype.element_ty), mask=here)


class SkinnyConfig(NamedTuple):
    """Tile, programs per tile of outputs, pipeline stages, warps."""

    bn: int
    bk: int
    splits: int
    stages: int
    warps: int


def skinny_config(rows: int, n_out: int, n_in: int, dtype: torch.dtype, is_gated: bool = False) -> SkinnyConfig | None:
    """How to multiply `rows` rows, or None where cuBLAS is as fast or the shape does not fit.

    Tiles of 64 outputs are the least that wgmma takes; K is split to have up to PROCESSORS programs, but into nothing
    shorter than pays. A wave that is hardly begun costs more than is won, unless programs are long or waves many.
    Against cuBLAS at 4 rows: N x K = 4096 x 1024 5.0 / 5.3, 4096 x 4096 11.2 / 13.0, 4096 x 12288 27.2 / 30.0, 5120 x
    17408 44.4 / 48.9, 151936 x 4096 275 / 287; cuBLAS wins 5120 x 5120 with 15.5 / 16.0. Gated, against cuBLAS and the
    activation: 3072 x 1024 6.4 / 7.1, 12288 x 4096 48.5 / 49.2; cuBLAS wins 17408 x 5120 (136 tiles) with 88 / 93.
    """
    if not 2 <= rows <= MAX_ROWS or dtype not in (torch.bfloat16, torch.float16):
        return None
    if is_gated:
        is_small = triton.cdiv(n_out, 64) <= PROCESSORS
        config = SkinnyConfig(64, 128, 1, 4, 4) if is_small else SkinnyConfig(128, 128, 1, 3, 8)
    else:
        splits = 8 if n_out <= 1024 else 4 if n_out <= 2048 else 2 if n_out < 6144 and n_in > 1024 else 1
        config = SkinnyConfig(64, 64 if splits == 8 else 128, splits, 4, 4)
    programs = triton.cdiv(n_out, config.bn) * config.splits
    is_one_wave = programs <= PROCESSORS
    is_long = not is_gated and (n_in >= 8192 or programs > 8 * PROCESSORS)
    fits = n_in % (config.bk * config.splits) == 0
    return config if fits and (is_one_wave or is_long) else None


def skinny(x: Tensor, weight: Tensor, bias: Tensor | None, config: SkinnyConfig, *, gate: str = "") -> Tensor:
    """x [rows, K] with 2 <= rows <= 16, weight [N or 2N, K] -> [rows, N]; gated as in `gemv` (then unsplit)."""
    rows, n_in = x.shape
    n_out = weight.shape[0] // (2 if gate else 1)
    bn, bk, splits, stages, warps = config
    assert splits == 1 or not gate, "the activation needs whole sums"
    out = empty((rows, n_out), dtype=x.dtype, device=x.device)
    parts, count = out, out
    if splits > 1:
        parts = empty((splits, rows, n_out), dtype=torch.float32, device=x.device)
        count = counters(x.device)
    _skinny[(triton.cdiv(n_out, bn), splits)](
        x, weight, out if bias is None else bias, out, parts, count, rows, n_out, n_in,
        BM=16, BN=bn, BK=bk, SPLITS=splits, STAGES=stages, GATE=gate, BIAS=bias is not None, num_warps=warps,
    )  # fmt: skip
    return out
