"""The radix tree of cached prefixes, in host integers. An edge has one or more whole pages.

The pages of an edge are in one or more *locations*, and have an id in each. Location 0 is the device's pool, the others
are tiers. The tree treats all tiers alike: it keeps the ids, and orders what is evicted from each.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from minisgl.core.errors import InvariantError
from minisgl.core.layout import NO_INTS

if TYPE_CHECKING:
    from minisgl.core.plan import Ints
    from minisgl.kvcache.prefixes import Hashes
    from minisgl.kvcache.tiers import Names

DEVICE: Final = 0  # the location of pages that steps can read
NOWHERE: Final = np.empty(0, np.int32)
NO_NAMES: Final = np.empty(0, np.int64)
NO_HASHES: Final = np.empty(0, np.uint64)
PART: Final = 32  # pages: a long edge is evicted in parts of at least this length, the last part first
HIDDEN: Final = b"\xff"  # suffix of a hidden node's child key; token ids are not negative, so no other key ends so
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


@dataclass(slots=True, eq=False, repr=False)
class Node:
    """An edge of the tree and the subtree below."""

    child_key: bytes  # in the parent's `children`: bytes of the first page, after the salt if the parent is the root
    key: Ints  # tokens of this edge, int32 [length * page_size]
    length: int  # pages of this edge
    depth: int  # pages from the root up to and including this edge
    parent: Node | None  # None for the root, and after removal
    timestamp: int  # step of the last use of this node or of a node below
    locations: list[Ints]  # of each, the ids of the pages there, int32 [length] (of a tier [length, units]), or NOWHERE
    below: list[int]  # for each location, the number of children with pages there
    is_candidate: list[bool]  # for each location, whether the node has an entry in the eviction queue
    children: dict[bytes, Node] = field(default_factory=dict)
    ref_count: int = 0  # locks on this node or below
    is_hidden: bool = False  # no walk finds this node, which is freed once unlocked

    # Kept by the other parts of the cache. When the tree splits an edge, it divides arrays and copies the rest.
    names: Names = field(default_factory=lambda: NO_NAMES)  # keeper: of each page; empty until needed
    tried_at: int = -1  # keeper: timestamp at the last attempt to write the pages back
    is_loaded: bool = False  # keeper: the pages came from a tier, and no finite result has confirmed them yet
    hashes: Hashes = field(default_factory=lambda: NO_HASHES)  # feed: up to each page; empty until needed

    @property
    def pages(self) -> Ints:
        """The page ids on the device; empty if the edge is only in other locations."""
        return self.locations[DEVICE]

    @property
    def location(self) -> int:
        """The first location that has the pages; -1 if none has."""
        return next((location for location, ids in enumerate(self.locations) if len(ids)), -1)

    @property
    def salt(self) -> bytes:
        """The salt of the first page of a prefix; empty below. Undefined for the root and for hidden nodes."""
        return self.child_key[: len(self.child_key) - self.key.nbytes // self.length]

    @property
    def is_salted(self) -> bool:
        """Whether the prefix was inserted with a salt. Undefined for the root."""
        node = self
        while node.parent is not None and node.parent.parent is not None:
            node = node.parent
        return bool(node.salt)


def subtree(top: Node) -> list[Node]:
    """Return `top` and all nodes below, parents first."""
    nodes = [top]
    for node in nodes:
        nodes.extend(node.children.values())
    return nodes


class PrefixTree:
    """Nodes, their locks, and the order in which they leave each location.

    `now` is the step that is recorded at each use. `sizes` are the numbers of pages on the device that are evictable
    and that are locked.

    Invariants (checked by `check`): a node's ref_count is the number of locks at or below it, hence never smaller than
    a child's; siblings differ in their first page; every page id appears once; a node has at least one location, and is
    on the device only if its parent is; `sizes` add up to the pages on the device; a parent's timestamp is never older
    than a child's.
    """

    def __init__(self, page_size: int, num_locations: int) -> None:
        self.page_size = page_size
        self.now = 0
        self.sizes = [0, 0]
        self.num_nodes = 0
        locations, below, is_candidate = [NOWHERE] * num_locations, [0] * num_locations, [False] * num_locations
        self.root = Node(b"", NOWHERE, 0, 0, None, 0, locations, below, is_candidate, ref_count=1)  # never evicted
        # An eviction queue of (timestamp, serial, node) for each location. A node has at most one entry, pushed
        # when the node is unlocked and has no children there, and checked again when popped. Entries may be stale
        # (locked, extended, used), but none is missing.
        self._candidates: list[list[tuple[int, int, Node]]] = [[] for _ in range(num_locations)]
        self._serial = 0

    # -- reading

    def walk(self, input_ids: Ints, salt: bytes) -> Node:
        """Return the node where the longest cached prefix of whole pages ends, now used; may split an edge."""
        ids = np.ascontiguousarray(input_ids, dtype=np.int32)
        node, total = self.root, len(ids) // self.page_size
        while node.depth < total:
            rest = ids[node.depth * self.page_size :]
            if (child := node.children.get(self._child_key(rest, node, salt))) is None:
                break
            common = common_prefix_len(child.key, rest) // self.page_size
            node = child if common == child.length else self._split(child, common)
            node.timestamp = self.now
        return node

    def continuation(self, node: Node, input_ids: Ints, count: int, salt: bytes) -> Ints:
        """Return up to `count` tokens, maybe none, that follow the prefix of `node` and `input_ids` in a text."""
        rest, found = input_ids, NO_INTS
        while len(found) < count:
            child = self._find_child(node, rest, salt)
            if child is None or common_prefix_len(child.key, rest) < min(len(child.key), len(rest)):
                break
            found = np.append(found, child.key[len(rest) :])
            node, rest = child, rest[len(child.key) :]
        return found[:count]

    def path(self, node: Node) -> list[Node]:
        """Return the nodes from below the root down to `node`."""
        path: list[Node] = []
        while node is not self.root:
            assert node.parent is not None, "a node was used after its removal"
            path.append(node)
            node = node.parent
        return path[::-1]

    def path_pages(self, node: Node) -> Ints:
        """Return the page ids of the prefix, int32 [node.depth]; -i for a page that is not on the device but in i."""
        parts = [NOWHERE]
        for edge in self.path(node):
            parts.append(edge.pages if edge.location == DEVICE else np.full(edge.length, -edge.location, np.int32))
        return np.concatenate(parts)

    def nodes(self) -> list[Node]:
        """Return all nodes but the root, parents first."""
        return subtree(self.root)[1:]

    def ids(self, location: int) -> list[int]:
        """Return all ids in `location`, in any order."""
        return [i for node in self.nodes() for i in node.locations[location].ravel().tolist()]

    # -- changing

    def add(self, parent: Node, key: Ints, salt: bytes) -> Node:
        """Add a node that is in no location yet: the caller puts it in one."""
        return self._attach(self._child_key(key, parent, salt), key, parent, self.now)

    def put(self, node: Node, location: int, ids: Ints) -> None:
        """Set the ids of `node` in `location`; NOWHERE if it has left."""
        parent = node.parent
        assert parent is not None
        change = int(len(ids) > 0) - int(len(node.locations[location]) > 0)
        node.locations[location] = ids
        parent.below[location] += change
        if location == DEVICE:
            self.sizes[node.ref_count > 0] += change * node.length
        self.push(node if len(ids) else parent, location)

    def remove(self, leaf: Node) -> None:
        """Remove an unlocked node without children, which has left the device."""
        assert leaf.parent is not None and not leaf.children and not len(leaf.pages) and not leaf.ref_count
        del leaf.parent.children[leaf.child_key]
        leaf.parent = None
        self.num_nodes -= 1

    def hide(self, top: Node) -> None:
        """Hide a node and its subtree from all walks. Handles on them stay valid."""
        assert top.parent is not None
        del top.parent.children[top.child_key]
        while top.child_key in top.parent.children or not top.child_key.endswith(HIDDEN):
            top.child_key += HIDDEN
        top.parent.children[top.child_key] = top
        for node in subtree(top):
            node.is_hidden = True

    def lock(self, node: Node, unlock: bool = False) -> None:
        """Add one lock to `node` and to all its ancestors; with `unlock`, remove one."""
        edge: Node | None = node
        while edge is not None and edge is not self.root:
            assert edge.ref_count or not unlock, "a prefix was unlocked more often than locked"
            edge.ref_count += -1 if unlock else 1
            if edge.ref_count == (0 if unlock else 1):  # this was its last lock, or is its first one
                self.sizes[unlock] -= len(edge.pages)
                self.sizes[not unlock] += len(edge.pages)
                for location in range(len(edge.locations)) if unlock else ():
                    self.push(edge, location)
            edge = edge.parent

    def trim(self, node: Node, max_pages: int) -> None:
        """Trim `node` to its last `max_pages` pages by splitting off the rest; no part gets shorter than PART."""
        if node.length >= (last := max(max_pages, PART)) + PART:
            self._split(node, node.length - last)

    # -- order of eviction

    def push(self, node: Node, location: int) -> None:
        """Queue `node` for its eviction from `location`, if it is evictable there."""
        if self._is_evictable(node, location) and not node.is_candidate[location]:
            node.is_candidate[location] = True
            self._serial += 1
            heapq.heappush(self._candidates[location], (node.timestamp, self._serial, node))

    def pop_oldest(self, location: int) -> Node | None:
        """Pop the least recently used evictable node of `location`. The caller removes it there or pushes it back."""
        queue = self._candidates[location]
        while queue:
            stamp, _, node = heapq.heappop(queue)
            node.is_candidate[location] = False
            if self._is_evictable(node, location):
                if node.timestamp == stamp:
                    return node
                self.push(node, location)
        return None

    # -- internals

    def _child_key(self, ids: Ints, parent: Node, salt: bytes) -> bytes:
        """Return the key for `ids` in `parent.children`. Pages have one size, so different salts never collide."""
        page = ids[: self.page_size].tobytes()
        return salt + page if parent is self.root else page

    def _find_child(self, node: Node, ids: Ints, salt: bytes) -> Node | None:
        """Return the child of `node` that begins with the first page of `ids`, if any.

        If `ids` are less than a page, return the most recently used child that begins with them.
        """
        if len(ids) >= self.page_size:
            return node.children.get(self._child_key(ids, node, salt))
        if len(node.children) > MAX_SIBLINGS:
            return None
        start = ids.tobytes()
        matches = [child for child in node.children.values() if child.key[: len(ids)].tobytes() == start]
        matches = [child for child in matches if child.child_key == self._child_key(child.key, node, salt)]
        return max(matches, key=lambda child: child.timestamp, default=None)

    def _attach(self, child_key: bytes, key: Ints, parent: Node, timestamp: int) -> Node:
        """Add a node that is in no location yet."""
        num_locations, length = len(parent.locations), len(key) // self.page_size
        locations, below, is_candidate = [NOWHERE] * num_locations, [0] * num_locations, [False] * num_locations
        node = Node(child_key, key, length, parent.depth + length, parent, timestamp, locations, below, is_candidate)
        parent.children[child_key] = node
        self.num_nodes += 1
        return node

    def _split(self, node: Node, length: int) -> Node:
        """Split an edge after `length` pages and return the new upper part. Handles on `node` stay valid."""
        parent, cut = node.parent, length * self.page_size
        assert parent is not None and 0 < length < node.length
        # Both parts have copies, so that neither keeps the other's arrays alive.
        upper = self._attach(node.child_key, node.key[:cut].copy(), parent, node.timestamp)
        upper.ref_count = node.ref_count  # every lock at or below `node` passes through the upper part
        upper.locations = [ids[:length].copy() for ids in node.locations]
        upper.below = [int(len(ids) > 0) for ids in node.locations]
        upper.is_hidden, upper.is_loaded, upper.tried_at = node.is_hidden, node.is_loaded, node.tried_at
        upper.names, node.names = node.names[:length].copy(), node.names[length:].copy()
        upper.hashes, node.hashes = node.hashes[:length].copy(), node.hashes[length:].copy()
        node.key, node.length = node.key[cut:].copy(), node.length - length
        node.locations = [ids[length:].copy() for ids in node.locations]
        node.parent, node.child_key = upper, self._child_key(node.key, upper, b"")
        upper.children[node.child_key] = node
        return upper

    def _is_evictable(self, node: Node, location: int) -> bool:
        is_there = node.parent is not None and len(node.locations[location]) > 0
        return is_there and not node.ref_count and not node.below[location]

    def check(self) -> None:
        """Raise `InvariantError` if sizes, locks or links contradict each other."""
        sizes = [0, 0]
        nodes = self.nodes()
        for node in nodes:
            parent = node.parent
            where = f"radix node at depth {node.depth}"
            if parent is None or parent.children.get(node.child_key) is not node:
                raise InvariantError(f"{where} is not its parent's child")
            page = node.key[: self.page_size].tobytes()
            name = node.child_key.rstrip(HIDDEN) if node.is_hidden else node.child_key
            if not (name.endswith(page) if parent is self.root else name == page):
                raise InvariantError(f"{where} has the child key of other tokens")
            if len(node.key) != node.length * self.page_size or {len(x) for x in node.locations} - {0, node.length}:
                raise InvariantError(f"{where} has {len(node.key)} tokens for {node.length} pages in {node.locations}")
            is_cut_off = len(node.pages) > 0 and parent is not self.root and not len(parent.pages)
            if is_cut_off or node.location < 0:
                raise InvariantError(f"{where} is nowhere, or on the device without its parent: {node.locations}")
            below = [sum(len(c.locations[i]) > 0 for c in node.children.values()) for i in range(len(node.below))]
            if node.below != below:
                raise InvariantError(f"{where} has wrong counts of children: {node.below}")
            if node.depth != parent.depth + node.length:
                raise InvariantError(f"{where} should be at depth {parent.depth + node.length}")
            if parent is not self.root and (parent.ref_count < node.ref_count or parent.timestamp < node.timestamp):
                raise InvariantError(f"{where} has more locks or a later use than its parent")
            sizes[node.ref_count > 0] += len(node.pages)
        if sizes != self.sizes:
            raise InvariantError(f"radix sizes {self.sizes} should be {sizes}")
        if len(nodes) != self.num_nodes:
            raise InvariantError(f"{len(nodes)} radix nodes, {self.num_nodes} counted")
        pages = self.ids(DEVICE)
        if len(set(pages)) != len(pages):
            raise InvariantError("a page is in the radix tree twice")
