"""Recording work on the device as CUDA graphs that share their memory, and choosing tokens that way."""

from __future__ import annotations

import gc
from collections.abc import Callable
from types import TracebackType
from typing import Final, TypeVar

import torch

from minisgl.layout import Flag
from minisgl.triton.cublas import cublas_linear

T = TypeVar("T")

# What graphs that choose tokens do, by flags of `BatchPlan`. Each does more than the one before, and a step takes the
# first that is enough: so few are captured, and most steps take the cheapest.
TAILS: Final = (
    0,
    Flag.FILTERED,
    Flag.FILTERED | Flag.PENALIZED | Flag.MASKED,
    Flag.FILTERED | Flag.PENALIZED | Flag.MASKED | Flag.LOGPROBS,
)


def tail_of(flags: int) -> int:
    """The first of `TAILS` that is enough for sequences with any of `flags`."""
    wanted = flags & TAILS[-1]
    return next(tail for tail in TAILS if not wanted & ~tail)


class Capture:
    """`with Capture() as capture: graph, result = capture(work)`, as often as wanted.

    All graphs draw on one pool, so they may only be replayed in turn, never at the same time; what a graph computes
    is lost when another is replayed, except for the results that somebody still holds.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # captures cannot use the default one; cuBLAS keeps a workspace for each

    def __enter__(self) -> Capture:
        gc.collect()
        gc.disable()  # what a collection during a capture frees would be freed by calls that are forbidden then
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        gc.enable()

    def __call__(self, work: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        """A graph of what `work` does, and what it returned while it was recorded."""
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            # Once for real: compiles kernels, chooses algorithms, and lets libraries allocate what they keep.
            with cublas_linear.autotuning():
                work()
            self._stream.synchronize()
            # Of this thread only: torch's NCCL asks for the state of events in another one, whenever it likes.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            result = work()
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        return graph, result
