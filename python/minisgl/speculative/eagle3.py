"""The draft head of EAGLE-3 (arXiv:2503.01840): one Llama layer on top of three hidden states of the target."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

import torch

from minisgl.checkpoint import hf
from minisgl.core.errors import ConfigError
from minisgl.layers.linear import Linear, RMSNorm, Stream
from minisgl.models.attention import Attention
from minisgl.models.llama import rope_tables
from minisgl.models.mlp import GatedMLP
from minisgl.models.weight import fill, fill_dummy, open_all
from minisgl.ops.deferred import finished

if TYPE_CHECKING:
    from torch import Tensor

    from minisgl.core.plan import Context
    from minisgl.device.device import Device
    from minisgl.layers.builder import Builder
    from minisgl.speculative.source import DraftSource

OPTIONAL: Final = {"d2t", "t2d", "embed_tokens.weight"}  # the embedding is the target's


class Eagle3Head:
    """At position p, the layer reads hidden states of token p and the embedding of token p + 1, and drafts token p + 2.

    The hidden states come from three layers of the target, joined by `fc`; beyond the last known token they are the
    head's own. `draft_ids` [draft vocabulary] int64 are the token ids of the draft vocabulary.
    """

    def __init__(self, builder: Builder, source: DraftSource) -> None:
        c, name = source.model, "model.layers.0"
        self.fc = Linear(builder, {"fc": c.hidden_size}, 3 * c.hidden_size, bias=False)
        self.embedding_norm = RMSNorm(builder, f"{name}.input_layernorm", c.hidden_size, c.rms_norm_eps)
        self.hidden_norm = RMSNorm(builder, f"{name}.hidden_norm", c.hidden_size, c.rms_norm_eps)
        self.attention = Attention(builder, c, 0, rope_tables(builder, c)[0], in_features=2 * c.hidden_size)
        self.mlp_norm = RMSNorm(builder, f"{name}.post_attention_layernorm", c.hidden_size, c.rms_norm_eps)
        self.mlp = GatedMLP(builder, c, 0)
        self.norm = RMSNorm(builder, "norm", c.hidden_size, c.rms_norm_eps)
        shard = builder.balanced_shard(c.vocab_size)
        self.lm_head = Linear(builder, {"lm_head": shard}, c.hidden_size, bias=False)
        self.parameters, self.states = tuple(builder.parameters), tuple(builder.states)
        self.mixers = tuple(builder.mixers)
        self.draft_ids: Tensor = torch.arange(c.vocab_size, device=builder.device)

    def load(self, source: DraftSource, vocab_size: int, device: Device, dummy: bool) -> None:
        """Fill the weights from the published layout. Raise `ConfigError` naming what does not fit."""
        if dummy:
            fill_dummy(self.parameters)
            return
        with ExitStack() as stack:
            stored = open_all(hf.weight_files(source.folder), stack)
            if (count := len(self.draft_ids)) < vocab_size:
                found = stored.get("d2t")
                if found is None or found.shape != (count,):
                    raise ConfigError(f"the head in {source.folder} has no d2t for its {count} draft tokens")
                self.draft_ids += found.data[:].to(self.draft_ids)
                if bool(((self.draft_ids < 0) | (self.draft_ids >= vocab_size)).any()):
                    raise ConfigError(f"d2t of the head in {source.folder} leads out of the vocabulary")
            # The layer's tensors are named as in a whole model.
            renamed = {name.replace("midlayer.", "model.layers.0."): tensor for name, tensor in stored.items()}
            fill(renamed, self.parameters, OPTIONAL, device)

    def join(self, states: list[Tensor]) -> Tensor:
        """Join the outputs [T, H] of the target's three layers to features [T, H]."""
        return finished(self.fc.forward(torch.cat(states, 1)))

    def forward(self, embedded: Tensor, features: Tensor, ctx: Context, keep: Tensor) -> tuple[Tensor, Tensor]:
        """Compute this rank's logits [S, draft vocabulary], and hidden states [S, H], of the tokens `keep` [S] int64.

        embedded and features [T, H] are the embeddings of the next tokens, and the hidden states of these.
        """
        normed = torch.cat([self.embedding_norm.forward(embedded), self.hidden_norm.forward(features)], 1)
        x = self.attention.attend(finished(self.attention.qkv_proj.forward(normed)), ctx)
        stream = self.mlp.forward(Stream(x, features).at(keep), self.mlp_norm)
        logits, hidden = self.lm_head.after_sum_norm(stream, self.norm)
        return finished(logits), finished(hidden)
