"""min-p, top-k and top-p without a sort of the vocabulary: each row's logit, and among equals the index, to cut at.

Tokens stay that have logit > cut, or logit == cut and index <= last. One pass over a row finds the peaks of its lanes
(every BLOCK-th logit), whose k-th largest is a bound that at least k logits reach, and seldom many more. A second one
collects what reaches it, and only that is ranked. Where these candidates do not settle it (very flat distributions, k
above 1,024), a bisection over the values of the logits' dtype finds the cut on the whole row: 16 steps for bfloat16.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.ops.sample import SamplingState
from minisgl.triton.launch import COUNTERS, INTERPRETED, counters

BLOCK: Final = 4096  # logits of a tile, lanes, and the most candidates
MOST_WANTED: Final = 1024  # the largest k that candidates are sought for
WANTED: Final = 128  # candidates without top-k, at first
WARPS: Final = 16
REGISTERS: Final = 64  # a thread, so that two programs fit on a processor
SHIFT: Final = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}  # float32's low bits that such values leave 0

LOG2_E = tl.constexpr(1.4426950408889634)
MAX_SCALE = tl.constexpr(1e30)
FLOAT_MAX = tl.constexpr(3.4028234663852886e38)
TILES = tl.constexpr(4)  # loads under way at once
PAIR_I = tl.constexpr(128)
PAIR_J = tl.constexpr(32)


@triton.jit
def _key(x, SHIFT: tl.constexpr):
    """float32 -> int32 in the same order; successive values of the logits' dtype are successive keys."""
    i = x.to(tl.int32, bitcast=True)
    return (i ^ ((i >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def _value(key, SHIFT: tl.constexpr):
    """The inverse of `_key`."""
    i = (key << SHIFT) | tl.where(key < 0, (1 << SHIFT) - 1, 0)
    return (i ^ ((i >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _middle(low, high):
    """(low + high) / 2, rounded down, without overflow."""
    return (low & high) + ((low ^ high) >> 1)


@triton.jit
def _above(values, n, bound, peak, scale, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """How many of values[:n] are above `bound`, or their mass, the sum of 2^((value - peak) scale)."""
    acc = tl.zeros([BLOCK], tl.float32)
    lane = tl.arange(0, BLOCK)
    for start in range(0, n, TILES * BLOCK):
        for i in tl.static_range(TILES):
            e = start + i * BLOCK + lane
            x = tl.load(values + e, mask=e < n, other=float("-inf")).to(tl.float32)
            if MASS:
                acc += tl.where(x > bound, tl.exp2((x - peak) * scale), 0.0)
            else:
                acc += tl.where(x > bound, 1.0, 0.0)
    return tl.sum(acc, 0)


@triton.jit
def _cut(values, n, low, high, limit, peak, scale, MASS: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """The smallest key of [low, high] with less than `limit` above it; none is above `high`."""
    while low < high:
        key = _middle(low, high)
        is_less = _above(values, n, _value(key, SHIFT), peak, scale, MASS, BLOCK) < limit
        high = tl.where(is_less, key, high)
        low = tl.where(is_less, low, key + 1)
    return low


@triton.jit
def _place(values, n, value, rank, BLOCK: tl.constexpr):
    """The index in values[:n] of the rank-th (from 1) that equals `value`; n if there are fewer."""
    seen = tl.full((), 0, tl.int32)
    place = tl.full((), 0, tl.int32) + n
    for start in range(0, n, BLOCK):
        e = start + tl.arange(0, BLOCK)
        x = tl.load(values + e, mask=e < n, other=float("-inf")).to(tl.float32)
        hit = (x == value).to(tl.int32)
        found = tl.sum(hit, 0)
        if (seen < rank) & (seen + found >= rank):
            place = tl.min(tl.where((hit > 0) & (seen + tl.cumsum(hit, 0) == rank), e, n), 0)
        seen += found
    return place


@triton.jit
def _lane_peaks(source, vocab, BLOCK: tl.constexpr):
    """The largest of every BLOCK-th logit [BLOCK]; NaN counts as +Inf."""
    lane = tl.arange(0, BLOCK)
    peaks = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, vocab, TILES * BLOCK):
        for i in tl.static_range(TILES):
            e = start + i * BLOCK + lane
            x = tl.load(source + e, mask=e < vocab, other=float("-inf")).to(tl.float32)
            peaks = tl.maximum(peaks, tl.where(x < float("inf"), x, float("inf")))
    return peaks


@triton.jit
def _collect(source, vocab, floor, cut, peak, scale, values, indices, count, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Logits that reach `floor` to `values` and `indices`, in any order, and how many they are to `count`.

    Returns the mass of those that reach `cut` if MASS.
    """
    lane = tl.arange(0, BLOCK)
    mass = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, TILES * BLOCK):
        for i in tl.static_range(TILES):
            e = start + i * BLOCK + lane
            x = tl.load(source + e, mask=e < vocab, other=float("-inf")).to(tl.float32)
            if MASS:
                mass += tl.where(x >= cut, tl.exp2((x - peak) * scale), 0.0)
            place = tl.atomic_add(count + lane * 0, 1, mask=x >= floor, sem="relaxed")
            tl.store(values + place, x, mask=(x >= floor) & (place < BLOCK))
            tl.store(indices + place, e, mask=(x >= floor) & (place < BLOCK))
    return tl.sum(mass, 0)


@triton.jit
def _sort(values, indices, n, sorted_values, sorted_indices):
    """Descending values[:n], the lowest index first among equals, by counting for each what comes before it."""
    for start in range(0, n, PAIR_I):
        i = start + tl.arange(0, PAIR_I)
        x = tl.load(values + i, mask=i < n, other=float("-inf"))
        at = tl.load(indices + i, mask=i < n, other=0)
        rank = tl.zeros([PAIR_I], tl.int32)
        for other in range(0, n, PAIR_J):
            j = other + tl.arange(0, PAIR_J)
            y = tl.load(values + j, mask=j < n, other=float("-inf"))[None, :]
            y_at = tl.load(indices + j, mask=j < n, other=0)[None, :]
            before = (y > x[:, None]) | ((y == x[:, None]) & (y_at < at[:, None]))
            rank += tl.sum(before.to(tl.int32), 1)
        tl.store(sorted_values + rank, x, mask=i < n)
        tl.store(sorted_indices + rank, at, mask=i < n)


@triton.jit
def _find_cuts(
    logits, rows, temperature, top_k, top_p, min_p, cuts, lasts, values, indices, counts, vocab,
    BLOCK: tl.constexpr, MOST_WANTED: tl.constexpr, WANTED: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """One row a program. `values` and `indices` [S, 2, BLOCK] are scratch; `counts` is left at zero."""
    seq = tl.program_id(0)
    row = tl.load(rows + seq)
    t, p, m = tl.load(temperature + row), tl.load(top_p + row), tl.load(min_p + row)
    k = tl.load(top_k + row)
    has_k = (k > 0) & (k < vocab)
    has_p = p < 1
    cut = tl.full((), float("-inf"), tl.float32)
    last = tl.full((), 0, tl.int32) + vocab
    source = logits + seq.to(tl.int64) * vocab
    peaks = tl.full([BLOCK], float("-inf"), tl.float32)
    if (t > 0) & (has_k | has_p | (m > 0)):
        peaks = _lane_peaks(source, vocab, BLOCK)
    peak = tl.max(peaks, 0)
    if (peak > float("-inf")) & (peak < float("inf")):
        scale = tl.minimum(1.0 / t, MAX_SCALE) * LOG2_E
        bottom, top = _key(tl.full((), -FLOAT_MAX, tl.float32), SHIFT), _key(peak, SHIFT)
        low, high = bottom, top
        if m > 0:  # the least value whose tempered distance to the peak is at least log(min_p)
            bound = tl.log(m)
            while low < high:
                key = _middle(low, high)
                stays = tl.div_rn(_value(key, SHIFT) - peak, t) >= bound
                high = tl.where(stays, key, high)
                low = tl.where(stays, low, key + 1)
        bottom = low
        cut = _value(bottom, SHIFT)
        if has_k | has_p:
            wanted = tl.where(has_k, tl.minimum(k, MOST_WANTED), WANTED)
            v, i = values + seq.to(tl.int64) * (2 * BLOCK), indices + seq.to(tl.int64) * (2 * BLOCK)
            rest = tl.full((), 0.0, tl.float32)
            is_settled = wanted < 0
            while (wanted <= MOST_WANTED) & (not is_settled):
                low, high = tl.maximum(bottom, _key(tl.min(peaks, 0), SHIFT)), top
                while low < high:
                    key = _middle(low, high)
                    is_less = tl.sum((peaks > _value(key, SHIFT)).to(tl.int32), 0) < wanted
                    high = tl.where(is_less, key, high)
                    low = tl.where(is_less, low, key + 1)
                floor = _value(low, SHIFT)
                if has_k:
                    rest = _collect(source, vocab, floor, cut, peak, scale, v, i, counts + seq, False, BLOCK)
                else:
                    rest = _collect(source, vocab, floor, cut, peak, scale, v, i, counts + seq, True, BLOCK)
                tl.debug_barrier()  # what other threads wrote is read from here on
                n = tl.load(counts + seq, volatile=True)
                tl.debug_barrier()
                tl.store(counts + seq, 0)
                if n <= BLOCK:
                    _sort(v, i, n, v + BLOCK, i + BLOCK)
                    tl.debug_barrier()
                    o = tl.arange(0, BLOCK)
                    x = tl.load(v + BLOCK + o, mask=o < n, other=float("-inf"))
                    here = (o < n) & ((o < k) | (not has_k))
                    mass = tl.where(here, tl.exp2((x - peak) * scale), 0.0)
                    upto = tl.cumsum(mass, 0)
                    total = tl.max(upto, 0)
                    if has_k:
                        is_settled = (n >= k) | (low == bottom)
                        rest = total
                    else:
                        is_settled = total >= p * rest
                    stays = here & ((upto - mass < p * rest) | (not has_p))
                    final = tl.maximum(tl.sum(stays.to(tl.int32), 0), 1) - 1
                    if is_settled:
                        cut = tl.load(v + BLOCK + final)
                        last = tl.load(i + BLOCK + final)
                tl.debug_barrier()  # the next turn overwrites what this one has read
                wanted *= 8
            if not is_settled:
                free = tl.full((), FLOAT_MAX, tl.float32)  # how many equals of the cut stay
                key = bottom
                if has_k:
                    key = _cut(source, vocab, bottom, top, k.to(tl.float32), peak, scale, False, SHIFT, BLOCK)
                    cut = _value(key, SHIFT)
                    above = _above(source, vocab, cut, peak, scale, False, BLOCK)
                    equal = _above(source, vocab, _value(key - 1, SHIFT), peak, scale, False, BLOCK) - above
                    free = k.to(tl.float32) - above
                    rest = _above(source, vocab, cut, peak, scale, True, BLOCK)
                    rest += tl.minimum(free, equal) * tl.exp2((cut - peak) * scale)
                if has_p:
                    found_key = _cut(source, vocab, key, top, p * rest, peak, scale, True, SHIFT, BLOCK)
                    cut = _value(found_key, SHIFT)
                    before = _above(source, vocab, cut, peak, scale, True, BLOCK)
                    # The j-th of the equals (from 0) stays while the mass before it, before + j w, is below p rest.
                    stay = tl.ceil((p * rest - before) / tl.exp2((cut - peak) * scale))
                    free = tl.maximum(1.0, tl.where(found_key == key, tl.minimum(free, stay), stay))
                last = _place(source, vocab, cut, tl.minimum(free, 1e9).to(tl.int32), BLOCK)
    tl.store(cuts + seq, cut)
    tl.store(lasts + seq, last)


def find_cuts(logits: Tensor, rows: Tensor, state: SamplingState) -> tuple[Tensor, Tensor]:
    """For logits [S, V] and the parameters of `rows` [S]: (cut [S] float32, last [S] int32), see above.

    A greedy row, an non_finite one and one without filters keep all: (-inf, V).
    """
    sampled, vocab = logits.shape
    device = logits.device
    assert sampled <= COUNTERS, f"{sampled} sequences sampled at once"
    cuts = torch.empty(sampled, dtype=torch.float32, device=device)
    lasts = torch.empty(sampled, dtype=torch.int32, device=device)
    block = min(BLOCK, triton.next_power_of_2(vocab))
    values = torch.empty((sampled, 2, block), dtype=torch.float32, device=device)
    options = {} if INTERPRETED else {"maxnreg": REGISTERS}
    _find_cuts[(sampled,)](
        logits, rows, state.temperature, state.top_k, state.top_p, state.min_p, cuts, lasts,
        values, torch.empty_like(values, dtype=torch.int32), counters(device), vocab,
        BLOCK=block, MOST_WANTED=MOST_WANTED, WANTED=WANTED, SHIFT=SHIFT[logits.dtype], num_warps=WARPS, **options,
    )  # fmt: skip
    return cuts, lasts
