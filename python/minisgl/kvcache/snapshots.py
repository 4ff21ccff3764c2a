"""State of bounded size: pages of a window, and the slot of a recurrent state. Rows have it, and snapshots of texts.

A page of a window is complete where a text is captured. So rows and snapshots share it, and it is free when the last of
them has released it. A slot changes with each token, so a capture copies it to a snapshot, and a restore to a row.
"""

from __future__ import annotations

import enum
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from minisgl.core.layout import FOLD_TOKENS
from minisgl.core.rounding import ceil_div, round_up
from minisgl.kvcache.arena import PagePool

if TYPE_CHECKING:
    from collections.abc import Sequence

    from minisgl.kvcache.arena import Arena
    from minisgl.kvcache.tree import Node

STEP_TOKENS: Final = 9  # the most that a row decodes in one step, drafts included
IN_FLIGHT: Final = 2 * STEP_TOKENS  # the most that a row decodes in uncollected steps
CHANCES: Final = 6
WHOLE_TEXT: Final = 1 << 30  # tokens: a slot is a page for any text


def recent_tokens(max_queries: int) -> int:
    """Return how many tokens a slot keeps besides its state, if a row computes up to `max_queries` in a step.

    They are those that the next fold takes in, and those of two steps in flight and the one that is planned.
    """
    return round_up(FOLD_TOKENS + 3 * max_queries, 4)


class Bounded(NamedTuple):
    """What each row of a model has of WINDOW or STATE."""

    group: int
    window: int = 0  # tokens that layers read at most, the newest included; 0 for STATE


def ids_per_row(window: int, page_size: int) -> int:
    """Return the maximum number of ids of a decoding row: for its window and tokens in flight, or one slot."""
    if not window:
        return 1
    return ceil_div(window, page_size) + 1 + (page_size + IN_FLIGHT + STEP_TOKENS - 2) // page_size


class IdPool(PagePool):
    """The ids of one group that are in use.

    For each row `per_row` ids are reserved, and `reserve` more for the prompts of all rows. So a decoding row never
    lacks an id. Snapshots use the others: an id that a snapshot has does not count as a row's.

    rows, snapshots    what each holds: ids by their index in the text
    kept               in how many snapshots each id is, if it is in one
    others             how many share each id with its first holder, if any do
    """

    def __init__(self, arena: Arena, bounded: Bounded, page_size: int, chunk_tokens: int) -> None:
        """Chunks of prompts have up to `chunk_tokens`."""
        self.group, window = bounded
        super().__init__(arena, arena.blocks.pages[self.group])
        self.page_size = page_size if window else WHOLE_TEXT
        self.window_pages = ceil_div(window, self.page_size)  # of a text that ends with a page
        self.per_row = ids_per_row(window, page_size)
        limit = (arena.blocks.ids(self.group) - self.per_row) // 4
        self.reserve = min(ceil_div(chunk_tokens, self.page_size), limit) if window else 0
        self.is_shared = window > 0
        self.rows: dict[int, dict[int, int]] = {}
        self.snapshots: dict[Snapshot, dict[int, int]] = {}
        self.kept: Counter[int] = Counter()
        self.others: Counter[int] = Counter()
        arena.pools[self.group] = self

    @property
    def reserved(self) -> int:
        return self.reserve + self.per_row * len(self.rows) - (self.num_used - len(self.kept))

    @property
    def evictable_blocks(self) -> int:
        """The most blocks that other groups gain if all snapshots are dropped."""
        spare = len(self.free) - self.reserved + self.per_block * self.blocks_for(0)
        return (len(self.kept) + spare) // self.per_block

    @property
    def least_blocks(self) -> int:
        return ceil_div(self.reserve + self.per_row, self.per_block)

    def span(self, computed: int, stop: int) -> range:
        """Return the indices that steps read or write up to token `stop` of a text with `computed` computed tokens."""
        return range(max(0, computed // self.page_size - self.window_pages), ceil_div(stop, self.page_size))

    @property
    def excess(self) -> int:
        """How much of the reserve is in use."""
        return sum(max(0, len(ids) - self.per_row) for ids in self.rows.values())

    def limit(self, row: int, computed: int) -> int:
        """Return the length up to which a prompt may be planned: its row has ids until these tokens are computed."""
        pages = max(len(self.rows[row]), self.per_row) + self.reserve - self.excess
        return (self.span(computed, 0).start + pages) * self.page_size - IN_FLIGHT

    def extend(self, ids: dict[int, int], span: range) -> dict[int, int]:
        """Add free ids for the indices of `span` that are missing; return the added ones. There must be enough."""
        missing = [index for index in span if index not in ids]
        added = dict(zip(missing, self.allocate(len(missing)), strict=True))
        ids.update(added)
        return added

    def release(self, pages: Sequence[int], *, last: bool = False) -> None:
        """Release `pages` of one holder; free those that no other holds."""
        super().release([page for page in pages if not _take_one(self.others, page)], last=last)

    def snapshot_needs(self, row: int, length: int) -> int:
        """Return how many more ids are needed if `length` tokens of a row's text are captured."""
        ids = self.rows[row]
        return sum(not (self.is_shared and ids[index] in self.kept) for index in self.span(length, length))

    def capture(self, row: int, length: int, snapshot: Snapshot) -> list[tuple[int, int]]:
        """Give `snapshot` what a row has for the end of its first `length` tokens; return (source, target) to copy."""
        own = self.rows[row]
        ids, copies = self._repeat({index: own[index] for index in self.span(length, length)})
        self.snapshots[snapshot] = ids
        self.kept.update(ids.values())
        return copies

    def hand_over(self, row: int, snapshot: Snapshot) -> None:
        """Give `snapshot` the slot of a row that needs it no more."""
        self.snapshots[snapshot], self.rows[row] = self.rows[row], {}
        self.kept.update(self.snapshots[snapshot].values())

    def restore(self, row: int, snapshot: Snapshot) -> list[tuple[int, int]]:
        """Give a row the ids of a snapshot, or new ones; return (source, target) to copy."""
        self.rows[row], copies = self._repeat(self.snapshots[snapshot])
        return copies

    def _repeat(self, ids: dict[int, int]) -> tuple[dict[int, int], list[tuple[int, int]]]:
        if self.is_shared:
            self.others.update(ids.values())
            return ids.copy(), []
        own = self.extend({}, range(len(ids)))
        return own, [(ids[index], own[index]) for index in ids]

    def drop(self, snapshot: Snapshot) -> None:
        """Release the ids of a snapshot."""
        ids = [*self.snapshots.pop(snapshot).values()]
        for i in ids:
            _take_one(self.kept, i)
        self.release(ids)


def _take_one(counts: Counter[int], key: int) -> bool:
    """Count one less of `key`, if there is one; return whether there was."""
    if key not in counts:
        return False
    counts[key] -= 1
    if not counts[key]:
        del counts[key]
    return True


class Reason(enum.IntEnum):
    """Why there is a snapshot; if there are several reasons, the largest."""

    SPARE = 0  # in case prompts diverge after it; nothing else is evicted for it
    END = 1  # a conversation may continue after it
    SHARED = 2  # prompts are known to diverge after it


@dataclass(slots=True, eq=False)
class Snapshot:
    """What a text needs to go on: ids for its last span, in each pool."""

    reason: Reason = Reason.END
    chances: int = 0  # the evictions that it still survives
    restored_in: int = 0  # the newest step that copies it to a row


class Snapshots:
    """The snapshots at the ends of a tree's nodes, in the order in which they are dropped: by last use.

    SPARE ones come first, until one is used. A SHARED one survives CHANCES evictions. After a conversation has a newer
    snapshot, its previous one is dropped first, unless the last conversation continued from a previous one: templates
    that leave out the reasoning of earlier answers make them do so.
    """

    def __init__(self, pools: list[IdPool]) -> None:
        self.pools = pools
        self.of: OrderedDict[Node, Snapshot] = OrderedDict()
        self._newest_is_used = True

    def free(self, snapshot: Snapshot) -> None:
        """Free the ids of a snapshot that no node has."""
        for pool in self.pools:
            pool.drop(snapshot)

    def add(self, node: Node | None, snapshot: Snapshot) -> None:
        """Give a node a snapshot; free it if the node has one, or if nothing is cached."""
        if node is None or node in self.of:
            self.free(snapshot)
            return
        self.of[node], snapshot.chances = snapshot, CHANCES * (snapshot.reason is Reason.SHARED)
        if snapshot.reason is Reason.SPARE:
            self.of.move_to_end(node, last=False)
            return
        before = node.parent
        while before is not None and len(before.children) == 1 and self._newest_is_used:
            if before in self.of:
                self.of.move_to_end(before, last=False)
                break
            before = before.parent

    def use(self, node: Node) -> Snapshot:
        """Return the snapshot of a node that the step that has just matched it restores."""
        snapshot = self.of[node]
        if snapshot.reason is Reason.SPARE:
            snapshot.reason = Reason.SHARED
        snapshot.restored_in, snapshot.chances = node.timestamp, CHANCES * (snapshot.reason is Reason.SHARED)
        self.of.move_to_end(node)
        if snapshot.reason is Reason.END:
            self._newest_is_used = not node.children
        return snapshot

    def remove(self, node: Node) -> None:
        """Free the snapshot of a node, if it has one."""
        if (snapshot := self.of.pop(node, None)) is not None:
            self.free(snapshot)

    def oldest(self, collected: int, reason: Reason, but: Node | None = None) -> Node | None:
        """Return the node whose snapshot is to be dropped for one with `reason`, if there is one other than `but`.

        A snapshot that a step after `collected` restores is not returned.
        """
        may_drop = {Reason.SPARE} if reason is Reason.SPARE else {*Reason}

        def first() -> Node | None:
            found = (n for n, s in self.of.items() if s.restored_in <= collected and s.reason in may_drop)
            return next((node for node in found if node is not but), None)

        while (node := first()) is not None and self.of[node].chances:
            self.of[node].chances -= 1
            self.of.move_to_end(node)
        return node
