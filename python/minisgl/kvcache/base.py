"""The contract of the prefix caches, which manage host integers; the K/V tensors are in `mha_pool`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from minisgl.layout import NO_INTS, NO_MOVES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from minisgl.core import Ints, Records
    from minisgl.kvcache.outline import OutlinedNode
    from minisgl.kvcache.tiers import Tier


@dataclass(frozen=True, slots=True)
class CacheHandle:
    """A cached prefix of `num_pages` pages, up to and including `node`; valid only while locked."""

    num_pages: int
    node: Any


class MatchResult(NamedTuple):
    """A matched prefix, and the ids of its pages [handle.num_pages].

    The last ones may have to be loaded: such a page has no id but ~i, for the tier with index i.
    """

    handle: CacheHandle
    pages: Ints


class SizeInfo(NamedTuple):
    """The numbers of evictable pages and of locked pages that the cache owns."""

    evictable_size: int
    protected_size: int


class PrefixCache(ABC):
    """Owns the pages of cached prefixes.

    All sizes count pages and all keys are whole pages: a prefix of n tokens uses its first n // page_size pages. Page
    ids enter by `insert_prefix` and leave by `evict` or `reset`; in between, the cache owns them. Locks nest and reach
    from a node up to the root; only unlocked pages are evicted, least recently used first. Time is the caller's step
    number (`tick`) and not the clock, so all runs with the same requests evict the same pages. A prefix that was
    inserted with a `salt` is found with the same salt only.

    A cache with `tiers` copies evicted pages there, finds them again, and loads them. The copies are `moves` of the
    next plan, so an evicted page may be used at once. A loaded page may turn out to be damaged: the device then reads
    NaN. So its request either vouches for the loaded pages, or loses them.
    """

    tiers: Sequence[Tier] = ()

    @abstractmethod
    def tick(self, step: int) -> None:
        """Set the time of every use from now on."""

    @abstractmethod
    def match_prefix(self, input_ids: Ints, salt: bytes = b"") -> MatchResult:
        """Return the longest cached prefix of `input_ids` in whole pages; lock the handle to keep the prefix."""

    @abstractmethod
    def insert_prefix(self, input_ids: Ints, pages: Ints, salt: bytes = b"") -> MatchResult:
        """Offer the pages of the first len(pages) * page_size tokens.

        Return the canonical pages of that prefix, or of the part that the cache keeps: a naive cache keeps none, and no
        cache takes what is behind a loaded page that nobody has vouched for. Where the prefix was cached already, the
        canonical pages differ from the offered ones: the caller uses the canonical pages and frees the offered ones.
        The cache owns all other offered pages from now on.
        """

    @abstractmethod
    def lock_handle(self, handle: CacheHandle, unlock: bool = False) -> None:
        """Lock a handle's node and all its ancestors; with `unlock`, release one lock of each."""

    @abstractmethod
    def evict(self, num_pages: int) -> Ints:
        """Evict at least `num_pages` pages, or all evictable ones if there are fewer; return their ids."""

    @abstractmethod
    def reset(self) -> Ints:
        """Evict all unlocked pages; return their ids."""

    def has_continuation(self, handle: CacheHandle) -> bool:
        """Return whether some cached text goes on behind the locked prefix."""
        return False

    def continuation(self, handle: CacheHandle, input_ids: Ints, count: int, salt: bytes = b"") -> Ints:
        """Return up to `count` tokens that followed the locked prefix and `input_ids` in a cached text; maybe none."""
        return NO_INTS

    def load(self, handle: CacheHandle, pages: Ints) -> Ints:
        """Load the absent pages of a locked prefix into `pages`, as many as are absent; return the prefix's pages."""
        raise NotImplementedError("there are no tiers")

    def vouch(self, handle: CacheHandle) -> None:  # noqa: B027, nothing to do without tiers
        """Note that the pages of this prefix have led to a finite result."""

    def lose(self, handle: CacheHandle) -> bool:
        """Forget what was loaded for this prefix and what is below, as damaged; return false if nothing was loaded.

        Requests that hold these pages keep them until they unlock.
        """
        return False

    def is_lost(self, handle: CacheHandle) -> bool:
        """Return whether a part of this prefix was forgotten as damaged."""
        return False

    def write_back(self, num_pages: int, *, lasting: bool) -> int:
        """Copy about `num_pages` pages to tiers, `lasting`: that outlive the process; return how many were copied."""
        return 0

    def take_moves(self, num_next: int = 0, most: int = 0) -> Records:
        """Return the MOVE records since the last call, for the next plan.

        They copy about `most` of the `num_next` pages that will be evicted next, too, so that no step waits for that.
        """
        return NO_MOVES

    def tell_prefixes(self) -> None:  # noqa: B027, a cache that keeps nothing has nothing to tell
        """Let `take_changes` return all prefixes that there are, and from then on what has changed."""

    def take_changes(self) -> dict[int, int]:
        """Return the prefixes whose place has changed since the last call; none before `tell_prefixes`.

        The keys are hashes (`routing/prefixes.py`), the values are 0 for the device, i for `tiers[i - 1]`, -1 for none.
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
        """The number of nodes of the tree; 0 without a tree."""
        return 0

    def outline(self) -> tuple[list[OutlinedNode], int]:
        """Return a bounded view of the tree for people, see `outline.py`."""
        return [], 0

    @abstractmethod
    def owned_pages(self) -> list[int]:
        """Return all owned page ids in any order, for the invariant checks."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Raise `InvariantError` if sizes, locks or links contradict each other."""
