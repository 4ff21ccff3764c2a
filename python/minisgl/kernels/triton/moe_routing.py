"""Mixture-of-experts routing: the experts of each token, and the lists from which the grouped GEMMs take their rows.

Letters: T tokens, E experts, k experts per token. A *pair* is one token at one of its experts; pair t k + i is choice i
of token t. Sizes depend on T only and the host reads nothing, so a CUDA graph can capture all of it. There are no
atomics: the same logits give the same lists.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor, empty, float32, int32, int64
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minisgl.kernels.triton.launch import pdl_options


@triton.jit
def _store_lists(order_ptr, tiles_ptr, choices, tokens, before, total, is_first, block_m, TOP_K: tl.constexpr):
    """Store the pairs of a block of tokens, sorted by expert; if `is_first`, also the tiles of all pairs.

    choices [BLOCK_T, BLOCK_E]: i if the expert is choice i of the token, else -1; total [BLOCK_E]: tokens per expert;
    before [BLOCK_E]: tokens per expert in earlier blocks. A token's rank among an expert's tokens is a running sum,
    because no token chooses an expert twice.
    """
    is_chosen = (choices >= 0).to(tl.int32)
    rank = tl.cumsum(is_chosen, 0) - is_chosen
    start = tl.cumsum(total, 0) - total
    order_ptrs = order_ptr + (start + before)[None, :] + rank
    tl.store(order_ptrs, tokens[:, None] * TOP_K + choices, mask=choices >= 0)
    if is_first:
        num_tiles = (total + block_m - 1) // block_m
        tile_ptrs = tiles_ptr + 4 + 4 * (tl.cumsum(num_tiles, 0) - num_tiles)
        offs_e = tl.arange(0, total.shape[0])
        tl.store(tiles_ptr, tl.sum(num_tiles, 0))
        for i in range(tl.max(num_tiles, 0)):
            mask = i < num_tiles
            tl.store(tile_ptrs + 4 * i, offs_e, mask=mask)
            tl.store(tile_ptrs + 4 * i + 1, start + i * block_m, mask=mask)
            tl.store(tile_ptrs + 4 * i + 2, start + total, mask=mask)


@triton.jit
def _ordered(bits):
    """Map the bits of a float to an integer that sorts like the float. The map is its own inverse."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit(do_not_specialize=["num_tokens", "block_m"])
def _route(
    logits_ptr, scales_ptr, experts_ptr, weights_ptr, counts_ptr, order_ptr, tiles_ptr, num_tokens, block_m,
    NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, NORMALISE: tl.constexpr, LISTS: tl.constexpr, COUNTS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute the experts and weights [T, k] of BLOCK_T tokens per program.

    LISTS: a single program also makes the lists. COUNTS: also count the tokens of each expert, for `_list_blocks`.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    is_token = (tokens < num_tokens)[:, None]
    offs_e, offs_k = tl.arange(0, BLOCK_E)[None, :], tl.arange(0, BLOCK_K)[None, :]
    mask = is_token & (offs_e < NUM_EXPERTS)
    x = tl.load(logits_ptr + tokens[:, None] * NUM_EXPERTS + offs_e, mask=mask, other=0.0).to(tl.float32)
    x = tl.where(offs_e < NUM_EXPERTS, x, float("-inf"))
    highest = tl.max(x, 1)
    scale = 1 / tl.sum(tl.exp(x - highest[:, None]), 1)
    # Experts not chosen yet rank above -inf even if their logits are -inf or NaN, so no expert is chosen twice.
    LOWEST: tl.constexpr = -3.4e38
    remaining = tl.where(offs_e < NUM_EXPERTS, tl.where(x > LOWEST, x, LOWEST), float("-inf"))
    choices = tl.full([BLOCK_T, BLOCK_E], -1, tl.int32)
    experts = tl.zeros([BLOCK_T, BLOCK_K], tl.int32)
    probabilities = tl.zeros([BLOCK_T, BLOCK_K], tl.float32)
    # Compared as integers, since the maximum or minimum over a warp's integers is one instruction.
    keys = _ordered((remaining + 0.0).to(tl.int32, bitcast=True))  # + 0.0, since -0.0 equals 0.0
    for j in tl.static_range(TOP_K):
        key = tl.max(keys, 1)
        expert = tl.min(tl.where(keys == key[:, None], offs_e, BLOCK_E), 1)
        value = _ordered(key).to(tl.float32, bitcast=True)
        is_expert = offs_e == expert[:, None]
        keys = tl.where(is_expert, -(2**31), keys)
        choices = tl.where(is_expert & is_token, j, choices)
        experts = tl.where(offs_k == j, expert[:, None], experts)
        probabilities = tl.where(offs_k == j, (tl.exp(value - highest) * scale)[:, None], probabilities)
    if NORMALISE:
        probabilities /= tl.sum(probabilities, 1)[:, None]
    if scales_ptr is not None:
        probabilities *= tl.load(scales_ptr + experts).to(tl.float32)
    offs_out = tokens[:, None] * TOP_K + offs_k
    tl.store(experts_ptr + offs_out, experts, mask=is_token & (offs_k < TOP_K))
    tl.store(weights_ptr + offs_out, probabilities, mask=is_token & (offs_k < TOP_K))
    if LISTS or COUNTS:
        total = tl.sum((choices >= 0).to(tl.int32), 0)
    if LISTS:
        _store_lists(order_ptr, tiles_ptr, choices, tokens, tl.zeros_like(total), total, True, block_m, TOP_K)
    if COUNTS:
        tl.store(counts_ptr + tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E), total)


@triton.jit(do_not_specialize=["num_tokens", "num_blocks", "block_m"])
def _list_blocks(
    experts_ptr, counts_ptr, order_ptr, tiles_ptr, num_tokens, num_blocks, block_m,
    TOP_K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Make the lists for BLOCK_T tokens per program, from the counts of all programs of `_route`."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    offs_e = tl.arange(0, BLOCK_E)[None, :]
    total, before = tl.zeros([BLOCK_E], tl.int32), tl.zeros([BLOCK_E], tl.int32)
    for first in range(0, num_blocks, 16):
        block = first + tl.arange(0, 16)[:, None]
        count = tl.load(counts_ptr + block * BLOCK_E + offs_e, mask=block < num_blocks, other=0)
        total += tl.sum(count, 0)
        before += tl.sum(tl.where(block < tl.program_id(0), count, 0), 0)
    choices = tl.full([BLOCK_T, BLOCK_E], -1, tl.int32)
    for j in tl.static_range(TOP_K):
        expert = tl.load(experts_ptr + tokens * TOP_K + j, mask=tokens < num_tokens, other=-1)
        choices = tl.where(offs_e == expert[:, None], j, choices)
    _store_lists(order_ptr, tiles_ptr, choices, tokens, before, total, tl.program_id(0) == 0, block_m, TOP_K)


class Lists(NamedTuple):
    """Pairs sorted by expert, then token, and their tiles of `block_m` pairs.

    order [T k] int32; tiles [1 + `max_tiles`, 4] int32: the number of tiles, then of each tile its expert, its first
    index into `order` and the end of the expert's pairs (a tile has up to `block_m` of them).
    """

    order: Tensor
    tiles: Tensor
    block_m: int

    @property
    def max_tiles(self) -> int:
        """The largest number of tiles of any routing."""
        return len(self.tiles) - 1


def route(logits: Tensor, top_k: int, normalise: bool, scales: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return experts [T, k] int32, most probable first (the lowest of equals), and their weights [T, k] float32.

    logits [T, E] are contiguous; `scales` [E] or None multiply the weights of experts. These are those of
    `reference.moe`: NaN where the softmax is NaN. Even then the experts of a token differ.
    """
    return _route_tokens(logits, top_k, normalise, scales, None)


def route_and_list(
    logits: Tensor, top_k: int, normalise: bool, block_m: int, scales: Tensor | None = None
) -> tuple[Tensor, Lists]:
    """Return the weights of `route`, and the pairs sorted by expert in tiles of `block_m`."""
    pairs = len(logits) * top_k
    max_tiles = min(pairs, (pairs + min(logits.shape[1], pairs) * (block_m - 1)) // block_m)
    order = empty(pairs, dtype=int32, device=logits.device)
    tiles = empty((1 + max_tiles, 4), dtype=int32, device=logits.device)
    lists = Lists(order, tiles, block_m)
    return _route_tokens(logits, top_k, normalise, scales, lists)[1], lists


def _route_tokens(
    logits: Tensor, top_k: int, normalise: bool, scales: Tensor | None, lists: Lists | None
) -> tuple[Tensor, Tensor]:
    """Do what `route` does, and fill `lists` if given."""
    tokens, num_experts = logits.shape
    if lists is None:
        block_t = 1  # tokens are independent
    else:
        block_t = 8 if tokens <= 8 else 32 if tokens <= 4096 else 64
    block_e, num_blocks = triton.next_power_of_2(num_experts), triton.cdiv(tokens, block_t)
    experts = empty((tokens, top_k), dtype=int32, device=logits.device)
    weights = empty((tokens, top_k), dtype=float32, device=logits.device)
    has_counts = lists is not None and num_blocks > 1
    counts = empty((num_blocks, block_e), dtype=int32, device=logits.device) if has_counts else experts
    order, tiles, block_m = lists or (experts, experts, 1)
    options = {"num_warps": min(8, block_t), **pdl_options(logits.device)}  # each warp has tokens of its own
    _route[(num_blocks,)](
        logits, scales, experts, weights, counts, order, tiles, tokens, block_m,
        NUM_EXPERTS=num_experts, TOP_K=top_k, NORMALISE=normalise, LISTS=lists is not None and num_blocks == 1,
        COUNTS=has_counts, BLOCK_T=block_t, BLOCK_E=block_e, BLOCK_K=triton.next_power_of_2(top_k), **options,
    )  # fmt: skip
    if has_counts:
        _list_blocks[(num_blocks,)](
            experts, counts, order, tiles, tokens, num_blocks, block_m,
            TOP_K=top_k, BLOCK_T=block_t, BLOCK_E=block_e, **options,
        )  # fmt: skip
    return experts, weights


@triton.jit
def _gather(x_ptr, order_ptr, out_ptr, quads, TOP_K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """out[i] = x of the token of pair order[i], with the even columns of each 16 before the odd ones; grid P.

    x is read as int64, four columns, and out is written as int32, two columns.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()  # only now: `experts.cu` reads the tiles before it waits
    source = tl.load(order_ptr + tl.program_id(0)).to(tl.int64) // TOP_K
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + source * quads + offs, mask=offs < quads)
    even, odd = (x & 0xFFFF) | (x >> 16 & 0xFFFF0000), (x >> 16 & 0xFFFF) | (x >> 32 & 0xFFFF0000)
    out_ptrs = out_ptr + tl.program_id(0).to(tl.int64) * quads * 2 + offs // 4 * 8 + offs % 4
    tl.store(out_ptrs, even.to(tl.int32), mask=offs < quads)
    tl.store(out_ptrs + 4, odd.to(tl.int32), mask=offs < quads)


def gather(x: Tensor, lists: Lists, top_k: int) -> Tensor:
    """x [T, K] -> [P, K], the rows that `experts.cu` multiplies."""
    out, quads = empty((len(lists.order), x.shape[1]), dtype=x.dtype, device=x.device), x.shape[1] // 4
    _gather[(len(out),)](
        x.view(int64), lists.order, out.view(int32), quads,
        TOP_K=top_k, BLOCK=triton.next_power_of_2(quads), **pdl_options(x.device),
    )  # fmt: skip
    return out
