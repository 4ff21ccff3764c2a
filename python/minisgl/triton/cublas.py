"""Linear layers by cuBLAS, in 16 and in 8 bits, whose kernels are loaded at the start."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from minisgl.core import TILE_TOKENS

# cuBLAS may take another kernel for every number of rows. Among these are all numbers of sequences that sample, and
# whole tiles of tokens, to which the scheduler cuts prompts (`scheduler/budget.py`).
LOADED_ROWS: Final = (*range(2, 257), *range(288, 4096, 32), *range(4096, 16385, TILE_TOKENS))


class CublasLinear:
    """Products with kernels for fewer rows loaded beforehand.

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
        return self._loaded_product(weight, bias is None, len(x), lambda rows: F.linear(x[:rows], weight, bias))

    def scaled(self, x: Tensor, weight: Tensor, scales: tuple[Tensor, Tensor] | None, dtype: torch.dtype) -> Tensor:
        """x [M, K] and weight [N, K] in 8 bits, M a multiple of 16 -> [M, N] in `dtype`.

        Scales of x and weight are of rows, [1, M] and [N, 1], or of blocks, [K / 128, M] and [N / 128, K / 128].
        Without any, cuBLAS takes its kernels for one scale, which are faster.
        """

        def product(rows: int) -> Tensor:
            own = other = _one(x.device)
            if scales is not None:
                groups = len(scales[0])
                own, other = scales[0].view(-1)[: groups * rows].view(groups, rows).t(), scales[1].t()
            # Without fast accumulation: the tensor cores' sums of 12,288 positive products were off by 20 % with it.
            # Row scales need a result in bfloat16.
            return torch._scaled_mm(x[:rows], weight.t(), own, other, out_dtype=torch.bfloat16).to(dtype)

        return self._loaded_product(weight, scales and len(scales[0]) == 1, len(x), product)

    def _loaded_product(self, weight: Tensor, kind: object, rows: int, product: Callable[[int], Tensor]) -> Tensor:
        if self._is_loading and _can_load(weight):
            key = weight.shape, weight.dtype, kind
            loaded = self._loaded.get(key, 0)
            self._loaded[key] = max(rows, loaded)
            for fewer in LOADED_ROWS:
                if loaded < fewer < rows and (weight.element_size() > 1 or fewer % 16 == 0):
                    product(fewer)
        return product(rows)


@cache
def _one(device: torch.device) -> Tensor:
    """1 in float32; made by a call before any is captured."""
    return torch.ones((), device=device)


def _can_load(weight: Tensor) -> bool:
    return weight.is_cuda and not torch.cuda.is_current_stream_capturing()


cublas_linear: Final = CublasLinear()
