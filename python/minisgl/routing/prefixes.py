"""Hashes of cached prefixes, by which a router knows what each replica's cache has.

A prefix of n pages is one integer: the sum over its tokens of a mix of token and position, so that all prefixes of a
prompt take a handful of array operations. A collision, one in 2^64 pairs, costs time and no more: the replica's cache
compares tokens.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from minisgl.core import Ints

    Hashes = npt.NDArray[np.uint64]

SALT_BYTES: Final = 16


def salt_digest(salt: str) -> bytes:
    """Return what stands for the salt of a request everywhere: SALT_BYTES bytes, or none without a salt."""
    return blake2b(salt.encode(errors="surrogatepass"), digest_size=SALT_BYTES).digest() if salt else b""


def prefix_hashes(ids: Ints, page_size: int, salt: bytes) -> Hashes:
    """Return the hash of each prefix of `ids` in whole pages: uint64 [len(ids) // page_size]."""
    return continued_hashes(ids, page_size, int.from_bytes(salt[:8]), 0)


def continued_hashes(ids: Ints, page_size: int, before: int, start: int) -> Hashes:
    """Return the hashes of the prefixes that end in `ids`, behind `start` tokens with the hash `before`."""
    pages = len(ids) // page_size
    mixed = np.arange(start, start + pages * page_size, dtype=np.uint64)
    mixed <<= np.uint64(32)
    mixed |= ids[: pages * page_size].view(np.uint32)
    _scatter(mixed)
    hashes: Hashes = np.cumsum(mixed.reshape(pages, page_size).sum(1)) + np.uint64(before)
    return hashes


def _scatter(x: Hashes) -> None:
    """Apply the finalizer of splitmix64 (Steele, Lea & Flood, OOPSLA 2014) in place."""
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
