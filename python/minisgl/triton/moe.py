"""Mixture of experts: grouped GEMMs over pairs sorted by expert, or a GEMV for each pair if there are few.

Both are bound by reading the weights of the experts. Letters: T tokens, E experts, k experts per token, P = T k pairs
(see `moe_routing.py`), H hidden size, I intermediate size; N output features, K input features of an expert's matrix.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor, empty, empty_like
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minisgl.triton.launch import pdl_options
from minisgl.triton.moe_routing import Lists, route, route_and_list

# A GEMV for each pair if there is at most one pair to so many experts, since then few experts are chosen twice. Against
# sorted lists at 1, 2, 4 tokens: Qwen3-30B-A3B 22, 39, 72 / 29, 45, 75 us; Mixtral 8x7B 162, 316, 621 / 171, 287, 455.
MIN_EXPERTS_PER_PAIR: Final = 4
GROUP_M: Final = 8  # tiles of rows that read the same weights one after the other, while these are in L2


def moe(x: Tensor, router_logits: Tensor, gate_up: Tensor, down: Tensor, top_k: int, normalise: bool) -> Tensor:
    """As `reference.moe`; of equally probable experts the lowest is chosen.

    A CUDA graph can hold it: the host reads nothing. A row's bits do not depend on the other rows, only (by the choice
    of kernels) on their number.
    """
    if not len(x):
        return empty_like(x)
    x, router_logits = x.contiguous(), router_logits.contiguous()
    pairs, num_experts = len(x) * top_k, len(gate_up)
    if pairs * MIN_EXPERTS_PER_PAIR <= num_experts:
        experts, weights = route(router_logits, top_k, normalise)
        return pair_down(pair_gate_up(x, experts, gate_up), experts, weights, down)
    config = moe_config(pairs, num_experts, x.dtype)
    weights, lists = route_and_list(router_logits, top_k, normalise, config.block_m)
    hidden = grouped_gemm(x, gate_up, lists, top_k, config.up, swap_ab=config.swap_ab, is_gated=True)
    outputs = grouped_gemm(hidden, down, lists, top_k, config.down, swap_ab=config.swap_ab, is_gated=False)
    return combine(outputs, weights)


# -- grouped GEMM


@triton.jit
def _grouped_gemm(
    x_ptr, weight_ptr, out_ptr, order_ptr, tiles_ptr, n_rows, n_in,
    TOP_K: tl.constexpr, IS_GATED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr, SWAP_AB: tl.constexpr, EVEN_K: tl.constexpr, GROUP_M: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A tile of BLOCK_M pairs of one expert by BLOCK_N of its `n_rows` rows of weights [E, n_rows, K] a program.

    IS_GATED: the weights are gate above up, read alternately, so that both halves of an output are neighbours; rows of
    x are those of the pairs' tokens, rows of out [P, n_rows / 2] in the order of the lists. Otherwise x is in the order
    of the lists and out [P, n_rows] in that of the pairs. SWAP_AB: the weights are the M side of the tensor cores, for
    few pairs. EVEN_K: BLOCK_K divides K. Programs beyond the last tile return.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    num_tiles, num_columns = tl.load(tiles_ptr), tl.cdiv(n_rows, BLOCK_N)
    pid = tl.program_id(0)
    if GROUP_M == 1:
        tile, column = pid // num_columns, pid % num_columns
    else:
        first = pid // (GROUP_M * num_columns) * GROUP_M
        size = tl.maximum(tl.minimum(num_tiles - first, GROUP_M), 1)
        tile = first + pid % (GROUP_M * num_columns) % size
        column = pid % (GROUP_M * num_columns) // size
    # Volatile, or the compiler would load them only after it knows that there is such a tile: one round trip more.
    expert = tl.load(tiles_ptr + 4 + 4 * tile, volatile=True).to(tl.int64)
    offs_m = tl.load(tiles_ptr + 5 + 4 * tile, volatile=True) + tl.arange(0, BLOCK_M)
    is_pair = offs_m < tl.load(tiles_ptr + 6 + 4 * tile, volatile=True)
    if pid >= num_tiles * num_columns:
        return
    pair = tl.load(order_ptr + offs_m, mask=is_pair, other=0)
    row = column * BLOCK_N + tl.arange(0, BLOCK_N)
    if IS_GATED:
        n_out = n_rows // 2
        source, target = pair // TOP_K, offs_m
        row = tl.minimum(row // 2, n_out - 1) + row % 2 * n_out
    else:
        n_out = n_rows
        source, target = offs_m, pair
        row = tl.minimum(row, n_out - 1)
    x_ptrs = x_ptr + source.to(tl.int64)[:, None] * n_in
    weight_ptrs = weight_ptr + (expert * n_rows + row)[:, None] * n_in
    acc = tl.zeros([BLOCK_N, BLOCK_M] if SWAP_AB else [BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(0, n_in, BLOCK_K, num_stages=NUM_STAGES):
        offs_k = (start + tl.arange(0, BLOCK_K))[None, :]
        if EVEN_K:
            w = tl.load(weight_ptrs + offs_k)
            x = tl.load(x_ptrs + offs_k, mask=is_pair[:, None], other=0.0)
        else:
            w = tl.load(weight_ptrs + offs_k, mask=offs_k < n_in, other=0.0)
            x = tl.load(x_ptrs + offs_k, mask=is_pair[:, None] & (offs_k < n_in), other=0.0)
        if SWAP_AB:
            acc = tl.dot(w, tl.trans(x), acc, input_precision="ieee")
        else:
            acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
    result = tl.trans(acc) if SWAP_AB else acc
    WIDTH: tl.constexpr = BLOCK_N // 2 if IS_GATED else BLOCK_N
    if IS_GATED:
        gate, up = tl.split(tl.reshape(result, [BLOCK_M, WIDTH, 2]))
        result = gate / (1 + tl.exp(-gate)) * up
    offs_n = (column * WIDTH + tl.arange(0, WIDTH))[None, :]
    out_ptrs = out_ptr + target.to(tl.int64)[:, None] * n_out + offs_n
    tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=is_pair[:, None] & (offs_n < n_out))


@triton.jit
def _combine(x_ptr, weights_ptr, out_ptr, n, TOP_K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """out[t] = sum over i of weights[t, i] x[t k + i], in this order and in float32; grid (T, n / BLOCK)."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(TOP_K):
        x = tl.load(x_ptr + (token * TOP_K + i) * n + offs, mask=offs < n, other=0.0)
        total += x.to(tl.float32) * tl.load(weights_ptr + token * TOP_K + i)
    tl.store(out_ptr + token * n + offs, total.to(out_ptr.dtype.element_ty), mask=offs < n)


class GemmTile(NamedTuple):
    """Rows of weights and inputs of a program's tile, pipeline stages, warps."""

    block_n: int
    block_k: int
    num_stages: int
    num_warps: int


class MoeConfig(NamedTuple):
    """Pairs of a tile, whether the weights are the M side, and the tiles of both GEMMs."""

    block_m: int
    swap_ab: bool
    up: GemmTile
    down: GemmTile


# Each is for up to so many rows of an expert on average. Of 6 to 9 tiles at 12 numbers of tokens these are the best or
# nearly so for Qwen3-30B-A3B, its halves and quarters, and Mixtral 8x7B on an H200.
CONFIGS: Final = (
    (8.0, MoeConfig(16, True, GemmTile(64, 128, 3, 4), GemmTile(128, 128, 3, 4))),
    (20.0, MoeConfig(32, True, GemmTile(64, 128, 3, 4), GemmTile(128, 64, 4, 4))),
    (48.0, MoeConfig(64, False, GemmTile(128, 64, 4, 4), GemmTile(128, 64, 4, 4))),
    (float("inf"), MoeConfig(128, False, GemmTile(256, 64, 4, 8), GemmTile(256, 64, 4, 8))),
)
FLOAT32: Final = MoeConfig(16, False, GemmTile(32, 32, 2, 4), GemmTile(32, 32, 2, 4))  # without tensor cores


def moe_config(pairs: int, num_experts: int, dtype: torch.dtype) -> MoeConfig:
    """The tiles for `pairs` pairs, from the mean number of pairs of an expert."""
    if dtype is torch.float32:
        return FLOAT32
    return next(config for max_rows, config in CONFIGS if pairs <= max_rows * num_experts)


def grouped_gemm(
    x: Tensor, weight: Tensor, lists: Lists, top_k: int, tile: GemmTile, *, swap_ab: bool, is_gated: bool
) -> Tensor:
    """One of the two GEMMs, as `_grouped_gemm` says: weight [E, n_rows, K] -> [P, n_rows / 2 or n_rows]."""
    n_rows, n_in = weight.shape[1:]
    out = empty((len(lists.order), n_rows // 2 if is_gated else n_rows), dtype=x.dtype, device=x.device)
    block_n, block_k, num_stages, num_warps = tile
    if block_k > 64 and n_in % block_k:
        block_k, num_stages = block_k // 2, num_stages + 1  # 192 inputs: 24 instead of 27 us
    _grouped_gemm[(lists.max_tiles * triton.cdiv(n_rows, block_n),)](
        x, weight, out, lists.order, lists.tiles, n_rows, n_in,
        TOP_K=top_k, IS_GATED=is_gated, BLOCK_M=lists.block_m, BLOCK_N=block_n, BLOCK_K=block_k,
        NUM_STAGES=num_stages, SWAP_AB=swap_ab, EVEN_K=n_in % block_k == 0, GROUP_M=1 if swap_ab else GROUP_M,
        num_warps=num_warps, **pdl_options(x.device),
    )  # fmt: skip
    return out


def combine(outputs: Tensor, weights: Tensor) -> Tensor:
    """outputs [P, H], weights [T, k] -> [T, H]."""
    (tokens, top_k), n = weights.shape, outputs.shape[1]
    out = empty((tokens, n), dtype=outputs.dtype, device=outputs.device)
    block = min(1024, triton.next_power_of_2(n))
    _combine[(tokens, triton.cdiv(n, block))](
        outputs, weights, out, n, TOP_K=top_k, BLOCK=block, num_warps=4, **pdl_options(outputs.device)
    )
    return out


# -- GEMV, on the CUDA cores: the weights go straight to registers, as in `linear.py`, once for each pair


@triton.jit
def _gate_up_gemv(
    x_ptr, weight_ptr, out_ptr, experts_ptr, n_out, n_in,
    TOP_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NUM_BLOCKS_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[pair] = silu(gate x) * (up x) of the pair's expert and token; grid (I / BLOCK_N, P)."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    pair = tl.program_id(1)
    expert = tl.load(experts_ptr + pair).to(tl.int64)
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    weight_ptrs = weight_ptr + (expert * 2 * n_out + tl.minimum(offs_n, n_out - 1))[:, None] * n_in
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    acc_up = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for i in tl.static_range(NUM_BLOCKS_K):
        offs_k = i * BLOCK_K + tl.arange(0, BLOCK_K)
        mask = offs_k < n_in
        w = tl.load(weight_ptrs + offs_k[None, :], mask=mask[None, :], other=0.0)
        up = tl.load(weight_ptrs + n_out.to(tl.int64) * n_in + offs_k[None, :], mask=mask[None, :], other=0.0)
        x = tl.load(x_ptr + pair // TOP_K * n_in + offs_k, mask=mask, other=0.0).to(tl.float32)
        acc += w.to(tl.float32) * x[None, :]
        acc_up += up.to(tl.float32) * x[None, :]
    gate = tl.sum(acc, 1)
    result = gate / (1 + tl.exp(-gate)) * tl.sum(acc_up, 1)
    tl.store(out_ptr + pair * n_out + offs_n, result.to(out_ptr.dtype.element_ty), mask=offs_n < n_out)


@triton.jit
def _down_gemv(
    x_ptr, weight_ptr, out_ptr, experts_ptr, weights_ptr, n_out, n_in,
    TOP_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NUM_BLOCKS_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[t] = sum over i of weights[t, i] down x[t k + i], experts in turn, in float32; grid (H / BLOCK_N, T)."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(1)
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(offs_n, n_out - 1)
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for j in tl.static_range(TOP_K):
        pair = token * TOP_K + j
        weight_ptrs = weight_ptr + (tl.load(experts_ptr + pair).to(tl.int64) * n_out + row)[:, None] * n_in
        scale = tl.load(weights_ptr + pair)
        for i in tl.static_range(NUM_BLOCKS_K):
            offs_k = i * BLOCK_K + tl.arange(0, BLOCK_K)
            mask = offs_k < n_in
            w = tl.load(weight_ptrs + offs_k[None, :], mask=mask[None, :], other=0.0).to(tl.float32)
            x = tl.load(x_ptr + pair * n_in + offs_k, mask=mask, other=0.0).to(tl.float32)
            acc += w * (x * scale)[None, :]
    tl.store(out_ptr + token * n_out + offs_n, tl.sum(acc, 1).to(out_ptr.dtype.element_ty), mask=offs_n < n_out)


class GemvTile(NamedTuple):
    """Outputs and inputs of a program's tile, and warps."""

    block_n: int
    block_k: int
    num_warps: int


UP_TILE: Final = GemvTile(1, 1024, 4)
# Each is for up to so many inputs; at 192, 384, 768 and 14,336 the best of eight on an H200.
DOWN_TILES: Final = (
    (256, GemvTile(4, 256, 1)),
    (512, GemvTile(1, 256, 1)),
    (1023, GemvTile(2, 512, 2)),
    (float("inf"), GemvTile(1, 1024, 4)),
)


def pair_gate_up(x: Tensor, experts: Tensor, gate_up: Tensor, tile: GemvTile | None = None) -> Tensor:
    """x [T, H], experts [T, k], gate_up [E, 2I, H] -> [P, I]."""
    top_k = experts.shape[1]
    n_out = gate_up.shape[1] // 2
    n_in = x.shape[1]
    pairs = experts.numel()
    out = empty((pairs, n_out), dtype=x.dtype, device=x.device)
    block_n, block_k, num_warps = tile or UP_TILE
    _gate_up_gemv[(triton.cdiv(n_out, block_n), pairs)](
        x, gate_up, out, experts, n_out, n_in,
        TOP_K=top_k, BLOCK_N=block_n, BLOCK_K=block_k, NUM_BLOCKS_K=triton.cdiv(n_in, block_k),
        num_warps=num_warps, **pdl_options(x.device),
    )  # fmt: skip
    return out


def pair_down(hidden: Tensor, experts: Tensor, weights: Tensor, down: Tensor, tile: GemvTile | None = None) -> Tensor:
    """hidden [P, I], weights [T, k], down [E, H, I] -> [T, H]."""
    tokens, top_k = experts.shape
    n_out, n_in = down.shape[1:]
    out = empty((tokens, n_out), dtype=hidden.dtype, device=hidden.device)
    block_n, block_k, num_warps = tile or next(tile for max_inputs, tile in DOWN_TILES if n_in <= max_inputs)
    _down_gemv[(triton.cdiv(n_out, block_n), tokens)](
        hidden, down, out, experts, weights, n_out, n_in,
        TOP_K=top_k, BLOCK_N=block_n, BLOCK_K=block_k, NUM_BLOCKS_K=triton.cdiv(n_in, block_k),
        num_warps=num_warps, **pdl_options(hidden.device),
    )  # fmt: skip
    return out
