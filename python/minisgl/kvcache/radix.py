"""The prefix cache that serves: a radix tree, tiers below the device's pool, and the changes for a router."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from minisgl.core.errors import InvariantError
from minisgl.kvcache.base import CacheHandle, MatchResult, PrefixCache, SizeInfo
from minisgl.kvcache.feed import RouterFeed
from minisgl.kvcache.keeper import TierKeeper
from minisgl.kvcache.outline import OutlinedNode, outline
from minisgl.kvcache.tree import DEVICE, NOWHERE, Node, PrefixTree

if TYPE_CHECKING:
    from collections.abc import Sequence

    from minisgl.core.plan import Ints, Records
    from minisgl.kvcache.snapshots import Snapshots
    from minisgl.kvcache.tiers import Tier


class RadixCache(PrefixCache):
    """A prefix cache as a `PrefixTree` over pages, with a `TierKeeper` and a `RouterFeed`."""

    def __init__(self, page_size: int, tiers: Sequence[Tier] = (), snapshots: Snapshots | None = None) -> None:
        """Create the tree from the pages that `tiers`, the fastest first, have kept of an earlier process."""
        self.tiers = list(tiers)
        self.tree = PrefixTree(page_size, 1 + len(self.tiers))
        self._feed = RouterFeed(page_size)
        self._keeper = TierKeeper(self.tree, self.tiers, self._feed, snapshots)
        self.snapshots = snapshots

    def tick(self, step: int) -> None:
        self.tree.now = step

    # -- the operations on prefixes

    def match_prefix(self, input_ids: Ints, salt: bytes = b"", *, anywhere: bool = False) -> MatchResult:
        end = self.tree.walk(input_ids, salt)
        found = end if anywhere or self.snapshots is None else self._best_snapshot(end)
        return self._match(found, end.depth)

    def _best_snapshot(self, end: Node) -> Node:
        """Return the node with the snapshot from which the text up to `end` takes the least time to load and compute.

        That is the root if computing all of it is quicker.
        """
        best, least, loading = self.tree.root, float(end.depth), 0.0
        for node in self.tree.path(end):
            loading += node.length * (self.tiers[node.location - 1].cost if node.location > DEVICE else 0.0)
            if (cost := loading + self._keeper.snapshot_cost(node) + end.depth - node.depth) <= least:
                best, least = node, cost
        return best

    def insert_prefix(self, input_ids: Ints, pages: Ints, salt: bytes = b"") -> MatchResult:
        size = self.tree.page_size
        ids = np.ascontiguousarray(input_ids[: len(pages) * size], dtype=np.int32)
        assert len(ids) == len(pages) * size, f"insert_prefix() got {len(pages)} pages for {len(ids)} tokens"
        node = self.tree.walk(ids, salt)
        for edge in self.tree.path(node):
            if edge.is_loaded:  # these pages may be damaged: they must not replace computed ones
                assert edge.parent is not None
                return self._match(edge.parent)
            if not len(edge.pages):  # only in a tier: take the computed pages instead of loading
                self._keeper.put(edge, DEVICE, np.array(pages[edge.depth - edge.length : edge.depth], np.int32))
        if (matched := node.depth) < len(pages):
            # Copies, so that a node does not keep a request's whole token buffer alive.
            node = self.tree.add(node, ids[matched * size :].copy(), salt)
            self._keeper.put(node, DEVICE, np.array(pages[matched:], np.int32))
        return self._match(node)

    def _match(self, node: Node, branch: int = 0) -> MatchResult:
        return MatchResult(CacheHandle(node.depth, node, branch), self.tree.path_pages(node))

    def lock_handle(self, handle: CacheHandle, unlock: bool = False) -> None:
        self.tree.lock(handle.node, unlock)

    def prune(self, node: Node) -> Ints:
        return self._prune(node, self._locations)

    def _prune(self, node: Node, locations: Sequence[int]) -> Ints:
        freed, snapshots = [NOWHERE], self.snapshots.of if self.snapshots is not None else {}
        while (above := node.parent) is not None and not (node.ref_count or node.below[DEVICE] or node in snapshots):
            freed.append(node.pages)
            for location in locations:
                self._keeper.store(node, location)
            self._keeper.remove(node, DEVICE)
            node = above
        return np.concatenate(freed)

    def drop_snapshot(self, node: Node, *, everywhere: bool = False) -> Ints:
        assert self.snapshots is not None
        for location in self._locations:
            if everywhere:
                self._keeper.forget(node, location)
            else:
                self._keeper.save(node, location)
        self.snapshots.remove(node)
        return self.prune(node)

    def has_continuation(self, handle: CacheHandle) -> bool:
        return bool(handle.node.children)

    def continuation(self, handle: CacheHandle, input_ids: Ints, count: int, salt: bytes = b"") -> Ints:
        return self.tree.continuation(handle.node, input_ids, count, salt)

    def evict(self, num_pages: int) -> Ints:
        return self._evict(num_pages, self._locations)

    @property
    def _locations(self) -> Sequence[int]:
        """Those of the tiers."""
        return range(1, 1 + len(self.tiers))

    def _evict(self, num_pages: int, locations: Sequence[int]) -> Ints:
        """Evict at least `num_pages` pages, if there are so many, store them in `locations`, and return them."""
        freed = [NOWHERE]
        count = 0
        while count < num_pages and (node := self.tree.pop_oldest(DEVICE)) is not None:
            if self.snapshots is not None:
                self.snapshots.remove(node)
                freed.append(self._prune(node, locations))
            else:
                self.tree.trim(node, num_pages - count)
                freed.append(node.pages)
                for location in locations:
                    self._keeper.store(node, location)
                self._keeper.remove(node, DEVICE)
            count += len(freed[-1])
        return np.concatenate(freed)

    def reset(self) -> Ints:
        for location in self._locations:
            while (node := self.tree.pop_oldest(location)) is not None:
                self._keeper.remove(node, location)
        return self._evict(self.evictable_size, ())

    # -- tiers

    def load(self, handle: CacheHandle, pages: Ints) -> Ints:
        self._keeper.load(handle.node, pages)
        return self.tree.path_pages(handle.node)

    def fetch(self, handle: CacheHandle) -> None:
        self._keeper.fetch(handle.node)

    def load_snapshot(self, handle: CacheHandle, count: int) -> None:
        self._keeper.load_snapshot(handle.node, count)

    def mark_intact(self, handle: CacheHandle) -> None:
        self._keeper.mark_intact(handle.node)

    def drop_damaged(self, handle: CacheHandle, *, with_snapshot: bool = False) -> bool:
        return self._keeper.drop_damaged(handle.node, with_snapshot=with_snapshot)

    def is_damaged(self, handle: CacheHandle) -> bool:
        return bool(handle.node.is_hidden)

    def write_back(self, num_pages: int, *, lasting: bool) -> int:
        return self._keeper.write_back(num_pages, lasting=lasting)

    def pop_moves(self, num_next: int = 0, max_stores: int = 0) -> Records:
        return self._keeper.pop_moves(num_next, max_stores)

    # -- changes for a router

    def track_changes(self) -> None:
        self._feed.start(self.tree.nodes())

    def pop_changes(self) -> dict[int, int]:
        return self._feed.pop()

    # -- what it holds

    @property
    def size_info(self) -> SizeInfo:
        return SizeInfo(*self.tree.sizes)

    @property
    def num_nodes(self) -> int:
        return self.tree.num_nodes

    def outline(self) -> tuple[list[OutlinedNode], int]:
        return outline(self.tree.root)

    def owned_pages(self) -> list[int]:
        return self.tree.ids(DEVICE)

    def check_integrity(self) -> None:
        self.tree.check()
        self._keeper.check()
        nodes = (node for node in self.tree.nodes() if len(node.pages) and not node.ref_count)
        leaves = {node for node in nodes if not node.below[DEVICE]}
        if self.snapshots is not None and not leaves <= self.snapshots.of.keys() <= {*self.tree.nodes()}:
            raise InvariantError("no text can go on from an unlocked leaf, or a node that has gone has a snapshot")
