"""The interface of prefix caches. They manage page ids on the host; the tensors are in `store.py`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from minisgl.core.layout import NO_INTS, NO_MOVES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from minisgl.core.plan import Ints, Records
    from minisgl.kvcache.outline import OutlinedNode
    from minisgl.kvcache.snapshots import Snapshots
    from minisgl.kvcache.tiers import Tier


@dataclass(frozen=True, slots=True)
class CacheHandle:
    """A cached prefix of `num_pages` pages, up to and including `node`; valid only while locked.

    In a model with bounded state, a match ends at a snapshot, and more pages are cached, up to `branch`. So the prefix
    can be used once its pages and the snapshot are on the device.
    """

    num_pages: int
    node: Any
    branch: int = 0


class MatchResult(NamedTuple):
    """A matched prefix, and the ids of its pages, int32 [handle.num_pages].

    The last pages may be in tiers only. Such a page has ~i instead of an id, where i is the index of its tier.
    """

    handle: CacheHandle
    pages: Ints


class SizeInfo(NamedTuple):
    """The numbers of evictable pages and of locked pages that the cache owns."""

    evictable_size: int
    protected_size: int


class PrefixCache(ABC):
    """Owns the pages of cached prefixes.

    All sizes count pages, and only whole pages are cached: a prefix of n tokens has n // page_size pages. Page ids
    enter by `insert_prefix` and leave by `evict` or `reset`; in between, the cache owns them. A lock holds a node and
    all its ancestors, and locks are counted. Only unlocked pages are evicted, least recently used first. Time is the
    caller's step number (`tick`), not the clock, so runs with the same requests evict the same pages. A prefix inserted
    with a `salt` is found only with the same salt.

    A cache with `tiers` stores evicted pages there, and loads them when a request needs them. These copies are the
    `moves` of the next plan, so an evicted page can be reused at once. A loaded page may prove damaged: then the device
    reads NaN. So the request that loaded it calls `mark_intact` after a finite result, and `drop_damaged` after a
    non-finite one.

    A cache with `snapshots` (of a model with bounded state) finds only prefixes that end at one, and evicts a node with
    its snapshot, and then the nodes above from which no text can go on. Tiers keep snapshots, too.
    """

    tiers: Sequence[Tier] = ()
    snapshots: Snapshots | None = None

    @abstractmethod
    def tick(self, step: int) -> None:
        """Set the current time, which is recorded at each use of a prefix, to the number of a step."""

    @abstractmethod
    def match_prefix(self, input_ids: Ints, salt: bytes = b"", *, anywhere: bool = False) -> MatchResult:
        """Return the longest cached prefix of `input_ids` in whole pages. The caller locks the handle to keep it.

        With snapshots, return the prefix that saves the most time; `anywhere`, the longest, which may end at none.
        """

    @abstractmethod
    def insert_prefix(self, input_ids: Ints, pages: Ints, salt: bytes = b"") -> MatchResult:
        """Offer `pages`, which hold the first len(pages) * page_size tokens.

        Return the canonical pages of that prefix, or of the part that the cache accepts: a naive cache accepts none,
        and no cache accepts pages after a loaded page that is not marked as intact. If the prefix was cached already,
        canonical pages differ from the offered ones: the caller uses the canonical ones and frees its own. The cache
        owns all other offered pages from now on.
        """

    @abstractmethod
    def lock_handle(self, handle: CacheHandle, unlock: bool = False) -> None:
        """Add one lock to the handle's node and to all its ancestors; with `unlock`, remove one."""

    @abstractmethod
    def evict(self, num_pages: int) -> Ints:
        """Evict at least `num_pages` pages, or all evictable ones if there are fewer; return their ids."""

    @abstractmethod
    def reset(self) -> Ints:
        """Evict all unlocked pages; return their ids."""

    def has_continuation(self, handle: CacheHandle) -> bool:
        """Return whether a cached text continues the locked prefix."""
        return False

    def continuation(self, handle: CacheHandle, input_ids: Ints, count: int, salt: bytes = b"") -> Ints:
        """Return up to `count` tokens, maybe none, that follow the locked prefix and `input_ids` in a cached text."""
        return NO_INTS

    def load(self, handle: CacheHandle, pages: Ints) -> Ints:
        """Load the pages of a locked prefix that are only in tiers into the page ids `pages`, one for each.

        Return the ids of all pages of the prefix.
        """
        raise NotImplementedError("there are no tiers")

    def fetch(self, handle: CacheHandle) -> None:  # noqa: B027, nothing to do without tiers
        """Give a locked prefix a snapshot on the device that `load_snapshot` loads, unless it has one.

        There must be enough ids.
        """

    def load_snapshot(self, handle: CacheHandle, count: int) -> None:
        """Load `count` units more of a snapshot that was fetched."""
        raise NotImplementedError("there are no tiers")

    def mark_intact(self, handle: CacheHandle) -> None:  # noqa: B027, nothing to do without tiers
        """Record that a finite result was computed from this prefix, so its loaded pages are intact."""

    def drop_damaged(self, handle: CacheHandle, *, with_snapshot: bool = False) -> bool:
        """Drop the loaded pages of this prefix that are not marked as intact, and all pages below them.

        `with_snapshot`: the prefix's snapshot may be damaged, and is dropped, too. Return false if there are none.
        Requests that have locked such pages keep them until they unlock.
        """
        return False

    def is_damaged(self, handle: CacheHandle) -> bool:
        """Return whether a part of this prefix was dropped as damaged."""
        return False

    def prune(self, node: Any) -> Ints:
        """Remove the end of an unlocked prefix without a snapshot or continuation, and so on; return its pages' ids."""
        return NO_INTS

    def drop_snapshot(self, node: Any, *, everywhere: bool = False) -> Ints:
        """Remove the snapshot of a node from the device (`everywhere`: and from tiers), and prune the node.

        Return the ids of pages that have become free.
        """
        raise NotImplementedError("there are no snapshots")

    def write_back(self, num_pages: int, *, lasting: bool) -> int:
        """Store about `num_pages` pages in tiers; with `lasting`, only in tiers that outlive the process.

        Return the number of copied pages.
        """
        return 0

    def pop_moves(self, num_next: int = 0, max_stores: int = 0) -> Records:
        """Return the MOVE records made since the last call, for the next plan.

        Also store about `max_stores` of the `num_next` pages that will be evicted next, so that no step waits for
        their copies later.
        """
        return NO_MOVES

    def track_changes(self) -> None:  # noqa: B027, a cache that keeps nothing has nothing to report
        """Make the next `pop_changes` return all cached prefixes, and later calls only the changes."""

    def pop_changes(self) -> dict[int, int]:
        """Return the prefixes whose location has changed since the last call; none before `track_changes`.

        Keys are prefix hashes (`kvcache/prefixes.py`). Values are 0 for the device, i for `tiers[i - 1]`, and -1 for an
        evicted prefix.
        """
        return {}

    @property
    @abstractmethod
    def size_info(self) -> SizeInfo: ...

    @property
    def evictable_size(self) -> int:
        return self.size_info.evictable_size

    @property
    def protected_size(self) -> int:
        return self.size_info.protected_size

    @property
    def num_nodes(self) -> int:
        """The number of nodes in the tree; 0 without a tree."""
        return 0

    def outline(self) -> tuple[list[OutlinedNode], int]:
        """Return a bounded view of the tree for people; see `outline.py`."""
        return [], 0

    @abstractmethod
    def owned_pages(self) -> list[int]:
        """Return the ids of all owned pages in any order, for the invariant checks."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Raise `InvariantError` if sizes, locks or links contradict each other."""
