"""What the layers of Gemma 4 have besides those of other decoders."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from minisgl.layers.linear import Embedding, Linear, RMSNorm, Stream
from minisgl.layers.parameter import Init
from minisgl.models.mlp import GatedMLP, SparseMLP
from minisgl.ops.deferred import finished
from minisgl.ops.reference import ACTIVATIONS

if TYPE_CHECKING:
    from torch import Tensor

    from minisgl.layers.builder import Builder
    from minisgl.layers.linear import Norm
    from minisgl.models.model_config import ModelConfig
    from minisgl.ops.adapters import TokenSlots


class BesideMLP:
    """An MLP and experts that both read the hidden states, each with a norm before and after it.

    The norms are layer `index`'s; that before the MLP is the caller's. The router has a norm without weights, whose
    results `router.scale` multiplies.
    """

    def __init__(self, builder: Builder, config: ModelConfig, index: int) -> None:
        c, name = config, f"model.layers.{index}"
        self.mlp, self.experts = GatedMLP(builder, c, index), SparseMLP(builder, c, index)
        names = ("post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2")
        self.norms = [RMSNorm(builder, f"{name}.{norm}", c.hidden_size, c.rms_norm_eps) for norm in names]
        scales = {f"{name}.router.scale": c.hidden_size}
        self.router_norm = builder.parameter(scales, init=Init.ONES, dtype=torch.float32, scale=c.hidden_size**-0.5)
        self._rms_norm, self._eps, self._sum = builder.ops.rms_norm, c.rms_norm_eps, builder.comm.sum

    def sum_forward(self, stream: Stream, norm: Norm) -> Stream:
        """Return the stream with the block's output [T, H], of all ranks, for the normalised `stream`."""
        normed, total = norm.sum_add(stream)
        after_mlp, before, after = self.norms
        dense = after_mlp.forward(self._sum(finished(self.mlp.forward(stream.of(normed), None).x)))
        routed = self._rms_norm(total, self.router_norm, self._eps)
        mixed = self._sum(self.experts.mix(before.forward(total), routed, stream.adapters))
        return stream.of(after.forward(mixed, dense), total)


class LayerInputs:
    """The inputs of all layers: embeddings of their own, of `layer_input_size`, and projections of the model's."""

    def __init__(self, builder: Builder, config: ModelConfig) -> None:
        self._count, self._size = config.num_layers, config.layer_input_size
        width = self._count * self._size
        # Both parts are divided by sqrt(2); the scale of the projection cancels in the norm, but for its epsilon.
        scale, eps = (self._size / 2) ** 0.5, config.rms_norm_eps * config.hidden_size
        self.embedding = Embedding(builder, "model.embed_tokens_per_layer", config.layer_input_vocab, width, scale)
        self.projection = Linear(builder, {"model.per_layer_model_projection": width}, config.hidden_size, bias=False)
        self.norm = RMSNorm(builder, "model.per_layer_projection_norm", self._size, eps, scale=0.5**0.5)

    def summed(self, ids: Tensor, hidden: Tensor, adapters: TokenSlots | None) -> Tensor:
        """Return [layers, T, size] for token ids [T] and their embeddings [T, H]."""
        shape = (-1, self._count, self._size)
        projected = finished(self.projection.forward(hidden, "", adapters)).view(shape)
        return self.norm.forward(projected, self.embedding.summed(ids).view(shape)).transpose(0, 1)


class LayerTail:
    """The end of layer `index`, from the norm after its MLP on: an MLP of hidden states and inputs, and a scale."""

    def __init__(self, builder: Builder, config: ModelConfig, index: int) -> None:
        c, name = config, f"model.layers.{index}"
        self.scalar = builder.parameter({f"{name}.layer_scalar": 1}, init=Init.ONES)
        self.norm = None
        if size := c.layer_input_size:
            self.gate = Linear(builder, {f"{name}.per_layer_input_gate": size}, c.hidden_size, bias=False)
            self.projection = Linear(builder, {f"{name}.per_layer_projection": c.hidden_size}, size, bias=False)
            self.norm = RMSNorm(builder, f"{name}.post_per_layer_input_norm", c.hidden_size, c.rms_norm_eps)
            self._activation = ACTIVATIONS[c.activation]

    def forward(self, stream: Stream, norm: RMSNorm, inputs: Tensor | None) -> Stream:
        """Return the stream for the block's output, of all ranks, and the residual, each [T, H].

        `norm` is after the block, `inputs` are [T, size].
        """
        x, residual, adapters = finished(stream.x), finished(stream.residual), stream.adapters
        if self.norm is None or inputs is None:
            return stream.of(norm.forward(x, residual, self.scalar))
        hidden = norm.forward(x, residual)
        gated = self._activation(finished(self.gate.forward(hidden, "", adapters))) * inputs
        projected = finished(self.projection.forward(gated, "", adapters))
        return stream.of(self.norm.forward(projected, hidden, self.scalar))
