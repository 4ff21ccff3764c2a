"""Products of sorted tokens with the matrices of their experts, on the tensor cores: one kernel for any number of rows.

Letters: P pairs (see `moe_route.py`), N output features, K input features of an expert's matrix.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor, empty
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minisgl.triton.launch import chained
from minisgl.triton.moe_route import Lists

GROUP = 8  # tiles of rows that go through the same weights together, while these are in the second-level cache


@triton.jit
def _grouped(
    x, weight, out, order, tiles, n_rows, n_in,
    TOP_K: tl.constexpr, GATED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    STAGES: tl.constexpr, SWAP: tl.constexpr, EVEN: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BM pairs of one expert by BN of its `n_rows` rows of weights [E, n_rows, K] a program.

    GATED: weights are gate above up, taken alternately, so that both halves of an output are neighbours; rows of x are
    those of the pairs' tokens, rows of `out` [P, n_rows / 2] in the order of the lists. Otherwise the reverse: x is in
    the order of the lists, `out` in that of the pairs. SWAP: the weights are the M side of the product, for few pairs.
    EVEN: BK divides K. A program beyond the last tile does nothing.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    num_tiles, columns = tl.load(tiles), tl.cdiv(n_rows, BN)
    pid = tl.program_id(0)
    if GROUP == 1:
        tile, column = pid // columns, pid % columns
    else:
        first = pid // (GROUP * columns) * GROUP
        size = tl.maximum(tl.minimum(num_tiles - first, GROUP), 1)
        tile = first + pid % (GROUP * columns) % size
        column = pid % (GROUP * columns) // size
    # Volatile, or the compiler would read them only when it knows that there is such a tile: one round trip more.
    expert = tl.load(tiles + 4 + 4 * tile, volatile=True).to(tl.int64)
    m = tl.load(tiles + 5 + 4 * tile, volatile=True) + tl.arange(0, BM)
    is_pair = m < tl.load(tiles + 6 + 4 * tile, volatile=True)
    if pid >= num_tiles * columns:
        return
    pair = tl.load(order + m, mask=is_pair, other=0)
    row = column * BN + tl.arange(0, BN)
    if GATED:
        n_out = n_rows // 2
        source, target = pair // TOP_K, m
        row = tl.minimum(row // 2, n_out - 1) + row % 2 * n_out
    else:
        n_out = n_rows
        source, target = m, pair
        row = tl.minimum(row, n_out - 1)
    x_rows = x + source.to(tl.int64)[:, None] * n_in
    w_rows = weight + (expert * n_rows + row)[:, None] * n_in
    acc = tl.zeros([BN, BM] if SWAP else [BM, BN], tl.float32)
    for start in tl.range(0, n_in, BK, num_stages=STAGES):
        k = (start + tl.arange(0, BK))[None, :]
        if EVEN:
            w = tl.load(w_rows + k)
            v = tl.load(x_rows + k, mask=is_pair[:, None], other=0.0)
        else:
            w = tl.load(w_rows + k, mask=k < n_in, other=0.0)
            v = tl.load(x_rows + k, mask=is_pair[:, None] & (k < n_in), other=0.0)
        if SWAP:
            acc = tl.dot(w, tl.trans(v), acc, input_precision="ieee")
        else:
            acc = tl.dot(v, tl.trans(w), acc, input_precision="ieee")
    result = tl.trans(acc) if SWAP else acc
    WIDTH: tl.constexpr = BN // 2 if GATED else BN
    if GATED:
        gate, up = tl.split(tl.reshape(result, [BM, WIDTH, 2]))
        result = gate / (1 + tl.exp(-gate)) * up
    n = (column * WIDTH + tl.arange(0, WIDTH))[None, :]
    at = out + target.to(tl.int64)[:, None] * n_out + n
    tl.store(at, result.to(out.dtype.element_ty), mask=is_pair[:, None] & (n < n_out))


@triton.jit
def _combine(x, weights, out, n, TOP_K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """out[t] = sum over i of weights[t, i] x[t k + i], in this order and in float32."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(TOP_K):
        v = tl.load(x + (token * TOP_K + i) * n + k, mask=k < n, other=0.0)
        total += v.to(tl.float32) * tl.load(weights + token * TOP_K + i)
    tl.store(out + token * n + k, total.to(out.dtype.element_ty), mask=k < n)


class Tile(NamedTuple):
    """Rows of weights and inputs of a program's tile, pipeline stages, warps."""

    bn: int
    bk: int
    stages: int
    warps: int


class MoeConfig(NamedTuple):
    """Pairs of a tile, which side of the product they are, and the tiles of both products."""

    rows: int
    swap: bool
    up: Tile
    down: Tile


# By the mean number of rows of an expert, up to which each is taken: of 6 to 9 tiles at 12 numbers of tokens those that
# are best or nearly so for Qwen3-30B-A3B, its halves and quarters, and Mixtral 8x7B on an H200.
CONFIGS = (
    (8.0, MoeConfig(16, True, Tile(64, 128, 3, 4), Tile(128, 128, 3, 4))),
    (20.0, MoeConfig(32, True, Tile(64, 128, 3, 4), Tile(128, 64, 4, 4))),
    (48.0, MoeConfig(64, False, Tile(128, 64, 4, 4), Tile(128, 64, 4, 4))),
    (float("inf"), MoeConfig(128, False, Tile(256, 64, 4, 8), Tile(256, 64, 4, 8))),
)
FLOAT32 = MoeConfig(16, False, Tile(32, 32, 2, 4), Tile(32, 32, 2, 4))  # without tensor cores


def moe_config(pairs: int, num_experts: int, dtype: torch.dtype) -> MoeConfig:
    """The tiles for `pairs` pairs, from the mean number of pairs that an expert gets."""
    if dtype is torch.float32:
        return FLOAT32
    return next(config for most, config in CONFIGS if pairs <= most * num_experts)


def grouped(x: Tensor, weight: Tensor, lists: Lists, top_k: int, tile: Tile, *, swap: bool, is_gated: bool) -> Tensor:
    """One of the two products, as `_grouped` says: weight [E, n_rows, K] -> [P, n_rows / 2 or n_rows]."""
    n_rows, n_in = weight.shape[1:]
    out = empty((len(lists.order), n_rows // 2 if is_gated else n_rows), dtype=x.dtype, device=x.device)
    bn, bk, stages, warps = tile
    if bk > 64 and n_in % bk:
        bk, stages = bk // 2, stages + 1  # 192 inputs: 24 instead of 27 us
    _grouped[(lists.max_tiles * triton.cdiv(n_rows, bn),)](
        x, weight, out, lists.order, lists.tiles, n_rows, n_in,
        TOP_K=top_k, GATED=is_gated, BM=lists.rows, BN=bn, BK=bk, STAGES=stages, SWAP=swap, EVEN=n_in % bk == 0,
        GROUP=1 if swap else GROUP, num_warps=warps, **chained(x.device),
    )  # fmt: skip
    return out


def combine(parts: Tensor, weights: Tensor) -> Tensor:
    """parts [T k, H], weights [T, k] -> [T, H]."""
    (tokens, top_k), n = weights.shape, parts.shape[1]
    out = empty((tokens, n), dtype=parts.dtype, device=parts.device)
    block = min(1024, triton.next_power_of_2(n))
    _combine[(tokens, triton.cdiv(n, block))](
        parts, weights, out, n, TOP_K=top_k, BLOCK=block, num_warps=4, **chained(parts.device)
    )
    return out
