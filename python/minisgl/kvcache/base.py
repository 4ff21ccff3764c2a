"""Contract of the prefix caches. Everything here is host integers; the K/V itself lives in `mha_pool`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from minisgl.core import Ints
    from minisgl.kvcache.outline import OutlinedNode


@dataclass(frozen=True, slots=True)
class CacheHandle:
    """A prefix inside the cache: `num_pages` pages up to and including `node`. Worth nothing unless locked."""

    num_pages: int
    node: Any


class MatchResult(NamedTuple):
    """`pages` [handle.num_pages] are the page ids that hold the matched prefix."""

    handle: CacheHandle
    pages: Ints


class SizeInfo(NamedTuple):
    """Pages that the cache owns: those it could give back, and those that locks hold."""

    evictable_size: int
    protected_size: int


class PrefixCache(ABC):
    """Who owns which page of which prefix.

    All sizes count pages and all keys are whole pages: a prefix of n tokens uses its first n // page_size pages.
    Page ids enter by `insert_prefix` and leave by `evict` or `reset`; while inside, the cache owns them.
    Locks nest and reach from a node up to the root; only what no lock holds is evicted, oldest use first. Time is the
    caller's step number (`tick`), never the clock, so all runs with the same requests evict alike. A prefix that was
    inserted with a `salt` is found with the same one only.
    """

    @abstractmethod
    def tick(self, step: int) -> None:
        """The time of every use from now on."""

    @abstractmethod
    def match_prefix(self, input_ids: Ints, salt: bytes = b"") -> MatchResult:
        """The longest cached prefix of `input_ids`, in whole pages. Changes no ownership; lock the handle to keep."""

    @abstractmethod
    def insert_prefix(self, input_ids: Ints, pages: Ints, salt: bytes = b"") -> MatchResult:
        """Offer the pages of the first len(pages) * page_size tokens.

        Returns the canonical pages of that prefix (or of the part the cache keeps: a naive cache keeps none). Where the
        prefix was there already, the canonical pages differ from the offered ones and those stay the caller's, who must
        use the canonical ones instead and free its own; all other pages of the result are the cache's from now on.
        """

    @abstractmethod
    def lock_handle(self, handle: CacheHandle, unlock: bool = False) -> None:
        """Protect (or, with `unlock`, release one protection of) a handle's node and all its ancestors."""

    @abstractmethod
    def evict(self, num_pages: int) -> Ints:
        """Give up at least `num_pages` pages if so many are evictable, else all that are; returns their ids."""

    @abstractmethod
    def reset(self) -> Ints:
        """Give up everything that is not locked; returns the page ids."""

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
        """Nodes of the tree, if there is one."""
        return 0

    def outline(self) -> tuple[list[OutlinedNode], int]:
        """What a person should see of the tree, see `outline.py`."""
        return [], 0

    @abstractmethod
    def owned_pages(self) -> list[int]:
        """Every page id inside, in no particular order (for the invariant checks)."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Raises `InvariantError` when sizes, locks or links contradict each other."""
