"""An NVIDIA GPU: all work runs in order in one stream, and integers travel through pinned buffers."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from minisgl.core.rounding import ceil_div, round_up
from minisgl.device.device import Copying, Device, Pending, Uploader

RING: Final = 4  # buffers for each direction: more than the steps in flight
UPLOADER_RING: Final = 2  # one buffer is written while the other one is copied
FIRST_INTS: Final = 1 << 15  # initial size of a buffer, enough for 8,192 tokens: to grow a buffer waits for the device
ALIGN: Final = 4  # ints, because kernels load 16 bytes at a time


class CudaDevice(Device):
    """One GPU, whose work runs in this thread's current stream.

    An asynchronous copy reads a pinned buffer after the call returns, so each buffer has an event that marks when the
    buffer may be written again.
    """

    is_async = True

    def __init__(self, index: int) -> None:
        # With a workspace, cuBLASLt prefers FP8 kernels that schedule tiles by a counter, which a memset clears first:
        # 5 us more a GEMM. Kernels without one are as fast. In KiB; PyTorch reads this at the first cuBLASLt call.
        os.environ.setdefault("CUBLASLT_WORKSPACE_SIZE", "0")
        self.torch_device = torch.device("cuda", index)
        torch.cuda.set_device(self.torch_device)
        self.has_fp8 = torch.cuda.get_device_capability(index) >= (8, 9)  # its kernels multiply quantized matrices
        self._up, self._down = _Ring(), _Ring()
        self._stores, self._loads, self._ahead = (torch.cuda.Stream(self.torch_device) for _ in range(3))

    def upload(self, *arrays: npt.NDArray[np.int32]) -> list[torch.Tensor]:
        """Upload all arrays by one copy."""
        starts, total = [], 0
        for array in arrays:
            starts.append(total)
            total += round_up(array.size, ALIGN)
        buffer = self._up.next()
        host = buffer.reserve(total)
        for array, start in zip(arrays, starts, strict=True):
            host.numpy()[start : start + array.size] = array.reshape(-1)
        device = host.to(self.torch_device, non_blocking=True)
        buffer.event.record()
        return [
            device[start : start + array.size].view(array.shape) for array, start in zip(arrays, starts, strict=True)
        ]

    def upload_into(self, target: torch.Tensor, array: npt.NDArray[np.int32]) -> None:
        """Overwrite `target` [n] int32 on the device with `array` [n], after all work submitted before."""
        buffer = self._up.next()
        host = buffer.reserve(array.size)
        host.numpy()[:] = array
        target.copy_(host, non_blocking=True)
        buffer.event.record()

    def copy_ahead(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy from pinned memory to the device beside the work submitted before; work submitted later waits for it.

        In the order of all other work, a copy would take 6 to 12 us of an H200, and a kernel that reads the host's
        memory 8 us for each load that depends on another.
        """
        with torch.cuda.stream(self._ahead):
            target.copy_(source, non_blocking=True)
        torch.cuda.current_stream(self.torch_device).wait_stream(self._ahead)

    def submit(self, work: Callable[[], torch.Tensor], flops: float) -> Pending:
        result = work()
        buffer = self._down.next()
        host = buffer.reserve(result.numel()).view(result.shape)
        host.copy_(result, non_blocking=True)
        buffer.event.record()

        def wait() -> npt.NDArray[np.int32]:
            buffer.event.synchronize()
            array: npt.NDArray[np.int32] = host.numpy().copy()  # the buffer is reused after RING results
            return array

        return wait

    def copy(self, work: Callable[[], None], *, is_load: bool, after: Sequence[Copying]) -> Copying:
        stream = self._loads if is_load else self._stores
        for event in after:
            stream.wait_event(event)
        with torch.cuda.stream(stream):
            work()
            event = torch.cuda.Event()
            event.record()
        return event

    def join(self, copies: Sequence[Copying]) -> None:
        for event in copies:
            torch.cuda.current_stream(self.torch_device).wait_event(event)

    def uploader(self) -> Uploader:
        return _CudaUploader(self.torch_device)

    def use_large_pages(self, tensor: torch.Tensor) -> None:
        pass

    def free_memory(self) -> int:
        """Return the driver's free memory plus the unused memory of torch's allocator."""
        free: int = torch.cuda.mem_get_info(self.torch_device)[0]
        return free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()

    def peak_memory(self, work: Callable[[], object]) -> int:
        work()  # on first use, libraries allocate memory that they keep
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        torch.cuda.synchronize()
        peak: int = torch.cuda.max_memory_allocated() - before
        torch.cuda.empty_cache()
        return peak

    def describe(self) -> str:
        return torch.cuda.get_device_name(self.torch_device)


class _CudaUploader:
    """Pinned buffers in turn and a separate stream: one piece is read while another is copied to the device.

    Dtypes are converted on the device, so that only the stored bytes travel.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ring = _Ring(UPLOADER_RING)
        self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))  # which may still use the targets' memory

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if target.dtype is source.dtype:
            with torch.cuda.stream(self._stream):
                self._through_pinned(source, lambda host: target.copy_(host, non_blocking=True))
        else:
            self.run(lambda upload: target.copy_(upload(source)))

    def run(self, work: Callable[[Callable[[torch.Tensor], torch.Tensor]], object]) -> None:
        with torch.cuda.stream(self._stream):  # also makes the stream's device the current one of this thread
            work(lambda source: self._through_pinned(source, lambda host: host.to(self._device, non_blocking=True)))

    def _through_pinned(self, source: torch.Tensor, copy: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        buffer = self._ring.next()
        host = buffer.reserve(ceil_div(source.nbytes, 4)).view(torch.uint8)[: source.nbytes]
        host = host.view(source.dtype).view(source.shape)
        host.copy_(source)
        result = copy(host)
        buffer.event.record()
        return result

    def finish(self) -> None:
        self._stream.synchronize()


class _Pinned:
    """Page-locked int32 host memory, and the event after its last use."""

    def __init__(self) -> None:
        self.event = torch.cuda.Event()
        self._memory = torch.empty(FIRST_INTS, dtype=torch.int32, pin_memory=True)

    def reserve(self, count: int) -> torch.Tensor:
        if count > len(self._memory):
            self._memory = torch.empty(1 << (count - 1).bit_length(), dtype=torch.int32, pin_memory=True)
        return self._memory[:count]


class _Ring:
    def __init__(self, size: int = RING) -> None:
        self._buffers = [_Pinned() for _ in range(size)]
        self._turn = 0

    def next(self) -> _Pinned:
        self._turn = (self._turn + 1) % len(self._buffers)
        buffer = self._buffers[self._turn]
        buffer.event.synchronize()
        return buffer
