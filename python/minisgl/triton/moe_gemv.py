"""The experts of a token or two, on the CUDA cores: the weights go straight to registers, as in `gemv.py`.

Bound by reading the weights of the chosen experts, once for each pair (see `moe_route.py`). Letters: T tokens, k
experts per token, H hidden size, I intermediate size.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor, empty
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minisgl.triton.launch import chained


@triton.jit
def _gate_up(
    x, weight, out, experts, n_out, n_in,
    TOP_K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STEPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (tile of outputs, pair): out[pair] = silu(gate x) * (up x) of the pair's expert and token."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    pair = tl.program_id(1)
    expert = tl.load(experts + pair).to(tl.int64)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    rows = weight + (expert * 2 * n_out + tl.minimum(n, n_out - 1))[:, None] * n_in
    acc = tl.zeros([BN, BK], tl.float32)
    acc_up = tl.zeros([BN, BK], tl.float32)
    for i in tl.static_range(STEPS):
        k = i * BK + tl.arange(0, BK)
        here = k < n_in
        w = tl.load(rows + k[None, :], mask=here[None, :], other=0.0)
        up = tl.load(rows + n_out.to(tl.int64) * n_in + k[None, :], mask=here[None, :], other=0.0)
        v = tl.load(x + pair // TOP_K * n_in + k, mask=here, other=0.0).to(tl.float32)
        acc += w.to(tl.float32) * v[None, :]
        acc_up += up.to(tl.float32) * v[None, :]
    gate = tl.sum(acc, 1)
    result = gate / (1 + tl.exp(-gate)) * tl.sum(acc_up, 1)
    tl.store(out + pair * n_out + n, result.to(out.dtype.element_ty), mask=n < n_out)


@triton.jit
def _down(
    x, weight, out, experts, weights, n_out, n_in,
    TOP_K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STEPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (tile of outputs, token): the token's experts one after the other, summed in float32."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(1)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    n_row = tl.minimum(n, n_out - 1)
    acc = tl.zeros([BN, BK], tl.float32)
    for j in tl.static_range(TOP_K):
        pair = token * TOP_K + j
        rows = weight + (tl.load(experts + pair).to(tl.int64) * n_out + n_row)[:, None] * n_in
        scale = tl.load(weights + pair)
        for i in tl.static_range(STEPS):
            k = i * BK + tl.arange(0, BK)
            here = k < n_in
            w = tl.load(rows + k[None, :], mask=here[None, :], other=0.0).to(tl.float32)
            v = tl.load(x + pair * n_in + k, mask=here, other=0.0).to(tl.float32)
            acc += w * (v * scale)[None, :]
    tl.store(out + token * n_out + n, tl.sum(acc, 1).to(out.dtype.element_ty), mask=n < n_out)


class PairTile(NamedTuple):
    """Outputs and inputs of a program's tile, and warps."""

    bn: int
    bk: int
    warps: int


UP = PairTile(1, 1024, 4)
# By the most inputs for which each is taken; at 192, 384, 768 and 14,336 the best of eight on an H200.
DOWN = (
    (256, PairTile(4, 256, 1)),
    (512, PairTile(1, 256, 1)),
    (1023, PairTile(2, 512, 2)),
    (float("inf"), PairTile(1, 1024, 4)),
)


def pair_gate_up(x: Tensor, experts: Tensor, gate_up: Tensor, tile: PairTile | None = None) -> Tensor:
    """x [T, H], experts [T, k], gate_up [E, 2I, H] -> [T k, I]."""
    top_k, n_out, n_in = experts.shape[1], gate_up.shape[1] // 2, x.shape[1]
    pairs = experts.numel()
    out = empty((pairs, n_out), dtype=x.dtype, device=x.device)
    bn, bk, warps = tile or UP
    _gate_up[(triton.cdiv(n_out, bn), pairs)](
        x, gate_up, out, experts, n_out, n_in,
        TOP_K=top_k, BN=bn, BK=bk, STEPS=triton.cdiv(n_in, bk), num_warps=warps, **chained(x.device),
    )  # fmt: skip
    return out


def pair_down(hidden: Tensor, experts: Tensor, weights: Tensor, down: Tensor, tile: PairTile | None = None) -> Tensor:
    """hidden [T k, I], weights [T, k], down [E, H, I] -> [T, H]."""
    (tokens, top_k), n_out, n_in = experts.shape, down.shape[1], down.shape[2]
    out = empty((tokens, n_out), dtype=hidden.dtype, device=hidden.device)
    bn, bk, warps = tile or next(tile for most, tile in DOWN if n_in <= most)
    _down[(triton.cdiv(n_out, bn), tokens)](
        hidden, down, out, experts, weights, n_out, n_in,
        TOP_K=top_k, BN=bn, BK=bk, STEPS=triton.cdiv(n_in, bk), num_warps=warps, **chained(hidden.device),
    )  # fmt: skip
    return out
