"""Mixture of experts: grouped GEMMs over pairs sorted by expert, or one GEMV per pair if there are few.

Both are bound by reading the experts' weights. For 8-bit and 4-bit weights, activations are quantized to 8 bits, in one
part or two, as in `quantized.py`. Letters: T tokens, E experts, k experts per token, P = T k pairs (see
`moe_routing.py`), H hidden size, I intermediate size; N output features, K input features of an expert's matrix.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor, empty
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minisgl.kernels.triton.epilogue import gated
from minisgl.kernels.triton.gemm import (
    add_4bit_products,
    add_products,
    as_float,
    group_scales,
    half_as_fp8,
    join_parts,
    less_zeros,
)
from minisgl.kernels.triton.launch import INTERPRETED, pdl_options
from minisgl.kernels.triton.moe_routing import Lists, route, route_and_list
from minisgl.kernels.triton.product import Mixture
from minisgl.kernels.triton.quantized import split_rows
from minisgl.kernels.triton.quantized_gemv import numbers_as_float
from minisgl.ops.quantized import E4M3, E8M0, Quantized
from minisgl.ops.reference import Experts

# GEMVs are used if there are at least this many experts per pair, since then few experts are chosen twice. GEMV /
# grouped GEMM at 1, 2, 4 tokens: Qwen3-30B-A3B 22, 39, 72 / 29, 45, 75 us; Mixtral 8x7B 162, 316, 621 / 171, 287, 455.
MIN_EXPERTS_PER_PAIR: Final = 4
# With 8-bit weights, down must also have at most this many inputs. Mixtral, 1 token, GEMV / grouped GEMM: 108 / 109
# with per-row scales, 207 / 110 with block scales.
MAX_FP8_GEMV_INPUTS: Final = 1024
GROUP_M: Final = 8  # tiles of rows that read the same weights in succession, while these are in L2


def refuses_pairs(m: Mixture) -> str | None:
    """Return why grouped GEMMs are faster than GEMVs."""
    if m.rows * m.top_k * MIN_EXPERTS_PER_PAIR > m.experts:
        return f"for {MIN_EXPERTS_PER_PAIR} experts or more per pair"
    if m.bits == 8 and m.size > MAX_FP8_GEMV_INPUTS:
        return f"for experts of up to {MAX_FP8_GEMV_INPUTS} features in 8 bits"
    return None


def by_pairs(x: Tensor, router_logits: Tensor, experts: Experts) -> Tensor:
    """`reference.moe` by a GEMV for each pair."""
    return run_pairs(x, *route(router_logits, experts.top_k, experts.normalise, experts.scale), experts)


def run_pairs(x: Tensor, chosen: Tensor, weights: Tensor, experts: Experts) -> Tensor:
    """x [T, H], the experts and weights of `route` -> [T, H]."""
    hidden = pair_gate_up(x, chosen, experts.gate_up, experts.gate_up_bias, experts.gate)
    return pair_down(hidden, chosen, weights, experts.down, experts.down_bias)


def by_groups(x: Tensor, router_logits: Tensor, experts: Experts) -> Tensor:
    """`reference.moe` by GEMMs over the pairs of each expert."""
    gate_up, down, top_k, normalise, gate_up_bias, down_bias, gate, scale = experts
    config = moe_config(len(x) * top_k, len(gate_up), x.dtype, Mixture.of(x, experts).bits)
    weights, lists = route_and_list(router_logits, top_k, normalise, config.block_m, scale)
    hidden = grouped_gemm(x, gate_up, lists, top_k, config, gate_up_bias, gate)
    return combine(grouped_gemm(hidden, down, lists, top_k, config, down_bias), weights)


def _numbers(weight: Tensor | Quantized) -> tuple[Tensor, Tensor, Tensor, int]:
    """Return matrices' data, scales, zero points (or a placeholder), and SCALE.

    SCALE is 0 for 16-bit weights, 1 for per-row scales, 128 for scales of 128 x 128 blocks, and the group size for
    4-bit weights.
    """
    if not isinstance(weight, Quantized):
        return weight, weight, weight, 0
    scale = weight.scale.view(torch.uint8) if weight.format.scale_dtype is E8M0 else weight.scale
    return weight.data, scale, scale if weight.zeros is None else weight.zeros, weight.format.group or 1


# -- grouped GEMM


@triton.jit(do_not_specialize=["max_rows"])
def _grouped_gemm(
    x_ptr, x_scale_ptr, sums_ptr, weight_ptr, scale_ptr, zeros_ptr, bias_ptr, out_ptr, order_ptr, tiles_ptr, max_rows,
    n_rows, n_in,
    TOP_K: tl.constexpr, GATE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr, SWAP_AB: tl.constexpr, EVEN_K: tl.constexpr, GROUP_M: tl.constexpr, PARTS: tl.constexpr,
    SCALE: tl.constexpr, BITS: tl.constexpr, HAS_ZEROS: tl.constexpr, INTERPRETED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Each program computes a tile: BLOCK_M pairs of one expert by BLOCK_N rows of its weights [n_rows, K].

    With a GATE, the first half of the weights is gate, the second up. Their rows are interleaved in a tile, so that the
    two terms of an output are neighbours. Rows of x are tokens, and rows of out [P, n_rows / 2] are in list order.
    Without one, x is in list order and out [P, n_rows] in pair order. The bias is [E, n_rows] or None. SWAP_AB: the
    weights are the M operand of the tensor cores, for few pairs. EVEN_K: BLOCK_K divides K. PARTS: x [PARTS max_rows,
    K] is quantized to 8 bits with a scale for each row, and weights have BITS and SCALE (see `_numbers`); two parts and
    4-bit weights need SWAP_AB. Programs beyond the last tile return at once.
    """
    IS_GATED: tl.constexpr = GATE != ""
    IS_E2M1: tl.constexpr = scale_ptr.dtype.element_ty == tl.uint8
    HALF: tl.constexpr = 32 if IS_E2M1 else 64
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
    # Volatile: else the compiler loads them only once it knows that the tile exists, which is one more round trip.
    expert = tl.load(tiles_ptr + 4 + 4 * tile, volatile=True).to(tl.int64)
    first_m = tl.load(tiles_ptr + 5 + 4 * tile, volatile=True)
    end = tl.load(tiles_ptr + 6 + 4 * tile, volatile=True)
    if pid >= num_tiles * num_columns:
        return
    ROWS: tl.constexpr = BLOCK_M * (2 if PARTS == 2 else 1)
    offs_m = first_m + tl.arange(0, BLOCK_M)
    offs_x = first_m + tl.arange(0, ROWS) % BLOCK_M
    is_pair, is_x = offs_m < end, offs_x < end
    pair = tl.load(order_ptr + offs_m, mask=is_pair, other=0)
    row = column * BLOCK_N + tl.arange(0, BLOCK_N)
    if IS_GATED:
        n_out = n_rows // 2
        source, target = pair // TOP_K, offs_m
        source_x = tl.load(order_ptr + offs_x, mask=is_x, other=0) // TOP_K
        row = tl.minimum(row // 2, n_out - 1) + row % 2 * n_out
    else:
        n_out = n_rows
        source, target = offs_m, pair
        source_x = offs_x
        row = tl.minimum(row, n_out - 1)
    source_x += tl.arange(0, ROWS) // BLOCK_M * max_rows
    x_ptrs = x_ptr + source_x.to(tl.int64)[:, None] * n_in
    WIDTH: tl.constexpr = BLOCK_N // 2 if IS_GATED else BLOCK_N
    if BITS == 8 and SCALE > 1:
        # A step needs one scale, or one for gate (even rows) and one for up, which is faster than loading BLOCK_N.
        block_ptr = scale_ptr + (expert * n_rows + column * WIDTH) // SCALE * (n_in // SCALE)
        is_up = tl.arange(0, BLOCK_N) % 2 == 1
    row += expert * n_rows
    weight_ptrs = weight_ptr + row[:, None] * (n_in // (2 * HALF) * HALF if BITS == 4 else n_in)  # aligned
    acc = tl.zeros(
        [BLOCK_N, ROWS] if SWAP_AB else [BLOCK_M, BLOCK_N],
        tl.int32 if weight_ptr.dtype.element_ty == tl.int8 else tl.float32,
    )
    if BITS == 4:
        GROUPS: tl.constexpr = BLOCK_K // SCALE
        scale_ptrs, zeros_ptrs = scale_ptr + row * (n_in // SCALE), zeros_ptr + row * (n_in // SCALE)
        scales = group_scales(scale_ptrs, 0, GROUPS)
    for start in tl.range(0, n_in, BLOCK_K, num_stages=NUM_STAGES):
        if BITS == 4:
            group = tl.minimum(start + BLOCK_K, n_in - BLOCK_K) // SCALE
            next_scales = group_scales(scale_ptrs, group, GROUPS)
            acc = add_4bit_products(
                acc, weight_ptrs, x_ptrs, is_x, start, scales, BLOCK_K, SCALE, HALF, IS_E2M1, INTERPRETED
            )  # fmt: skip
            scales = next_scales
        else:
            offs_k = (start + tl.arange(0, BLOCK_K))[None, :]
            w = tl.load(weight_ptrs + offs_k, mask=EVEN_K | (offs_k < n_in), other=0.0)
            x = tl.load(x_ptrs + offs_k, mask=is_x[:, None] & (EVEN_K | (offs_k < n_in)), other=0.0)
            if SCALE > 1:  # the tensor cores accumulate FP8 with 14 bits, so a sum covers only BLOCK_K inputs
                scale = tl.load(block_ptr + start // SCALE)
                if IS_GATED:
                    up_scale = tl.load(block_ptr + n_out // SCALE * (n_in // SCALE) + start // SCALE)
                    scale = tl.where(is_up[:, None] if SWAP_AB else is_up[None, :], up_scale, scale)
                acc += (tl.dot(w, tl.trans(x)) if SWAP_AB else tl.dot(x, tl.trans(w))) * scale
            else:
                acc = add_products(acc, w, x, SWAP_AB, BLOCK_K)
    if BITS == 4:
        sums_ptrs, groups = sums_ptr + source_x, n_in // SCALE
        acc = less_zeros(
            acc, scale_ptrs, zeros_ptrs, sums_ptrs, PARTS * max_rows, groups, is_x, HAS_ZEROS, IS_E2M1
        )  # fmt: skip
    acc = join_parts(acc, BLOCK_N, BLOCK_M, PARTS)
    result = tl.trans(acc) if SWAP_AB else acc
    if PARTS > 0:
        result *= tl.load(x_scale_ptr + source, mask=is_pair, other=0.0)[:, None]
    if SCALE == 1:
        result *= tl.load(scale_ptr + row)[None, :]
    if bias_ptr is not None:
        result += tl.load(bias_ptr + row).to(tl.float32)[None, :]
    if IS_GATED:
        gate, up = tl.split(tl.reshape(result, [BLOCK_M, WIDTH, 2]))
        result = gated(gate, up, GATE)
    offs_n = (column * WIDTH + tl.arange(0, WIDTH))[None, :]
    out_ptrs = out_ptr + target.to(tl.int64)[:, None] * n_out + offs_n
    tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=is_pair[:, None] & (offs_n < n_out))


@triton.jit
def _combine(x_ptr, weights_ptr, out_ptr, n, TOP_K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """out[t] = sum over i of weights[t, i] x[t k + i], in order and in float32; grid (T, n / BLOCK)."""
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
    """Tile (rows of weights, inputs), pipeline stages, warps."""

    block_n: int
    block_k: int
    num_stages: int
    num_warps: int


class MoeConfig(NamedTuple):
    """Pairs per tile, whether the weights are the M operand, the tiles of both GEMMs, and the number of parts of x."""

    block_m: int
    swap_ab: bool
    up: GemmTile
    down: GemmTile
    parts: int = 0


# Bounds are the mean number of rows per expert. Of 6 to 9 tiles at 12 numbers of tokens, these are the fastest or
# nearly so on an H200, for Qwen3-30B-A3B, its halves and quarters, and Mixtral 8x7B.
CONFIGS: Final = (
    (8.0, MoeConfig(16, True, GemmTile(64, 128, 3, 4), GemmTile(128, 128, 3, 4))),
    (20.0, MoeConfig(32, True, GemmTile(64, 128, 3, 4), GemmTile(128, 64, 4, 4))),
    (48.0, MoeConfig(64, False, GemmTile(128, 64, 4, 4), GemmTile(128, 64, 4, 4))),
    (float("inf"), MoeConfig(128, False, GemmTile(256, 64, 4, 8), GemmTile(256, 64, 4, 8))),
)
FLOAT32: Final = MoeConfig(16, False, GemmTile(32, 32, 2, 4), GemmTile(32, 32, 2, 4))  # without tensor cores


# For 8-bit weights: the fastest or nearly so of 5 to 15 tiles at 7 numbers of tokens (Qwen3-30B-A3B, H200).
FP8_CONFIGS: Final = (
    (8.0, MoeConfig(16, True, GemmTile(64, 128, 6, 4), GemmTile(64, 128, 4, 4), 2)),
    (20.0, MoeConfig(32, True, GemmTile(128, 128, 4, 8), GemmTile(128, 128, 4, 8), 2)),
    (float("inf"), MoeConfig(64, False, GemmTile(128, 128, 4, 8), GemmTile(128, 128, 3, 4), 1)),
)

# For 4-bit weights: the fastest or nearly so of 2 to 8 tiles at 7 numbers of tokens (Qwen3-30B-A3B, H200).
INT4_CONFIGS: Final = (
    (8.0, MoeConfig(16, True, GemmTile(128, 128, 4, 4), GemmTile(128, 128, 4, 4), 2)),
    (20.0, MoeConfig(32, True, GemmTile(64, 128, 4, 4), GemmTile(64, 128, 4, 4), 2)),
    (48.0, MoeConfig(64, True, GemmTile(64, 128, 4, 4), GemmTile(64, 128, 4, 4), 1)),
    (float("inf"), MoeConfig(64, True, GemmTile(128, 128, 4, 4), GemmTile(128, 128, 4, 4), 1)),
)


def moe_config(pairs: int, num_experts: int, dtype: torch.dtype, bits: int = 16) -> MoeConfig:
    """Return the tiles for `pairs` pairs, chosen by the mean number of pairs per expert."""
    if dtype is torch.float32 and bits == 16:
        return FLOAT32
    configs = {16: CONFIGS, 8: FP8_CONFIGS, 4: INT4_CONFIGS}[bits]
    return next(config for max_rows, config in configs if pairs <= max_rows * num_experts)


def grouped_gemm(
    x: Tensor, weight: Tensor | Quantized, lists: Lists, top_k: int, config: MoeConfig, bias: Tensor | None = None,
    gate: str = "",
) -> Tensor:  # fmt: skip
    """Run one of the two GEMMs of `_grouped_gemm`: weight [E, n_rows, K] -> [P, n_rows / 2 or n_rows]."""
    (n_rows, n_in), is_gated = weight.shape[1:], gate != ""
    out = empty((len(lists.order), n_rows // 2 if is_gated else n_rows), dtype=x.dtype, device=x.device)
    (data, scale, zeros, kind), x_scale, sums, max_rows = _numbers(weight), x, x, 0
    if isinstance(weight, Quantized):
        sum_group = kind if weight.format.name == "int4" else 0
        dtype = torch.int8 if weight.format.is_integer else E4M3
        x, x_scale, sums = split_rows(x, None, config.parts, dtype=dtype, sum_group=sum_group)
        max_rows = len(x) // config.parts
    block_n, block_k, num_stages, num_warps = config.up if is_gated else config.down
    if x.dtype is torch.float32:  # 16 bits beside 8 in the other GEMM
        block_n, block_k, num_stages, num_warps = FLOAT32.up
    if block_k > 64 and n_in % block_k:
        block_k, num_stages = block_k // 2, num_stages + 1  # at 192 inputs 24 us instead of 27
    _grouped_gemm[(lists.max_tiles * triton.cdiv(n_rows, block_n),)](
        x, x_scale, sums, data, scale, zeros, bias, out, lists.order, lists.tiles, max_rows, n_rows, n_in,
        TOP_K=top_k, GATE=gate, BLOCK_M=lists.block_m, BLOCK_N=block_n, BLOCK_K=block_k,
        NUM_STAGES=num_stages, SWAP_AB=config.swap_ab, EVEN_K=n_in % block_k == 0,
        GROUP_M=1 if config.swap_ab else GROUP_M, PARTS=config.parts if kind else 0, SCALE=kind,
        BITS=weight.format.bits if isinstance(weight, Quantized) else 16,
        HAS_ZEROS=zeros is not scale, INTERPRETED=INTERPRETED, num_warps=num_warps, **pdl_options(x.device),
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


# -- GEMV on the CUDA cores: weights go straight to registers, as in `linear.py`, once for each pair


@triton.jit
def _block_scales(scale_ptrs, start, groups, BLOCK_K: tl.constexpr, SCALE: tl.constexpr):
    """Return the scales of BLOCK_K inputs from `start` on; `scale_ptrs` point to the first of each row's `groups`."""
    scale = tl.load(scale_ptrs + start // SCALE)
    for i in tl.static_range(1, BLOCK_K // SCALE):  # cheaper than a load for each input
        next_scale = tl.load(scale_ptrs + tl.minimum(start // SCALE + i, groups - 1))
        scale = tl.where(tl.arange(0, BLOCK_K) // SCALE == i, next_scale, scale)
    return scale


@triton.jit
def _gate_up_gemv(
    x_ptr, weight_ptr, scale_ptr, bias_ptr, out_ptr, experts_ptr, n_out, n_in,
    TOP_K: tl.constexpr, GATE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NUM_BLOCKS_K: tl.constexpr,
    SCALE: tl.constexpr, INTERPRETED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[pair] = f(gate x + bias, up x + bias) of the pair's expert and token; grid (I / BLOCK_N, P)."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()  # only now: `_down_gemv` may read `experts` as soon as it runs
    pair = tl.program_id(1)
    expert = tl.load(experts_ptr + pair).to(tl.int64)
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = expert * 2 * n_out + tl.minimum(offs_n, n_out - 1)
    weight_ptrs = weight_ptr + row[:, None] * n_in
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    acc_up = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for i in tl.static_range(NUM_BLOCKS_K):
        offs_k = i * BLOCK_K + tl.arange(0, BLOCK_K)
        mask = offs_k < n_in
        w = tl.load(weight_ptrs + offs_k[None, :], mask=mask[None, :], other=0.0)
        up = tl.load(weight_ptrs + n_out.to(tl.int64) * n_in + offs_k[None, :], mask=mask[None, :], other=0.0)
        x = tl.load(x_ptr + pair // TOP_K * n_in + offs_k, mask=mask, other=0.0).to(tl.float32)
        x_up = x
        if SCALE > 1:
            groups = n_in // SCALE
            scale_ptrs = scale_ptr + (expert * 2 * n_out + tl.program_id(0) * BLOCK_N) // SCALE * groups
            x_up = x * _block_scales(scale_ptrs + n_out // SCALE * groups, i * BLOCK_K, groups, BLOCK_K, SCALE)
            x *= _block_scales(scale_ptrs, i * BLOCK_K, groups, BLOCK_K, SCALE)
        acc += numbers_as_float(w, INTERPRETED) * x[None, :]
        acc_up += numbers_as_float(up, INTERPRETED) * x_up[None, :]
    gate, up = tl.sum(acc, 1), tl.sum(acc_up, 1)
    if SCALE == 1:
        gate *= tl.load(scale_ptr + row)
        up *= tl.load(scale_ptr + n_out + row)
    if bias_ptr is not None:
        gate += tl.load(bias_ptr + row).to(tl.float32)
        up += tl.load(bias_ptr + n_out + row).to(tl.float32)
    result = gated(gate, up, GATE)
    tl.store(out_ptr + pair * n_out + offs_n, result.to(out_ptr.dtype.element_ty), mask=offs_n < n_out)


@triton.jit
def _down_gemv(
    x_ptr, weight_ptr, scale_ptr, bias_ptr, out_ptr, experts_ptr, weights_ptr, n_out, n_in,
    TOP_K: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    NUM_BLOCKS_K: tl.constexpr, AHEAD: tl.constexpr, SCALE: tl.constexpr, INTERPRETED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[t] = sum over i of weights[t, i] (down x[t k + i] + bias), in float32; grid (H / BLOCK_N, T).

    Tiles are [BLOCK_P, BLOCK_N, BLOCK_K], for BLOCK_P experts at a time. Weights are loaded AHEAD tiles before their
    use, so the first AHEAD tiles are loaded before x is available.
    """
    token = tl.program_id(1)
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(offs_n, n_out - 1)
    if PDL:
        gdc_launch_dependents()
    NUM_TILES: tl.constexpr = (TOP_K + BLOCK_P - 1) // BLOCK_P * NUM_BLOCKS_K
    acc = tl.zeros([BLOCK_P, BLOCK_N, BLOCK_K], tl.float32)
    biases = tl.zeros([BLOCK_P, BLOCK_N], tl.float32)
    firsts, tiles = tl.tuple([]), tl.tuple([])  # the experts' first rows; their weights
    for step in tl.static_range(NUM_TILES + AHEAD):
        if step < NUM_TILES:
            choice = step // NUM_BLOCKS_K * BLOCK_P + tl.arange(0, BLOCK_P)
            if step % NUM_BLOCKS_K == 0:
                expert = tl.load(experts_ptr + token * TOP_K + choice, mask=choice < TOP_K, other=0)
                firsts += (expert.to(tl.int64) * n_out,)
            offs_k = step % NUM_BLOCKS_K * BLOCK_K + tl.arange(0, BLOCK_K)
            offs = (firsts[step // NUM_BLOCKS_K][:, None] + row[None, :])[:, :, None] * n_in + offs_k[None, None, :]
            mask = ((choice < TOP_K)[:, None] & (offs_k < n_in)[None, :])[:, None, :]
            tiles += (tl.load(weight_ptr + offs, mask=mask, other=0.0),)
        if PDL and step == AHEAD - 1:
            gdc_wait()
        if step >= AHEAD:
            choice = (step - AHEAD) // NUM_BLOCKS_K * BLOCK_P + tl.arange(0, BLOCK_P)
            pair, first = token * TOP_K + choice, firsts[(step - AHEAD) // NUM_BLOCKS_K]
            offs_k = (step - AHEAD) % NUM_BLOCKS_K * BLOCK_K + tl.arange(0, BLOCK_K)
            mask = (choice < TOP_K)[:, None] & (offs_k < n_in)[None, :]
            x = tl.load(x_ptr + pair[:, None] * n_in + offs_k[None, :], mask=mask, other=0.0).to(tl.float32)
            if (step - AHEAD) % NUM_BLOCKS_K == 0:
                factor = tl.load(weights_ptr + pair, mask=choice < TOP_K, other=0.0)[:, None]
                part = tl.zeros_like(acc) if SCALE == 1 else acc
                if bias_ptr is not None:
                    biases += factor * tl.load(bias_ptr + first[:, None] + row[None, :]).to(tl.float32)
            if SCALE != 1:
                x *= factor
            if SCALE > 1:
                groups, start = n_in // SCALE, (step - AHEAD) % NUM_BLOCKS_K * BLOCK_K
                scale_ptrs = scale_ptr + ((first + tl.program_id(0) * BLOCK_N) // SCALE * groups)[:, None]
                x *= _block_scales(scale_ptrs, start, groups, BLOCK_K, SCALE)
            part += numbers_as_float(tiles[step - AHEAD], INTERPRETED) * x[:, None, :]
            if (step - AHEAD) % NUM_BLOCKS_K == NUM_BLOCKS_K - 1:
                if SCALE == 1:
                    factor *= tl.load(scale_ptr + first[:, None] + row[None, :])
                    acc += part * factor[:, :, None]
                else:
                    acc = part
    result = tl.sum(tl.sum(acc, 2), 0) if bias_ptr is None else tl.sum(tl.sum(acc, 2) + biases, 0)
    tl.store(out_ptr + token * n_out + offs_n, result.to(out_ptr.dtype.element_ty), mask=offs_n < n_out)


@triton.jit
def _gemv_of_4_bits(
    x_ptr, weight_ptr, scale_ptr, zeros_ptr, bias_ptr, out_ptr, experts_ptr, n_rows, n_in,
    TOP_K: tl.constexpr, GATE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    NUM_BLOCKS_K: tl.constexpr, GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr, INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """`_gate_up_gemv` with 4-bit weights, or without a GATE out[pair] = down x[pair] + bias; grid (n_out / OUT, P)."""
    IS_GATED: tl.constexpr = GATE != ""
    IS_E2M1: tl.constexpr = scale_ptr.dtype.element_ty == tl.uint8
    HALF: tl.constexpr = 32 if IS_E2M1 else 64
    WIDTH: tl.constexpr = HALF if GROUP > HALF else GROUP  # bytes whose low nibbles share a group
    GROUPS: tl.constexpr = BLOCK_K // 2 // WIDTH
    OUT: tl.constexpr = BLOCK_N // 2 if IS_GATED else BLOCK_N
    if PDL and IS_GATED:
        gdc_wait()
    if PDL:
        gdc_launch_dependents()  # only now, as in `_gate_up_gemv`
    n_out = n_rows // 2 if IS_GATED else n_rows
    pair = tl.program_id(1)
    offs_n = tl.program_id(0) * OUT + tl.arange(0, BLOCK_N) % OUT
    row = tl.minimum(offs_n, n_out - 1) + tl.arange(0, BLOCK_N) // OUT * n_out
    row = (tl.load(experts_ptr + pair).to(tl.int64) * n_rows + row)[:, None]
    width = n_in // (2 * HALF) * HALF
    acc = tl.zeros([BLOCK_N, GROUPS], tl.float32)
    for i in tl.static_range(NUM_BLOCKS_K):
        offs_b = i * (BLOCK_K // 2) + tl.arange(0, BLOCK_K // 2)
        packed = tl.load(weight_ptr + row * width + offs_b[None, :], mask=(offs_b < width)[None, :], other=0)
        if PDL and not IS_GATED and i == 0:
            gdc_wait()
        offs_k = offs_b // HALF * (2 * HALF) + offs_b % HALF
        offs_g = i * (BLOCK_K // 2) + tl.arange(0, GROUPS) * WIDTH  # the first byte of each group
        part, total = tl.zeros_like(acc), tl.zeros([GROUPS], tl.float32)
        for j in tl.static_range(2):
            x_ptrs = x_ptr + (pair // TOP_K if IS_GATED else pair) * n_in + offs_k + j * HALF
            x = tl.load(x_ptrs, mask=offs_b < width, other=0.0).to(tl.float32)
            w = half_as_fp8(packed, j == 1, IS_E2M1, INTERPRETED).to(tl.float32)
            part += tl.sum(tl.reshape(w * x[None, :], [BLOCK_N, GROUPS, WIDTH]), 2)
            total += tl.sum(tl.reshape(x, [GROUPS, WIDTH]), 1)
            if GROUP <= HALF or j == 1:
                group = (offs_g // HALF * (2 * HALF) + offs_g % HALF + j * HALF) // GROUP
                offs, mask = row * (n_in // GROUP) + group[None, :], (offs_g < width)[None, :]
                scale = as_float(tl.load(scale_ptr + offs, mask=mask, other=0))
                if IS_E2M1:
                    acc += part * 64.0 * scale
                elif HAS_ZEROS:
                    zero = tl.load(zeros_ptr + offs, mask=mask, other=0).to(tl.float32)
                    acc += (part * 512.0 - zero * total[None, :]) * scale
                else:
                    acc += (part * 512.0 - 8.0 * total[None, :]) * scale
                part, total = tl.zeros_like(acc), tl.zeros([GROUPS], tl.float32)
    result = tl.sum(acc, 1)
    if bias_ptr is not None:
        result += tl.sum(tl.load(bias_ptr + row).to(tl.float32), 1)
    if IS_GATED:
        gate, up = tl.split(tl.permute(tl.reshape(result, [2, OUT]), (1, 0)))
        result = gated(gate, up, GATE)
    offs_n = tl.program_id(0) * OUT + tl.arange(0, OUT)
    out_ptrs = out_ptr + pair.to(tl.int64) * n_out + offs_n
    tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=offs_n < n_out)


class GemvTile(NamedTuple):
    """Tile (outputs, inputs) and warps; for `_down_gemv` also experts per tile, and tiles loaded ahead."""

    block_n: int
    block_k: int
    num_warps: int
    block_p: int = 1
    ahead: int = 1


UP_TILE: Final = GemvTile(1, 1024, 4)
FP8_UP_TILE: Final = GemvTile(16, 256, 4)  # 8.5 us for Qwen3-30B-A3B (floor 5.5); 16-bit 13.0 (11.1)
# Bounds are numbers of inputs. At 192, 384, 768 and 14,336 these are the fastest of eight on an H200.
DOWN_TILES: Final = (
    (256, GemvTile(4, 256, 1)),
    (512, GemvTile(1, 256, 1)),
    (1023, GemvTile(2, 512, 2)),
    (float("inf"), GemvTile(1, 1024, 4)),
)
INT4_TILE: Final = GemvTile(16, 1024, 4)  # gate_up: 8.1 us at 1 token of Qwen3-30B-A3B (floor 2.9), 22.1 at 4
INT4_UP_TILE: Final = GemvTile(8, 2048, 4)  # one token, up to 2,048 inputs: 7.5 us instead of 8.1
FP8_DOWN_TILE: Final = GemvTile(4, 128, 4, 8, 3)  # 5.5 us (floor 2.8); 6.7 with one expert at a time


def pair_gate_up(
    x: Tensor, experts: Tensor, gate_up: Tensor | Quantized, bias: Tensor | None = None, gate: str = "silu",
    tile: GemvTile | None = None,
) -> Tensor:  # fmt: skip
    """x [T, H], experts [T, k], gate_up [E, 2I, H], bias [E, 2I] -> [P, I]."""
    top_k = experts.shape[1]
    n_out = gate_up.shape[1] // 2
    n_in = x.shape[1]
    pairs = experts.numel()
    out = empty((pairs, n_out), dtype=x.dtype, device=x.device)
    if isinstance(gate_up, Quantized) and gate_up.format.bits == 4:
        own = INT4_UP_TILE if len(x) == 1 and 1024 < n_in <= 2048 else INT4_TILE
        return _pair_gemv_of_4_bits(x, experts, gate_up, bias, out, gate, tile or own)
    data, scale, _, kind = _numbers(gate_up)
    tile = tile or (FP8_UP_TILE if kind else UP_TILE)
    _gate_up_gemv[(triton.cdiv(n_out, tile.block_n), pairs)](
        x, data, scale, bias, out, experts, n_out, n_in,
        TOP_K=top_k, GATE=gate, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
        NUM_BLOCKS_K=triton.cdiv(n_in, tile.block_k), SCALE=kind, INTERPRETED=INTERPRETED, num_warps=tile.num_warps,
        **pdl_options(x.device),
    )  # fmt: skip
    return out


def pair_down(
    hidden: Tensor, experts: Tensor, weights: Tensor, down: Tensor | Quantized, bias: Tensor | None = None,
    tile: GemvTile | None = None,
) -> Tensor:  # fmt: skip
    """hidden [P, I], weights [T, k], down [E, H, I], bias [E, H] -> [T, H]; after `pair_gate_up` of these experts."""
    tokens, top_k = experts.shape
    n_out, n_in = down.shape[1:]
    if isinstance(down, Quantized) and down.format.bits == 4:
        outputs = empty((len(hidden), n_out), dtype=hidden.dtype, device=hidden.device)
        outputs = _pair_gemv_of_4_bits(hidden, experts, down, bias, outputs, "", tile or INT4_TILE)
        return combine(outputs, weights)
    out = empty((tokens, n_out), dtype=hidden.dtype, device=hidden.device)
    data, scale, _, kind = _numbers(down)
    own = FP8_DOWN_TILE if kind else next(tile for max_inputs, tile in DOWN_TILES if n_in <= max_inputs)
    tile = tile or own
    _down_gemv[(triton.cdiv(n_out, tile.block_n), tokens)](
        hidden, data, scale, bias, out, experts, weights, n_out, n_in,
        TOP_K=top_k, BLOCK_P=min(tile.block_p, triton.next_power_of_2(top_k)), BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k, NUM_BLOCKS_K=triton.cdiv(n_in, tile.block_k), AHEAD=tile.ahead, SCALE=kind,
        INTERPRETED=INTERPRETED, num_warps=tile.num_warps, **pdl_options(hidden.device),
    )  # fmt: skip
    return out


def _pair_gemv_of_4_bits(
    x: Tensor, experts: Tensor, matrices: Quantized, bias: Tensor | None, out: Tensor, gate: str, tile: GemvTile
) -> Tensor:
    n_rows, n_in = matrices.shape[1:]
    data, scale, zeros, group = _numbers(matrices)
    _gemv_of_4_bits[(triton.cdiv(out.shape[1], tile.block_n // (2 if gate else 1)), len(out))](
        x, data, scale, zeros, bias, out, experts, n_rows, n_in,
        TOP_K=experts.shape[1], GATE=gate, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
        NUM_BLOCKS_K=triton.cdiv(n_in, tile.block_k), GROUP=group, HAS_ZEROS=zeros is not scale,
        INTERPRETED=INTERPRETED, num_warps=tile.num_warps, **pdl_options(x.device),
    )  # fmt: skip
    return out
