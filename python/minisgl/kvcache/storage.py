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
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
import torch

from minisgl.errors import ConfigError
from minisgl.kvcache.tiers import TierSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

    from minisgl.core import Records
    from minisgl.kvcache.mha_pool import MHAKVPool

_log = logging.getLogger("minisgl.kvcache")

HEADER_BYTES: Final = 4096  # of a file: says whose pages it holds, as JSON
PAGE_HEAD: Final = np.dtype([("name", "<i8"), ("checksum", "<i8")])
GB: Final = 1e9
TRIAL_BYTES: Final = 8 << 20  # written and read to measure a disk
TRIALS: Final = 3


class Store(Protocol):
    """The slots of one tier of one rank."""

    spec: TierSpec

    def store(self, slot: int, name: int, page: int) -> None:
        """Copy a page of the pool to a slot. Raises `OSError`; then the slot holds nothing, or another page."""

    def load(self, slot: int, name: int, page: int) -> None:
        """Copy the page `name` from a slot into the pool. Raises `OSError` if the slot does not hold it intact."""


class HostStore:
    """Slots in host memory, pinned if the pool is on a GPU."""

    def __init__(self, pool: MHAKVPool, size: int, page_seconds: float = 0.0) -> None:
        """Take `size` bytes. Raises `ConfigError` if no page fits."""
        self._pool = pool
        num_slots = _count_slots("--host-kv", size, pool.page_bytes)
        pinned = pool.device.type == "cuda"
        self._memory = torch.empty(num_slots, pool.page_bytes, dtype=torch.uint8, pin_memory=pinned)
        self.spec = TierSpec("host", num_slots, page_seconds)

    def store(self, slot: int, name: int, page: int) -> None:
        self._pool.copy_page(page, self._memory[slot], is_load=False)

    def load(self, slot: int, name: int, page: int) -> None:
        self._pool.copy_page(page, self._memory[slot], is_load=True)


class DiskStore:
    """Slots in a file, each with its page's name and a checksum. The file is found again by the next process."""

    def __init__(self, pool: MHAKVPool, folder: Path, size: int, rank: int, owner: Mapping[str, Any]) -> None:
        """Use `size` bytes of `folder`, all of which are taken from the disk now.

        `owner` says which model's pages these are, and in which form. Raises `ConfigError` if the folder has those of
        another owner, is in use, or if the disk has too little space.
        """
        self._pool = pool
        self._stride = PAGE_HEAD.itemsize + pool.page_bytes
        num_slots = _count_slots("--disk-kv", size - HEADER_BYTES, self._stride)
        self._buffer = torch.empty(self._stride, dtype=torch.uint8, pin_memory=pool.device.type == "cuda")
        self._bytes: Any = self._buffer.numpy()
        self._payload = self._buffer[PAGE_HEAD.itemsize :]
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

    def store(self, slot: int, name: int, page: int) -> None:
        self._pool.copy_page(page, self._payload, is_load=False)
        if self._buffer.is_pinned():
            torch.cuda.current_stream().synchronize()
        self._bytes[: PAGE_HEAD.itemsize] = np.array([(name, self._checksum())], PAGE_HEAD).view(np.uint8)
        written = os.pwrite(self._fd, self._bytes, self._offset(slot))
        if written < self._stride:
            raise OSError(f"only {written} bytes of {self._stride} were written")

    def load(self, slot: int, name: int, page: int) -> None:
        got = os.preadv(self._fd, [self._bytes], self._offset(slot))
        head = self._bytes[: PAGE_HEAD.itemsize].view(PAGE_HEAD)[0]
        if got < self._stride or head["name"] != name or head["checksum"] != self._checksum():
            raise OSError(f"slot {slot} does not hold the page that was stored there")
        self._pool.copy_page(page, self._payload, is_load=True)
        if self._buffer.is_pinned():
            torch.cuda.current_stream().synchronize()  # the buffer is used again

    def _offset(self, slot: int) -> int:
        return HEADER_BYTES + slot * self._stride

    def _checksum(self) -> int:
        return zlib.crc32(self._bytes[PAGE_HEAD.itemsize :])


class Mover:
    """Carries out the moves of plans, in their order. A page that cannot be loaded becomes NaN, as do its logits."""

    def __init__(
        self, pool: MHAKVPool, stores: list[Store], copies: Callable[[bool], AbstractContextManager[object]]
    ) -> None:
        """`copies`: see `Device.copies`."""
        self._pool = pool
        self.stores = stores
        self._copies = copies
        self._is_full = False

    def apply(self, moves: Records) -> None:
        """Carry out MOVE records; a failure costs a log line."""
        with self._copies(bool((moves["is_load"] == 0).any())):
            for page, tier, slot, is_load, name in moves.tolist():
                store = self.stores[tier]
                try:
                    (store.load if is_load else store.store)(slot, name, page)
                except OSError as e:
                    self._fail(store, page, is_load, e)

    def _fail(self, store: Store, page: int, is_load: bool, error: OSError) -> None:
        if is_load:
            self._pool.poison([page])
            _log.warning("a page of the %s tier is lost and will be computed: %s", store.spec.name, error)
        elif not self._is_full:
            self._is_full = True  # a full disk stays full: one line is enough
            _log.warning("pages cannot be written to the %s tier: %s", store.spec.name, error)


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
        times = []
        for _ in range(TRIALS):  # the best, since other processes delay some
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            started = time.perf_counter()
            zlib.crc32(os.pread(file.fileno(), TRIAL_BYTES, 0))
            times.append(time.perf_counter() - started)
    return min(times) * stride / TRIAL_BYTES
