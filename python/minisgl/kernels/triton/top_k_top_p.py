"""min-p, top-k and top-p without sorting the vocabulary: they find the logit, and among equals the index, to cut at.

Kept are the tokens with logit > cut, or logit == cut and index <= cut_index. One pass over a row finds the peaks of its
lanes (every BLOCK-th logit); at least k logits reach the k-th largest peak, and seldom many more. A second pass
collects them, and only these candidates are sorted. If they do not settle the cut (very flat distributions, k above
1,024), a bisection over the values of the logits' dtype finds it on the whole row: 16 passes for bfloat16.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernels.triton.launch import COUNTERS, INTERPRETED, ROW_WORDS, counters

if TYPE_CHECKING:
    from minisgl.ops.sampling import SamplingState

BLOCK: Final = 4096  # logits per tile, lanes, and the largest number of candidates
MAX_WANTED: Final = 1024  # the largest k that candidates are collected for
WANTED: Final = 128  # candidates at first, without top-k
NUM_WARPS: Final = 16
MAX_REGISTERS: Final = 64  # per thread, so that two programs fit on an SM
SHIFT: Final = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}  # float32's low bits that are 0 in such values

LOG2_E = tl.constexpr(1.4426950408889634)
MAX_SCALE = tl.constexpr(1e30)
FLOAT_MAX = tl.constexpr(3.4028234663852886e38)
TILES = tl.constexpr(4)  # loads in flight at once
PAIR_I = tl.constexpr(128)
PAIR_J = tl.constexpr(32)


@triton.jit
def _key(x, SHIFT: tl.constexpr):
    """Map float32 to int32 that sorts alike; successive values of the logits' dtype are successive keys."""
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
def _sum_above(values_ptr, n, bound, peak, scale, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Return how many of values[:n] are above `bound`, or their mass: the sum of 2^((value - peak) scale)."""
    acc = tl.zeros([BLOCK], tl.float32)
    lane = tl.arange(0, BLOCK)
    for start in range(0, n, TILES * BLOCK):
        for i in tl.static_range(TILES):
            offs = start + i * BLOCK + lane
            x = tl.load(values_ptr + offs, mask=offs < n, other=float("-inf")).to(tl.float32)
            if MASS:
                acc += tl.where(x > bound, tl.exp2((x - peak) * scale), 0.0)
            else:
                acc += tl.where(x > bound, 1.0, 0.0)
    return tl.sum(acc, 0)


@triton.jit
def _find_key(
    values_ptr, n, low, high, limit, peak, scale, MASS: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr
):
    """Find the smallest key in [low, high] above which count or mass is less than `limit`; no value is above `high`."""
    while low < high:
        key = _middle(low, high)
        is_less = _sum_above(values_ptr, n, _value(key, SHIFT), peak, scale, MASS, BLOCK) < limit
        high = tl.where(is_less, key, high)
        low = tl.where(is_less, low, key + 1)
    return low


@triton.jit
def _index_of(values_ptr, n, value, rank, BLOCK: tl.constexpr):
    """Return the index in values[:n] of the rank-th value (from 1) that equals `value`; n if there are fewer."""
    seen = tl.full((), 0, tl.int32)
    index = tl.full((), 0, tl.int32) + n
    for start in range(0, n, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        x = tl.load(values_ptr + offs, mask=offs < n, other=float("-inf")).to(tl.float32)
        hit = (x == value).to(tl.int32)
        found = tl.sum(hit, 0)
        if (seen < rank) & (seen + found >= rank):
            index = tl.min(tl.where((hit > 0) & (seen + tl.cumsum(hit, 0) == rank), offs, n), 0)
        seen += found
    return index


@triton.jit
def _lane_peaks(logits_ptr, vocab_size, BLOCK: tl.constexpr):
    """Return the peak of each lane [BLOCK], where lane i has every BLOCK-th logit from i on; NaN counts as +Inf."""
    lane = tl.arange(0, BLOCK)
    peaks = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, vocab_size, TILES * BLOCK):
        for i in tl.static_range(TILES):
            offs = start + i * BLOCK + lane
            x = tl.load(logits_ptr + offs, mask=offs < vocab_size, other=float("-inf")).to(tl.float32)
            peaks = tl.maximum(peaks, tl.where(x < float("inf"), x, float("inf")))
    return peaks


@triton.jit
def _collect(
    logits_ptr, vocab_size, floor, cut, peak, scale, values_ptr, indices_ptr, count_ptr, MASS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the logits >= `floor` and their indices in any order, and their number.

    Returns the mass of the logits >= `cut` if MASS.
    """
    lane = tl.arange(0, BLOCK)
    mass = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab_size, TILES * BLOCK):
        for i in tl.static_range(TILES):
            offs = start + i * BLOCK + lane
            x = tl.load(logits_ptr + offs, mask=offs < vocab_size, other=float("-inf")).to(tl.float32)
            if MASS:
                mass += tl.where(x >= cut, tl.exp2((x - peak) * scale), 0.0)
            slot = tl.atomic_add(count_ptr + lane * 0, 1, mask=x >= floor, sem="relaxed")
            tl.store(values_ptr + slot, x, mask=(x >= floor) & (slot < BLOCK))
            tl.store(indices_ptr + slot, offs, mask=(x >= floor) & (slot < BLOCK))
    return tl.sum(mass, 0)


@triton.jit
def _sort(values_ptr, indices_ptr, n, sorted_values_ptr, sorted_indices_ptr):
    """Sort values[:n] descending, the lowest index first among equals, by counting how many come before each."""
    for start in range(0, n, PAIR_I):
        offs_i = start + tl.arange(0, PAIR_I)
        x = tl.load(values_ptr + offs_i, mask=offs_i < n, other=float("-inf"))
        x_index = tl.load(indices_ptr + offs_i, mask=offs_i < n, other=0)
        rank = tl.zeros([PAIR_I], tl.int32)
        for other in range(0, n, PAIR_J):
            offs_j = other + tl.arange(0, PAIR_J)
            y = tl.load(values_ptr + offs_j, mask=offs_j < n, other=float("-inf"))[None, :]
            y_index = tl.load(indices_ptr + offs_j, mask=offs_j < n, other=0)[None, :]
            is_before = (y > x[:, None]) | ((y == x[:, None]) & (y_index < x_index[:, None]))
            rank += tl.sum(is_before.to(tl.int32), 1)
        tl.store(sorted_values_ptr + rank, x, mask=offs_i < n)
        tl.store(sorted_indices_ptr + rank, x_index, mask=offs_i < n)


@triton.jit
def _find_cuts(
    logits_ptr, rows_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, cuts_ptr, cut_indices_ptr,
    values_ptr, indices_ptr, counter_ptr, vocab_size,
    BLOCK: tl.constexpr, MAX_WANTED: tl.constexpr, WANTED: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """One program per row. values and indices [S, 2, BLOCK] are scratch; counters are left at zero."""
    seq = tl.program_id(0)
    row = tl.load(rows_ptr + seq)
    temperature = tl.load(temperature_ptr + row * ROW_WORDS)
    top_p = tl.load(top_p_ptr + row * ROW_WORDS)
    min_p = tl.load(min_p_ptr + row * ROW_WORDS)
    top_k = tl.load(top_k_ptr + row * ROW_WORDS)
    has_top_k = (top_k > 0) & (top_k < vocab_size)
    has_top_p = top_p < 1
    cut = tl.full((), float("-inf"), tl.float32)
    cut_index = tl.full((), 0, tl.int32) + vocab_size
    logits_ptr += seq.to(tl.int64) * vocab_size
    peaks = tl.full([BLOCK], float("-inf"), tl.float32)
    if (temperature > 0) & (has_top_k | has_top_p | (min_p > 0)):
        peaks = _lane_peaks(logits_ptr, vocab_size, BLOCK)
    peak = tl.max(peaks, 0)
    if (peak > float("-inf")) & (peak < float("inf")):
        scale = tl.minimum(1.0 / temperature, MAX_SCALE) * LOG2_E
        bottom, top = _key(tl.full((), -FLOAT_MAX, tl.float32), SHIFT), _key(peak, SHIFT)
        low, high = bottom, top
        if min_p > 0:  # the smallest value whose tempered distance to the peak is at least log(min_p)
            bound = tl.log(min_p)
            while low < high:
                key = _middle(low, high)
                is_kept = tl.div_rn(_value(key, SHIFT) - peak, temperature) >= bound
                high = tl.where(is_kept, key, high)
                low = tl.where(is_kept, low, key + 1)
        bottom = low
        cut = _value(bottom, SHIFT)
        if has_top_k | has_top_p:
            wanted = tl.where(has_top_k, tl.minimum(top_k, MAX_WANTED), WANTED)
            values_ptr += seq.to(tl.int64) * (2 * BLOCK)
            indices_ptr += seq.to(tl.int64) * (2 * BLOCK)
            kept_mass = tl.full((), 0.0, tl.float32)  # of the tokens that min-p and top-k keep
            is_settled = wanted < 0
            while (wanted <= MAX_WANTED) & (not is_settled):
                low, high = tl.maximum(bottom, _key(tl.min(peaks, 0), SHIFT)), top
                while low < high:
                    key = _middle(low, high)
                    is_less = tl.sum((peaks > _value(key, SHIFT)).to(tl.int32), 0) < wanted
                    high = tl.where(is_less, key, high)
                    low = tl.where(is_less, low, key + 1)
                floor = _value(low, SHIFT)
                if has_top_k:
                    kept_mass = _collect(
                        logits_ptr, vocab_size, floor, cut, peak, scale, values_ptr, indices_ptr, counter_ptr + seq,
                        False, BLOCK,
                    )  # fmt: skip
                else:
                    kept_mass = _collect(
                        logits_ptr, vocab_size, floor, cut, peak, scale, values_ptr, indices_ptr, counter_ptr + seq,
                        True, BLOCK,
                    )  # fmt: skip
                tl.debug_barrier()  # what other threads wrote is read from here on
                n = tl.load(counter_ptr + seq, volatile=True)
                tl.debug_barrier()
                tl.store(counter_ptr + seq, 0)
                if n <= BLOCK:
                    _sort(values_ptr, indices_ptr, n, values_ptr + BLOCK, indices_ptr + BLOCK)
                    tl.debug_barrier()
                    offs = tl.arange(0, BLOCK)
                    x = tl.load(values_ptr + BLOCK + offs, mask=offs < n, other=float("-inf"))
                    mask = (offs < n) & ((offs < top_k) | (not has_top_k))
                    mass = tl.where(mask, tl.exp2((x - peak) * scale), 0.0)
                    cumulative = tl.cumsum(mass, 0)
                    total = tl.max(cumulative, 0)
                    if has_top_k:
                        is_settled = (n >= top_k) | (low == bottom)
                        kept_mass = total
                    else:
                        is_settled = total >= top_p * kept_mass
                    is_kept = mask & ((cumulative - mass < top_p * kept_mass) | (not has_top_p))
                    last = tl.maximum(tl.sum(is_kept.to(tl.int32), 0), 1) - 1
                    if is_settled:
                        cut = tl.load(values_ptr + BLOCK + last)
                        cut_index = tl.load(indices_ptr + BLOCK + last)
                tl.debug_barrier()  # the next pass overwrites what this one has read
                wanted *= 8
            if not is_settled:
                num_equal = tl.full((), FLOAT_MAX, tl.float32)  # how many logits that equal the cut are kept
                key = bottom
                if has_top_k:
                    key = _find_key(
                        logits_ptr, vocab_size, bottom, top, top_k.to(tl.float32), peak, scale, False, SHIFT, BLOCK
                    )
                    cut = _value(key, SHIFT)
                    above = _sum_above(logits_ptr, vocab_size, cut, peak, scale, False, BLOCK)
                    below = _value(key - 1, SHIFT)
                    equal = _sum_above(logits_ptr, vocab_size, below, peak, scale, False, BLOCK) - above
                    num_equal = top_k.to(tl.float32) - above
                    kept_mass = _sum_above(logits_ptr, vocab_size, cut, peak, scale, True, BLOCK)
                    kept_mass += tl.minimum(num_equal, equal) * tl.exp2((cut - peak) * scale)
                if has_top_p:
                    limit = top_p * kept_mass
                    top_p_key = _find_key(logits_ptr, vocab_size, key, top, limit, peak, scale, True, SHIFT, BLOCK)
                    cut = _value(top_p_key, SHIFT)
                    before = _sum_above(logits_ptr, vocab_size, cut, peak, scale, True, BLOCK)
                    # Of the logits that equal the cut, the j-th (from 0) is kept while the mass before it,
                    # before + j w, is below the limit.
                    count = tl.ceil((limit - before) / tl.exp2((cut - peak) * scale))
                    num_equal = tl.maximum(1.0, tl.where(top_p_key == key, tl.minimum(num_equal, count), count))
                cut_index = _index_of(logits_ptr, vocab_size, cut, tl.minimum(num_equal, 1e9).to(tl.int32), BLOCK)
    tl.store(cuts_ptr + seq, cut)
    tl.store(cut_indices_ptr + seq, cut_index)


def find_cuts(logits: Tensor, rows: Tensor, state: SamplingState) -> tuple[Tensor, Tensor]:
    """Return the cut [S] float32 and its index [S] int32 (see above) for logits [S, V] and `rows` [S].

    Rows that are greedy, have non-finite logits or have no filters keep all tokens: (-inf, V).
    """
    num_seqs, vocab_size = logits.shape
    device = logits.device
    assert num_seqs <= COUNTERS, f"the kernel cannot sample {num_seqs} sequences at once"
    cuts = torch.empty(num_seqs, dtype=torch.float32, device=device)
    cut_indices = torch.empty(num_seqs, dtype=torch.int32, device=device)
    block = min(BLOCK, triton.next_power_of_2(vocab_size))
    values = torch.empty((num_seqs, 2, block), dtype=torch.float32, device=device)
    options = {} if INTERPRETED else {"maxnreg": MAX_REGISTERS}
    _find_cuts[(num_seqs,)](
        logits, rows, state.temperature, state.top_k, state.top_p, state.min_p, cuts, cut_indices,
        values, torch.empty_like(values, dtype=torch.int32), counters(device), vocab_size,
        BLOCK=block, MAX_WANTED=MAX_WANTED, WANTED=WANTED, SHIFT=SHIFT[logits.dtype], num_warps=NUM_WARPS, **options,
    )  # fmt: skip
    return cuts, cut_indices
