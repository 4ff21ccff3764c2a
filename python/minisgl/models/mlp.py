"""Feed-forward blocks: a gated MLP, or experts of which a router selects a few per token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minisgl.layers.linear import Linear, Stream
from minisgl.ops.deferred import finished

if TYPE_CHECKING:
    from minisgl.layers.builder import Builder, Rows
    from minisgl.layers.linear import RMSNorm
    from minisgl.models.model_config import ModelConfig


class GatedMLP:
    """The MLP of layer `index`: down(f(gate(x)) * up(x)), where f is the model's activation (`reference.GATES`)."""

    def __init__(self, builder: Builder, config: ModelConfig, index: int) -> None:
        c, name = config, f"model.layers.{index}.mlp"
        self.activation = c.activation
        shard = builder.shard(c.intermediate_size, "intermediate features")
        gate_up: dict[str, Rows] = {f"{name}.gate_proj": shard, f"{name}.up_proj": shard}
        if c.fused_projections:
            gate_up = {f"{name}.gate_up_proj": (shard, shard)}
        self.gate_up_proj = Linear(builder, gate_up, c.hidden_size, bias=c.mlp_bias)
        self.down_proj = Linear(builder, {f"{name}.down_proj": c.hidden_size}, shard, bias=c.mlp_bias)

    def forward(self, stream: Stream, norm: RMSNorm) -> Stream:
        """Return the stream [T, H] with this rank's part of the block's output, for the normalised `stream`.

        `stream` may be overwritten.
        """
        gated, total = self.gate_up_proj.after_sum_norm(stream, norm, self.activation)
        return Stream(self.down_proj.forward(gated), total)


class SparseMLP:
    """The mixture of experts of layer `index`; see `ops/reference.py: moe`.

    The weights are router [E, H], gate_up [E, 2I, H] and down [E, H, I]. Each rank has a shard of I of all experts.
    """

    def __init__(self, builder: Builder, config: ModelConfig, index: int) -> None:
        assert config.experts is not None, "the model has no experts"
        self.experts, hidden_size = config.experts, config.hidden_size
        count, name = self.experts.count, f"model.layers.{index}.{self.experts.flags.module}"
        gate, up, down = self.experts.flags.parts
        experts = [f"{name}.experts.{e}" for e in range(count)]
        self.router = Linear(builder, {f"{name}.gate": count}, hidden_size, bias=False)
        shard = builder.shard(self.experts.intermediate_size, "intermediate features of an expert")
        gate_up_parts = {f"{e}.{part}.weight": shard for e in experts for part in (gate, up)}
        down_parts = {f"{e}.{down}.weight": hidden_size for e in experts}
        self.gate_up = builder.experts(gate_up_parts, hidden_size, count)
        self.down = builder.experts(down_parts, shard, count)
        self._moe = builder.ops.moe

    def forward(self, stream: Stream, norm: RMSNorm) -> Stream:
        """Return what `GatedMLP.forward` does."""
        normed, total = norm.sum_add(stream)
        router_logits, experts = finished(self.router.forward(normed)), self.experts
        out = self._moe(normed, router_logits, self.gate_up, self.down, experts.top_k, experts.normalise)
        return Stream(out, total)
