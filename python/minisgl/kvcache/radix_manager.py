"""The radix tree of cached prefixes, in host integers. An edge has one or more whole pages.

The pages of an edge are in one or more *places*: the device's pool, and the tiers below it (`tiers.py`). Pages evicted
from the pool are stored in the tiers, and loaded again when a request needs them.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Final

import numpy as np

from minisgl.errors import InvariantError
from minisgl.kvcache.base import CacheHandle, MatchResult, PrefixCache, SizeInfo
from minisgl.kvcache.outline import OutlinedNode, outline
from minisgl.kvcache.tiers import Tier, page_name
from minisgl.layout import LOAD, MOVE, NO_INTS, NO_MOVES, STORE
from minisgl.routing.prefixes import continued_hashes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from minisgl.core import Ints, Records
    from minisgl.kvcache.tiers import Names
    from minisgl.routing.prefixes import Hashes

DEVICE: Final = 0  # the place of pages that steps can read; tier i is place 1 + i
NOWHERE: Final = np.empty(0, np.int32)
NO_HASHES: Final = np.empty(0, np.uint64)
PART: Final = 32  # pages: a long edge is evicted in parts of at least this length, the last part first
DAMAGED: Final = b"\xff"  # suffix of the child key of a damaged node; token ids are not negative, so no key ends so
MAX_SIBLINGS: Final = 64  # the most children that are searched for a text that ends within a page
COMPARE_BLOCK: Final = 4096  # tokens per comparison, so that an early difference in a long key ends the scan


def common_prefix_len(a: Ints, b: Ints) -> int:
    """Return the largest n with a[:n] == b[:n], for int32 arrays of any stride and length."""
    n = min(len(a), len(b))
    for start in range(0, n, COMPARE_BLOCK):
        stop = min(start + COMPARE_BLOCK, n)
        differs = a[start:stop] != b[start:stop]
        first = int(differs.argmax())
        if differs[first]:
            return start + first
    return n


class RadixTreeNode:
    """An edge of the tree and the subtree below.

    key         tokens of this edge, int32 [length * page_size]
    length      pages of this edge
    places      for each place, the page ids or slots of the pages, int32 [length], or NOWHERE
    below       for each place, the number of children with pages there
    child_key   the key in the parent's `children`: bytes of the first page, after the salt if the parent is the root
    page_names  `page_name` of each page, int64 [length]; None until needed
    hashes      prefix hash at the end of each page, uint64 [length]; empty unless a router asked for them
    children    child key -> child
    ref_count   locks on this node or below
    timestamp   step of the last use of this node or of a node below
    tried_at    timestamp at the last attempt to write the pages back; -1 if never
    depth       pages from the root up to and including this edge
    is_loaded   the pages came from a tier, and no finite result has confirmed them yet
    is_damaged  these pages or pages above are damaged: no request finds them, and they are freed once unlocked
    """

    __slots__ = (
        "below",
        "child_key",
        "children",
        "depth",
        "hashes",
        "is_candidate",
        "is_loaded",
        "is_damaged",
        "key",
        "length",
        "page_names",
        "parent",
        "places",
        "ref_count",
        "timestamp",
        "tried_at",
    )

    def __init__(
        self, child_key: bytes, key: Ints, length: int, parent: RadixTreeNode | None, timestamp: int, num_places: int
    ) -> None:
        self.child_key = child_key
        self.key = key
        self.length = length
        self.places: list[Ints] = [NOWHERE] * num_places
        self.below = [0] * num_places
        self.page_names: Names | None = None
        self.hashes: Hashes = NO_HASHES
        self.parent = parent
        self.children: dict[bytes, RadixTreeNode] = {}
        self.ref_count = 0
        self.timestamp = timestamp
        self.tried_at = -1
        self.is_candidate = [False] * num_places  # has an entry in the place's eviction queue
        self.is_loaded = False
        self.is_damaged = False
        self.depth: int = length + (parent.depth if parent else 0)

    @property
    def pages(self) -> Ints:
        """The page ids on the device; empty if the edge is only in tiers."""
        return self.places[DEVICE]

    @property
    def place(self) -> int:
        """The first place that has the pages; -1 if none has."""
        return next((place for place, ids in enumerate(self.places) if len(ids)), -1)

    @property
    def is_salted(self) -> bool:
        """Whether the prefix was inserted with a salt. Undefined for the root."""
        node = self
        while node.parent is not None and node.parent.parent is not None:
            node = node.parent
        return len(node.child_key) * node.length > node.key.nbytes


class RadixCacheManager(PrefixCache):
    """A prefix cache as a radix tree over pages.

    Invariants (checked by `check_integrity`): a node's ref_count is the number of locks at or below it, hence never
    smaller than a child's; siblings differ in their first page; every page id and every slot appears once; a node is in
    at least one place, and on the device only if its parent is; evictable + protected = pages on the device; a parent's
    timestamp is never older than a child's.
    """

    def __init__(self, page_size: int, tiers: Sequence[Tier] = ()) -> None:
        """Create the tree from the pages that `tiers`, the fastest first, have kept of an earlier process."""
        self.page_size = page_size
        self.tiers = list(tiers)
        self._moves: list[Records] = []
        self._changes: dict[int, int] | None = None  # for a router: hash -> place; None until it asks
        self._num_stored = 0  # about how many of the pages that are evicted next are in tiers
        self._now = 0
        self._evictable = 0
        self._protected = 0
        self._num_nodes = 0
        self.root = RadixTreeNode(b"", NOWHERE, 0, None, 0, 1 + len(self.tiers))
        self.root.ref_count = 1  # never evicted
        # An eviction queue of (timestamp, serial, node) for each place. A node has at most one entry, which is pushed
        # when the node is unlocked and has no children there, and checked again when popped. Entries may be stale
        # (locked, extended, used), but none is missing.
        self._candidates: list[list[tuple[int, int, RadixTreeNode]]] = [[] for _ in self.root.places]
        self._serial = 0
        for place, tier in enumerate(self.tiers, 1):
            self._restore(place, tier)

    def tick(self, step: int) -> None:
        self._now = step

    # -- the three operations on prefixes

    def match_prefix(self, input_ids: Ints, salt: bytes = b"") -> MatchResult:
        node, matched = self._walk(input_ids, salt)
        return MatchResult(CacheHandle(matched, node), self._path_pages(node))

    def insert_prefix(self, input_ids: Ints, pages: Ints, salt: bytes = b"") -> MatchResult:
        size = self.page_size
        ids = np.ascontiguousarray(input_ids[: len(pages) * size], dtype=np.int32)
        assert len(ids) == len(pages) * size, f"{len(pages)} pages offered for {len(ids)} tokens"
        node, matched = self._walk(ids, salt)
        for edge in self._path(node):
            if edge.is_loaded:  # these pages may be damaged: they must not replace computed ones
                assert edge.parent is not None
                return MatchResult(CacheHandle(edge.parent.depth, edge.parent), self._path_pages(edge.parent))
            if not len(edge.pages):  # only in a tier: take the computed pages instead of loading
                self._set_place(edge, DEVICE, np.array(pages[edge.depth - edge.length : edge.depth], np.int32))
        if matched < len(pages):
            # Copies, so that a node does not keep a request's whole token buffer alive.
            node = self._add(node, ids[matched * size :].copy(), salt)
            self._set_place(node, DEVICE, np.array(pages[matched:], np.int32))
        return MatchResult(CacheHandle(len(pages), node), self._path_pages(node))

    def lock_handle(self, handle: CacheHandle, unlock: bool = False) -> None:
        node: RadixTreeNode | None = handle.node
        while node is not None and node is not self.root:
            if unlock:
                assert node.ref_count > 0, "a prefix was unlocked more often than locked"
                node.ref_count -= 1
                if node.ref_count == 0:
                    self._protected -= len(node.pages)
                    self._evictable += len(node.pages)
                    for place in range(len(node.places)):
                        self._push_candidate(node, place)
            else:
                if node.ref_count == 0:
                    self._evictable -= len(node.pages)
                    self._protected += len(node.pages)
                node.ref_count += 1
            node = node.parent

    def has_continuation(self, handle: CacheHandle) -> bool:
        return bool(handle.node.children)

    def continuation(self, handle: CacheHandle, input_ids: Ints, count: int, salt: bytes = b"") -> Ints:
        node, rest, found = handle.node, input_ids, NO_INTS
        while len(found) < count:
            child = self._find_child(node, rest, salt)
            if child is None or common_prefix_len(child.key, rest) < min(len(child.key), len(rest)):
                break
            found = np.append(found, child.key[len(rest) :])
            node, rest = child, rest[len(child.key) :]
        return found[:count]

    # -- tiers

    def load(self, handle: CacheHandle, pages: Ints) -> Ints:
        for node in self._path(handle.node):
            if len(node.pages):
                continue
            targets, pages = pages[: node.length], pages[node.length :]
            place = node.place
            self._move(node, place, targets, node.places[place], LOAD)
            self.tiers[place - 1].loaded_pages += node.length
            self._set_place(node, DEVICE, targets)
            node.is_loaded = True
        assert not len(pages), f"load() was given {len(pages)} pages too many"
        return self._path_pages(handle.node)

    def mark_intact(self, handle: CacheHandle) -> None:
        if self.tiers:
            for node in self._path(handle.node):
                node.is_loaded = False

    def drop_damaged(self, handle: CacheHandle) -> bool:
        top = next((node for node in self._path(handle.node) if node.is_loaded), None)
        if top is None:
            return False
        if not top.is_damaged:
            assert top.parent is not None
            del top.parent.children[top.child_key]
            while top.child_key in top.parent.children or not top.child_key.endswith(DAMAGED):
                top.child_key += DAMAGED
            top.parent.children[top.child_key] = top
            for node in reversed(_subtree(top)):
                node.is_damaged = True
                self._report(node, -1)
                node.hashes = NO_HASHES
                for place, tier in enumerate(self.tiers, 1):
                    tier.lost_pages += len(node.places[place])
                    self._remove(node, place)
        return True

    def is_damaged(self, handle: CacheHandle) -> bool:
        is_damaged: bool = handle.node.is_damaged
        return is_damaged

    def write_back(self, num_pages: int, *, lasting: bool) -> int:
        count = 0
        for place, tier in enumerate(self.tiers, 1):
            lasts = tier.spec.lasts
            for node in _subtree(self.root)[1:] if lasts or not lasting else ():
                # In a full tier, two nodes could replace each other forever. So a lasting tier takes each node once
                # after each use. Host memory takes only what fits: it is for the pages that are evicted next.
                is_wanted = node.tried_at != node.timestamp if lasts else tier.free_size >= node.length
                if is_wanted and len(node.pages) and count < num_pages:
                    self._trim(node, num_pages - count)
                    node.tried_at = node.timestamp if lasts else node.tried_at
                    count += self._store(node, place)
        return count

    def take_moves(self, num_next: int = 0, max_stores: int = 0) -> Records:
        oldest: list[RadixTreeNode] = []
        if num_next - self._num_stored >= PART and max_stores > 0:
            self._num_stored = 0
        else:
            max_stores = 0
        while self._num_stored < num_next and max_stores > 0 and (node := self._pop_oldest(DEVICE)) is not None:
            oldest.append(node)
            for edge in reversed(self._path(node)):  # unlocked ancestors are evicted next
                if self._num_stored < num_next and max_stores > 0 and edge.ref_count == 0:
                    if not all(map(len, edge.places)):
                        self._trim(edge, min(num_next - self._num_stored, max_stores))
                        max_stores -= max(self._store(edge, place) for place in range(1, len(edge.places)))
                    self._num_stored += edge.length
        for node in oldest:
            self._push_candidate(node, DEVICE)
        if not self._moves:
            return NO_MOVES
        moves = np.concatenate(self._moves)
        self._moves = []
        return moves

    def _store(self, node: RadixTreeNode, place: int) -> int:
        """Store a node's pages in a tier, where only older ones are evicted for them; return how many were stored."""
        tier = self.tiers[place - 1]
        if len(node.places[place]) or node.is_damaged or node.length > tier.spec.num_slots:
            return 0
        while tier.free_size < node.length and (old := self._pop_oldest(place)) is not None:
            if old.timestamp > node.timestamp:
                self._push_candidate(old, place)
                return 0
            self._remove(old, place)
        if tier.free_size < node.length:
            return 0
        names, (before, salt) = self._page_names(node), self._predecessor(node)
        slots = tier.allocate(names, before, salt, node.key)
        self._move(node, place, node.pages, slots, STORE)
        self._set_place(node, place, slots)
        return node.length

    def _move(self, node: RadixTreeNode, place: int, pages: Ints, slots: Ints, kind: int) -> None:
        moves = np.empty(node.length, MOVE)
        moves["page"], moves["slot"], moves["name"] = pages, slots, self._page_names(node)
        moves["tier"], moves["kind"] = self.tiers[place - 1].number, kind
        self._moves.append(moves)

    def _page_names(self, node: RadixTreeNode) -> Names:
        """Return the names of the node's pages, int64 [length]. Also sets `page_names` of all ancestors."""
        for edge in self._path(node):
            if edge.page_names is None:
                before, salt = self._predecessor(edge)
                names = []
                for page in edge.key.reshape(edge.length, -1):
                    before, salt = page_name(before, salt, page.tobytes()), b""
                    names.append(before)
                edge.page_names = np.array(names, np.int64)
        assert node.page_names is not None
        return node.page_names

    def _predecessor(self, node: RadixTreeNode) -> tuple[int, bytes]:
        """Return the name of the page before the node and b""; or 0 and the salt for a first page."""
        parent = node.parent
        assert parent is not None
        if parent is self.root:
            return 0, node.child_key[: len(node.child_key) - node.key.nbytes // node.length]
        assert parent.page_names is not None
        return int(parent.page_names[-1]), b""

    def _restore(self, place: int, tier: Tier) -> None:
        """Add the pages that the tier has kept. A run of pages without branches becomes one edge."""
        found = tier.restore()
        kept: list[int] = []
        todo = [(self.root, 0)]
        while todo:
            parent, before = todo.pop()
            for first in found.get(before, ()):
                run = [first]
                while len(after := found.get(run[-1].name, [])) == 1:
                    run += after
                node = self._add(parent, np.concatenate([page.tokens for page in run]), first.salt)
                node.page_names = np.array([page.name for page in run], np.int64)
                slots = [page.slot for page in run]
                self._set_place(node, place, np.array(slots, np.int32))
                kept += slots
                todo.append((node, run[-1].name))
        tier.claim(kept)

    # -- changes for a router

    def track_changes(self) -> None:
        self._changes = {}
        for node in _subtree(self.root)[1:]:
            if not node.is_damaged:
                self._hash(node)
                self._report(node, node.place)

    def take_changes(self) -> dict[int, int]:
        if not self._changes:
            return {}
        changes, self._changes = self._changes, {}
        return changes

    def _hash(self, node: RadixTreeNode) -> None:
        parent = node.parent
        assert parent is not None
        before = int.from_bytes(self._predecessor(node)[1][:8]) if parent is self.root else int(parent.hashes[-1])
        node.hashes = continued_hashes(node.key, self.page_size, before, parent.depth * self.page_size)

    def _report(self, node: RadixTreeNode, place: int) -> None:
        if self._changes is not None:
            self._changes.update(dict.fromkeys(node.hashes.tolist(), place))

    # -- eviction

    def evict(self, num_pages: int) -> Ints:
        return self._evict(num_pages, range(1, len(self.root.places)))

    def _evict(self, num_pages: int, places: Sequence[int]) -> Ints:
        """Evict at least `num_pages` pages, if there are so many, and store them in the tiers `places`; return them."""
        freed: list[Ints] = []
        count = 0
        while count < num_pages and (node := self._pop_oldest(DEVICE)) is not None:
            self._trim(node, num_pages - count)
            freed.append(node.pages)
            count += node.length
            self._num_stored = max(0, self._num_stored - node.length)
            for place in places:
                self._store(node, place)
            self._remove(node, DEVICE)
        return np.concatenate(freed) if freed else NOWHERE

    def reset(self) -> Ints:
        for place in range(1, len(self.root.places)):
            while (node := self._pop_oldest(place)) is not None:
                self._remove(node, place)
        return self._evict(self._evictable, ())

    @property
    def size_info(self) -> SizeInfo:
        return SizeInfo(self._evictable, self._protected)

    @property
    def num_nodes(self) -> int:
        return self._num_nodes

    def outline(self) -> tuple[list[OutlinedNode], int]:
        return outline(self.root)

    # -- internals

    def _child_key(self, ids: Ints, parent: RadixTreeNode, salt: bytes) -> bytes:
        """Return the key for `ids` in `parent.children`. Pages have one size, so different salts never collide."""
        page = ids[: self.page_size].tobytes()
        return salt + page if parent is self.root else page

    def _find_child(self, node: RadixTreeNode, ids: Ints, salt: bytes) -> RadixTreeNode | None:
        """Return the child of `node` that begins with the first page of `ids`, if any.

        If `ids` are less than a page, return the most recently used child that begins with them.
        """
        if len(ids) >= self.page_size:
            return node.children.get(self._child_key(ids, node, salt))
        if len(node.children) > MAX_SIBLINGS:
            return None
        start = ids.tobytes()
        matches = [
            child
            for child in node.children.values()
            if child.key[: len(ids)].tobytes() == start and child.child_key == self._child_key(child.key, node, salt)
        ]
        return max(matches, key=lambda child: child.timestamp, default=None)

    def _walk(self, input_ids: Ints, salt: bytes) -> tuple[RadixTreeNode, int]:
        """Return the last node of the longest cached prefix and the prefix's length in pages; may split an edge."""
        size = self.page_size
        ids = np.ascontiguousarray(input_ids, dtype=np.int32)
        node, matched = self.root, 0
        total = len(ids) // size
        while matched < total:
            rest = ids[matched * size :]
            child = node.children.get(self._child_key(rest, node, salt))
            if child is None:
                break
            common = common_prefix_len(child.key, rest) // size
            matched += common
            node = child if common == child.length else self._split(child, common)
            node.timestamp = self._now
            if node is not child:
                break
        return node, matched

    def _split(self, node: RadixTreeNode, length: int) -> RadixTreeNode:
        """Split an edge after `length` pages and return the new upper part. Handles on `node` stay valid."""
        parent = node.parent
        assert parent is not None and 0 < length < node.length
        cut = length * self.page_size
        upper = RadixTreeNode(node.child_key, node.key[:cut].copy(), length, parent, node.timestamp, len(node.places))
        upper.ref_count = node.ref_count  # every lock at or below `node` passes through the upper part
        upper.places = [ids[:length].copy() for ids in node.places]
        upper.below = [int(len(ids) > 0) for ids in node.places]
        upper.is_loaded, upper.is_damaged, upper.tried_at = node.is_loaded, node.is_damaged, node.tried_at
        if node.page_names is not None:
            upper.page_names, node.page_names = node.page_names[:length].copy(), node.page_names[length:].copy()
        upper.hashes, node.hashes = node.hashes[:length].copy(), node.hashes[length:].copy()
        self._num_nodes += 1
        parent.children[upper.child_key] = upper
        node.key = node.key[cut:].copy()
        node.length -= length
        node.places = [ids[length:].copy() for ids in node.places]
        node.parent = upper
        node.child_key = self._child_key(node.key, upper, b"")
        upper.children[node.child_key] = node
        return upper

    def _trim(self, node: RadixTreeNode, max_pages: int) -> None:
        """Trim `node` to its last `max_pages` pages by splitting off the rest; no part gets shorter than PART."""
        if node.length >= (last := max(max_pages, PART)) + PART:
            self._split(node, node.length - last)

    def _add(self, parent: RadixTreeNode, key: Ints, salt: bytes) -> RadixTreeNode:
        """Add a node that is in no place yet."""
        length, places = len(key) // self.page_size, len(parent.places)
        node = RadixTreeNode(self._child_key(key, parent, salt), key, length, parent, self._now, places)
        parent.children[node.child_key] = node
        self._num_nodes += 1
        if self._changes is not None:
            self._hash(node)
        return node

    def _set_place(self, node: RadixTreeNode, place: int, ids: Ints) -> None:
        """Set the page ids or slots of `node` in `place`; NOWHERE if it has left."""
        parent = node.parent
        assert parent is not None
        change, before = int(len(ids) > 0) - int(len(node.places[place]) > 0), node.place
        node.places[place] = ids
        if node.place != before:
            self._report(node, node.place)
        parent.below[place] += change
        if place == DEVICE and node.ref_count:
            self._protected += change * node.length
        elif place == DEVICE:
            self._evictable += change * node.length
        self._push_candidate(node if len(ids) else parent, place)

    def _remove(self, node: RadixTreeNode, place: int) -> None:
        """Remove the pages of `node` from `place`; if no place has them, remove the node and its subtree."""
        if not len(node.places[place]):
            return
        if place != DEVICE:
            self.tiers[place - 1].free(node.places[place])
        self._set_place(node, place, NOWHERE)
        if node.place >= 0:
            return
        for edge in reversed(_subtree(node)):  # pages below are in tiers, and no walk can reach them any more
            self._report(edge, -1)
            for other, tier in enumerate(self.tiers, 1):
                tier.free(edge.places[other])
            assert edge.parent is not None and not len(edge.pages) and not edge.ref_count
            del edge.parent.children[edge.child_key]
            edge.parent = None
            self._num_nodes -= 1

    def _path(self, node: RadixTreeNode) -> list[RadixTreeNode]:
        """Return the nodes from below the root down to `node`."""
        path: list[RadixTreeNode] = []
        while node is not self.root:
            assert node.parent is not None
            path.append(node)
            node = node.parent
        return path[::-1]

    def _path_pages(self, node: RadixTreeNode) -> Ints:
        parts = [NOWHERE]
        for edge in self._path(node):
            parts.append(edge.pages if edge.place == DEVICE else np.full(edge.length, -edge.place, np.int32))
        return np.concatenate(parts)

    def _is_evictable(self, node: RadixTreeNode, place: int) -> bool:
        is_there = node.parent is not None and len(node.places[place]) > 0
        return is_there and node.ref_count == 0 and node.below[place] == 0

    def _push_candidate(self, node: RadixTreeNode, place: int) -> None:
        if self._is_evictable(node, place) and not node.is_candidate[place]:
            node.is_candidate[place] = True
            self._serial += 1
            heapq.heappush(self._candidates[place], (node.timestamp, self._serial, node))

    def _pop_oldest(self, place: int) -> RadixTreeNode | None:
        """Pop the least recently used evictable node of `place`. The caller removes it from there or pushes it back."""
        queue = self._candidates[place]
        while queue:
            stamp, _, node = heapq.heappop(queue)
            node.is_candidate[place] = False
            if self._is_evictable(node, place):
                if node.timestamp == stamp:
                    return node
                self._push_candidate(node, place)
        return None

    # -- invariants

    def owned_pages(self) -> list[int]:
        return [p for node in _subtree(self.root) for p in node.pages.tolist()]

    def check_integrity(self) -> None:
        evictable = protected = 0
        nodes = _subtree(self.root)[1:]
        for node in nodes:
            parent = node.parent
            where = f"radix node at depth {node.depth}"
            if parent is None or parent.children.get(node.child_key) is not node:
                raise InvariantError(f"{where} is not its parent's child")
            page = node.key[: self.page_size].tobytes()
            name = node.child_key.rstrip(DAMAGED) if node.is_damaged else node.child_key
            if not (name.endswith(page) if parent is self.root else name == page):
                raise InvariantError(f"{where} has the child key of other tokens")
            if len(node.key) != node.length * self.page_size or {len(x) for x in node.places} - {0, node.length}:
                raise InvariantError(f"{where} has {len(node.key)} tokens for {node.length} pages in {node.places}")
            if not any(map(len, node.places)) or (
                len(node.pages) and parent is not self.root and not len(parent.pages)
            ):
                raise InvariantError(f"{where} is in no place, or on the device without its parent: {node.places}")
            if node.below != [
                sum(len(c.places[i]) > 0 for c in node.children.values()) for i in range(len(node.below))
            ]:
                raise InvariantError(f"{where} has wrong counts of children: {node.below}")
            if node.depth != parent.depth + node.length:
                raise InvariantError(f"{where} should be at depth {parent.depth + node.length}")
            if parent is not self.root and (parent.ref_count < node.ref_count or parent.timestamp < node.timestamp):
                raise InvariantError(f"{where} has more locks or a later use than its parent")
            if node.ref_count:
                protected += len(node.pages)
            else:
                evictable += len(node.pages)
        if (evictable, protected) != (self._evictable, self._protected):
            raise InvariantError(f"radix sizes {self.size_info} should be {(evictable, protected)}")
        if len(nodes) != self._num_nodes:
            raise InvariantError(f"{len(nodes)} radix nodes, {self._num_nodes} counted")
        for place, tier in enumerate(self.tiers, 1):
            tier.check([slot for node in nodes for slot in node.places[place].tolist()])
        pages = self.owned_pages()
        if len(set(pages)) != len(pages):
            raise InvariantError("a page is in the radix tree twice")


def _subtree(top: RadixTreeNode) -> list[RadixTreeNode]:
    """Return `top` and all nodes below, parents first."""
    nodes = [top]
    for node in nodes:
        nodes.extend(node.children.values())
    return nodes
