"""Prefix caches (host integers) and the K/V storage (tensors)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from minisgl.kvcache.base import PrefixCache
from minisgl.kvcache.tiers import Tier
from minisgl.registry import Registry

PREFIX_CACHES: Final[Registry[Callable[[int, Sequence[Tier]], PrefixCache]]] = Registry("cache type")
PREFIX_CACHES.add("radix", "minisgl.kvcache.radix:RadixCache")
PREFIX_CACHES.add("naive", "minisgl.kvcache.naive_manager:NaiveCacheManager")


def create_prefix_cache(name: str, page_size: int, tiers: Sequence[Tier] = ()) -> PrefixCache:
    """Create a prefix cache, filled from the pages that its tiers have kept. Raises `ConfigError` for unknown names."""
    return PREFIX_CACHES.load(name)(page_size, tiers)
