"""The host's bookkeeping of tiers below the device's pool: their free slots, and the index that outlives the process.

A tier is host memory or a file. Each of its slots holds a copy of one unit of the device's memory (`arena.py`): a page
or a part of one. The keeper knows which unit is in which slot; `storage.py` makes the copies.
"""

from __future__ import annotations

import logging
import math
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


def unit_names(names: Names, units: int) -> Names:
    """Return the names of all units of what has `names` [n] and so many units each, int64 [n, units]."""
    found: Names = np.add.outer(names, np.arange(units))  # which may wrap around
    return found


def snapshot_names(name: int, units: int) -> Names:
    """Return the names of the units of a snapshot of a text whose last page has `name`, int64 [units]."""
    return unit_names(np.array([page_name(name, NO_SALT, b"snapshot")]), units).ravel()


@dataclass(frozen=True, slots=True)
class TierSpec:
    """A tier that an engine offers: `num_slots` units. A page of FULL takes `page_seconds` to load.

    If `lasts`, the tier outlives the process, and its index is in `folder`.
    """

    name: str
    num_slots: int
    page_seconds: float
    lasts: bool = False
    folder: str = ""


class KeptPage(NamedTuple):
    """A page of an earlier process, read from the index: its tokens int32 [page_size], and the salt of a first page."""

    slots: list[int]
    name: int
    salt: bytes
    tokens: Ints


class Tier:
    """The slots of one tier, and counts of the units stored, loaded and lost. `number` is its index in the engine.

    Loading a page takes `cost` of the time in which it could be computed.
    """

    def __init__(self, spec: TierSpec, number: int, page_size: int, is_fresh: bool = False) -> None:
        """Open the index, if the tier has a folder; with `is_fresh`, clear it."""
        self.spec = spec
        self.number = number
        self.stored_pages = 0
        self.loaded_pages = 0
        self.lost_pages = 0  # dropped because a loaded one was damaged
        self.cost = 0.0
        self.index = _open_index(Path(spec.folder), spec.num_slots, page_size) if spec.folder else None
        if self.index is not None and is_fresh:
            self.index["name"] = 0
        self._free = list(range(spec.num_slots - 1, -1, -1))
        self._kept: dict[int, int] = {}  # the slot of each unit of an earlier process, by name, until `claim`
        if self.index is not None:
            self._kept = {int(self.index["name"][slot]): slot for slot in np.flatnonzero(self.index["name"]).tolist()}

    @property
    def free_size(self) -> int:
        return len(self._free)

    def allocate(self, names: Names) -> Ints:
        """Allocate a slot for each unit of `names`, int32 of the same shape."""
        start = len(self._free) - names.size
        slots = np.array(self._free[start:][::-1], np.int32).reshape(names.shape)
        del self._free[start:]
        if self.index is not None:
            self.index["name"][slots] = names
        self.stored_pages += names.size
        return slots

    def describe(self, slots: Ints, before: int, salt: bytes, tokens: Ints) -> None:
        """Write the text of consecutive pages, whose first units are in `slots` [n], to the index, if there is one.

        `before` and `salt` are those of the first page, as in `page_name`; `tokens` are [n * page_size].
        """
        if self.index is not None:
            self.index["before"][slots] = [before, *self.index["name"][slots[:-1]].tolist()]
            self.index["salt"][slots] = np.frombuffer(salt or NO_SALT, np.uint8)
            self.index["tokens"][slots] = tokens.reshape(len(slots), -1)

    def free(self, slots: Ints) -> None:
        """Free slots whose units are no longer needed."""
        self._free += slots.ravel()[::-1].tolist()  # so that `allocate` returns runs of adjacent slots again
        if self.index is not None:
            self.index["name"][slots] = 0

    def find(self, names: Names) -> list[int]:
        """Return the slots in which an earlier process has kept the units of `names`; none if any is missing."""
        found = [self._kept.get(name, -1) for name in names.tolist()]
        return [] if -1 in found else found

    def restore(self, units: int) -> dict[int, list[KeptPage]]:
        """Return the pages of an earlier process, of so many `units`, by the name of the page before each.

        Skips torn records. Only the first unit of a page has more than a name.
        """
        found: dict[int, list[KeptPage]] = {}
        for name, slot in self._kept.items():
            assert self.index is not None
            record = self.index[slot]
            before, salt = int(record["before"]), record["salt"].tobytes()
            if before or salt == NO_SALT:
                salt = b""
            if page_name(before, salt, record["tokens"].tobytes()) == name and (
                slots := self.find(unit_names(np.array([name]), units)[0])
            ):
                found.setdefault(before, []).append(KeptPage(slots, name, salt, np.array(record["tokens"])))
        return found

    def claim(self, slots: Sequence[int]) -> None:
        """Mark the restored `slots` as used, and clear all others."""
        if self.index is not None:
            kept = set(slots)
            self._free = [slot for slot in self._free if slot not in kept]
            self.index["name"][self._free] = 0
            self._kept = {}

    def check(self, owned: list[int]) -> None:
        """Raise `InvariantError` unless each slot is either free or one of `owned`, and only once."""
        if sorted([*self._free, *owned]) != list(range(self.spec.num_slots)):
            raise InvariantError(f"slots of the {self.spec.name} tier have leaked, or are used twice")


def worthwhile_tiers(
    specs: Sequence[TierSpec], page_size: int, costs: StepCosts | None, *, is_fresh: bool
) -> list[Tier]:
    """Return the tiers from which loading a page is faster than computing it; with `is_fresh`, empty ones."""
    tiers = []
    computing = math.inf if costs is None else costs.per_token * page_size
    for number, spec in enumerate(specs):
        if spec.page_seconds < computing:
            tiers.append(Tier(spec, number, page_size, is_fresh))
            tiers[-1].cost = spec.page_seconds / computing
        else:
            load_ms, compute_ms = 1e3 * spec.page_seconds, 1e3 * computing
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
