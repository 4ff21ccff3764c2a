"""The device's memory for state, in blocks. A block is free, or one or more pages of a single group (`core/layout.py`).

So each group has as much of the memory as the texts of the moment need.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from minisgl.core.errors import InvariantError
from minisgl.core.layout import FULL, STATE
from minisgl.core.rounding import ceil_div, round_up

if TYPE_CHECKING:
    from minisgl.core.plan import Ints

ALIGNMENT: Final = 256  # of a page, in bytes
MAX_WASTE: Final = 0.05  # part of a block that its pages may leave
MAX_PAGES: Final = 8  # of the group with the largest ones, in a block


@dataclass(frozen=True, slots=True)
class Blocks:
    """How many blocks there are, and how many pages of each group are in one.

    A *unit* is the largest part of a block of which every page has a whole number: what a slot of a tier holds.
    """

    count: int
    pages: tuple[int, ...] = (1,)

    def ids(self, group: int) -> int:
        """Return the number of page ids of a group: block b has those from b * pages on."""
        return self.count * self.pages[group]

    @property
    def units(self) -> int:
        """The number of units in a block."""
        return math.lcm(*self.pages)

    def units_of(self, group: int, pages: Ints | Sequence[int]) -> Ints:
        """Return the units of some pages [n] of a group, int32 [n, units of a page]."""
        size = self.units // self.pages[group]
        first: Ints = np.asarray(pages, np.int32) * np.int32(size)
        return np.add.outer(first, np.arange(size, dtype=np.int32))

    def spread(self) -> list[range]:
        """Return page ids of each group that share no block: a text has as many of FULL and WINDOW, and one slot.

        If two blocks are enough for a request, no layer has a window, and FULL has the first instead of WINDOW.
        """
        has_state = len(self.pages) > STATE
        shares = [1 if has_state else self.units // count for count in self.pages]
        ends = [self.count * sum(shares[:i]) // sum(shares) for i in range(len(shares) + 1)]
        return [range(ends[i] * n, ends[i + 1] * n) or range(n) for i, n in enumerate(self.pages)]


def divide(page_bytes: Sequence[int]) -> tuple[int, tuple[int, ...]]:
    """Return the bytes of a block, and the pages of each group in it, for pages of so many bytes.

    A block is the smallest of which every group uses nearly all; `block // pages` is a multiple of `ALIGNMENT`. A model
    has nothing of a group whose pages have no bytes.
    """
    aligned = [round_up(size, ALIGNMENT) for size in page_bytes]
    best: tuple[int, tuple[int, ...]] = 0, ()
    least_waste = 1.0
    for count in range(1, MAX_PAGES + 1):
        pages = tuple(count * max(aligned) // size if size else 1 for size in aligned)
        size = round_up(count * max(aligned), ALIGNMENT * math.lcm(*pages))
        waste = max(1 - n * used / size for n, used in zip(pages, aligned, strict=True) if used)
        if waste < least_waste:
            best, least_waste = (size, pages), waste
        if waste <= MAX_WASTE:
            break
    return best


class PagePool:
    """The pages of one group: those of the blocks that it has.

    free      its free pages, last freed last
    reserved  the number of pages that must stay available to running rows
    """

    def __init__(self, arena: Arena, per_block: int) -> None:
        self._arena = arena
        self.per_block = per_block
        self.free: dict[int, None] = {}
        self._used: dict[int, int] = {}  # pages in use of each block

    @property
    def reserved(self) -> int:
        return 0

    @property
    def least_blocks(self) -> int:
        """The number of blocks reserved for a row that runs alone."""
        return 0

    @property
    def num_used(self) -> int:
        """The number of pages in use."""
        return len(self._used) * self.per_block - len(self.free)

    def blocks_for(self, count: int) -> int:
        """Return how many more blocks are needed for `count` pages besides the reserved ones."""
        return max(0, ceil_div(self.reserved + count - len(self.free), self.per_block))

    def allocate(self, count: int) -> list[int]:
        """Return `count` pages, the last freed first. There must be enough."""
        taken: list[int] = []
        for _ in range(count):
            if not self.free:
                self._open()
            page, _ = self.free.popitem()
            self._used[page // self.per_block] += 1
            taken.append(page)
        return taken

    def _open(self) -> None:
        if not self._arena.free:
            raise InvariantError(f"no block is free for pages of {self.per_block} in one")
        block = self._arena.free.pop()
        self._used[block] = 0
        self.free |= dict.fromkeys(range((block + 1) * self.per_block - 1, block * self.per_block - 1, -1))

    def release(self, pages: Sequence[int], *, last: bool = False) -> None:
        """Free `pages`. `last`: blocks of these alone are used after all others."""
        emptied: list[int] = []
        for page in pages:
            block = page // self.per_block
            self.free[page] = None
            self._used[block] -= 1
            if not self._used[block]:
                emptied.append(block)
                del self._used[block]
                for other in range(block * self.per_block, (block + 1) * self.per_block):
                    del self.free[other]
        if last:
            self._arena.free[:0] = emptied[::-1]
        else:
            self._arena.free += emptied

    def check(self) -> None:
        """Raise `InvariantError` unless the free pages are those of its blocks that are not in use."""
        pages = dict.fromkeys(self._used, 0)
        for page in self.free:
            pages[page // self.per_block] += 1
        if any(self._used[block] + count != self.per_block or not self._used[block] for block, count in pages.items()):
            raise InvariantError(f"pages of blocks with {self.per_block} are lost, or a block has no page in use")
        if {*self._used} & {*self._arena.free}:
            raise InvariantError(f"blocks are free and in use: {sorted({*self._used} & {*self._arena.free})[:8]}")


class Arena:
    """All blocks.

    free   blocks that no group has, the next one last
    pools  of the groups
    """

    def __init__(self, blocks: Blocks) -> None:
        self.blocks = blocks
        self.free = list(range(blocks.count - 1, -1, -1))
        self.pools: dict[int, PagePool] = {FULL: PagePool(self, blocks.pages[FULL])}

    def fits(self, needs: Mapping[int, int]) -> bool:
        """Return whether `needs` (pages by group) can be allocated besides the reserved pages."""
        return sum(pool.blocks_for(needs.get(group, 0)) for group, pool in self.pools.items()) <= len(self.free)

    @property
    def max_pages(self) -> int:
        """The maximum number of FULL pages of a row that runs alone."""
        full = self.pools[FULL]
        return full.per_block * (self.blocks.count - sum(pool.least_blocks for pool in self.pools.values()))

    def spare(self, group: int) -> int:
        """Return how many unreserved pages of a group are available; negative if reserved ones are missing."""
        pool = self.pools[group]
        others = sum(other.blocks_for(0) for other in self.pools.values() if other is not pool)
        return len(pool.free) - pool.reserved + pool.per_block * (len(self.free) - others)

    def check(self) -> None:
        """Raise `InvariantError` unless each block is free or has pages in use, and reserved pages are available."""
        for pool in self.pools.values():
            pool.check()
        held = sum(ceil_div(pool.num_used + len(pool.free), pool.per_block) for pool in self.pools.values())
        if held + len({*self.free}) != self.blocks.count or len(self.free) != len({*self.free}) or not self.fits({}):
            raise InvariantError(f"of {self.blocks.count} blocks {held} are held and {len(self.free)} free")
