"""The Llama-shaped decoder, which the flags in `ModelConfig` turn into Mistral, Qwen, Phi-3 or Mixtral."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar, Protocol

from minisgl.layers.linear import Embedding, Linear, RMSNorm
from minisgl.layers.rotary import cos_sin_table
from minisgl.models.attention import Attention
from minisgl.models.mlp import GatedMLP, SparseMLP
from minisgl.ops.quantized import Quantized

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from minisgl.core import Context
    from minisgl.layers.builder import Builder
    from minisgl.models.model_config import ModelConfig


class DecoderLayer(Protocol):
    """A decoder layer of any family."""

    def forward(self, x: Tensor, residual: Tensor | None, ctx: Context, keep: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the (x, residual) [T, H] for the next layer.

        `residual` is None in the first layer. `keep` [S] int64 selects the tokens that are needed after attention.
        """


class LlamaDecoderLayer:
    """Attention and MLP, each behind a norm; addition to the residual, norm and projection are one op."""

    def __init__(self, builder: Builder, config: ModelConfig, index: int, cos_sin: Tensor) -> None:
        c, name = config, f"model.layers.{index}"
        self.input_layernorm = RMSNorm(builder, f"{name}.input_layernorm", c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(builder, c, index, cos_sin)
        self.post_attention_layernorm = RMSNorm(
            builder, f"{name}.post_attention_layernorm", c.hidden_size, c.rms_norm_eps
        )
        is_dense = c.experts is None or index in c.experts.dense_layers
        self.mlp = GatedMLP(builder, c, index) if is_dense else SparseMLP(builder, c, index)

    def forward(self, x: Tensor, residual: Tensor | None, ctx: Context, keep: Tensor | None) -> tuple[Tensor, Tensor]:
        x, residual = self.self_attn.forward(x, residual, self.input_layernorm, ctx)
        if keep is not None:
            x, residual = x.index_select(0, keep), residual.index_select(0, keep)
        return self.mlp.forward(x, residual, self.post_attention_layernorm)


def rope_tables(builder: Builder, config: ModelConfig) -> list[Tensor]:
    """Return the `cos_sin_table` of each layer; layers with the same RoPE share a table."""
    ropes = [config.rope if window is None else config.window_rope for window in config.windows]
    tables = {
        rope: cos_sin_table(rope, config.head_dim, config.max_position_embeddings, builder.device)
        for rope in dict.fromkeys(ropes)
    }
    return [tables[rope] for rope in ropes]


class LlamaModel:
    """The decoder without its head; callers apply the last norm."""

    def __init__(self, embed_tokens: Embedding, layers: Sequence[DecoderLayer], norm: RMSNorm) -> None:
        self.embed_tokens = embed_tokens
        self.layers = layers
        self.norm = norm

    def forward(self, input_ids: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
        """Compute (x, residual) [S, H] of `ctx.batch.logit_tokens`, which add up to the final hidden states."""
        x, residual = self.embed_tokens.forward(input_ids), None
        logit_tokens = ctx.batch.logit_tokens
        # Ascending, so equal lengths mean all tokens.
        keep = logit_tokens if len(logit_tokens) != len(input_ids) else None
        last = len(self.layers) - 1
        for i, layer in enumerate(self.layers):
            x, residual = layer.forward(x, residual, ctx, keep if i == last else None)
            if i in ctx.taps:  # the sum over the ranks is that of the norm, and both arguments may be overwritten
                ctx.taps[i] = self.norm.add(x.clone(), residual.clone())[1]
        assert residual is not None, "a model has at least one layer"
        return x, residual


class LlamaForCausalLM:
    """The whole model; weights are filled by `models.weight`."""

    has_post_norms: ClassVar[bool] = False  # a norm between a block and the residual

    def __init__(self, builder: Builder, config: ModelConfig) -> None:
        self.config = config
        self.model = self._decoder(builder, config)
        tied = self.model.embed_tokens.weight if config.tie_word_embeddings else None
        shard = builder.balanced_shard(config.vocab_size)  # as the embedding's
        self.lm_head = Linear(builder, {"lm_head": shard}, config.hidden_size, bias=False, tied=tied)
        self.parameters = tuple(builder.parameters)

    def _decoder(self, builder: Builder, config: ModelConfig) -> LlamaModel:
        """Build the decoder; other families override this."""
        return LlamaModel(
            Embedding(builder, "model.embed_tokens", config.vocab_size, config.hidden_size),
            [LlamaDecoderLayer(builder, config, i, table) for i, table in enumerate(rope_tables(builder, config))],
            RMSNorm(builder, "model.norm", config.hidden_size, config.rms_norm_eps),
        )

    @property
    def num_parameters(self) -> int:
        """The number of elements of the whole model's weights, with tied weights counted once."""
        shapes = {source.name: source.shape for p in self.parameters for source in p.sources}
        return sum(map(math.prod, shapes.values()))

    @property
    def quantization(self) -> str:
        """The formats in which matrices are held, besides the model's dtype."""
        formats = {str(p.tensor.format) for p in self.parameters if isinstance(p.tensor, Quantized)}
        return ", ".join(sorted(formats)) or "none"

    def hidden(self, input_ids: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
        """Compute (x, residual) [S, H] of `ctx.batch.logit_tokens`, the input of `logits`, from token ids [T] int32."""
        return self.model.forward(input_ids, ctx)

    def normed(self, x: Tensor, residual: Tensor) -> Tensor:
        """Apply the last norm to the (x, residual) [S, H] of `hidden`; `residual` may be overwritten."""
        return self.model.norm.add(x, residual)[0]

    def logits(self, x: Tensor, residual: Tensor) -> Tensor:
        """Compute logits [S, V] in the model's dtype from (x, residual) [S, H] of `hidden`.

        `residual` may be overwritten. With several ranks, V is this rank's shard.
        """
        return self.lm_head.after_norm(x, residual, self.model.norm)[0]
