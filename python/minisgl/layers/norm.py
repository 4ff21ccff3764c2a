"""RMS normalisation: mostly one op with the projection behind it, see `ops/reference.py: add_norm_linear`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from minisgl.layers.base import Init

if TYPE_CHECKING:
    from torch import Tensor

    from minisgl.layers.base import Builder


class RMSNorm:
    """weight [size]; `name` is the checkpoint's module name.

    With an `offset` the weight is what the checkpoint holds plus that, in float32, in which such norms are computed.
    """

    def __init__(self, builder: Builder, name: str, size: int, eps: float, offset: float = 0.0) -> None:
        dtype = torch.float32 if offset else builder.dtype
        self.weight = builder.parameter({f"{name}.weight": size}, init=Init.ONES, dtype=dtype, offset=offset)
        self.eps = eps
        self._all_reduce, self._rms_norm = builder.ops.all_reduce, builder.ops.rms_norm
        self._add_rms_norm = builder.ops.add_rms_norm

    def forward(self, x: Tensor) -> Tensor:
        """What a block has computed, [..., size], normalised; with several ranks it is summed over them first."""
        return self._rms_norm(self._all_reduce(x), self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """x + residual [S, size] normalised; may overwrite `residual`."""
        return self._add_rms_norm(x, residual, self.weight, self.eps)[0]
