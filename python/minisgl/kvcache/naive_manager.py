"""A prefix cache that caches nothing: an ablation, and the smallest implementation of the interface."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from minisgl.kvcache.base import CacheHandle, MatchResult, PrefixCache, SizeInfo

if TYPE_CHECKING:
    from collections.abc import Sequence

    from minisgl.core.plan import Ints
    from minisgl.kvcache.snapshots import Snapshots
    from minisgl.kvcache.tiers import Tier


class NaiveCacheManager(PrefixCache):
    """A cache that accepts no page and finds no prefix."""

    def __init__(self, page_size: int, tiers: Sequence[Tier] = (), snapshots: Snapshots | None = None) -> None:
        self.page_size = page_size
        self.snapshots = snapshots

    def tick(self, step: int) -> None:
        pass

    def match_prefix(self, input_ids: Ints, salt: bytes = b"", *, anywhere: bool = False) -> MatchResult:
        return MatchResult(CacheHandle(0, None), np.empty(0, np.int32))

    def insert_prefix(self, input_ids: Ints, pages: Ints, salt: bytes = b"") -> MatchResult:
        return self.match_prefix(input_ids)

    def lock_handle(self, handle: CacheHandle, unlock: bool = False) -> None:
        pass

    def evict(self, num_pages: int) -> Ints:
        return np.empty(0, np.int32)

    def reset(self) -> Ints:
        return np.empty(0, np.int32)

    @property
    def size_info(self) -> SizeInfo:
        return SizeInfo(0, 0)

    def owned_pages(self) -> list[int]:
        return []

    def check_integrity(self) -> None:
        pass
