"""Token embedding and LM head."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from minisgl.layers.base import Builder
    from minisgl.layers.norm import RMSNorm


class Embedding:
    """weight [V, H], of which each rank has a run of tokens.

    Rows are multiplied by `scale`, rounded to the model's dtype, unless that is 1.
    """

    def __init__(self, builder: Builder, name: str, vocab_size: int, hidden_size: int, scale: float = 1.0) -> None:
        self.scale = float(torch.tensor(scale, dtype=builder.dtype))
        self._own = builder.balanced_shard(vocab_size)
        self.weight = builder.parameter({f"{name}.weight": self._own}, hidden_size)
        self._all_reduce, self._embedding = builder.ops.all_reduce, builder.ops.embedding

    def forward(self, ids: Tensor) -> Tensor:
        """[T] int32 -> [T, H]."""
        own = self._own
        if own.count == own.size:
            x = self._embedding(ids, self.weight)
        else:
            is_own = (ids >= own.start) & (ids < own.stop)
            x = self._embedding((ids - own.start).clamp(0, own.count - 1), self.weight)
            x = self._all_reduce(x.masked_fill_(~is_own.unsqueeze(1), 0.0))
        return x if self.scale == 1.0 else x.mul_(self.scale)


class LMHead:
    """weight [V, H]: its own, or the embedding's when `tied`; each rank has the same run of tokens as there."""

    def __init__(self, builder: Builder, name: str, vocab_size: int, hidden_size: int, tied: Embedding | None) -> None:
        if tied is None:
            self.weight = builder.parameter({f"{name}.weight": builder.balanced_shard(vocab_size)}, hidden_size)
        else:
            self.weight = tied.weight
        self._add_norm_linear = builder.ops.add_norm_linear

    def forward(self, x: Tensor, residual: Tensor | None, norm: RMSNorm) -> Tensor:
        """Final hidden states [S, H], as x + residual and before their norm -> logits [S, V] in the model's dtype.

        With several ranks those of this rank's tokens only.
        """
        return self._add_norm_linear(x, residual, norm.weight, norm.eps, self.weight, None)[0]
