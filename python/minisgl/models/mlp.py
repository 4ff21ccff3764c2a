"""Feed-forward blocks: an MLP with or without a gate, or experts of which a router selects a few per token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

from minisgl.layers.linear import Linear, Stream
from minisgl.layers.parameter import Init
from minisgl.ops.deferred import finished
from minisgl.ops.reference import ACTIVATIONS, Experts, chosen_scores, soft_cap

if TYPE_CHECKING:
    from torch import Tensor

    from minisgl.layers.builder import Builder, Rows
    from minisgl.layers.linear import Norm
    from minisgl.models.model_config import ModelConfig
    from minisgl.ops.adapters import TokenSlots


class GatedMLP:
    """The MLP of layer `index`: down(f(gate(x)) * up(x)), where f is the model's activation (`reference.GATES`)."""

    def __init__(
        self, builder: Builder, config: ModelConfig, index: int, module: str = "mlp", size: int | None = None
    ) -> None:
        """`module` is its name in the layer, `size` its intermediate size, by default the model's."""
        c, name = config, f"model.layers.{index}.{module}"
        self.activation = c.activation
        shard = builder.shard(size or c.layers[index].intermediate, "intermediate features")
        gate_up: dict[str, Rows] = {f"{name}.gate_proj": shard, f"{name}.up_proj": shard}
        if "gate_up" in c.family.fused:
            gate_up = {f"{name}.gate_up_proj": (shard, shard)}
        self.gate_up_proj = Linear(builder, gate_up, c.hidden_size, bias=c.mlp_bias)
        self.down_proj = Linear(builder, {f"{name}.down_proj": c.hidden_size}, shard, bias=c.mlp_bias)

    def forward(self, stream: Stream, norm: Norm | None) -> Stream:
        """Return the stream [T, H] with this rank's part of the block's output, for the normalised `stream`.

        `stream` may be overwritten.
        """
        gated, total = self.gate_up_proj.after_sum_norm(stream, norm, self.activation)
        return stream.of(self.down_proj.forward(gated, "", stream.adapters), total)


class PlainMLP:
    """The MLP of layer `index`: down(f(up(x))), where f is the model's activation (`reference.ACTIVATIONS`)."""

    def __init__(self, builder: Builder, config: ModelConfig, index: int) -> None:
        c, name = config, f"model.layers.{index}.mlp"
        up, down = (f"{name}.{c.family.names.get(part, part)}" for part in ("up_proj", "down_proj"))
        self._activation = ACTIVATIONS[c.activation]
        shard = builder.shard(c.layers[index].intermediate, "intermediate features")
        self.up_proj = Linear(builder, {up: shard}, c.hidden_size, bias=c.mlp_bias)
        self.down_proj = Linear(builder, {down: c.hidden_size}, shard, bias=c.mlp_bias)

    def forward(self, stream: Stream, norm: Norm | None) -> Stream:
        """Return what `GatedMLP.forward` does."""
        up, total = self.up_proj.after_sum_norm(stream, norm)
        return stream.of(self.down_proj.forward(self._activation(finished(up)), "", stream.adapters), total)


class SparseMLP:
    """The mixture of experts of layer `index`; see `ops/reference.py: moe`.

    The weights are router [E, H], gate_up [E, 2I, H] and down [E, H, I]. Each rank has a shard of I of all experts. A
    router that does more than softmax is in float32, and the scores of its choice are given to `moe` as logits.
    """

    def __init__(self, builder: Builder, config: ModelConfig, index: int) -> None:
        assert config.experts is not None, "the model has no experts"
        self.experts, hidden_size = config.experts, config.hidden_size
        e, count, flags = self.experts, self.experts.count, self.experts.flags
        name = f"model.layers.{index}" + (f".{flags.module}" if flags.module else "")
        gate, up, down = flags.parts
        experts = [f"{name}.experts.{e}" for e in range(count)]
        self.is_plain = flags.scoring == "softmax" and not flags.bias and not flags.has_groups
        if self.is_plain:
            self.router = Linear(
                builder, {f"{name}.{flags.router}": count}, hidden_size, bias=flags.has_bias, is_fixed=True
            )
        else:
            self.scorer = builder.parameter({f"{name}.{flags.router}.weight": count}, hidden_size, dtype=torch.float32)
            self.bias = self.scorer.new_zeros(1)
            if flags.bias:
                shape = (count,) if flags.bias_rows is None else (flags.bias_rows, count)
                self.bias = builder.parameter({f"{name}.{flags.bias}": shape[0]}, *shape[1:], dtype=torch.float32)
        self.shared, self.shared_gate = None, None
        if self.experts.shared_size:
            module = f"{flags.module}.{flags.shared}"
            self.shared = GatedMLP(builder, config, index, module, self.experts.shared_size)
            if flags.shared_gate:
                self.shared_gate = Linear(builder, {f"{name}.{flags.shared_gate}": 1}, hidden_size, bias=False)
        shard = builder.shard(self.experts.intermediate_size, "intermediate features of an expert")
        up_names = [f"{expert}.{part}" for expert in experts for part in (gate, up)]
        down_names = [f"{expert}.{down}" for expert in experts]
        up_bias = down_bias = None
        if flags.has_bias:
            up_bias = builder.parameter({f"{n}.bias": shard for n in up_names}).view(count, -1)
            down_bias = builder.parameter({f"{n}.bias": hidden_size for n in down_names}).view(count, -1)
            if builder.info.rank != 0:  # as in `Linear`, the others add it to no partial sum
                down_bias = None
        self.weights = Experts(
            builder.experts({f"{n}.weight": shard for n in up_names}, hidden_size, count),
            builder.experts({f"{n}.weight": hidden_size for n in down_names}, shard, count),
            e.top_k,
            e.normalise or not self.is_plain,  # scores are given as logits of a softmax
            up_bias,
            down_bias,
            flags.gate,
            builder.parameter({f"{name}.router.per_expert_scale": count}, init=Init.ONES) if flags.is_beside else None,
        )
        self._moe = builder.ops.moe

    def forward(self, stream: Stream, norm: Norm | None) -> Stream:
        """Return what `GatedMLP.forward` does."""
        normed, total = (finished(stream.x),) * 2 if norm is None else norm.sum_add(stream)
        return stream.of(self.mix(normed, normed, stream.adapters), total)

    def mix(self, normed: Tensor, routed: Tensor, adapters: TokenSlots | None) -> Tensor:
        """Return this rank's part of the block's output for its inputs, and those of the router, each [T, H]."""
        logits, factor = self._route(routed)
        out = self._moe(normed, logits, self.weights)
        if isinstance(factor, torch.Tensor) or factor != 1.0:
            out = (out * factor).to(out.dtype)
        if self.shared is not None:
            shared = finished(self.shared.forward(Stream(normed, None, adapters), None).x)
            if self.shared_gate is not None:
                shared = finished(self.shared_gate.forward(normed, "", adapters)).sigmoid() * shared
            out = out + shared
        return out

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor | float]:
        """Return logits for `moe`, and a factor of its result, a number or [T, 1]."""
        e = self.experts
        if self.is_plain:
            return finished(self.router.forward(x)), e.scale
        scores = chosen_scores(
            soft_cap(F.linear(x.float(), self.scorer), e.softcap),
            self.bias.view(-1),
            e.flags.scoring,
            e.top_k,
            e.groups,
            e.top_groups,
            e.flags.group_best,
        )
        return scores.log(), e.scale if e.normalise else e.scale * scores.sum(1, keepdim=True)
