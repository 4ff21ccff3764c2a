"""The gated feed-forward block."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minisgl.layers.linear import Linear

if TYPE_CHECKING:
    from torch import Tensor

    from minisgl.layers.base import Builder
    from minisgl.layers.norm import RMSNorm


class GatedMLP:
    """down(f(gate x) * up x); `name` is the checkpoint's module name, `activation` f, one of `reference.GATES`."""

    def __init__(
        self, builder: Builder, name: str, hidden_size: int, intermediate_size: int, *, bias: bool, activation: str
    ) -> None:
        self.activation = activation
        own = builder.shard(intermediate_size, "intermediate features")
        gate_up = {f"{name}.gate_proj": own, f"{name}.up_proj": own}
        self.gate_up_proj = Linear(builder, gate_up, hidden_size, bias=bias)
        self.down_proj = Linear(builder, {f"{name}.down_proj": hidden_size}, own, bias=bias)
        self._add_norm_gated = builder.ops.add_norm_gated

    def forward(self, x: Tensor, residual: Tensor | None, norm: RMSNorm) -> tuple[Tensor, Tensor]:
        """x, residual [T, H] -> (the block's output for the normalised sum, the sum); `residual` may be overwritten."""
        w = self.gate_up_proj
        gated, total = self._add_norm_gated(x, residual, norm.weight, norm.eps, w.weight, w.bias, self.activation)
        return self.down_proj.forward(gated), total
