"""Token embedding and LM head."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from minisgl.layers.base import Builder
    from minisgl.layers.norm import RMSNorm


class Embedding:
    """weight [V, H]."""

    def __init__(self, builder: Builder, name: str, vocab_size: int, hidden_size: int) -> None:
        self.weight = builder.parameter({f"{name}.weight": vocab_size}, hidden_size)
        self._embedding = builder.ops.embedding

    def forward(self, ids: Tensor) -> Tensor:
        """[T] int32 -> [T, H]."""
        return self._embedding(ids, self.weight)


class LMHead:
    """weight [V, H]: its own, or the embedding's when `tied`."""

    def __init__(self, builder: Builder, name: str, vocab_size: int, hidden_size: int, tied: Embedding | None) -> None:
        if tied is None:
            self.weight = builder.parameter({f"{name}.weight": vocab_size}, hidden_size)
        else:
            self.weight = tied.weight
        self._add_norm_linear = builder.ops.add_norm_linear

    def forward(self, x: Tensor, residual: Tensor | None, norm: RMSNorm) -> Tensor:
        """Final hidden states [S, H], as x + residual and before their norm -> logits [S, V] in the model's dtype."""
        return self._add_norm_linear(x, residual, norm.weight, norm.eps, self.weight, None)[0]
