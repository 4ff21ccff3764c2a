"""The shares of decode attention: read as its programs read them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
import torch

from minisgl.kernels.triton.attention_decode import BEGINS, GAP, PART, PLAN_ROWS, plan_decode

HEADS, FIRST_ROW = 2, 100
TILE = 32
SHORT = list(range(1, 60, 7))
RANDOM = np.random.default_rng(0).integers(1, 3000, 40).tolist()


@dataclass
class Part:
    """What a share reads of a sequence."""

    share: int
    lo: int
    hi: int
    first_share: int
    parts: int


@dataclass
class Shares:
    size: int  # tiles
    by_ticket: bool
    gap: int
    parts: list[list[Part]]  # of each sequence
    tiles: list[int]  # of each share, with gaps


def plan(lens: list[int], shares: int, window: int = 0, even: bool = False) -> Shares:
    work = torch.full((BEGINS.value + (shares + len(lens)) * PART.value,), -7, dtype=torch.int32)
    counters = torch.full((len(lens) * HEADS,), 7, dtype=torch.int32)
    rows = torch.arange(FIRST_ROW, FIRST_ROW + len(lens), dtype=torch.int32)
    grid = (-(-len(lens) // PLAN_ROWS.value),)
    kv_lens = torch.tensor(lens, dtype=torch.int32)
    sizes = {"NUM_SPLITS": shares, "NUM_KV_HEADS": HEADS, "TILE_KEYS": TILE, "WINDOW": window, "EVEN": even}
    plan_decode[grid](rows, kv_lens, work, counters, len(lens), **sizes)
    assert not counters.any()
    count, num_seqs, gap, tickets = work[:4].tolist()
    assert tickets == 0
    begins = work[BEGINS.value :].view(-1, PART.value).tolist()
    size = max((begin[6] for begin in begins[:count]), default=0)
    found = Shares(size, count > shares, gap, [[] for _ in lens], [])
    for share in range(count):
        (seq, row, lo, length, first, parts, left, _), tiles = begins[share], 0
        while left > 0:
            assert row == FIRST_ROW + seq and length == lens[seq]
            hi = min(lo + left * TILE, length)
            assert lo < hi
            found.parts[seq].append(Part(share, lo, hi, first, parts))
            tiles += -(-(hi - lo) // TILE)
            left -= -(-(hi - lo) // TILE) + gap
            if seq + 1 >= num_seqs:
                break
            if left > 0:
                seq, row, lo, length, first, parts, _, _ = begins[shares + seq + 1]
                tiles += gap
        found.tiles.append(tiles)
    return found


@pytest.mark.parametrize("even", [False, True])
@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("shares", [1, 16, 66])
@pytest.mark.parametrize(
    "lens",
    [[1], [5000], [700] * 20, SHORT, RANDOM, [*SHORT, 0, 0], [*RANDOM, 20_000, 1, 0], RANDOM * 7, [33] * 50],
    ids=["one key", "one long", "equal", "short", "random", "padded", "one of all", "many", "many equal"],
)
def test_every_key_is_read_once(lens: list[int], shares: int, window: int, even: bool):
    found = plan(lens, shares, window, even)
    for length, parts in zip(lens, found.parts, strict=True):
        if length == 0:
            assert not parts
            continue
        assert parts[0].lo == (max(length - window, 0) // TILE * TILE if window else 0)
        assert parts[-1].hi == length
        assert all(a.hi == b.lo and a.share + 1 == b.share for a, b in pairwise(parts))
        assert all(part.first_share == parts[0].share and part.parts == len(parts) for part in parts)


def test_shares_are_equal():
    lens = RANDOM[:20]
    found = plan(lens, 16)
    assert found.gap == GAP.value and len(found.tiles) == 16
    assert found.size == -(-sum(-(-n // TILE) + found.gap for n in lens) // 16)
    assert max(found.tiles) <= found.size
    assert min(found.tiles[:-1]) >= found.size - found.gap


@pytest.mark.parametrize("lens", [[700, 500, 300], [1, 6, 11], RANDOM[:20]], ids=["few", "short", "random"])
def test_even_shares_differ_by_the_last_one_only(lens: list[int]):
    found = plan(lens, 16, even=True)
    assert found.gap == 0 and not found.by_ticket
    assert set(found.tiles[:-1]) <= {found.size} and 0 < found.tiles[-1] <= found.size


def test_short_shares_keep_to_one_sequence():
    found = plan([700, 500, 300], 16)
    assert all(len({part.share for part in parts}) == len(parts) for parts in found.parts)
    assert sum(map(len, found.parts)) == len(found.tiles) <= 16
    assert found.size <= 1.5 * -(-sum(-(-n // TILE) for n in (700, 500, 300)) // 16)


def test_many_sequences_are_not_split_and_the_longest_come_first():
    lens = [1 + 37 * i % 300 for i in range(100)]
    found = plan(lens, 16)
    assert found.by_ticket and all(len(parts) == 1 for parts in found.parts)
    assert found.tiles == sorted((-(-n // TILE) for n in lens), reverse=True)
    assert not plan([*lens, 100_000], 16).by_ticket
    assert plan([*lens, 100_000], 16, window=200).by_ticket  # of which no more than the window is read
