"""Results that are not computed yet, since their reader may do the rest of the work with its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, overload

import torch
from torch import Tensor


class Work(Protocol):
    """What is left to do for a result."""

    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...

    def finish(self) -> Tensor:
        """Return the result."""


class Deferred:
    """A projection's result [T, N], which `finished` computes, once; `work` is then None.

    Only the projection that reads it may take over `work`, which saves a kernel. The kernels that quantize rows
    (`kernels/triton/quantized.py`) take a GEMM's `Products`: they apply scales, bias and activation. The GEMV that
    follows one or more GEMVs makes them one kernel (`kernels/hopper/gemv.py: Chain`). A result that is read after the
    end of a CUDA graph must be finished inside the graph.
    """

    def __init__(self, work: Work) -> None:
        self.work: Work | None = work
        self.shape, self.dtype, self.device = torch.Size(work.shape), work.dtype, work.device
        self._tensor: Tensor | None = None

    def __len__(self) -> int:
        return self.shape[0]

    def finished(self) -> Tensor:
        """Return the result, always the same tensor."""
        if self.work is not None:
            self._tensor, self.work = self.work.finish(), None
        assert self._tensor is not None, "the deferred result has neither a tensor nor work"
        return self._tensor


Result = Tensor | Deferred


@overload
def finished(x: Result) -> Tensor: ...
@overload
def finished(x: Result | None) -> Tensor | None: ...
def finished(x: Result | None) -> Tensor | None:
    """Return x as a tensor."""
    return x.finished() if isinstance(x, Deferred) else x
