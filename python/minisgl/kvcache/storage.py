"""One rank's storage of the tiers below the pool: its shard of each unit, in pinned host memory or in a file."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import time
import weakref
import zlib
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
import torch

from minisgl.core.errors import ConfigError
from minisgl.core.layout import FULL, LOAD
from minisgl.kvcache.tiers import TierSpec

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from minisgl.core.plan import Ints, Records
    from minisgl.device.device import Copying, Device
    from minisgl.kvcache.store import StateStore

_log = logging.getLogger("minisgl.kvcache")

HEADER_BYTES: Final = 4096  # of a file: JSON that identifies the model and format of its units
UNIT_HEAD: Final = np.dtype([("name", "<i8"), ("checksum", "<i8")])
GB: Final = 1e9
TRIAL_BYTES: Final = 8 << 20  # written once and read repeatedly to measure a disk
TRIALS, TRIAL_S = 3, 0.2  # the least number of measurements, and the least time spent reading a disk
RUN: Final = 32  # units per copy: each copy has one event


class Store(Protocol):
    """The slots of one tier of one rank."""

    spec: TierSpec
    is_file: bool

    def store(self, slots: list[int], names: list[int], data: torch.Tensor) -> None:
        """Copy `data`, uint8 [n, unit_bytes] on the device, into slots. Raises `OSError` if the write fails."""

    def load(self, slots: list[int], names: list[int]) -> tuple[torch.Tensor, dict[int, str]]:
        """Return the units in slots, uint8 [n, unit_bytes] on the device; and an error message per damaged index."""


class HostStore:
    """Slots in host memory, pinned if the pool is on a GPU."""

    is_file = False

    def __init__(self, pool: StateStore, size: int) -> None:
        """Allocate `size` bytes. Raises `ConfigError` if that is less than a unit, or if memory cannot be pinned."""
        self._device = pool.device
        self._is_pinned = pool.device.type == "cuda"
        num_slots = _count_slots("--host-kv", size, pool.unit_bytes)
        self._memory = torch.empty(num_slots, pool.unit_bytes, dtype=torch.uint8)
        if self._is_pinned:
            _pin(self, self._memory)
        seconds = self._measure_load() if self._is_pinned else 0.0
        self.spec = TierSpec("host", num_slots, seconds * pool.strides[FULL] / pool.unit_bytes)

    def store(self, slots: list[int], names: list[int], data: torch.Tensor) -> None:
        for start, stop in _adjacent_ranges(slots):
            memory = self._memory[slots[start] : slots[stop - 1] + 1]
            memory.copy_(data[start:stop], non_blocking=self._is_pinned)

    def load(self, slots: list[int], names: list[int]) -> tuple[torch.Tensor, dict[int, str]]:
        data = torch.empty(len(slots), self._memory.shape[1], dtype=torch.uint8, device=self._device)
        for start, stop in _adjacent_ranges(slots):
            memory = self._memory[slots[start] : slots[stop - 1] + 1]
            data[start:stop].copy_(memory, non_blocking=self._is_pinned)
        return data, {}

    def _measure_load(self) -> float:
        """Return the seconds that loading a unit takes."""
        slots = list(range(min(RUN, len(self._memory))))
        times = []
        for _ in range(TRIALS):  # take the best: the first ones allocate memory
            torch.cuda.synchronize()
            started = time.perf_counter()
            self.load(slots, slots)
            torch.cuda.synchronize()
            times.append((time.perf_counter() - started) / len(slots))
        return min(times)


class DiskStore:
    """Slots in a file, each with its unit's name and a checksum. The next process uses the file again."""

    is_file = True

    def __init__(self, pool: StateStore, folder: Path, size: int, rank: int, owner: Mapping[str, Any]) -> None:
        """Open or create a file of `size` bytes in `folder`, and reserve all of its space on the disk.

        `owner` identifies the model and the format of its pages. Raises `ConfigError` if the file has another owner, if
        another server uses the folder, or if the disk has too little space.
        """
        self._device = pool.device
        self._stride = UNIT_HEAD.itemsize + pool.unit_bytes
        num_slots = _count_slots("--disk-kv", size - HEADER_BYTES, self._stride)
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            path = folder / f"rank{rank}.kv"
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            with ExitStack() as stack:
                stack.callback(os.close, self._fd)
                _lock(self._fd, folder)
                _claim(self._fd, path, owner)
                _reserve(self._fd, folder, HEADER_BYTES + num_slots * self._stride)
                seconds = _page_seconds(folder, pool.strides[FULL])
                self._close = weakref.finalize(self, stack.pop_all().close)
        except OSError as e:
            raise ConfigError(f"--disk-kv {folder} cannot be used: {e.strerror}") from e
        self.spec = TierSpec("disk", num_slots, seconds, lasts=True, folder=str(folder))

    def store(self, slots: list[int], names: list[int], data: torch.Tensor) -> None:
        heads = np.zeros(len(slots), UNIT_HEAD)
        heads["name"] = names
        for slot, head, unit in zip(slots, heads, data.cpu().numpy(), strict=True):
            head["checksum"] = zlib.crc32(unit)
            written = os.pwritev(self._fd, [head.tobytes(), unit], self._offset(slot))
            if written < self._stride:
                raise OSError(f"only {written} of {self._stride} bytes were written")

    def load(self, slots: list[int], names: list[int]) -> tuple[torch.Tensor, dict[int, str]]:
        data = torch.empty(len(slots), self._stride - UNIT_HEAD.itemsize, dtype=torch.uint8)
        head, damaged = bytearray(UNIT_HEAD.itemsize), {}
        for i, (slot, unit) in enumerate(zip(slots, data.numpy(), strict=True)):
            try:
                got = os.preadv(self._fd, [head, unit], self._offset(slot))
                name, checksum = np.frombuffer(head, UNIT_HEAD)[0]
                if got < self._stride or name != names[i] or checksum != zlib.crc32(unit):
                    damaged[i] = f"slot {slot} does not hold what was stored there"
            except OSError as e:
                damaged[i] = str(e)
        return data.to(self._device), damaged

    def _offset(self, slot: int) -> int:
        return HEADER_BYTES + slot * self._stride


class Mover:
    """Executes the moves of plans asynchronously. Moves of the same unit or slot keep their order.

    A unit that cannot be loaded is filled with NaN, which makes the logits of its requests NaN.
    """

    def __init__(self, pool: StateStore, stores: list[Store], device: Device) -> None:
        self._pool = pool
        self.stores = stores
        self._device = device
        self._newest: dict[tuple[int, int], Copying] = {}  # the last copy of each (-1, unit) and (tier, slot)
        self._has_warned = False

    def launch(self, moves: Records, written: Ints) -> Records:
        """Start the MOVE records that the next step must wait for; return the others, for `start`.

        Work submitted later waits for all loads, and for stores of the units `written`, which it may overwrite. Stores
        need not wait for earlier work: they copy what collected steps have written. A failed store is only logged.
        """
        if not self._newest and not len(moves):
            return moves
        overwritten = {(-1, unit) for unit in written.tolist()}
        is_needed, keys = np.zeros(len(moves), np.bool_), set(overwritten)
        for i, (unit, tier, slot, kind, _) in reversed([*enumerate(moves.tolist())]):
            if kind == LOAD or (-1, unit) in keys or (tier, slot) in keys:
                is_needed[i] = True
                keys |= {(-1, unit), (tier, slot)}
        copies = self.start(moves[is_needed])
        copies += [self._newest.pop(key) for key in overwritten if key in self._newest]
        self._device.join(list(dict.fromkeys(copies)))
        return moves[~is_needed]

    def start(self, moves: Records) -> list[Copying]:
        """Start the copies of all `moves`; return those that load."""
        loads: list[Copying] = []
        if not len(moves):
            return loads
        units = self._pool.index(moves["unit"])
        for start, stop in _runs(moves):
            run = moves[start:stop]
            tier, is_load = int(run["tier"][0]), bool(run["kind"][0] == LOAD)
            keys = [*((-1, unit) for unit in run["unit"].tolist()), *((tier, slot) for slot in run["slot"].tolist())]
            after = dict.fromkeys(self._newest[key] for key in keys if key in self._newest)
            work = partial(self._copy, run, units[start:stop])
            copying = self._device.copy(work, is_load=is_load, after=list(after))
            self._newest |= dict.fromkeys(keys, copying)
            if is_load:
                loads.append(copying)
        return loads

    def _copy(self, run: Records, units: torch.Tensor) -> None:
        store = self.stores[run["tier"][0]]
        if store.is_file and len(run) > 1:  # one by one, since one unit fits into the CPU's cache
            for i in range(len(run)):
                self._copy(run[i : i + 1], units[i : i + 1])
            return
        slots, names = run["slot"].tolist(), run["name"].tolist()
        if run["kind"][0] == LOAD:
            data, damaged = store.load(slots, names)
            for i, error in damaged.items():
                data[i] = 0xFF  # NaN in every format
                _log.warning("a page of the %s tier is lost and will be computed: %s", store.spec.name, error)
            self._pool.write(units, data)
            return
        try:
            store.store(slots, names, self._pool.read(units))
        except OSError as e:
            if not self._has_warned:
                self._has_warned = True  # a broken disk stays broken: one line is enough
                _log.warning("pages cannot be written to the %s tier: %s", store.spec.name, e)


def _adjacent_ranges(slots: list[int]) -> Iterator[tuple[int, int]]:
    """Return the ranges of indices (start, stop) with adjacent slots. Each range is one copy."""
    return pairwise([0, *(i for i in range(1, len(slots)) if slots[i] != slots[i - 1] + 1), len(slots)])


def _runs(moves: Records) -> Iterator[tuple[int, int]]:
    """Yield ranges (start, stop) of at most RUN moves with the same kind and tier."""
    is_new = (np.diff(moves["kind"]) != 0) | (np.diff(moves["tier"]) != 0)
    for first, end in pairwise([0, *(1 + np.flatnonzero(is_new)).tolist(), len(moves)]):
        for start in range(first, end, RUN):
            yield start, min(start + RUN, end)


def _pin(owner: object, memory: torch.Tensor) -> None:
    """Pin `memory` while `owner` lives. torch's own allocator would round 20 GB up to a power of two."""
    cudart, address = torch.cuda.cudart(), memory.data_ptr()
    if error := int(cudart.cudaHostRegister(address, memory.nbytes, 0)):
        raise ConfigError(
            f"--host-kv: {memory.nbytes / GB:.1f} GB of host memory cannot be pinned (CUDA error {error}): give less"
        )

    def unpin() -> None:
        torch.cuda.synchronize()
        cudart.cudaHostUnregister(address)

    weakref.finalize(owner, unpin)


def _count_slots(flag: str, size: int, page_bytes: int) -> int:
    if size < page_bytes:
        raise ConfigError(f"{flag} leaves {max(0, size)} bytes for this rank, but a page takes {page_bytes}: give more")
    return size // page_bytes


def _lock(fd: int, folder: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(f"--disk-kv {folder} is in use by another server: give each its own folder") from None


def _claim(fd: int, path: Path, owner: Mapping[str, Any]) -> None:
    """Write `owner` into the file's header. Raises `ConfigError` if the file has another owner."""
    ours = json.dumps(owner, sort_keys=True).encode().ljust(HEADER_BYTES, b"\n")
    assert len(ours) == HEADER_BYTES, f"the header is too long: {owner}"
    theirs = os.pread(fd, HEADER_BYTES, 0)
    if theirs in (b"", ours):
        os.pwrite(fd, ours, 0)
        return
    try:
        old = dict(json.loads(theirs))
    except ValueError:
        raise ConfigError(f"{path} is not a file of K/V pages: give another folder for --disk-kv") from None
    name = next((name for name in owner if old.get(name) != owner[name]), "form")
    raise ConfigError(
        f"--disk-kv {path.parent} holds pages with {name} {old.get(name)}, but this server has {owner.get(name)}: "
        "give another folder, or delete this one"
    )


def _reserve(fd: int, folder: Path, size: int) -> None:
    """Allocate `size` bytes on the disk: a hole in the file could not be filled once the disk is full."""
    disk, before = os.fstatvfs(fd), os.fstat(fd).st_size
    if size - before > (free := disk.f_bavail * disk.f_frsize):
        raise ConfigError(f"--disk-kv {folder} lacks space: {size / GB:.1f} GB are needed, {free / GB:.1f} GB are free")
    os.ftruncate(fd, min(size, before))
    os.posix_fallocate(fd, 0, size)


def _page_seconds(folder: Path, size: int) -> float:
    """Return the seconds that the disk takes to read `size` bytes that are not in the page cache."""
    with TemporaryFile(dir=folder, buffering=0) as file:
        file.write(bytes(TRIAL_BYTES))
        os.fsync(file.fileno())
        times: list[float] = []
        while len(times) < TRIALS or sum(times) < TRIAL_S:  # take the best: other processes delay the rest
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            started = time.perf_counter()
            zlib.crc32(os.pread(file.fileno(), TRIAL_BYTES, 0))
            times.append(time.perf_counter() - started)
    return min(times) * size / TRIAL_BYTES
