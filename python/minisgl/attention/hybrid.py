"""Combines two backends: one for prompts, one for decoding sequences."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from minisgl.attention.backend import AttentionBackend, Window
from minisgl.core import SeqLayout

if TYPE_CHECKING:
    from torch import Tensor

    from minisgl.core import Batch, Context
    from minisgl.ops.quantized import Pages
    from minisgl.ops.reference import HeadTransform


@dataclass(frozen=True, slots=True)
class _Part:
    """Consecutive sequences of the step, for one of the backends."""

    backend: AttentionBackend
    batch: Batch
    metadata: Any

    def context(self, ctx: Context) -> Context:
        return replace(ctx, batch=self.batch, attention=self.backend, attn_metadata=self.metadata)


class HybridAttention(AttentionBackend):
    """Splits a mixed step between two backends on the same cache. Decoding sequences come first in a plan."""

    name = "hybrid"

    def __init__(self, prefill: AttentionBackend, decode: AttentionBackend) -> None:
        super().__init__(prefill.spec, prefill.ops)
        self.prefill = prefill
        self.decode = decode
        self.is_capturable = decode.is_capturable
        self.captures_prompts = prefill.captures_prompts
        self.needs_host_lengths = decode.needs_host_lengths  # lengths of prompts are always exact

    def prepare(self, batch: Batch, page_table: Tensor) -> list[_Part]:
        is_prompt = batch.layout.query_lens_host > self.spec.max_queries
        cut = int(is_prompt.argmax()) if is_prompt.any() else len(is_prompt)
        parts = []
        for backend, first, last in ((self.decode, 0, cut), (self.prefill, cut, len(is_prompt))):
            if first < last:
                part = batch if last - first == len(is_prompt) else _sequences(batch, first, last)
                parts.append(_Part(backend, part, backend.prepare(part, page_table)))
        return parts

    def attend(self, qkv: Tensor, heads: HeadTransform, layer_pages: Pages, ctx: Context) -> Tensor:
        parts: list[_Part] = ctx.attn_metadata
        if len(parts) == 1:  # the backend may fuse everything into one kernel
            return parts[0].backend.attend(qkv, heads, layer_pages, parts[0].context(ctx))
        return super().attend(qkv, heads, layer_pages, ctx)

    def forward(self, q: Tensor, layer_pages: Pages, ctx: Context, window: Window = None) -> Tensor:
        parts: list[_Part] = ctx.attn_metadata
        queries = torch.split(q, [part.batch.num_tokens for part in parts])
        out = [p.backend.forward(x, layer_pages, p.context(ctx), window) for p, x in zip(parts, queries, strict=True)]
        return out[0] if len(out) == 1 else torch.cat(out)


def _sequences(batch: Batch, first: int, last: int) -> Batch:
    """Return the sequences [first, last) of a step, with the fields that attention reads."""
    layout = batch.layout
    lens = layout.query_lens_host
    start, stop = int(lens[:first].sum()), int(lens[:last].sum())
    return replace(
        batch,
        layout=SeqLayout(
            layout.rows_host[first:last],
            lens[first:last],
            layout.kv_lens_host[first:last],
            layout.rows[first:last],
            layout.kv_lens[first:last],
            layout.cu_query_lens[first : last + 1] - start,
        ),
        input_ids=batch.input_ids[start:stop],
        positions=batch.positions[start:stop],
        token_rows=batch.token_rows[start:stop],
    )
