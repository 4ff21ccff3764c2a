"""A CPU that is always late: work runs only when the next work is submitted, or when its result is awaited.

A race on a GPU (a buffer reused, a page freed, a row taken over while a step is in flight) becomes a wrong result here,
every time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from minisgl.device.device import Copying, CpuDevice, Pending


class LateWork:
    def __init__(self, device: LateDevice, work: Callable[[], torch.Tensor]) -> None:
        self.device, self.work = device, work
        self.result: np.ndarray | None = None

    def run(self) -> None:
        self.result = self.work().numpy()

    def wait(self) -> np.ndarray:
        while self.result is None:
            self.device.pending.pop(0).run()
        return self.result


class LateDevice(CpuDevice):
    is_async = True

    def __init__(self, threads: int | None = None) -> None:
        super().__init__(threads)
        self.pending: list[LateWork] = []
        self.copying: list[Callable[[], None]] = []

    def submit(self, work: Callable[[], torch.Tensor], flops: float) -> Pending:
        while self.pending:
            self.pending.pop(0).run()
        self.pending.append(LateWork(self, work))
        return self.pending[-1].wait

    def copy(self, work: Callable[[], None], *, is_load: bool, after: Sequence[Copying]) -> Copying:
        """Copy only when `join` or a later copy waits for it."""
        self.join(after)
        self.copying.append(work)
        return work

    def join(self, copies: Sequence[Copying]) -> None:
        for work in [work for work in self.copying if work in copies]:
            self.copying.remove(work)
            work()
