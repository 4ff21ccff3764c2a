"""RMS normalisation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minisgl.layers.base import Init

if TYPE_CHECKING:
    from torch import Tensor

    from minisgl.layers.base import Builder


class RMSNorm:
    """weight [size]; `name` is the checkpoint's module name."""

    def __init__(self, builder: Builder, name: str, size: int, eps: float) -> None:
        self.weight = builder.parameter({f"{name}.weight": size}, init=Init.ONES)
        self.eps = eps
        self._norm = builder.ops.rms_norm
        self._add_norm = builder.ops.add_rms_norm

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> the same shape."""
        return self._norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(normalised sum, sum) of [T, size] each; `residual` may be overwritten."""
        return self._add_norm(x, residual, self.weight, self.eps)
