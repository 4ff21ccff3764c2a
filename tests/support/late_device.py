"""A CPU that is always late: work runs only when the next work is submitted, or when its result is awaited.

Copies between pool and tiers run at once or as late as they may, at random.

A race on a GPU (a buffer reused, a page freed, a row taken over while a step is in flight) becomes a wrong result here,
every time.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
import torch

from minisgl.device.device import Copying, CpuDevice, Pending


class LateCopy:
    def __init__(self, work: Callable[[], None], after: Sequence[LateCopy]) -> None:
        self.work, self.after, self.is_done = work, after, False

    def run(self) -> None:
        if not self.is_done:
            for copy in self.after:
                copy.run()
            self.work()
            self.is_done, self.after = True, ()


class LateWork:
    def __init__(self, device: LateDevice, work: Callable[[], torch.Tensor], copies: Sequence[LateCopy]) -> None:
        self.device, self.work, self.copies = device, work, copies
        self.result: np.ndarray | None = None

    def run(self) -> None:
        for copy in self.copies:
            copy.run()
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
        self.joined: list[LateCopy] = []  # the next work waits for these
        self.newest: dict[bool, LateCopy] = {}
        self.rng = random.Random(5)

    def submit(self, work: Callable[[], torch.Tensor], flops: float) -> Pending:
        while self.pending:
            self.pending.pop(0).run()
        late = LateWork(self, work, self.joined)
        self.joined = []
        if flops:
            self.pending.append(late)
        else:  # copies of a snapshot, which may be freed, and poisoned, with the result of their step
            late.run()
        return late.wait

    def copy(self, work: Callable[[], None], *, is_load: bool, after: Sequence[Copying]) -> Copying:
        before = [self.newest[is_load]] if is_load in self.newest else []
        copy = self.newest[is_load] = LateCopy(work, [*before, *after])
        if self.rng.random() < 0.5:
            copy.run()
        return copy

    def join(self, copies: Sequence[Copying]) -> None:
        self.joined += copies

    def peak_memory(self, work: Callable[[], object]) -> int:
        """Run `work`, as a GPU does at its start: here an index out of range is an error."""
        work()
        return 0
