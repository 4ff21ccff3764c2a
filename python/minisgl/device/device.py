"""The interface of a device, and the CPU. Only this room distinguishes types of devices."""

from __future__ import annotations

import ctypes
import mmap
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from minisgl.core.rounding import round_up
from minisgl.device.machine import available_memory, usable_cores

Pending = Callable[[], npt.NDArray[np.int32]]
"""Submitted work: a call blocks until the work is done, and returns its result on the host."""

Copying = Any
"""Copies that may still run, as the device knows them."""


class Uploader(Protocol):
    """Copies host tensors into tensors of a device, for one loading thread."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Overwrite `target` with the host tensor `source` of the same shape and any float dtype, asynchronously."""

    def run(self, work: Callable[[Callable[[torch.Tensor], torch.Tensor]], object]) -> None:
        """Call `work` with a function that copies a host tensor to the device; all runs in order, asynchronously."""

    def finish(self) -> None:
        """Block until all copies are done."""


class Device(ABC):
    """Holds tensors and runs work in the order of `submit`, which does not wait for the work."""

    torch_device: torch.device
    is_async: bool  # whether planning ahead on the host saves time

    @property
    def type(self) -> str:
        return self.torch_device.type

    @abstractmethod
    def upload(self, *arrays: npt.NDArray[np.int32]) -> list[torch.Tensor]:
        """Return copies of the arrays on the device, in order. The arrays may be changed afterwards."""

    @abstractmethod
    def submit(self, work: Callable[[], torch.Tensor], flops: float) -> Pending:
        """Run `work` after all earlier work, and copy its int32 result to the host.

        `flops` is a rough number of floating-point operations, for devices that choose their threads by it.
        """

    @abstractmethod
    def copy(self, work: Callable[[], None], *, is_load: bool, after: Sequence[Copying]) -> Copying:
        """Run copies beside submitted work, after the copies `after`. Loads keep their order; so do stores."""

    @abstractmethod
    def join(self, copies: Sequence[Copying]) -> None:
        """Make work that is submitted later wait for these copies."""

    @abstractmethod
    def uploader(self) -> Uploader:
        """Create an uploader for one thread. Copying takes no memory besides the tensors and its buffers."""

    @abstractmethod
    def use_large_pages(self, tensor: torch.Tensor) -> None:
        """Ask the system for large memory pages for a new, unwritten `tensor`."""

    @abstractmethod
    def free_memory(self) -> int:
        """Return the bytes that can still be allocated."""

    @abstractmethod
    def peak_memory(self, work: Callable[[], object]) -> int:
        """Run `work` and return its peak memory in bytes; return 0 without running it if the device cannot measure."""

    @abstractmethod
    def describe(self) -> str:
        """Return a name for messages."""


# With two threads on two idle cores, a step of 16 rows of the built-in model (0.2 GFLOP) is 1.3 x as fast as with one,
# and a chunk of 500 tokens (7 GFLOP) 1.9 x. If another process is busy, the former is up to 100 x slower
# (docs/notebook/cpu-step.md).
SMALL_WORK_FLOPS = 1e9
HUGE_PAGE = 2 << 20


class _CpuUploader:
    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def run(self, work: Callable[[Callable[[torch.Tensor], torch.Tensor]], object]) -> None:
        work(lambda source: source)

    def finish(self) -> None:
        pass


class CpuDevice(Device):
    """The host: work is done when `submit` returns."""

    is_async = False

    def __init__(self, threads: int | None = None, num_processes: int = 1) -> None:
        """Use an equal part of the cores and memory, for one of `num_processes` processes."""
        self.torch_device = torch.device("cpu")
        self.num_processes = num_processes
        self.threads = threads or max(1, usable_cores() // num_processes)
        torch.set_num_threads(self.threads)

    def upload(self, *arrays: npt.NDArray[np.int32]) -> list[torch.Tensor]:
        return [torch.from_numpy(array.copy()) for array in arrays]

    def submit(self, work: Callable[[], torch.Tensor], flops: float) -> Pending:
        self.use_threads_for(flops)
        return work().numpy

    def use_threads_for(self, flops: float) -> None:
        """Use all threads for large work, and one for small work.

        A step of a tiny model has hundreds of parallel regions of some microseconds. If the cores are busy, each region
        may wait a time slice for the other thread.
        """
        threads = self.threads if flops > SMALL_WORK_FLOPS else 1
        if threads != torch.get_num_threads():
            torch.set_num_threads(threads)

    def copy(self, work: Callable[[], None], *, is_load: bool, after: Sequence[Copying]) -> Copying:
        self.use_threads_for(0.0)  # a page is small, too
        work()
        return None

    def join(self, copies: Sequence[Copying]) -> None:
        pass

    def uploader(self) -> Uploader:
        return _CpuUploader()

    def use_large_pages(self, tensor: torch.Tensor) -> None:
        """Call madvise: with large pages, writing new memory was 2.5 x as fast, and reading K/V 1.3 x."""
        start = round_up(tensor.data_ptr(), mmap.PAGESIZE)
        size = tensor.data_ptr() + tensor.nbytes - start
        if size >= HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
            libc = ctypes.CDLL(None)
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), mmap.MADV_HUGEPAGE)  # a refusal is harmless

    def free_memory(self) -> int:
        """Return this process's part of the available memory, within its cgroup's limit."""
        return available_memory() // self.num_processes

    def peak_memory(self, work: Callable[[], object]) -> int:
        return 0

    def describe(self) -> str:
        return f"cpu ({self.threads} threads)"
