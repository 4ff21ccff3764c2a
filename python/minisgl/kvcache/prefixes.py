"""Hashes of cached prefixes. They tell a router what the cache of each replica has.

A prefix of n pages has one 64-bit hash: the sum over its tokens of a mix of token and position. So a few array
operations hash all prefixes of a prompt. A collision (one in 2^64 pairs) only costs time, since the replica's cache
compares tokens.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from minisgl.core.plan import Ints

    Hashes = npt.NDArray[np.uint64]

SALT_BYTES: Final = 16


def salt_digest(salt: str) -> bytes:
    """Return the digest of a request's salt: SALT_BYTES bytes, or b"" without a salt."""
    return blake2b(salt.encode(errors="surrogatepass"), digest_size=SALT_BYTES).digest() if salt else b""


def prefix_hashes(ids: Ints, page_size: int, salt: bytes) -> Hashes:
    """Return the hash of each prefix of `ids` that has whole pages: uint64 [len(ids) // page_size]."""
    return continued_hashes(ids, page_size, int.from_bytes(salt[:8]), 0)


def continued_hashes(ids: Ints, page_size: int, before: int, start: int) -> Hashes:
    """Return the hashes at the end of each page of `ids`, which follow `start` tokens with the hash `before`."""
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
