"""Two backends: one for the steps with a prompt in them, one for pure decode."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from minisgl.attention.base import AttentionBackend, HeadTransform

if TYPE_CHECKING:
    from torch import Tensor

    from minisgl.core import Batch, Context


@dataclass(frozen=True, slots=True)
class _Chosen:
    backend: AttentionBackend
    metadata: Any


class HybridAttention(AttentionBackend):
    """Chooses by step, so both backends read the same cache."""

    name = "hybrid"

    def __init__(self, prefill: AttentionBackend, decode: AttentionBackend) -> None:
        super().__init__(prefill.spec, prefill.ops)
        self.prefill = prefill
        self.decode = decode
        self.is_capturable = decode.is_capturable

    def prepare(self, batch: Batch, page_table: Tensor) -> _Chosen:
        backend = self.decode if batch.layout.is_decode else self.prefill
        return _Chosen(backend, backend.prepare(batch, page_table))

    def attend(self, qkv: Tensor, heads: HeadTransform, layer_pages: Tensor, ctx: Context) -> Tensor:
        chosen: _Chosen = ctx.attn_metadata
        return chosen.backend.attend(qkv, heads, layer_pages, replace(ctx, attn_metadata=chosen.metadata))

    def forward(self, q: Tensor, layer_pages: Tensor, ctx: Context) -> Tensor:
        chosen: _Chosen = ctx.attn_metadata
        return chosen.backend.forward(q, layer_pages, replace(ctx, attn_metadata=chosen.metadata))
