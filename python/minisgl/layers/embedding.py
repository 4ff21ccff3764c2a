"""Token embedding and LM head."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from minisgl.layers.base import Builder


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
        self._linear = builder.ops.linear

    def forward(self, x: Tensor) -> Tensor:
        """[S, H] -> logits [S, V] float32."""
        return self._linear(x, self.weight, None).float()
