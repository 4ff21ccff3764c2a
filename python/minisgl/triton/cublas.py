"""Linear layers by cuBLAS, whose kernels are loaded at the start."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from minisgl.core import TILE_TOKENS

# cuBLAS may take another kernel for every number of rows. Among these are all numbers of sequences that sample, and
# whole tiles of tokens, to which the scheduler cuts prompts (`scheduler/budget.py`).
LOADED_ROWS: Final = (*range(2, 257), *range(288, 4096, 32), *range(4096, 16385, TILE_TOKENS))


class CublasLinear:
    """`F.linear`, with kernels for fewer rows loaded beforehand.

    The first launch of a kernel waits until the device is idle: under load, for as long as the steps in flight take (80
    to 110 ms).
    """

    def __init__(self) -> None:
        self._is_loading = False
        self._loaded: dict[tuple[object, ...], int] = {}  # up to this many rows

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Within, every call that is not captured also loads the kernels for fewer rows of its weight."""
        self._is_loading = True
        try:
            yield
        finally:
            self._is_loading = False

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [M, K] contiguous, weight [N, K], bias [N] -> [M, N]."""
        if self._is_loading and _can_load(weight):
            self._load(x, weight, bias)
        return F.linear(x, weight, bias)

    def _load(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        kind = weight.shape, weight.dtype, bias is None
        loaded = self._loaded.get(kind, 0)
        self._loaded[kind] = max(len(x), loaded)
        for rows in LOADED_ROWS:
            if loaded < rows < len(x):
                F.linear(x[:rows], weight, bias)


def _can_load(weight: Tensor) -> bool:
    return weight.is_cuda and not torch.cuda.is_current_stream_capturing()


cublas_linear: Final = CublasLinear()
