"""Prefix caches (host integers) and the K/V storage (tensors)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from minisgl.kvcache.base import PrefixCache
from minisgl.registry import Registry

PREFIX_CACHES: Final[Registry[Callable[[int], PrefixCache]]] = Registry("cache type")
PREFIX_CACHES.add("radix", "minisgl.kvcache.radix_manager:RadixCacheManager")
PREFIX_CACHES.add("naive", "minisgl.kvcache.naive_manager:NaiveCacheManager")


def create_prefix_cache(name: str, page_size: int) -> PrefixCache:
    """Create an empty prefix cache; raise `ConfigError` for an unknown name."""
    return PREFIX_CACHES.load(name)(page_size)
