"""16-bit and FP8 GEMMs by cuBLAS, whose kernels are loaded at the start."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from minisgl.core.plan import TILE_TOKENS

# cuBLAS may choose another kernel for every number of rows. These are all numbers of sampled sequences, and the whole
# tiles of tokens to which the scheduler cuts prompts (`scheduler/budget.py`).
LOADED_ROWS: Final = (*range(2, 257), *range(288, 4096, 32), *range(4096, 16385, TILE_TOKENS))


class CublasLinear:
    """GEMMs whose kernels can be loaded ahead of their first use.

    The first launch of a kernel waits until the device is idle, which takes 80 to 110 ms under load.
    """

    def __init__(self) -> None:
        self._is_loading = False
        self._loaded: dict[tuple[object, ...], int] = {}  # up to this many rows

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Inside this context, every uncaptured call also loads the kernels for fewer rows of the same weight."""
        self._is_loading = True
        try:
            yield
        finally:
            self._is_loading = False

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [M, K] contiguous, weight [N, K], bias [N] -> [M, N]."""
        return self._loaded_product(weight, bias is None, len(x), lambda rows: F.linear(x[:rows], weight, bias))

    def scaled(self, x: Tensor, weight: Tensor, scales: tuple[Tensor, Tensor] | None, dtype: torch.dtype) -> Tensor:
        """x [M, K] and weight [N, K] float8_e4m3fn, M a multiple of 16 -> [M, N] in `dtype`.

        The scales of x and weight are per row, [1, M] and [N, 1], or per block, [K / 128, M] and [N / 128, K / 128].
        None selects cuBLAS's kernels for per-tensor scales, which are faster, with both scales 1.
        """

        def product(rows: int) -> Tensor:
            own = other = _one(x.device)
            if scales is not None:
                groups = len(scales[0])
                own, other = scales[0].view(-1)[: groups * rows].view(groups, rows).t(), scales[1].t()
            # No fast accumulation: with it, a sum of 12,288 positive terms was off by 20 %.
            # Per-row scales need a bfloat16 result.
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
    """Return the scale 1 in float32. The first call, which is not captured, creates it."""
    return torch.ones((), device=device)


def _can_load(weight: Tensor) -> bool:
    return weight.is_cuda and not torch.cuda.is_current_stream_capturing()


cublas_linear: Final = CublasLinear()
