"""Captures work as CUDA graphs that share one memory pool, and names the tails: the graphs that sample."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Final, TypeVar

import torch

from minisgl.core.layout import Flag
from minisgl.kernels.triton.cublas import cublas_linear

T = TypeVar("T")

# The capabilities of the graphs that sample, as flags. Each has those of its predecessor and more, and a step takes the
# first that suffices: so few graphs are captured, and most steps take the cheapest.
TAILS: Final = (
    0,
    Flag.FILTERED,
    Flag.FILTERED | Flag.PENALIZED | Flag.MASKED,
    Flag.FILTERED | Flag.PENALIZED | Flag.MASKED | Flag.LOGPROBS,
)


def tail_of(flags: int) -> int:
    """Return the first of `TAILS` that suffices for sequences with `flags`."""
    wanted = flags & TAILS[-1]
    return next(tail for tail in TAILS if not wanted & ~tail)


class Capture:
    """Captures graphs: `with Capture() as capture: graph, result = capture(work)`, any number of times.

    All graphs allocate from one pool, so they must be replayed one after the other. Replaying a graph overwrites what
    another one computed, except for results that are still referenced. Before it is captured, work runs once inside
    `rehearsal()`.
    """

    def __init__(self, rehearsal: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        self._rehearsal = rehearsal
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = (
            torch.cuda.Stream()
        )  # the default stream cannot be captured; cuBLAS keeps a workspace for each stream

    def __enter__(self) -> Capture:
        gc.collect()
        gc.disable()  # a collection during a capture could free memory by calls that are forbidden there
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        gc.enable()

    def __call__(self, work: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        """Capture `work`; return the graph, and what `work` returned during the capture."""
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            # Run once first: this compiles kernels, chooses algorithms, and lets libraries allocate their workspaces.
            with self._rehearsal(), cublas_linear.loading():
                work()
            self._stream.synchronize()
            # Check this thread only: torch's NCCL queries events in a thread of its own at any time.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            result = work()
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        return graph, result
