"""Llama's decoder. The flags of `ModelConfig` turn it into Mistral, Qwen, Phi-3 or Mixtral."""

from __future__ import annotations

import math
import re
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Final, Protocol

import torch

from minisgl.layers.linear import Embedding, Linear, RMSNorm, Stream
from minisgl.layers.rotary import cos_sin_table
from minisgl.models.attention import Attention
from minisgl.models.mlp import GatedMLP, SparseMLP
from minisgl.ops.deferred import finished
from minisgl.ops.quantized import Quantized

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from minisgl.core.plan import Context
    from minisgl.layers.builder import Builder
    from minisgl.models.model_config import ModelConfig


IN_LAYER: Final = re.compile(r"model\.layers\.(\d+)\.(.*)")
FEW_LAYERS: Final = 3  # the first, one in the middle and the last


class DecoderLayer(Protocol):
    """The interface of a decoder layer."""

    def forward(self, stream: Stream, ctx: Context, keep: Tensor | None) -> Stream:
        """Return the stream [T, H] for the next layer, or [S, H] with `keep`; may overwrite `stream`.

        `keep` [S] int64 has the tokens that are needed after attention.
        """


class LlamaDecoderLayer:
    """Attention and MLP, each after a norm. One op adds to the residual, normalises and projects."""

    def __init__(self, builder: Builder, config: ModelConfig, index: int, cos_sin: Tensor) -> None:
        c, name = config, f"model.layers.{index}"
        self.input_layernorm = RMSNorm(builder, f"{name}.input_layernorm", c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(builder, c, index, cos_sin)
        self.post_attention_layernorm = RMSNorm(
            builder, f"{name}.post_attention_layernorm", c.hidden_size, c.rms_norm_eps
        )
        is_dense = c.experts is None or index in c.experts.dense_layers
        self.mlp = GatedMLP(builder, c, index) if is_dense else SparseMLP(builder, c, index)

    def forward(self, stream: Stream, ctx: Context, keep: Tensor | None) -> Stream:
        stream = self.self_attn.forward(stream, self.input_layernorm, ctx)
        if keep is not None:
            stream = stream.at(keep)
        return self.mlp.forward(stream, self.post_attention_layernorm)


def rope_tables(builder: Builder, config: ModelConfig) -> list[Tensor]:
    """Return the `cos_sin_table` of each layer; layers with the same RoPE share a table."""
    ropes = [config.rope if window is None else config.window_rope for window in config.windows]
    tables = {
        rope: cos_sin_table(rope, config.head_dim, config.max_position_embeddings, builder.device)
        for rope in dict.fromkeys(ropes)
    }
    return [tables[rope] for rope in ropes]


class LlamaModel:
    """The decoder without its head. Callers apply the last norm."""

    def __init__(self, embed_tokens: Embedding, layers: Sequence[DecoderLayer], norm: RMSNorm) -> None:
        self.embed_tokens = embed_tokens
        self.layers = layers
        self.norm = norm

    def forward(self, input_ids: Tensor, ctx: Context) -> Stream:
        """Return the last hidden states [S, H] of `ctx.batch.logit_tokens`."""
        stream = Stream(self.embed_tokens.summed(input_ids))
        logit_tokens = ctx.batch.logit_tokens
        # `logit_tokens` is ascending, so equal lengths mean all tokens.
        keep = logit_tokens if len(logit_tokens) != len(input_ids) else None
        last = len(self.layers) - 1
        for i, layer in enumerate(self.layers):
            stream = layer.forward(stream, ctx, keep if i == last else None)
            if i in ctx.taps:
                ctx.taps[i] = self.norm.sum_add(stream.each(torch.Tensor.clone))[1]
        return stream


class LlamaForCausalLM:
    """The whole model. `models/weight.py` fills its weights."""

    def __init__(self, builder: Builder, config: ModelConfig) -> None:
        self.config = config
        self.model = self._decoder(builder, config)
        tied = self.model.embed_tokens.weight if config.tie_word_embeddings else None
        shard = builder.balanced_shard(config.vocab_size)  # the same as the embedding's
        self.lm_head = Linear(builder, {"lm_head": shard}, config.hidden_size, bias=False, tied=tied)
        self.parameters, self.states = tuple(builder.parameters), tuple(builder.states)
        self.mixers = tuple(builder.mixers)

    def _decoder(self, builder: Builder, config: ModelConfig) -> LlamaModel:
        """Build the decoder. Other families override this."""
        return LlamaModel(
            Embedding(builder, "model.embed_tokens", config.vocab_size, config.hidden_size),
            [LlamaDecoderLayer(builder, config, i, table) for i, table in enumerate(rope_tables(builder, config))],
            RMSNorm(builder, "model.norm", config.hidden_size, config.rms_norm_eps),
        )

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
        return finished(self.lm_head.after_sum_norm(stream, self.model.norm)[0])
