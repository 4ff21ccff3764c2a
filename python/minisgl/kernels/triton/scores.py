"""What both attention kernels do with heads of any size and with the options of scores: tiles, soft cap and sinks.

Scores, maxima and caps are in base 2: multiplied by log2(e).
"""

from __future__ import annotations

import triton
import triton.language as tl

NEGATIVE = tl.constexpr(-1e30)  # instead of -inf, whose differences are NaN
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def columns(SIZE: tl.constexpr, PARTS: tl.constexpr):
    """Return the dimensions of a tile's columns, of the smallest power of two >= SIZE, and which of these exist.

    Each of PARTS parts of the tile has as many dimensions as the others, so that tiles of halves of heads form a tile
    of heads. Masks are constants if SIZE is a power of two, and then vanish.
    """
    BLOCK: tl.constexpr = triton.next_power_of_2(SIZE)
    offs = tl.arange(0, BLOCK)
    if BLOCK == SIZE:
        return offs, tl.full([BLOCK], True, tl.int1)
    else:
        offs_part = offs % (BLOCK // PARTS)
        return offs // (BLOCK // PARTS) * (SIZE // PARTS) + offs_part, offs_part < SIZE // PARTS


@triton.jit
def soft_capped(x, SOFTCAP: tl.constexpr):
    """Return SOFTCAP tanh(x / SOFTCAP), or x if it is 0; tanh(z) is 1 - 2 / (1 + exp(2 z))."""
    if SOFTCAP == 0:
        return x
    else:
        return SOFTCAP - (2 * SOFTCAP) / (1 + tl.exp2(x * (2 * LOG2_E / SOFTCAP)))


@triton.jit
def with_sinks(m, total, sink_ptrs, mask):
    """Add sinks to softmaxes with maxima `m` and sums `total`: return both, and the factor of their outputs.

    The mask must select one part of each softmax: its sum is what all parts' sums are added to.
    """
    sink = tl.load(sink_ptrs, mask=mask, other=NEGATIVE) * LOG2_E
    new_m = tl.maximum(m, sink)
    correction = tl.exp2(m - new_m)
    return new_m, total * correction + tl.exp2(sink - new_m), correction


@triton.jit
def add_parts(m, total, acc, lse, x):
    """Add a part per lane, its results x [M, LANES, D] and log-sums lse [M, LANES], to the maxima and sums of lanes."""
    new_m = tl.maximum(m, lse)
    correction, p = tl.exp2(m - new_m), tl.exp2(lse - new_m)
    return new_m, total * correction + p, acc * correction[:, :, None] + x * p[:, :, None]


@triton.jit
def merge_lanes(m, total, acc):
    """Return the result [M, D] of all lanes."""
    p = tl.exp2(m - tl.max(m, 1)[:, None])
    return tl.sum(acc * p[:, :, None], 1) / tl.sum(total * p, 1)[:, None]
