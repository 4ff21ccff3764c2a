"""Tiers below the pool, as one rank keeps them: copies of its shard of a page, in pinned host memory or in a file."""

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

from minisgl.errors import ConfigError
from minisgl.kvcache.tiers import TierSpec
from minisgl.layout import LOAD

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from minisgl.core import Ints, Records
    from minisgl.device.device import Copying, Device
    from minisgl.kvcache.mha_pool import MHAKVPool

_log = logging.getLogger("minisgl.kvcache")

HEADER_BYTES: Final = 4096  # of a file: says whose pages it holds, as JSON
PAGE_HEAD: Final = np.dtype([("name", "<i8"), ("checksum", "<i8")])
GB: Final = 1e9
TRIAL_BYTES: Final = 8 << 20  # written and read to measure a disk
TRIALS, TRIAL_S = 3, 0.2  # at least; a disk is read for so long
RUN: Final = 32  # pages that are copied between two events


class Store(Protocol):
    """The slots of one tier of one rank."""

    spec: TierSpec
    is_file: bool

    def store(self, slots: list[int], names: list[int], data: torch.Tensor) -> None:
        """Keep pages `data`, uint8 [n, page_bytes] on the device, in slots. Raises `OSError` if one cannot be kept."""

    def load(self, slots: list[int], names: list[int]) -> tuple[torch.Tensor, dict[int, str]]:
        """Return pages from slots, uint8 [n, page_bytes] on the device, and what is wrong with some, by their index."""


class HostStore:
    """Slots in host memory, pinned if the pool is on a GPU."""

    is_file = False

    def __init__(self, pool: MHAKVPool, size: int) -> None:
        """Take `size` bytes. Raises `ConfigError` if no page fits."""
        self._device = pool.device
        self._is_pinned = pool.device.type == "cuda"
        num_slots = _count_slots("--host-kv", size, pool.page_bytes)
        self._memory = torch.empty(num_slots, pool.page_bytes, dtype=torch.uint8)
        if self._is_pinned:
            _pin(self, self._memory)
        self.spec = TierSpec("host", num_slots, self._measure() if self._is_pinned else 0.0)

    def store(self, slots: list[int], names: list[int], data: torch.Tensor) -> None:
        for start, stop in _adjacent(slots):
            mine = self._memory[slots[start] : slots[stop - 1] + 1]
            mine.copy_(data[start:stop], non_blocking=self._is_pinned)

    def load(self, slots: list[int], names: list[int]) -> tuple[torch.Tensor, dict[int, str]]:
        data = torch.empty(len(slots), self._memory.shape[1], dtype=torch.uint8, device=self._device)
        for start, stop in _adjacent(slots):
            mine = self._memory[slots[start] : slots[stop - 1] + 1]
            data[start:stop].copy_(mine, non_blocking=self._is_pinned)
        return data, {}

    def _measure(self) -> float:
        """Return the seconds to load a page."""
        slots = list(range(min(RUN, len(self._memory))))
        times = []
        for _ in range(TRIALS):  # the best, since the first ones get memory
            torch.cuda.synchronize()
            started = time.perf_counter()
            self.load(slots, slots)
            torch.cuda.synchronize()
            times.append((time.perf_counter() - started) / len(slots))
        return min(times)


class DiskStore:
    """Slots in a file, each with its page's name and a checksum. The file is found again by the next process."""

    is_file = True

    def __init__(self, pool: MHAKVPool, folder: Path, size: int, rank: int, owner: Mapping[str, Any]) -> None:
        """Use `size` bytes of `folder`, all of which are taken from the disk now.

        `owner` says which model's pages these are, and in which form. Raises `ConfigError` if the folder has those of
        another owner, is in use, or if the disk has too little space.
        """
        self._device = pool.device
        self._stride = PAGE_HEAD.itemsize + pool.page_bytes
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
                seconds = _page_seconds(folder, self._stride)
                self._close = weakref.finalize(self, stack.pop_all().close)
        except OSError as e:
            raise ConfigError(f"--disk-kv {folder} cannot be used: {e.strerror}") from e
        self.spec = TierSpec("disk", num_slots, seconds, lasts=True, folder=str(folder))

    def store(self, slots: list[int], names: list[int], data: torch.Tensor) -> None:
        heads = np.zeros(len(slots), PAGE_HEAD)
        heads["name"] = names
        for slot, head, page in zip(slots, heads, data.cpu().numpy(), strict=True):
            head["checksum"] = zlib.crc32(page)
            written = os.pwritev(self._fd, [head.tobytes(), page], self._offset(slot))
            if written < self._stride:
                raise OSError(f"only {written} bytes of {self._stride} were written")

    def load(self, slots: list[int], names: list[int]) -> tuple[torch.Tensor, dict[int, str]]:
        data = torch.empty(len(slots), self._stride - PAGE_HEAD.itemsize, dtype=torch.uint8)
        head, damaged = bytearray(PAGE_HEAD.itemsize), {}
        for i, (slot, page) in enumerate(zip(slots, data.numpy(), strict=True)):
            try:
                got = os.preadv(self._fd, [head, page], self._offset(slot))
                name, checksum = np.frombuffer(head, PAGE_HEAD)[0]
                if got < self._stride or name != names[i] or checksum != zlib.crc32(page):
                    damaged[i] = f"slot {slot} does not hold the page that was stored there"
            except OSError as e:
                damaged[i] = str(e)
        return data.to(self._device), damaged

    def _offset(self, slot: int) -> int:
        return HEADER_BYTES + slot * self._stride


class Mover:
    """Carries out the moves of plans beside all other work; moves of the same page or slot in their order.

    A page that cannot be loaded becomes NaN, as do its logits.
    """

    def __init__(self, pool: MHAKVPool, stores: list[Store], device: Device) -> None:
        self._pool = pool
        self.stores = stores
        self._device = device
        self._newest: dict[tuple[int, int], Copying] = {}  # of (-1, page) and of (tier, slot)
        self._is_full = False

    def launch(self, moves: Records, written: Ints) -> Records:
        """Start the MOVE records that the next step needs, and return the others; a failure costs a log line.

        Work submitted later waits for the loads, and for stores only of the pages `written`, which it may overwrite.
        Stores need not wait for work submitted before: what is stored was computed by a step whose result is known.
        """
        if not self._newest and not len(moves):
            return moves
        wanted = {*written.tolist()}
        needed, keys = np.zeros(len(moves), np.bool_), {(-1, page) for page in wanted}
        for i, (page, tier, slot, kind, _) in reversed([*enumerate(moves.tolist())]):
            if kind == LOAD or (-1, page) in keys or (tier, slot) in keys:
                needed[i] = True
                keys |= {(-1, page), (tier, slot)}
        joined = self.start(moves[needed])
        joined += [self._newest.pop((-1, page)) for page in wanted if (-1, page) in self._newest]
        self._device.join(list(dict.fromkeys(joined)))
        return moves[~needed]

    def start(self, moves: Records) -> list[Copying]:
        """Start all `moves`; return the loads."""
        loads: list[Copying] = []
        if not len(moves):
            return loads
        pages = self._pool.index(moves["page"])
        for start, stop in _runs(moves):
            run = moves[start:stop]
            tier, is_load = int(run["tier"][0]), bool(run["kind"][0] == LOAD)
            keys = [*((-1, page) for page in run["page"].tolist()), *((tier, slot) for slot in run["slot"].tolist())]
            after = dict.fromkeys(self._newest[key] for key in keys if key in self._newest)
            work = partial(self._copy, run, pages[start:stop])
            copying = self._device.copy(work, is_load=is_load, after=list(after))
            self._newest |= dict.fromkeys(keys, copying)
            if is_load:
                loads.append(copying)
        return loads

    def _copy(self, run: Records, pages: torch.Tensor) -> None:
        store = self.stores[run["tier"][0]]
        if store.is_file and len(run) > 1:  # page by page, since one fits into the CPU's cache
            for i in range(len(run)):
                self._copy(run[i : i + 1], pages[i : i + 1])
            return
        slots, names = run["slot"].tolist(), run["name"].tolist()
        if run["kind"][0] == LOAD:
            data, damaged = store.load(slots, names)
            self._pool.write(pages, data)
            for i, problem in damaged.items():
                self._pool.poison([int(pages[i])])
                _log.warning("a page of the %s tier is lost and will be computed: %s", store.spec.name, problem)
            return
        try:
            store.store(slots, names, self._pool.read(pages))
        except OSError as e:
            if not self._is_full:
                self._is_full = True  # a full disk stays full: one line is enough
                _log.warning("pages cannot be written to the %s tier: %s", store.spec.name, e)


def _adjacent(slots: list[int]) -> Iterator[tuple[int, int]]:
    """Return the ranges of indices at which there are adjacent slots, each of which is one copy."""
    return pairwise([0, *(i for i in range(1, len(slots)) if slots[i] != slots[i - 1] + 1), len(slots)])


def _runs(moves: Records) -> Iterator[tuple[int, int]]:
    """Return ranges of MOVE records of one kind and tier, of at most RUN records."""
    is_new = (np.diff(moves["kind"]) != 0) | (np.diff(moves["tier"]) != 0)
    for first, end in pairwise([0, *(1 + np.flatnonzero(is_new)).tolist(), len(moves)]):
        for start in range(first, end, RUN):
            yield start, min(start + RUN, end)


def _pin(owner: object, memory: torch.Tensor) -> None:
    """Pin `memory` as long as `owner` lives. torch's own allocator would round 20 GB up to a power of two."""
    cudart, address = torch.cuda.cudart(), memory.data_ptr()
    if error := int(cudart.cudaHostRegister(address, memory.nbytes, 0)):
        raise ConfigError(
            f"--host-kv: {memory.nbytes / GB:.1f} GB of host memory cannot be pinned (CUDA error {error})"
        )

    def unpin() -> None:
        torch.cuda.synchronize()
        cudart.cudaHostUnregister(address)

    weakref.finalize(owner, unpin)


def _count_slots(flag: str, size: int, page_bytes: int) -> int:
    if size < page_bytes:
        raise ConfigError(f"{flag} has {max(0, size)} bytes for this rank, and a page takes {page_bytes}: give more")
    return size // page_bytes


def _lock(fd: int, folder: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(f"--disk-kv {folder} is in use by another server: give each its own folder") from None


def _claim(fd: int, path: Path, owner: Mapping[str, Any]) -> None:
    """Write whose pages the file holds; raise `ConfigError` if they are another owner's."""
    ours = json.dumps(owner, sort_keys=True).encode().ljust(HEADER_BYTES, b"\n")
    assert len(ours) == HEADER_BYTES, f"a long header: {owner}"
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
        f"--disk-kv {path.parent} holds pages with {name} {old.get(name)}, and this server has {owner.get(name)}: "
        "give another folder, or delete that one"
    )


def _reserve(fd: int, folder: Path, size: int) -> None:
    """Give the file `size` bytes of the disk: a hole could not be filled once the disk is full."""
    disk, before = os.fstatvfs(fd), os.fstat(fd).st_size
    if size - before > (free := disk.f_bavail * disk.f_frsize):
        raise ConfigError(f"--disk-kv {folder} lacks space: {size / GB:.1f} GB are asked for, {free / GB:.1f} are free")
    os.ftruncate(fd, min(size, before))
    os.posix_fallocate(fd, 0, size)


def _page_seconds(folder: Path, stride: int) -> float:
    """Measure how long the disk takes to read `stride` bytes that are not in memory."""
    with TemporaryFile(dir=folder, buffering=0) as file:
        file.write(bytes(TRIAL_BYTES))
        os.fsync(file.fileno())
        times: list[float] = []
        while len(times) < TRIALS or sum(times) < TRIAL_S:  # the best, since other processes delay most
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            started = time.perf_counter()
            zlib.crc32(os.pread(file.fileno(), TRIAL_BYTES, 0))
            times.append(time.perf_counter() - started)
    return min(times) * stride / TRIAL_BYTES
