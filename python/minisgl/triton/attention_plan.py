"""How decode attention is split over programs: which keys of which sequences each of them reads.

Letters in shapes: B sequences, Hk KV heads.
"""

from __future__ import annotations

import triton
import triton.language as tl

# The `work` buffer, int32: [0] number of shares, [1] number of sequences if shares may have parts of several, else 0,
# [2] tiles that the beginning of a sequence counts for, [3] tickets given out; then the part that each share begins
# with, then the first part of each sequence: sequence, row of the page table, first key, length of the sequence, its
# first share, its number of parts, tiles left to the share (if it begins here). Where there are more than SHARES, each
# is a whole sequence, and they go on where the first parts would be.
BEGINS = tl.constexpr(8)
PART = tl.constexpr(8)  # numbers per part, one of them unused
TILE_KEYS = tl.constexpr(32)  # that `decode_attention` reads at once, from a multiple of it on
MIN_TILES = tl.constexpr(2)  # of a share
GAP = tl.constexpr(1)  # tiles that could be read in the time that the beginning of a sequence costs a program
PLAN_ROWS = tl.constexpr(8)  # sequences per program of `plan_decode`


@triton.jit
def _first_key(length, WINDOW: tl.constexpr):
    """Where the tiles of a sequence begin: at or before the first key that its last position sees."""
    if WINDOW == 0:
        return tl.zeros_like(length)
    return tl.maximum(length - WINDOW, 0) // TILE_KEYS * TILE_KEYS


@triton.jit
def _tiles(kv_lens, seqs, num_seqs, WINDOW: tl.constexpr):
    """Of each sequence, 0 beyond the last."""
    length = tl.load(kv_lens + seqs, mask=seqs < num_seqs, other=0)
    return tl.cdiv(length - _first_key(length, WINDOW), TILE_KEYS)


@triton.jit
def _store_part(part, seq, row, lo, length, first_share, parts, left, mask):
    tl.store(part, seq, mask=mask)
    tl.store(part + 1, row, mask=mask)
    tl.store(part + 2, lo, mask=mask)
    tl.store(part + 3, length, mask=mask)
    tl.store(part + 4, first_share, mask=mask)
    tl.store(part + 5, parts, mask=mask)
    tl.store(part + 6, left, mask=mask)


@triton.jit
def load_part(part):
    """As stored: sequence, row, first key, length, first share, parts, tiles left."""
    seq = tl.load(part)
    row = tl.load(part + 1)
    lo = tl.load(part + 2)
    length = tl.load(part + 3)
    first_share = tl.load(part + 4)
    parts = tl.load(part + 5)
    left = tl.load(part + 6)
    return seq, row, lo, length, first_share, parts, left


@triton.jit(do_not_specialize=["num_seqs"], do_not_specialize_on_alignment=["rows", "kv_lens"])
def plan_decode(rows, kv_lens, work, counters, num_seqs, SHARES: tl.constexpr, HK: tl.constexpr, WINDOW: tl.constexpr):
    """The shares of a step for layers with this window (0: without one); grid (B / PLAN_ROWS).

    SHARES is the number of programs per KV head that run at the same time. The sequences' tiles are laid end to end and
    cut into as many equal shares, but for two cases, found by timing whole steps on an H200:
    - Many sequences, none longer than a fair share: each is a share, the longest first, and programs draw tickets. With
      sequences to spare that is as even, and merges nothing.
    - Few sequences, so that shares are short and a second beginning is dear: a share keeps to one sequence, if it need
      not be longer by more than half for it.
    Sequences without keys, as a graph is padded with, come last. Also zeroes the merge counters [B, Hk].
    """
    BLOCK: tl.constexpr = 256
    LANES: tl.constexpr = 16
    own = tl.program_id(0) * PLAN_ROWS + tl.arange(0, PLAN_ROWS)
    is_own = own < num_seqs
    length = tl.load(kv_lens + own, mask=is_own, other=0)
    row = tl.load(rows + own, mask=is_own, other=0)
    begin = _first_key(length, WINDOW)
    tiles = tl.cdiv(length - begin, TILE_KEYS)
    b = tl.arange(0, BLOCK)
    some_tiles = tl.zeros([BLOCK], tl.int32)
    some_seqs = tl.zeros([BLOCK], tl.int32)
    some_longest = tl.zeros([BLOCK], tl.int32)
    for start in range(0, num_seqs, BLOCK):
        other = _tiles(kv_lens, start + b, num_seqs, WINDOW)
        some_tiles += other
        some_seqs += (other > 0).to(tl.int32)
        some_longest = tl.maximum(some_longest, other)
    all_tiles = tl.sum(some_tiles, 0)
    all_seqs = tl.sum(some_seqs, 0)
    longest = tl.max(some_longest, 0)
    fair = tl.maximum(tl.cdiv(all_tiles, SHARES), MIN_TILES)
    are_many = (2 * all_seqs >= 5 * SHARES) & (longest <= fair)
    size = tl.where(are_many, longest, fair)
    are_whole = are_many
    if (num_seqs <= BLOCK) & (not are_many):
        while (2 * size <= 3 * fair) & (tl.sum(tl.cdiv(some_tiles, size), 0) > SHARES):
            size += 1 + size // 16
        are_whole = 2 * size <= 3 * fair
    gap = tl.where(are_whole, 0, GAP)
    if not are_whole:
        size = tl.maximum(tl.cdiv(all_tiles + all_seqs * GAP, SHARES), MIN_TILES)

    # Where a sequence begins: all before it are laid end to end with their gaps, or each rounded up to whole shares.
    before = tl.zeros([PLAN_ROWS], tl.int32)
    total = tl.zeros([BLOCK], tl.int32)
    for start in range(0, num_seqs, BLOCK):
        other = _tiles(kv_lens, start + b, num_seqs, WINDOW)
        taken = tl.where(are_whole, tl.cdiv(other, size) * size, other + tl.where(other > 0, gap, 0))
        total += taken
        is_before = (start + b)[None, :] < own[:, None]
        if are_many:
            is_equal = other[None, :] == tiles[:, None]
            is_before = (other[None, :] > tiles[:, None]) | (is_equal & is_before)
        before += tl.sum(tl.where(is_before, taken[None, :], 0), 1)
    place = before + gap
    first = place // size
    parts = tl.where(tiles > 0, (place + tiles - 1) // size - first + 1, 0)
    begins = work + BEGINS
    if not are_many:
        _store_part(begins + (SHARES + own) * PART, own, row, begin, length, first, parts, size, tiles > 0)
    for start in range(0, tl.max(parts, 0), LANES):
        i = start + tl.arange(0, LANES)[None, :]
        share = first[:, None] + i
        tile = share * size - place[:, None]  # of the sequence; if it is negative, the share begins in the gap before
        is_begun = (i < parts[:, None]) & (share * size >= before[:, None])
        left = size + tl.minimum(tile, 0)
        lo = begin[:, None] + tl.maximum(tile, 0) * TILE_KEYS
        part = begins + share * PART
        _store_part(
            part, own[:, None], row[:, None], lo, length[:, None], first[:, None], parts[:, None], left, is_begun
        )
    for head in range(HK):
        tl.store(counters + own * HK + head, 0, mask=is_own)
    if tl.program_id(0) == 0:
        tl.store(work, tl.cdiv(tl.sum(total, 0), size))
        tl.store(work + 1, tl.where(are_whole, 0, all_seqs))
        tl.store(work + 2, gap)
        tl.store(work + 3, 0)
