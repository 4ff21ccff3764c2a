"""Keeps pages of the radix tree, and snapshots, in the tiers below the device's memory (`tiers.py`).

Location i of the tree is tier i - 1. What is evicted from the device is stored in tiers, and loaded again when a
request needs it. In a model with bounded state, pages are worth storing where a snapshot of a text with them is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from minisgl.core.errors import InvariantError
from minisgl.core.layout import FULL, LOAD, MOVE, NO_MOVES, STORE
from minisgl.kvcache.snapshots import Reason
from minisgl.kvcache.tiers import page_name, snapshot_names, unit_names
from minisgl.kvcache.tree import DEVICE, NOWHERE, PART, subtree

if TYPE_CHECKING:
    from minisgl.core.plan import Ints, Records
    from minisgl.kvcache.feed import RouterFeed
    from minisgl.kvcache.snapshots import Snapshots
    from minisgl.kvcache.tiers import Names, Tier
    from minisgl.kvcache.tree import Node, PrefixTree


class SavedSnapshot(NamedTuple):
    """A snapshot in a tier, by the slots of its units, int32 [n]."""

    reason: Reason
    slots: Ints


class TierKeeper:
    """The one writer of the locations of nodes: slots of tiers, the moves to and from them, and damaged pages.

    It reports each change to the router's feed.

    saved  the snapshots in each location, by node. They leave a tier with the pages of their node; on the device, where
           `snapshots` has them, none is listed.
    """

    def __init__(self, tree: PrefixTree, tiers: list[Tier], feed: RouterFeed, snapshots: Snapshots | None) -> None:
        """Fill the tree from the pages that `tiers`, the fastest first, have kept of an earlier process."""
        self.tiers = tiers
        self.saved: list[dict[Node, SavedSnapshot]] = [{} for _ in range(1 + len(tiers))]
        self._snapshots = snapshots
        self._page_units = 1 if snapshots is None else len(snapshots.blocks.units_of(FULL, [0])[0])
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
            self._free(node, location)
        self.put(node, location, NOWHERE)
        # Pages below are in tiers, and no walk can reach them any more.
        for edge in reversed(subtree(node)) if node.location < 0 else ():
            self._feed.report(edge, -1)
            for other in range(1, 1 + len(self.tiers)):
                self._free(edge, other)
            if self._snapshots is not None:
                self._snapshots.remove(edge)
            self._tree.remove(edge)

    def _free(self, node: Node, location: int) -> None:
        """Free a node's slots in a tier."""
        self.tiers[location - 1].free(node.locations[location])
        self.forget(node, location)

    def forget(self, node: Node, location: int) -> None:
        """Remove the snapshot of a node from a tier, if it is there; no request may await it."""
        if (saved := self.saved[location].pop(node, None)) is not None:
            self.tiers[location - 1].free(saved.slots)

    def snapshot_cost(self, node: Node) -> float:
        """Return how many pages can be computed while the snapshot of a node is loaded; infinity if it has none."""
        assert self._snapshots is not None
        if node in self._snapshots.of:
            return 0.0
        for tier, saved in zip(self.tiers, self.saved[1:], strict=True):
            if node in saved:
                return tier.cost * len(saved[node].slots) / self._page_units
        return math.inf

    # -- moves

    def store(self, node: Node, location: int, *, evicts: bool = True) -> int:
        """Store a node's pages in a tier; return how many were stored.

        Only older ones are evicted for them, and none unless it `evicts`.
        """
        tier, count = self.tiers[location - 1], node.length * self._page_units
        is_needed = self._snapshots is None or node.below[location] > 0 or node in self.saved[location]
        if not is_needed or len(node.locations[location]) or node.is_hidden or not len(node.pages):
            return 0
        if not self._make_room(location, count, node.timestamp if evicts else -1):
            return 0
        names = unit_names(self._names(node), self._page_units)
        slots = tier.allocate(names)
        tier.describe(slots[:, 0], self._name_before(node), node.salt, node.key)
        self._move(location, self._units(node.pages), slots, names, STORE)
        self.put(node, location, slots)
        return node.length

    def save(self, node: Node, location: int, *, evicts: bool = True) -> int:
        """Store the snapshot of a node, and the node's pages, as `store` does; return their size in pages."""
        found, saved = self._snapshots, self.saved[location]
        if found is None or node not in found.of or node in saved or not found.is_lasting(node):
            return 0
        if node.is_hidden or not len(node.pages):
            return 0
        snapshot, tier = found.of[node], self.tiers[location - 1]
        units = found.units(snapshot)
        count = len(units) + (0 if len(node.locations[location]) else node.length * self._page_units)
        self._tree.lock(node)  # so that nothing of this text makes room
        if fits := self._make_room(location, count, node.timestamp if evicts else -1):
            names = self._snapshot_names(node, len(units))
            saved[node] = SavedSnapshot(snapshot.reason, tier.allocate(names))
            self._move(location, units, saved[node].slots, names, STORE)
            self.store(node, location)
        self._tree.lock(node, unlock=True)
        passed = found.passed_by(node, saved)
        if fits and passed is not None and saved[passed].reason is Reason.END and passed not in found.awaited:
            self.forget(passed, location)
        return -(-count // self._page_units) if fits else 0

    def _make_room(self, location: int, count: int, timestamp: int) -> bool:
        """Evict what was last used until `timestamp` from a tier, until `count` slots are free; return whether so."""
        tier = self.tiers[location - 1]
        if count > tier.spec.num_slots:
            return False
        while tier.free_size < count and (old := self._tree.pop_oldest(location)) is not None:
            if old.timestamp > timestamp:
                self._tree.push(old, location)
                return False
            self.remove(old, location)
        return tier.free_size >= count

    def load(self, node: Node, pages: Ints) -> None:
        """Load the pages of the prefix that are only in tiers into the page ids `pages`, one for each."""
        for edge in self._tree.path(node):
            if len(edge.pages):
                continue
            targets, pages = pages[: edge.length], pages[edge.length :]
            location = edge.location
            names, slots = unit_names(self._names(edge), self._page_units), edge.locations[location]
            self._move(location, self._units(targets), slots, names, LOAD)
            self.put(edge, DEVICE, targets)
            edge.is_loaded = True
        assert not len(pages), f"load() was given {len(pages)} pages too many"

    def fetch(self, node: Node) -> None:
        """Give a locked node a snapshot on the device that `load_snapshot` loads, unless it has one."""
        found = self._snapshots
        if found is None or node in found.of:
            return
        location = next(i for i, saved in enumerate(self.saved) if node in saved)
        reason, slots = self.saved[location][node]
        snapshot = found.fetch(node, reason, node.depth * self._tree.page_size)
        names = self._snapshot_names(node, len(slots))
        snapshot.loads = self._moves_of(location, found.units(snapshot), slots, names, LOAD)

    def load_snapshot(self, node: Node, count: int) -> None:
        """Load `count` units more of the snapshot of a node."""
        assert self._snapshots is not None
        snapshot = self._snapshots.of[node]
        moves, snapshot.loads = snapshot.loads[:count], snapshot.loads[count:]
        self._moves.append(moves)
        for tier in self.tiers:
            tier.loaded_pages += int((moves["tier"] == tier.number).sum())

    def write_back(self, num_pages: int, *, lasting: bool) -> int:
        """See `PrefixCache.write_back`."""
        count = 0
        # With snapshots children first, since what is above one is stored if it is.
        nodes = self._tree.nodes() if self._snapshots is None else self._tree.nodes()[::-1]
        for location, tier in enumerate(self.tiers, 1):
            lasts = tier.spec.lasts
            for node in nodes if lasts or not lasting else ():
                # In a full tier, two nodes could replace each other forever. So a lasting tier takes each node once
                # after each use. Host memory takes only what fits: it is for the pages that are evicted next.
                is_wanted = node.tried_at != node.timestamp if lasts else tier.free_size > 0
                if is_wanted and len(node.pages) and count < num_pages:
                    self._tree.trim(node, num_pages - count)
                    node.tried_at = node.timestamp if lasts else node.tried_at
                    count += self.save(node, location, evicts=lasts) or self.store(node, location, evicts=lasts)
        return count + len(self._moves)  # with what was evicted since the last plan

    def pop_moves(self, num_next: int, max_stores: int) -> Records:
        """See `PrefixCache.pop_moves`."""
        if num_next - self._num_stored >= PART and max_stores > 0:
            self._num_stored = 0
        else:
            max_stores = 0
        tiers = range(1, 1 + len(self.tiers))
        popped: list[Node] = []
        queue = self._evicted_next(popped)
        while self._num_stored < num_next and max_stores > 0 and (node := next(queue, None)) is not None:
            max_stores -= max(self.save(node, location) for location in tiers)
            for edge in reversed(self._tree.path(node)):  # unlocked ancestors are evicted next
                is_needed = edge.below[DEVICE] > 1 or (self._snapshots is not None and edge in self._snapshots.of)
                if is_needed and self._snapshots is not None and edge is not node:
                    break
                if self._num_stored < num_next and max_stores > 0 and edge.ref_count == 0:
                    if not all(map(len, edge.locations)):
                        self._tree.trim(edge, min(num_next - self._num_stored, max_stores))
                        max_stores -= max(self.store(edge, location) for location in tiers)
                    self._num_stored += edge.length
        for node in popped:
            self._tree.push(node, DEVICE)
        moves, self._moves = self._moves, []
        return np.concatenate(moves) if moves else NO_MOVES

    def _evicted_next(self, popped: list[Node]) -> Iterator[Node]:
        """Yield nodes on the device in the order of their eviction; list those that the caller pushes back."""
        if self._snapshots is not None:
            yield from [*self._snapshots.of]
            return
        while (node := self._tree.pop_oldest(DEVICE)) is not None:
            popped.append(node)
            yield node

    def _units(self, pages: Ints) -> Ints:
        """Return the units of pages [n] of FULL, int32 [n, units of a page]."""
        return pages[:, None] if self._snapshots is None else self._snapshots.blocks.units_of(FULL, pages)

    def _move(self, location: int, units: Ints, slots: Ints, names: Names, kind: int) -> None:
        self._moves.append(self._moves_of(location, units, slots, names, kind))
        if kind == LOAD:
            self.tiers[location - 1].loaded_pages += units.size

    def _moves_of(self, location: int, units: Ints, slots: Ints, names: Names, kind: int) -> Records:
        moves = np.empty(units.size, MOVE)
        moves["unit"], moves["slot"], moves["name"] = units.ravel(), slots.ravel(), names.ravel()
        moves["tier"], moves["kind"] = self.tiers[location - 1].number, kind
        return moves

    # -- damage

    def mark_intact(self, node: Node) -> None:
        """Record that a finite result was computed from the prefix, so its loaded pages are intact."""
        if self.tiers:
            for edge in self._tree.path(node):
                edge.is_loaded = False

    def drop_damaged(self, node: Node, *, with_snapshot: bool) -> bool:
        """Hide the loaded pages of the prefix, and all below, and free their slots; return false if there are none.

        `with_snapshot`: the node's snapshot may be damaged, too, so at least the node is hidden.
        """
        top = next((edge for edge in self._tree.path(node) if edge.is_loaded), node if with_snapshot else None)
        if top is not None and not top.is_hidden:
            nodes = subtree(top)
            for edge in nodes:
                self._feed.report(edge, -1)
            self._tree.hide(top)
            for edge in reversed(nodes):
                for location, tier in enumerate(self.tiers, 1):
                    free = tier.free_size
                    if len(edge.locations[location]):
                        self.remove(edge, location)
                    tier.lost_pages += tier.free_size - free
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
        found = tier.restore(self._page_units)
        kept: list[int] = []
        todo = [(self._tree.root, 0)]
        while todo:
            parent, before = todo.pop()
            for first in found.get(before, ()):
                run = [first]
                while not (saved := self._find_snapshot(tier, run[-1].name, parent.depth + len(run))):
                    if len(after := found.get(run[-1].name, [])) != 1:
                        break
                    run += after
                node = self._tree.add(parent, np.concatenate([page.tokens for page in run]), first.salt)
                node.names = np.array([page.name for page in run], np.int64)
                slots = np.array([page.slots for page in run], np.int32)
                self.put(node, location, slots)
                kept += [*slots.ravel().tolist(), *saved]
                if saved:
                    self.saved[location][node] = SavedSnapshot(Reason.END, np.array(saved, np.int32))
                todo.append((node, run[-1].name))
        tier.claim(kept)

    def _snapshot_names(self, node: Node, units: int) -> Names:
        """Return the names of the units of a node's snapshot, int64 [units]."""
        return snapshot_names(int(self._names(node)[-1]), units)

    def _find_snapshot(self, tier: Tier, name: int, depth: int) -> list[int]:
        """Return the slots of the snapshot that a tier has kept of a text of `depth` pages, the last with `name`."""
        if self._snapshots is None:
            return []
        blocks, needs = self._snapshots.blocks, self._snapshots.needs(depth * self._tree.page_size)
        units = sum(count * blocks.units_of(group, [0]).size for group, count in needs.items())
        return tier.find(snapshot_names(name, units))

    def check(self) -> None:
        """Raise `InvariantError` unless each slot is free or in the tree, and only once."""
        for location, tier in enumerate(self.tiers, 1):
            saved = self.saved[location]
            if not all(len(node.locations[location]) for node in saved):
                raise InvariantError(f"the {tier.spec.name} tier has a snapshot without the pages of its node")
            tier.check([*self._tree.ids(location), *(slot for s in saved.values() for slot in s.slots.tolist())])
