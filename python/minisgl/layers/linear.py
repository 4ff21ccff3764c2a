"""Projections. Those that read the same input are one matrix: its parts are stacked in the order given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from minisgl.layers.base import Shard

if TYPE_CHECKING:
    from torch import Tensor

    from minisgl.layers.base import Builder, Size
    from minisgl.layers.norm import RMSNorm


class Linear:
    """x W^T + b; weight [sum of parts, in_features], bias [sum of parts] or None.

    `parts` maps the checkpoint's module names to their output features: one for a plain projection, q, k, v for the
    QKV projection, gate and up for the first half of an MLP. With a share of them a rank has a part of the output; with
    a share of the inputs a part of the sum that the output is, to which rank 0 adds the bias.
    """

    def __init__(self, builder: Builder, parts: Mapping[str, Size], in_features: Size, *, bias: bool) -> None:
        self.weight = builder.parameter({f"{name}.weight": rows for name, rows in parts.items()}, in_features)
        self.bias = builder.parameter({f"{name}.bias": rows for name, rows in parts.items()}) if bias else None
        if isinstance(in_features, Shard) and builder.info.rank != 0:
            self.bias = None
        self._linear = builder.ops.linear
        self._add_norm_linear = builder.ops.add_norm_linear

    def forward(self, x: Tensor) -> Tensor:
        """[T, in_features] -> [T, sum of parts]."""
        return self._linear(x, self.weight, self.bias)

    def after_norm(self, x: Tensor, residual: Tensor | None, norm: RMSNorm) -> tuple[Tensor, Tensor]:
        """(projection of the normalised x + residual, x + residual); `residual` may be overwritten."""
        return self._add_norm_linear(x, residual, norm.weight, norm.eps, self.weight, self.bias)
