"""Keeps pages of the radix tree in the tiers below the device's pool (`tiers.py`).

Location i of the tree is tier i - 1. Pages that are evicted from the pool are stored in tiers, and loaded again when a
request needs them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from minisgl.core.layout import LOAD, MOVE, NO_MOVES, STORE
from minisgl.kvcache.tiers import page_name
from minisgl.kvcache.tree import DEVICE, NOWHERE, PART, subtree

if TYPE_CHECKING:
    from minisgl.core.plan import Ints, Records
    from minisgl.kvcache.feed import RouterFeed
    from minisgl.kvcache.tiers import Names, Tier
    from minisgl.kvcache.tree import Node, PrefixTree


class TierKeeper:
    """The one writer of the locations of nodes: slots of tiers, the moves to and from them, and damaged pages.

    It reports each change to the router's feed.
    """

    def __init__(self, tree: PrefixTree, tiers: list[Tier], feed: RouterFeed) -> None:
        """Fill the tree from the pages that `tiers`, the fastest first, have kept of an earlier process."""
        self.tiers = tiers
        self._tree = tree
        self._feed = feed
        self._moves: list[Records] = []
        self._num_stored = 0  # about how many of the pages that are evicted next are in tiers
        for location, tier in enumerate(self.tiers, 1):
            self._restore(location, tier)

    # -- locations

    def put(self, node: Node, location: int, ids: Ints) -> None:
        """Set the page ids or slots of `node` in `location`; NOWHERE if it has left."""
        before = node.location
        self._tree.put(node, location, ids)
        if node.location != before:
            self._feed.report(node, node.location)

    def remove(self, node: Node, location: int) -> None:
        """Remove the pages of `node` from `location`; if no location has them, remove the node and its subtree."""
        if location == DEVICE:
            self._num_stored = max(0, self._num_stored - node.length)
        else:
            self.tiers[location - 1].free(node.locations[location])
        self.put(node, location, NOWHERE)
        # Pages below are in tiers, and no walk can reach them any more.
        for edge in reversed(subtree(node)) if node.location < 0 else ():
            self._feed.report(edge, -1)
            for other, tier in enumerate(self.tiers, 1):
                tier.free(edge.locations[other])
            self._tree.remove(edge)

    # -- moves

    def store(self, node: Node, location: int) -> int:
        """Store a node's pages in a tier, where only older ones are evicted for them; return how many were stored."""
        tier = self.tiers[location - 1]
        if len(node.locations[location]) or node.is_hidden or node.length > tier.spec.num_slots:
            return 0
        while tier.free_size < node.length and (old := self._tree.pop_oldest(location)) is not None:
            if old.timestamp > node.timestamp:
                self._tree.push(old, location)
                return 0
            self.remove(old, location)
        if tier.free_size < node.length:
            return 0
        slots = tier.allocate(self._names(node), self._name_before(node), node.salt, node.key)
        self._move(node, location, node.pages, slots, STORE)
        self.put(node, location, slots)
        return node.length

    def load(self, node: Node, pages: Ints) -> None:
        """Load the pages of the prefix that are only in tiers into the page ids `pages`, one for each."""
        for edge in self._tree.path(node):
            if len(edge.pages):
                continue
            targets, pages = pages[: edge.length], pages[edge.length :]
            location = edge.location
            self._move(edge, location, targets, edge.locations[location], LOAD)
            self.tiers[location - 1].loaded_pages += edge.length
            self.put(edge, DEVICE, targets)
            edge.is_loaded = True
        assert not len(pages), f"load() was given {len(pages)} pages too many"

    def write_back(self, num_pages: int, *, lasting: bool) -> int:
        """See `PrefixCache.write_back`."""
        count = 0
        for location, tier in enumerate(self.tiers, 1):
            lasts = tier.spec.lasts
            for node in self._tree.nodes() if lasts or not lasting else ():
                # In a full tier, two nodes could replace each other forever. So a lasting tier takes each node once
                # after each use. Host memory takes only what fits: it is for the pages that are evicted next.
                is_wanted = node.tried_at != node.timestamp if lasts else tier.free_size >= node.length
                if is_wanted and len(node.pages) and count < num_pages:
                    self._tree.trim(node, num_pages - count)
                    node.tried_at = node.timestamp if lasts else node.tried_at
                    count += self.store(node, location)
        return count

    def pop_moves(self, num_next: int, max_stores: int) -> Records:
        """See `PrefixCache.pop_moves`."""
        oldest: list[Node] = []
        if num_next - self._num_stored >= PART and max_stores > 0:
            self._num_stored = 0
        else:
            max_stores = 0
        while self._num_stored < num_next and max_stores > 0 and (node := self._tree.pop_oldest(DEVICE)) is not None:
            oldest.append(node)
            for edge in reversed(self._tree.path(node)):  # unlocked ancestors are evicted next
                if self._num_stored < num_next and max_stores > 0 and edge.ref_count == 0:
                    if not all(map(len, edge.locations)):
                        self._tree.trim(edge, min(num_next - self._num_stored, max_stores))
                        max_stores -= max(self.store(edge, location) for location in range(1, len(edge.locations)))
                    self._num_stored += edge.length
        for node in oldest:
            self._tree.push(node, DEVICE)
        moves, self._moves = self._moves, []
        return np.concatenate(moves) if moves else NO_MOVES

    def _move(self, node: Node, location: int, pages: Ints, slots: Ints, kind: int) -> None:
        moves = np.empty(node.length, MOVE)
        moves["page"], moves["slot"], moves["name"] = pages, slots, self._names(node)
        moves["tier"], moves["kind"] = self.tiers[location - 1].number, kind
        self._moves.append(moves)

    # -- damage

    def mark_intact(self, node: Node) -> None:
        """Record that a finite result was computed from the prefix, so its loaded pages are intact."""
        if self.tiers:
            for edge in self._tree.path(node):
                edge.is_loaded = False

    def drop_damaged(self, node: Node) -> bool:
        """Hide the loaded pages of the prefix, and all below, and free their slots; return false if there are none."""
        top = next((edge for edge in self._tree.path(node) if edge.is_loaded), None)
        if top is not None and not top.is_hidden:
            nodes = subtree(top)
            for edge in nodes:
                self._feed.report(edge, -1)
            self._tree.hide(top)
            for edge in reversed(nodes):
                for location, tier in enumerate(self.tiers, 1):
                    if lost := len(edge.locations[location]):
                        tier.lost_pages += lost
                        self.remove(edge, location)
        return top is not None

    # -- names, by which a tier recognizes its pages

    def _names(self, node: Node) -> Names:
        """Return the names of the node's pages, int64 [length]. Also sets `names` of all ancestors."""
        for edge in self._tree.path(node):
            if not len(edge.names):
                before, salt = self._name_before(edge), edge.salt
                names = []
                for page in edge.key.reshape(edge.length, -1):
                    before, salt = page_name(before, salt, page.tobytes()), b""
                    names.append(before)
                edge.names = np.array(names, np.int64)
        return node.names

    def _name_before(self, node: Node) -> int:
        """Return the name of the page before the node; 0 for a first page."""
        parent = node.parent
        assert parent is not None
        return int(parent.names[-1]) if parent.depth else 0

    def _restore(self, location: int, tier: Tier) -> None:
        """Add the pages that the tier has kept. A run of pages without branches becomes one edge."""
        found = tier.restore()
        kept: list[int] = []
        todo = [(self._tree.root, 0)]
        while todo:
            parent, before = todo.pop()
            for first in found.get(before, ()):
                run = [first]
                while len(after := found.get(run[-1].name, [])) == 1:
                    run += after
                node = self._tree.add(parent, np.concatenate([page.tokens for page in run]), first.salt)
                node.names = np.array([page.name for page in run], np.int64)
                slots = [page.slot for page in run]
                self.put(node, location, np.array(slots, np.int32))
                kept += slots
                todo.append((node, run[-1].name))
        tier.claim(kept)

    def check(self) -> None:
        """Raise `InvariantError` unless each slot is free or in the tree, and only once."""
        for location, tier in enumerate(self.tiers, 1):
            tier.check(self._tree.ids(location))
