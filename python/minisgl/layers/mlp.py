"""The gated feed-forward block."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minisgl.layers.linear import Linear

if TYPE_CHECKING:
    from torch import Tensor

    from minisgl.layers.base import Builder


class GatedMLP:
    """down(silu(gate x) * up x); `name` is the checkpoint's module name."""

    def __init__(self, builder: Builder, name: str, hidden_size: int, intermediate_size: int, *, bias: bool) -> None:
        gate_up = {f"{name}.gate_proj": intermediate_size, f"{name}.up_proj": intermediate_size}
        self.gate_up_proj = Linear(builder, gate_up, hidden_size, bias=bias)
        self.down_proj = Linear(builder, {f"{name}.down_proj": hidden_size}, intermediate_size, bias=bias)
        self._silu_and_mul = builder.ops.silu_and_mul

    def forward(self, x: Tensor) -> Tensor:
        """[T, H] -> [T, H]."""
        return self.down_proj.forward(self._silu_and_mul(self.gate_up_proj.forward(x)))
