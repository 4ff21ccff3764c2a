"""Which experts each token goes to, and the lists by which the grouped products find their rows: all on the device.

Letters: T tokens, E experts, k experts per token. A *pair* is one token at one of its experts; pair t k + i is choice i
of token t. Sizes are fixed by T alone and nothing is read by the host, so a CUDA graph may hold it. There are no
atomics: the same logits give the same lists.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor, empty, float32, int32
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minisgl.triton.launch import chained


@triton.jit
def _list(order, tiles, slots, tokens, before, total, is_first, rows, TOP_K: tl.constexpr):
    """Store the pairs of some tokens in the order of their experts, and, if `is_first`, the tiles of all.

    slots [BT, BE] is which choice of a token an expert is, or -1; `total` [BE] the tokens of each expert, `before`
    those of them in front of the tokens here. A token's rank among its expert's is a running sum, as no token chooses
    an expert twice.
    """
    chosen = (slots >= 0).to(tl.int32)
    rank = tl.cumsum(chosen, 0) - chosen
    start = tl.cumsum(total, 0) - total
    tl.store(order + (start + before)[None, :] + rank, tokens[:, None] * TOP_K + slots, mask=slots >= 0)
    if is_first:
        count = (total + rows - 1) // rows
        at = tiles + 4 + 4 * (tl.cumsum(count, 0) - count)
        e = tl.arange(0, total.shape[0])
        tl.store(tiles, tl.sum(count, 0))
        for i in range(tl.max(count, 0)):
            here = i < count
            tl.store(at + 4 * i, e, mask=here)
            tl.store(at + 4 * i + 1, start + i * rows, mask=here)
            tl.store(at + 4 * i + 2, start + total, mask=here)


@triton.jit(do_not_specialize=["num_tokens", "rows"])
def _route(
    logits, experts, weights, counts, order, tiles, num_tokens, rows,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, NORMALISE: tl.constexpr, LISTS: tl.constexpr, COUNTS: tl.constexpr,
    BT: tl.constexpr, BE: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BT tokens a program: choices and weights [T, k]; LISTS: and the lists (there is one program), COUNTS: or how many
    of the tokens go to each expert, for `_list_blocks`."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    tokens = tl.program_id(0) * BT + tl.arange(0, BT)
    is_token = (tokens < num_tokens)[:, None]
    e, i = tl.arange(0, BE)[None, :], tl.arange(0, BK)[None, :]
    x = tl.load(logits + tokens[:, None] * EXPERTS + e, mask=is_token & (e < EXPERTS), other=0.0).to(tl.float32)
    x = tl.where(e < EXPERTS, x, float("-inf"))
    highest = tl.max(x, 1)
    scale = 1 / tl.sum(tl.exp(x - highest[:, None]), 1)
    # What is left to choose from: above -inf even where the logits are not, or are no numbers, so that no expert is
    # chosen twice.
    LOWEST: tl.constexpr = -3.4e38
    left = tl.where(e < EXPERTS, tl.where(x > LOWEST, x, LOWEST), float("-inf"))
    slots = tl.full([BT, BE], -1, tl.int32)
    picks = tl.zeros([BT, BK], tl.int32)
    probabilities = tl.zeros([BT, BK], tl.float32)
    for j in tl.static_range(TOP_K):
        value, pick = tl.max(left, 1, return_indices=True, return_indices_tie_break_left=True)
        is_pick = e == pick[:, None]
        left = tl.where(is_pick, float("-inf"), left)
        slots = tl.where(is_pick & is_token, j, slots)
        picks = tl.where(i == j, pick[:, None], picks)
        probabilities = tl.where(i == j, (tl.exp(value - highest) * scale)[:, None], probabilities)
    if NORMALISE:
        probabilities /= tl.sum(probabilities, 1)[:, None]
    at = tokens[:, None] * TOP_K + i
    tl.store(experts + at, picks, mask=is_token & (i < TOP_K))
    tl.store(weights + at, probabilities, mask=is_token & (i < TOP_K))
    if LISTS or COUNTS:
        total = tl.sum((slots >= 0).to(tl.int32), 0)
    if LISTS:
        _list(order, tiles, slots, tokens, tl.zeros_like(total), total, True, rows, TOP_K)
    if COUNTS:
        tl.store(counts + tl.program_id(0) * BE + tl.arange(0, BE), total)


@triton.jit(do_not_specialize=["num_tokens", "blocks", "rows"])
def _list_blocks(
    experts, counts, order, tiles, num_tokens, blocks, rows,
    TOP_K: tl.constexpr, BT: tl.constexpr, BE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The lists of BT tokens a program, from what all programs of `_route` counted."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    tokens = tl.program_id(0) * BT + tl.arange(0, BT)
    e = tl.arange(0, BE)[None, :]
    total, before = tl.zeros([BE], tl.int32), tl.zeros([BE], tl.int32)
    for first in range(0, blocks, 16):
        block = first + tl.arange(0, 16)[:, None]
        count = tl.load(counts + block * BE + e, mask=block < blocks, other=0)
        total += tl.sum(count, 0)
        before += tl.sum(tl.where(block < tl.program_id(0), count, 0), 0)
    slots = tl.full([BT, BE], -1, tl.int32)
    for j in tl.static_range(TOP_K):
        pick = tl.load(experts + tokens * TOP_K + j, mask=tokens < num_tokens, other=-1)
        slots = tl.where(e == pick[:, None], j, slots)
    _list(order, tiles, slots, tokens, before, total, tl.program_id(0) == 0, rows, TOP_K)


class Lists(NamedTuple):
    """Pairs sorted by expert, then token, and their tiles of `rows` pairs.

    order [T k] int32; tiles [1 + `max_tiles`, 4] int32: their number, then expert, first and end of each tile's place
    in `order` (a tile has `rows` pairs or what is left before the end of its expert's).
    """

    order: Tensor
    tiles: Tensor
    rows: int

    @property
    def max_tiles(self) -> int:
        """The most tiles that any routing of so many tokens can have."""
        return len(self.tiles) - 1


def route(logits: Tensor, top_k: int, normalise: bool) -> tuple[Tensor, Tensor]:
    """Experts [T, k] int32, the most probable first and the lowest of equals, and their weights [T, k] float32.

    logits [T, E], contiguous. The weights are those of `reference.moe`; NaN where the softmax is, and even then the
    experts of a token differ.
    """
    return _routed(logits, top_k, normalise, None)


def route_and_list(logits: Tensor, top_k: int, normalise: bool, rows: int) -> tuple[Tensor, Lists]:
    """The weights of `route`, and the pairs by expert in tiles of `rows`."""
    pairs = len(logits) * top_k
    most = min(pairs, (pairs + min(logits.shape[1], pairs) * (rows - 1)) // rows)
    order, tiles = (empty(shape, dtype=int32, device=logits.device) for shape in ((pairs,), (1 + most, 4)))
    lists = Lists(order, tiles, rows)
    return _routed(logits, top_k, normalise, lists)[1], lists


def _routed(logits: Tensor, top_k: int, normalise: bool, lists: Lists | None) -> tuple[Tensor, Tensor]:
    """As `route`; fills `lists` too, if given."""
    tokens, num_experts = logits.shape
    if lists is None:
        bt = 1  # no token concerns another
    else:
        bt = 8 if tokens <= 8 else 32 if tokens <= 4096 else 64
    be, blocks = triton.next_power_of_2(num_experts), triton.cdiv(tokens, bt)
    experts = empty((tokens, top_k), dtype=int32, device=logits.device)
    weights = empty((tokens, top_k), dtype=float32, device=logits.device)
    counts = empty((blocks, be), dtype=int32, device=logits.device) if lists is not None and blocks > 1 else experts
    order, tiles, rows = lists or (experts, experts, 1)
    options = {"num_warps": min(8, bt), **chained(logits.device)}  # each warp has tokens of its own
    _route[(blocks,)](
        logits, experts, weights, counts, order, tiles, tokens, rows,
        EXPERTS=num_experts, TOP_K=top_k, NORMALISE=normalise, LISTS=lists is not None and blocks == 1,
        COUNTS=lists is not None and blocks > 1, BT=bt, BE=be, BK=triton.next_power_of_2(top_k), **options,
    )  # fmt: skip
    if lists is not None and blocks > 1:
        _list_blocks[(blocks,)](
            experts, counts, order, tiles, tokens, blocks, rows, TOP_K=top_k, BT=bt, BE=be, **options
        )
    return experts, weights
