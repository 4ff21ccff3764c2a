"""The radix tree of cached prefixes. Host integers only; one edge holds one or more whole pages."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Final

import numpy as np

from minisgl.errors import InvariantError
from minisgl.kvcache.base import CacheHandle, MatchResult, PrefixCache, SizeInfo
from minisgl.kvcache.outline import OutlinedNode, outline
from minisgl.layout import NO_INTS

if TYPE_CHECKING:
    from minisgl.core import Ints

MAX_SIBLINGS: Final = 64  # among which a text that ends within a page is looked for
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

    key         tokens of this edge, int32 [len(pages) * page_size]
    pages       page ids of this edge, int32
    name        bytes of the first page of the key, prefixed by the salt if the parent is the root
    children    name of the child -> child
    ref_count   locks on this node or below
    timestamp   step of the last use of this node or of a node below
    depth       pages from the root up to and including this edge
    """

    __slots__ = ("children", "depth", "is_candidate", "key", "name", "pages", "parent", "ref_count", "timestamp")

    def __init__(self, name: bytes, key: Ints, pages: Ints, parent: RadixTreeNode | None, timestamp: int) -> None:
        self.name = name
        self.key = key
        self.pages = pages
        self.parent = parent
        self.children: dict[bytes, RadixTreeNode] = {}
        self.ref_count = 0
        self.timestamp = timestamp
        self.is_candidate = False  # has an entry in the eviction queue
        self.depth: int = len(pages) + (parent.depth if parent else 0)

    @property
    def length(self) -> int:
        """Pages on this edge."""
        return len(self.pages)

    @property
    def is_salted(self) -> bool:
        """Whether the prefix was inserted with a salt. Not for the root."""
        node = self
        while node.parent is not None and node.parent.parent is not None:
            node = node.parent
        return len(node.name) * len(node.pages) > node.key.nbytes

    @property
    def is_leaf(self) -> bool:
        return not self.children


class RadixCacheManager(PrefixCache):
    """Prefix sharing through a radix tree over pages.

    Invariants (checked by `check_integrity`): a node's ref_count is the number of locks at or below it, hence never
    smaller than a child's; siblings differ in their first page; every page id appears once; evictable + protected =
    pages in the tree; a parent's timestamp is never older than a child's.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._now = 0
        self._evictable = 0
        self._protected = 0
        self._num_nodes = 0
        none = np.empty(0, np.int32)
        self.root = RadixTreeNode(b"", none, none, None, 0)
        self.root.ref_count = 1  # never evicted
        # Eviction queue of (timestamp, serial, node): at most one entry per node, pushed when the node becomes an
        # unlocked leaf and rechecked when popped. Entries may be stale (locked, extended, used) but not missing.
        self._candidates: list[tuple[int, int, RadixTreeNode]] = []
        self._serial = 0

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
        if matched < len(pages):
            # Copies, so that a node does not keep a request's whole token buffer alive.
            new_pages, new_key = np.array(pages[matched:], np.int32), ids[matched * size :].copy()
            child = RadixTreeNode(self._name(new_key, node, salt), new_key, new_pages, node, self._now)
            node.children[child.name] = child
            self._num_nodes += 1
            self._evictable += child.length
            self._offer(child)
            node = child
        return MatchResult(CacheHandle(len(pages), node), self._path_pages(node))

    def lock_handle(self, handle: CacheHandle, unlock: bool = False) -> None:
        node: RadixTreeNode | None = handle.node
        while node is not None and node is not self.root:
            if unlock:
                assert node.ref_count > 0, "a prefix was unlocked more often than locked"
                node.ref_count -= 1
                if node.ref_count == 0:
                    self._protected -= node.length
                    self._evictable += node.length
                    self._offer(node)
            else:
                if node.ref_count == 0:
                    self._evictable -= node.length
                    self._protected += node.length
                node.ref_count += 1
            node = node.parent

    def continuation(self, handle: CacheHandle, input_ids: Ints, count: int, salt: bytes = b"") -> Ints:
        node, rest, found = handle.node, input_ids, NO_INTS
        while len(found) < count:
            child = self._next(node, rest, salt)
            if child is None or common_prefix_len(child.key, rest) < min(len(child.key), len(rest)):
                break
            found = np.append(found, child.key[len(rest) :])
            node, rest = child, rest[len(child.key) :]
        return found[:count]

    # -- eviction

    def evict(self, num_pages: int) -> Ints:
        freed: list[Ints] = []
        count = 0
        while count < num_pages and self._candidates:
            stamp, _, node = heapq.heappop(self._candidates)
            node.is_candidate = False
            if not self._is_evictable(node):
                continue
            if node.timestamp != stamp:
                self._offer(node)
                continue
            freed.append(node.pages)
            count += node.length
            self._remove(node)
        return np.concatenate(freed) if freed else np.empty(0, np.int32)

    def reset(self) -> Ints:
        return self.evict(self._evictable)

    @property
    def size_info(self) -> SizeInfo:
        return SizeInfo(self._evictable, self._protected)

    @property
    def num_nodes(self) -> int:
        return self._num_nodes

    def outline(self) -> tuple[list[OutlinedNode], int]:
        return outline(self.root)

    # -- internals

    def _name(self, ids: Ints, parent: RadixTreeNode, salt: bytes) -> bytes:
        """Return the key of the edge for `ids` in `parent`; pages have one size, so different salts never collide."""
        page = ids[: self.page_size].tobytes()
        return salt + page if parent is self.root else page

    def _next(self, node: RadixTreeNode, ids: Ints, salt: bytes) -> RadixTreeNode | None:
        """Return the child of `node` for `ids`; where they do not fill a page, the child used last that begins so."""
        if len(ids) >= self.page_size:
            return node.children.get(self._name(ids, node, salt))
        if len(node.children) > MAX_SIBLINGS:
            return None
        name = ids.tobytes()
        fits = [
            c
            for c in node.children.values()
            if c.key[: len(ids)].tobytes() == name and c.name == self._name(c.key, node, salt)
        ]
        return max(fits, key=lambda c: c.timestamp, default=None)

    def _walk(self, input_ids: Ints, salt: bytes) -> tuple[RadixTreeNode, int]:
        """Return the last node of the longest cached prefix, split off if needed, and the prefix's length in pages."""
        size = self.page_size
        ids = np.ascontiguousarray(input_ids, dtype=np.int32)
        node, matched = self.root, 0
        total = len(ids) // size
        while matched < total:
            rest = ids[matched * size :]
            child = node.children.get(self._name(rest, node, salt))
            if child is None:
                break
            common = common_prefix_len(child.key, rest) // size
            matched += common
            node = child if common == child.length else self._split(child, common)
            node.timestamp = self._now
            if node is not child:
                break
        return node, matched

    def _split(self, node: RadixTreeNode, at: int) -> RadixTreeNode:
        """Split an edge after `at` pages and return the new upper part; handles on `node` stay valid."""
        parent = node.parent
        assert parent is not None and 0 < at < node.length
        cut = at * self.page_size
        upper = RadixTreeNode(node.name, node.key[:cut].copy(), node.pages[:at].copy(), parent, node.timestamp)
        upper.ref_count = node.ref_count  # every lock at or below `node` passes through the upper part
        self._num_nodes += 1
        parent.children[upper.name] = upper
        node.key = node.key[cut:].copy()
        node.pages = node.pages[at:].copy()
        node.parent = upper
        node.name = self._name(node.key, upper, b"")
        upper.children[node.name] = node
        return upper

    def _path_pages(self, node: RadixTreeNode) -> Ints:
        parts: list[Ints] = []
        at: RadixTreeNode | None = node
        while at is not None:
            parts.append(at.pages)
            at = at.parent
        return np.concatenate(parts[::-1])

    def _is_evictable(self, node: RadixTreeNode) -> bool:
        return node.parent is not None and node.is_leaf and node.ref_count == 0

    def _offer(self, node: RadixTreeNode) -> None:
        if self._is_evictable(node) and not node.is_candidate:
            node.is_candidate = True
            self._serial += 1
            heapq.heappush(self._candidates, (node.timestamp, self._serial, node))

    def _remove(self, node: RadixTreeNode) -> None:
        parent = node.parent
        assert parent is not None
        del parent.children[node.name]
        node.parent = None
        self._num_nodes -= 1
        self._evictable -= node.length
        self._offer(parent)

    # -- invariants

    def _nodes(self) -> list[RadixTreeNode]:
        nodes = [self.root]
        for node in nodes:
            nodes.extend(node.children.values())
        return nodes[1:]

    def owned_pages(self) -> list[int]:
        return [p for node in self._nodes() for p in node.pages.tolist()]

    def check_integrity(self) -> None:
        evictable = protected = 0
        for node in self._nodes():
            parent = node.parent
            where = f"radix node at depth {node.depth}"
            if parent is None or parent.children.get(node.name) is not node:
                raise InvariantError(f"{where} is not its parent's child")
            page = node.key[: self.page_size].tobytes()
            if not (node.name.endswith(page) if parent is self.root else node.name == page):
                raise InvariantError(f"{where} has the name of other tokens")
            if len(node.key) != node.length * self.page_size or node.length == 0:
                raise InvariantError(f"{where} has {len(node.key)} tokens for {node.length} pages")
            if node.depth != parent.depth + node.length:
                raise InvariantError(f"{where} should be at depth {parent.depth + node.length}")
            if parent is not self.root and (parent.ref_count < node.ref_count or parent.timestamp < node.timestamp):
                raise InvariantError(f"{where} has more locks or a later use than its parent")
            if node.ref_count:
                protected += node.length
            else:
                evictable += node.length
        if (evictable, protected) != (self._evictable, self._protected):
            raise InvariantError(f"radix sizes {self.size_info} should be {(evictable, protected)}")
        if len(self._nodes()) != self._num_nodes:
            raise InvariantError(f"{len(self._nodes())} radix nodes, {self._num_nodes} counted")
        pages = self.owned_pages()
        if len(set(pages)) != len(pages):
            raise InvariantError("a page is in the radix tree twice")
