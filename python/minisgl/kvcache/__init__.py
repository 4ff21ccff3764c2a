"""Prefix caches (host integers) and the K/V storage (tensors)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from minisgl.core.registry import Registry
from minisgl.kvcache.base import PrefixCache
from minisgl.kvcache.snapshots import Snapshots
from minisgl.kvcache.tiers import Tier

PREFIX_CACHES: Final[Registry[Callable[[int, Sequence[Tier], Snapshots | None], PrefixCache]]] = Registry("cache type")
PREFIX_CACHES.add("radix", "minisgl.kvcache.radix:RadixCache")
PREFIX_CACHES.add("naive", "minisgl.kvcache.naive_manager:NaiveCacheManager")


def create_prefix_cache(
    name: str, page_size: int, tiers: Sequence[Tier] = (), snapshots: Snapshots | None = None
) -> PrefixCache:
    """Create a prefix cache, filled from the pages that its tiers have kept; `snapshots` if there is bounded state.

    Raises `ConfigError` for unknown names.
    """
    return PREFIX_CACHES.load(name)(page_size, tiers, snapshots)
