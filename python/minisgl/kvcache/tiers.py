"""The host's bookkeeping of tiers below the device's pool: their free slots, and the index that outlives the process.

A tier is host memory or a file. Each of its slots holds a copy of one page. The radix tree knows which page is in which
slot; `storage.py` makes the copies.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from minisgl.core.errors import InvariantError
from minisgl.kvcache.prefixes import SALT_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from minisgl.core.plan import Ints, Records, StepCosts

    Names = npt.NDArray[np.int64]

_log = logging.getLogger("minisgl.kvcache")

NO_SALT: Final = bytes(SALT_BYTES)


def page_name(before: int, salt: bytes, tokens: bytes) -> int:
    """Return a 64-bit hash of a page's tokens and of all tokens before them, as a signed int that is not 0.

    `before` is the name of the previous page. It is 0 for a first page, which has the salt instead.
    """
    seed = before.to_bytes(8, "little", signed=True) + salt
    return int.from_bytes(blake2b(seed + tokens, digest_size=8).digest(), "little", signed=True) or 1


@dataclass(frozen=True, slots=True)
class TierSpec:
    """A tier that an engine offers: `num_slots` pages, each of which takes `page_seconds` to load.

    If `lasts`, the tier outlives the process, and its index is in `folder`.
    """

    name: str
    num_slots: int
    page_seconds: float
    lasts: bool = False
    folder: str = ""


class KeptPage(NamedTuple):
    """A page of an earlier process, read from the index: its tokens int32 [page_size], and the salt of a first page."""

    slot: int
    name: int
    salt: bytes
    tokens: Ints


class Tier:
    """The slots of one tier, and counts of the pages stored, loaded and lost. `number` is its index in the engine."""

    def __init__(self, spec: TierSpec, number: int, page_size: int, is_fresh: bool = False) -> None:
        """Open the index, if the tier has a folder; with `is_fresh`, clear it."""
        self.spec = spec
        self.number = number
        self.stored_pages = 0
        self.loaded_pages = 0
        self.lost_pages = 0  # dropped because a loaded page was damaged
        self.index = _open_index(Path(spec.folder), spec.num_slots, page_size) if spec.folder else None
        if self.index is not None and is_fresh:
            self.index["name"] = 0
        self._free = list(range(spec.num_slots - 1, -1, -1))

    @property
    def free_size(self) -> int:
        return len(self._free)

    def allocate(self, names: Names, before: int, salt: bytes, tokens: Ints) -> Ints:
        """Allocate slots, int32 [n], for consecutive pages with `names` [n] and `tokens` [n * page_size].

        `before` and `salt` are those of the first page, as in `page_name`.
        """
        start = len(self._free) - len(names)
        slots = np.array(self._free[start:][::-1], np.int32)
        del self._free[start:]
        if self.index is not None:
            records = np.zeros(len(names), self.index.dtype)
            records["name"] = names
            records["before"] = [before, *names[:-1].tolist()]
            records["salt"] = np.frombuffer(salt or NO_SALT, np.uint8)
            records["tokens"] = tokens.reshape(len(names), -1)
            self.index[slots] = records
        self.stored_pages += len(names)
        return slots

    def free(self, slots: Ints) -> None:
        """Free slots whose pages are no longer needed."""
        self._free += slots[::-1].tolist()  # so that `allocate` returns runs of adjacent slots again
        if self.index is not None:
            self.index["name"][slots] = 0

    def restore(self) -> dict[int, list[KeptPage]]:
        """Return the pages of an earlier process, by the name of the page before each. Skips torn records."""
        found: dict[int, list[KeptPage]] = {}
        seen: set[int] = set()
        if self.index is None:
            return found
        for slot in np.flatnonzero(self.index["name"]).tolist():
            record = self.index[slot]
            before, name, salt = int(record["before"]), int(record["name"]), record["salt"].tobytes()
            if before or salt == NO_SALT:
                salt = b""
            if name not in seen and page_name(before, salt, record["tokens"].tobytes()) == name:
                seen.add(name)
                found.setdefault(before, []).append(KeptPage(slot, name, salt, np.array(record["tokens"])))
        return found

    def claim(self, slots: Sequence[int]) -> None:
        """Mark the restored `slots` as used, and clear all others."""
        if self.index is not None:
            kept = set(slots)
            self._free = [slot for slot in self._free if slot not in kept]
            self.index["name"][self._free] = 0

    def check(self, owned: list[int]) -> None:
        """Raise `InvariantError` unless each slot is either free or one of `owned`, and only once."""
        if sorted([*self._free, *owned]) != list(range(self.spec.num_slots)):
            raise InvariantError(f"slots of the {self.spec.name} tier have leaked, or are used twice")


def worthwhile_tiers(
    specs: Sequence[TierSpec], page_size: int, costs: StepCosts | None, *, is_fresh: bool
) -> list[Tier]:
    """Return the tiers from which loading a page is faster than computing it; with `is_fresh`, empty ones."""
    tiers = []
    for number, spec in enumerate(specs):
        if costs is None or spec.page_seconds < costs.per_token * page_size:
            tiers.append(Tier(spec, number, page_size, is_fresh))
        else:
            load_ms, compute_ms = 1e3 * spec.page_seconds, 1e3 * costs.per_token * page_size
            reason = f"loading a page takes {load_ms:.2g} ms, computing it {compute_ms:.2g} ms"
            _log.warning("the %s tier is not used: %s", spec.name, reason)
    return tiers


def _open_index(folder: Path, num_slots: int, page_size: int) -> Records:
    """Map the index file, one record per slot. Only the user can read it: its tokens are as private as the K/V."""
    record = np.dtype(
        [("name", "<i8"), ("before", "<i8"), ("salt", "u1", (SALT_BYTES,)), ("tokens", "<i4", (page_size,))]
    )
    size = num_slots * record.itemsize
    with open(os.open(folder / "index", os.O_RDWR | os.O_CREAT, 0o600), "r+b") as file:
        os.ftruncate(file.fileno(), min(size, os.fstat(file.fileno()).st_size))
        os.posix_fallocate(file.fileno(), 0, size)  # writing to a hole of a full disk would kill the process
        return np.memmap(file, record, "r+", shape=(num_slots,))
