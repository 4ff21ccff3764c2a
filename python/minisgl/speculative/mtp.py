"""The layer that a checkpoint has for drafts: multi-token prediction, as in DeepSeek V3 (arXiv:2412.19437, 2.2)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from minisgl.layers.linear import Linear, Stream
from minisgl.models.llama import DecoderLayer, LlamaForCausalLM, make_norm, rope_tables
from minisgl.ops.deferred import finished

if TYPE_CHECKING:
    from torch import Tensor

    from minisgl.core.plan import Context
    from minisgl.layers.builder import Builder
    from minisgl.models.model_config import ModelConfig


class NextTokensLayer:
    """Position p reads the hidden state of token p and the embedding of token p + 1, and drafts token p + 2.

        x = layer(W [embedding_norm(embedding); hidden_norm(hidden)]),   hidden' = norm(x),   logits = head(hidden')

    The hidden states are the target's after its last norm; beyond the last known token, they are the layer's own
    hidden', as in SGLang and vLLM. Embedding and head are the target's: files of DeepSeek and GLM repeat them.
    """

    draft_ids: Tensor | None = None  # the draft vocabulary is the target's

    def __init__(self, builder: Builder, config: ModelConfig, target: LlamaForCausalLM) -> None:
        """`config` is `ModelConfig.next_tokens_layer` of the target's."""
        c = config
        self.embedding_norm = make_norm(builder, c, "embedding_norm", c.norm_eps)
        self.hidden_norm = make_norm(builder, c, "hidden_norm", c.norm_eps)
        self.fc = Linear(builder, {"model.layers.0.join_proj": c.hidden_size}, 2 * c.hidden_size, bias=False)
        self.layer = DecoderLayer(builder, c, 0, rope_tables(builder, c)[0], None)
        self.norm = make_norm(builder, c, "norm", c.norm_eps)
        self.lm_head = target.lm_head
        self.parameters, self.states = tuple(builder.parameters), tuple(builder.states)
        self.mixers = tuple(builder.mixers)

    def join(self, states: list[Tensor]) -> Tensor:
        """Return the hidden states [T, H] of the target, the only ones that it gives."""
        return states[0]

    def forward(self, embedded: Tensor, features: Tensor, ctx: Context, keep: Tensor) -> tuple[Tensor, Tensor]:
        """Compute this rank's logits [S, its shard of V], and hidden states [S, H], of the tokens `keep` [S] int64.

        embedded and features [T, H] are the embeddings of the next tokens, and the hidden states of these.
        """
        joined = torch.cat([self.embedding_norm.forward(embedded), self.hidden_norm.forward(features)], 1)
        stream = self.layer.forward(Stream(finished(self.fc.forward(joined))), ctx, keep)
        hidden = self.norm.sum_add(stream)[0]
        return finished(self.lm_head.forward(hidden)), hidden
