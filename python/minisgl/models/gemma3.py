"""Gemma 3 (arXiv:2503.19786), text only: Llama's blocks, with two more norms in each layer."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from minisgl.layers.linear import Embedding, RMSNorm, Stream
from minisgl.models.attention import Attention
from minisgl.models.llama import LlamaForCausalLM, LlamaModel, rope_tables
from minisgl.models.mlp import GatedMLP
from minisgl.ops.deferred import finished

if TYPE_CHECKING:
    from torch import Tensor

    from minisgl.core.plan import Context
    from minisgl.layers.builder import Builder
    from minisgl.models.model_config import ModelConfig

NORM_OFFSET: Final = 1.0  # norms multiply by 1 + the checkpoint's weight


class Gemma3DecoderLayer:
    """Attention and MLP, each between two norms; the second normalises the sum of the ranks' outputs."""

    def __init__(self, builder: Builder, config: ModelConfig, index: int, cos_sin: Tensor) -> None:
        c, name = config, f"model.layers.{index}"
        norm = partial(RMSNorm, builder, size=c.hidden_size, eps=c.rms_norm_eps, offset=NORM_OFFSET)
        self.input_layernorm = norm(f"{name}.input_layernorm")
        self.self_attn = Attention(builder, c, index, cos_sin, NORM_OFFSET)
        self.post_attention_layernorm = norm(f"{name}.post_attention_layernorm")
        self.pre_feedforward_layernorm = norm(f"{name}.pre_feedforward_layernorm")
        self.mlp = GatedMLP(builder, c, index)
        self._sum = builder.comm.sum
        self.post_feedforward_layernorm = norm(f"{name}.post_feedforward_layernorm")

    def forward(self, stream: Stream, ctx: Context, keep: Tensor | None) -> Stream:
        stream = self.self_attn.forward(stream, self.input_layernorm, ctx)
        if keep is not None:
            stream = stream.at(keep)
        stream = self._sum_after_norm(stream, self.post_attention_layernorm)
        stream = self.mlp.forward(stream, self.pre_feedforward_layernorm)
        return self._sum_after_norm(stream, self.post_feedforward_layernorm)

    def _sum_after_norm(self, stream: Stream, norm: RMSNorm) -> Stream:
        return Stream(norm.forward(self._sum(finished(stream.x)), finished(stream.residual)))


class Gemma3ForCausalLM(LlamaForCausalLM):
    """Gemma 3: embeddings times sqrt(hidden_size), and a separate RoPE for layers with a window."""

    def _decoder(self, builder: Builder, config: ModelConfig) -> LlamaModel:
        c = config
        return LlamaModel(
            Embedding(builder, "model.embed_tokens", c.vocab_size, c.hidden_size, scale=c.hidden_size**0.5),
            [Gemma3DecoderLayer(builder, c, i, table) for i, table in enumerate(rope_tables(builder, c))],
            RMSNorm(builder, "model.norm", c.hidden_size, c.rms_norm_eps, NORM_OFFSET),
        )
