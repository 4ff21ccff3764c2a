"""Llama's decoder. `models/families.py` turns it into others: Qwen, Gemma, Cohere, Mixtral and so on."""

from __future__ import annotations

import math
import re
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Final

import torch

from minisgl.layers.linear import Embedding, LayerNorm, Linear, RMSNorm, Stream
from minisgl.layers.rotary import cos_sin_table, query_scales
from minisgl.models.attention import Attention, LatentAttention
from minisgl.models.gated_delta import GatedDeltaNet
from minisgl.models.gemma4 import BesideMLP, LayerInputs, LayerTail
from minisgl.models.mlp import GatedMLP, PlainMLP, SparseMLP
from minisgl.ops.deferred import finished
from minisgl.ops.quantized import Quantized

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from minisgl.core.plan import Context
    from minisgl.layers.builder import Builder
    from minisgl.layers.linear import Norm
    from minisgl.models.model_config import ModelConfig


IN_LAYER: Final = re.compile(r"model\.layers\.(\d+)\.(.*)")
FEW_LAYERS: Final = 3  # the first, one in the middle and the last


class DecoderLayer:
    """Attention and MLP, with norms before or after each (`Family.norms`).

    With a norm before, one op adds to the residual, normalises and projects. A norm after normalises the sum of the
    ranks' outputs.
    """

    def __init__(
        self,
        builder: Builder,
        config: ModelConfig,
        index: int,
        cos_sin: Tensor,
        q_scale: Tensor | None,
        source: Attention | LatentAttention | None = None,
    ) -> None:
        c, name = config, f"model.layers.{index}"
        assert not isinstance(source, LatentAttention), "layers with latents have their own"
        epsilons = c.norm_eps, c.rms_norm_eps, c.norm_eps, c.rms_norm_eps
        self.norms = [
            None if module is None else make_norm(builder, c, f"{name}.{module}", eps)
            for module, eps in zip(c.family.norms, epsilons, strict=True)
        ]
        self.self_attn: Attention | LatentAttention | GatedDeltaNet
        if index in c.linear_layers:
            self.self_attn = GatedDeltaNet(builder, c, index)
        elif c.latent is not None:
            self.self_attn = LatentAttention(builder, c, c.latent, index, cos_sin, q_scale)
        else:
            self.self_attn = Attention(builder, c, index, cos_sin, q_scale=q_scale, source=source)
        self.mlp = make_mlp(builder, c, index)
        self.tail = LayerTail(builder, c, index) if c.family.has_layer_tail else None
        self._is_parallel = c.family.is_parallel
        self._sum = builder.comm.sum

    def forward(self, stream: Stream, ctx: Context, keep: Tensor | None, inputs: Tensor | None = None) -> Stream:
        """Return the stream [T, H] for the next layer, or [S, H] with `keep`; may overwrite `stream`.

        `keep` [S] int64 has the tokens that are needed after attention. `inputs` [T, size] are the layer's own.
        """
        if self._is_parallel:
            return self._both(stream, ctx, keep)
        stream = self.self_attn.forward(stream, self.norms[0], ctx)
        if keep is not None:
            stream = stream.at(keep)
        stream = self._sum_after_norm(stream, self.norms[1])
        if isinstance(self.mlp, BesideMLP):
            assert self.norms[2] is not None, "experts beside an MLP need a norm before it"
            out = self.mlp.sum_forward(stream, self.norms[2])
        else:
            out = self.mlp.forward(stream, self.norms[2])
        if self.tail is None:
            return self._sum_after_norm(out, self.norms[3])
        assert isinstance(self.norms[3], RMSNorm), "the end of a layer begins with a norm"
        x = finished(out.x) if isinstance(self.mlp, BesideMLP) else self._sum(finished(out.x))
        own = inputs if keep is None or inputs is None else inputs.index_select(0, keep)
        return self.tail.forward(out._replace(x=x), self.norms[3], own)

    def _sum_after_norm(self, stream: Stream, norm: Norm | None) -> Stream:
        if norm is None:
            return stream
        return stream.of(norm.forward(self._sum(finished(stream.x)), finished(stream.residual)))

    def _both(self, stream: Stream, ctx: Context, keep: Tensor | None) -> Stream:
        """Give attention and MLP the same input."""
        assert self.norms[0] is not None, "attention and MLP need a norm before them"
        assert not isinstance(self.mlp, BesideMLP), "experts beside an MLP follow attention"
        normed, total = self.norms[0].sum_add(stream)
        out = stream.of(self.self_attn.forward(stream.of(normed), None, ctx).x, total)
        if keep is not None:
            normed, out = normed.index_select(0, keep), out.at(keep)
        added = finished(self.mlp.forward(out.of(normed), None).x)
        return out._replace(x=added.add_(finished(out.x)))


def make_mlp(builder: Builder, config: ModelConfig, index: int) -> GatedMLP | PlainMLP | SparseMLP | BesideMLP:
    """Return the feed-forward block of a layer."""
    experts = config.experts
    if experts is None or index in experts.dense_layers:
        return (GatedMLP if config.family.is_gated else PlainMLP)(builder, config, index)
    return (BesideMLP if experts.flags.is_beside else SparseMLP)(builder, config, index)


def make_norm(builder: Builder, config: ModelConfig, name: str, eps: float, scale: float = 1.0) -> Norm:
    """Return a norm of the hidden states; its weights are multiplied by `scale`."""
    family, size = config.family, config.hidden_size
    if family.norm == "rms":
        return RMSNorm(builder, name, size, eps, family.norm_offset, scale)
    return LayerNorm(builder, name, size, eps, family.norm_offset, scale, has_bias=family.norm_bias)


def rope_tables(builder: Builder, config: ModelConfig) -> list[Tensor]:
    """Return the `cos_sin_table` of each layer; layers with the same RoPE share a table."""
    kinds = [(rope, layer.head_dim) for rope, layer in zip(config.ropes, config.layers, strict=True)]
    length, device = config.max_position_embeddings, builder.device
    tables = {kind: cos_sin_table(*kind, length, device) for kind in dict.fromkeys(kinds)}
    return [tables[kind] for kind in kinds]


class LlamaModel:
    """The decoder without its head. Callers apply the last norm."""

    def __init__(
        self, embed_tokens: Embedding, layers: Sequence[DecoderLayer], norm: Norm, inputs: LayerInputs | None = None
    ) -> None:
        self.embed_tokens = embed_tokens
        self.inputs = inputs
        self.layers = layers
        self.norm = norm

    def forward(self, input_ids: Tensor, ctx: Context) -> Stream:
        """Return the last hidden states [S, H] of `ctx.batch.logit_tokens`."""
        stream = Stream(self.embed_tokens.summed(input_ids), adapters=ctx.adapters)
        inputs = None if self.inputs is None else self.inputs.summed(input_ids, finished(stream.x), ctx.adapters)
        logit_tokens = ctx.batch.logit_tokens
        # `logit_tokens` is ascending, so equal lengths mean all tokens.
        keep = logit_tokens if len(logit_tokens) != len(input_ids) else None
        last = len(self.layers) - 1
        own_keep = None if last in ctx.taps else keep
        for i, layer in enumerate(self.layers):
            own = None if inputs is None else inputs[i]
            stream = layer.forward(stream, ctx, own_keep if i == last else None, own)
            if i in ctx.taps:
                normed, total = self.norm.sum_add(stream.each(torch.Tensor.clone))
                ctx.taps[i] = normed if i == last else total
        return stream if keep is own_keep else stream.at(logit_tokens)


class LlamaForCausalLM:
    """The whole model. `models/weight.py` fills its weights."""

    def __init__(self, builder: Builder, config: ModelConfig) -> None:
        c = self.config = config
        scales = None
        if c.query_scaling is not None:
            scales = query_scales(*c.query_scaling, c.max_position_embeddings, builder.device)
        scale = c.embedding_scale
        if c.family.scales_embedding is True:  # as Gemma was trained
            scale = float(torch.tensor(scale, dtype=builder.dtype))
        name = f"model.{c.family.names.get('norm', 'norm')}"
        embedding = Embedding(builder, "model.embed_tokens", c.vocab_size, c.hidden_size, scale=scale)
        inputs = LayerInputs(builder, c) if c.layer_input_size else None
        layers: list[DecoderLayer] = []
        for i, table in enumerate(rope_tables(builder, c)):
            kv_of = c.layers[i].kv_of
            source = None if kv_of is None else layers[kv_of].self_attn
            assert not isinstance(source, GatedDeltaNet), "a recurrent layer has no keys to share"
            layers.append(DecoderLayer(builder, c, i, table, scales, source))
        norm = make_norm(builder, c, name, c.norm_eps, c.logit_scale)
        self.model = LlamaModel(embedding, layers, norm, inputs)
        tied = self.model.embed_tokens.weight if config.tie_word_embeddings else None
        shard = builder.balanced_shard(config.vocab_size)  # the same as the embedding's
        self.lm_head = Linear(builder, {"lm_head": shard}, config.hidden_size, bias=c.family.head_bias, tied=tied)
        self.parameters, self.states = tuple(builder.parameters), tuple(builder.states)
        self.mixers, self.recurrences = tuple(builder.mixers), builder.recurrences
        self.adapted = tuple(builder.adapted)

    @property
    def num_parameters(self) -> int:
        """The number of weights of the whole model, over all ranks; tied weights count once."""
        shapes = {source.name: source.shape for p in self.parameters for source in p.sources}
        return sum(map(math.prod, shapes.values()))

    @property
    def quantization(self) -> str:
        """The formats of quantized matrices, or "none"."""
        formats = {str(p.tensor.format) for p in self.parameters if isinstance(p.tensor, Quantized)}
        return ", ".join(sorted(formats)) or "none"

    @contextmanager
    def shortened(self) -> Iterator[None]:
        """Have only FEW_LAYERS layers inside this context if all are alike: they use every kernel of a step."""
        layers = self.model.layers
        if self._has_layers_alike:
            self.model.layers = layers[:FEW_LAYERS]
        try:
            yield
        finally:
            self.model.layers = layers

    @cached_property
    def _has_layers_alike(self) -> bool:
        found: dict[str, list[object]] = {}
        for p in self.parameters:
            if match := IN_LAYER.match(p.sources[0].name):
                index, name = match.groups()
                kind = p.tensor.format if isinstance(p.tensor, Quantized) else p.tensor.dtype
                found.setdefault(index, []).append((name, kind, tuple(p.tensor.shape)))
        first = next(iter(found.values()))
        return all(layer == first for layer in found.values()) and len(self.mixers) == 1

    def hidden(self, input_ids: Tensor, ctx: Context) -> Stream:
        """Run the decoder on token ids [T] int32; return the hidden states [S, H] of `ctx.batch.logit_tokens`."""
        return self.model.forward(input_ids, ctx)

    def normed(self, stream: Stream) -> Tensor:
        """Apply the last norm to `hidden` [S, H]; may overwrite the stream."""
        return self.model.norm.sum_add(stream)[0]

    def logits(self, stream: Stream) -> Tensor:
        """Return logits [S, V] in the model's dtype for `hidden` [S, H]; may overwrite the stream.

        With several ranks, V is this rank's shard of the vocabulary.
        """
        logits = finished(self.lm_head.after_sum_norm(stream, self.model.norm)[0])
        cap = self.config.logit_softcap
        return logits.div_(cap).tanh_().mul_(cap) if cap else logits
