"""Feed-forward blocks: one gated MLP, or many small ones of which a router selects a few per token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minisgl.layers.linear import Linear

if TYPE_CHECKING:
    from torch import Tensor

    from minisgl.layers.builder import Builder, Rows
    from minisgl.layers.linear import RMSNorm


class GatedMLP:
    """down(f(gate x) * up x); `name` is the checkpoint's module name, f is the `activation` (`reference.GATES`).

    `fused` means that gate and up are one tensor of the checkpoint.
    """

    def __init__(
        self,
        builder: Builder,
        name: str,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool,
        activation: str,
        fused: bool = False,
    ) -> None:
        self.activation = activation
        own = builder.shard(intermediate_size, "intermediate features")
        gate_up: dict[str, Rows] = {f"{name}.gate_proj": own, f"{name}.up_proj": own}
        if fused:
            gate_up = {f"{name}.gate_up_proj": (own, own)}
        self.gate_up_proj = Linear(builder, gate_up, hidden_size, bias=bias)
        self.down_proj = Linear(builder, {f"{name}.down_proj": hidden_size}, own, bias=bias)
        self._add_norm_gated = builder.ops.add_norm_gated

    def forward(self, x: Tensor, residual: Tensor | None, norm: RMSNorm) -> tuple[Tensor, Tensor]:
        """Return (the block's output for the normalised x + residual, x + residual), each [T, H].

        `residual` may be overwritten.
        """
        w = self.gate_up_proj
        gated, total = self._add_norm_gated(x, residual, norm.weight, norm.eps, w.weight, w.bias, self.activation)
        return self.down_proj.forward(gated), total


class SparseMLP:
    """The `top_k` of `num_experts` gated MLPs that the router selects for a token; see `ops/reference.py: moe`.

    router [E, H], gate_up [E, 2I, H], down [E, H, I]; each rank holds a shard of I of all experts. `name` is the
    checkpoint's module name, `parts` are its names of an expert's gate, up and down projections.
    """

    def __init__(
        self,
        builder: Builder,
        name: str,
        hidden_size: int,
        intermediate_size: int,
        *,
        num_experts: int,
        top_k: int,
        normalise: bool,
        parts: tuple[str, str, str],
    ) -> None:
        gate, up, down = parts
        experts = [f"{name}.experts.{e}" for e in range(num_experts)]
        self.router = builder.parameter({f"{name}.gate.weight": num_experts}, hidden_size)
        own = builder.shard(intermediate_size, "intermediate features of an expert")
        gate_up_parts = {f"{e}.{part}.weight": own for e in experts for part in (gate, up)}
        down_parts = {f"{e}.{down}.weight": hidden_size for e in experts}
        self.gate_up = builder.parameter(gate_up_parts, hidden_size).view(num_experts, -1, hidden_size)
        self.down = builder.parameter(down_parts, own).view(num_experts, hidden_size, -1)
        self.top_k, self.normalise = top_k, normalise
        self._add_rms_norm, self._linear, self._moe = builder.ops.add_rms_norm, builder.ops.linear, builder.ops.moe

    def forward(self, x: Tensor, residual: Tensor, norm: RMSNorm) -> tuple[Tensor, Tensor]:
        """Return (the block's output for the normalised x + residual, x + residual), each [T, H].

        `residual` may be overwritten.
        """
        normed, total = self._add_rms_norm(x, residual, norm.weight, norm.eps)
        router_logits = self._linear(normed, self.router, None)
        return self._moe(normed, router_logits, self.gate_up, self.down, self.top_k, self.normalise), total
