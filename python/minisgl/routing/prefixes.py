"""Hashes of cached prefixes, by which a router knows what each replica's cache has.

A prefix of n pages is one integer: the sum over its tokens of a mix of token and position, so that all prefixes of a
prompt take a handful of array operations. A collision, one in 2^64 pairs, costs time and no more: the replica's cache
compares tokens.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from minisgl.core import Ints

    Hashes = npt.NDArray[np.uint64]


def prefix_hashes(ids: Ints, page_size: int, salt: str) -> Hashes:
    """Return the hash of each prefix of `ids` in whole pages: uint64 [len(ids) // page_size]."""
    return _continued(ids, page_size, _of_salt(salt), 0)


def _continued(ids: Ints, page_size: int, before: int, start: int) -> Hashes:
    """Return the hashes of the prefixes that end in `ids`, behind `start` tokens with the hash `before`."""
    pages = len(ids) // page_size
    mixed = np.arange(start, start + pages * page_size, dtype=np.uint64)
    mixed <<= np.uint64(32)
    mixed |= ids[: pages * page_size].view(np.uint32)
    _scatter(mixed)
    hashes: Hashes = np.cumsum(mixed.reshape(pages, page_size).sum(1)) + np.uint64(before)
    return hashes


def _of_salt(salt: str) -> int:
    digest = blake2b(salt.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest) if salt else 0


def _scatter(x: Hashes) -> None:
    """Apply the finalizer of splitmix64 (Steele, Lea & Flood, OOPSLA 2014) in place."""
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)


class CachedPrefixes:
    """The hashes of the prefixes in one prefix cache, and what has changed since the last `take`.

    Every page in the cache ends one prefix, so the hashes are kept by page id.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self._hashes = np.zeros(num_pages, np.uint64)
        self._changes: dict[int, bool] = {}  # hash -> whether the cache has it

    def insert(self, ids: Ints, pages: Ints, start: int, salt: str) -> None:
        """Record that the cache has got `pages` [n], which hold the tokens `ids`; the first `start` it had before."""
        before = int(self._hashes[pages[start - 1]]) if start else _of_salt(salt)
        tokens = start * self.page_size
        hashes = _continued(ids[tokens:], self.page_size, before, tokens)
        self._hashes[pages[start:]] = hashes
        self._changes.update(dict.fromkeys(hashes.tolist(), True))

    def remove(self, pages: Ints) -> None:
        """Record that `pages` have left the cache."""
        self._changes.update(dict.fromkeys(self._hashes[pages].tolist(), False))

    def take(self) -> tuple[bytes, bytes] | None:
        """Return the hashes that were added and removed since the last call, as uint64 bytes; None without changes."""
        if not self._changes:
            return None
        added = [h for h, is_cached in self._changes.items() if is_cached]
        removed = [h for h, is_cached in self._changes.items() if not is_cached]
        self._changes = {}
        return np.array(added, np.uint64).tobytes(), np.array(removed, np.uint64).tobytes()
