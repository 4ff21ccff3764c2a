"""Paged attention on a CPU in pure torch: gathers the pages of a sequence, then `scaled_dot_product_attention`.

That has neither soft caps nor sinks. With these, the scores of a few queries at a time are in memory.

Sequences are computed one by one: padding them to a common length costs 2 to 26 times as much (measured on the
prototype), and so a result does not depend on the batch. What layers share (the rows to gather, views of the gathered
buffer, masks) is computed once per step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from minisgl.attention.backend import AttentionBackend, StepAttention
from minisgl.core.rounding import ceil_div
from minisgl.ops.quantized import E4M3, Pages, QuantizedPages
from minisgl.ops.reference import soft_cap, softmax_with_sinks

if TYPE_CHECKING:
    from minisgl.attention.backend import AttentionSpec
    from minisgl.core.plan import Batch
    from minisgl.core.specs import GroupedQuery
    from minisgl.ops.table import OpTable

GATHER_BYTES: Final = 8 << 20  # of K/V gathered at a time; more would not stay in the CPU's cache
QUERY_BLOCK: Final = 256  # queries per masked call
SCORED_QUERIES: Final = 32  # queries whose scores are in memory: 32 MB for 64 heads and 4,096 keys

Window = int | None  # as in `GroupedQuery`


@dataclass(frozen=True, slots=True)
class _Block:
    """Queries [start, stop) of the batch, all of one sequence, and the K/V that the last one attends to."""

    start: int
    stop: int
    k: Tensor  # [1, Hk, L, D], a view into the gathered buffer
    v: Tensor
    mask: Tensor | None  # [queries, L], added to the scores
    is_causal: bool  # query i attends to keys 0..i

    @property
    def is_decode(self) -> bool:
        return self.stop - self.start == 1 and self.mask is None


@dataclass(frozen=True, slots=True)
class _Group:
    """Sequences whose pages are gathered together."""

    pages: Tensor  # [n] int64
    heads: Tensor  # [n] int64, of [2, Hk] in a page
    gathered: Tensor  # [n, page * D]
    blocks: list[_Block]


class CpuAttention(AttentionBackend):
    """Attention in float dtypes. All layers and steps use the same scratch memory."""

    name = "cpu"

    def __init__(self, spec: AttentionSpec, ops: OpTable) -> None:
        super().__init__(spec, ops)
        self._scratch = torch.empty(0, dtype=spec.dtype)

    def prepare(self, batch: Batch, page_table: Tensor, out_loc: Tensor) -> StepAttention:
        layout, page_size, kind, dtype = batch.layout, self.spec.page_size, self.spec.kind, self.spec.dtype
        heads, window = 2 * kind.kv_heads, kind.window
        table, rows, kv_lens = page_table.numpy(), layout.rows.tolist(), layout.kv_lens.tolist()
        starts, query_lens = layout.cu_query_lens.tolist(), layout.cu_query_lens.diff().tolist()
        first_page = [_first_visible(q, kv, window) // page_size for q, kv in zip(query_lens, kv_lens, strict=True)]
        num_pages = [ceil_div(kv, page_size) - first for kv, first in zip(kv_lens, first_page, strict=True)]
        row_bytes = page_size * kind.head_dim * dtype.itemsize
        groups = _split([n * heads for n in num_pages], GATHER_BYTES // row_bytes)
        band = _mask_band(query_lens, kv_lens, window, dtype)
        self._reserve(max(sum(num_pages[s] for s in group) for group in groups) * heads)
        result = []
        for group in groups:
            gathered = []
            blocks = []
            first = 0
            for s in group:
                pages = table[rows[s], first_page[s] : first_page[s] + num_pages[s]]
                gathered.append(np.array(np.broadcast_arrays(pages, np.arange(heads)[:, None])).reshape(2, -1))
                kv = self._scratch[first : first + pages.size * heads]
                kv = kv.view(2, 1, kind.kv_heads, num_pages[s] * page_size, kind.head_dim)
                skipped = first_page[s] * page_size
                blocks += _blocks(kv, starts[s], query_lens[s], kv_lens[s] - skipped, window, band)
                first += pages.size * heads
            index = torch.from_numpy(np.concatenate(gathered, 1))
            result.append(_Group(index[0], index[1], self._scratch[:first], blocks))
        return _Step(self.ops, batch, page_table, out_loc, kind, result)

    def _reserve(self, rows: int) -> None:
        if len(self._scratch) < rows:
            width = self.spec.page_size * self.spec.kind.head_dim
            self._scratch = torch.empty(rows, width, dtype=self.spec.dtype)


@dataclass(frozen=True, slots=True)
class _Step(StepAttention):
    """Sequences by the groups whose pages are gathered together."""

    kind: GroupedQuery
    groups: list[_Group]

    def forward(self, q: Tensor, pages: Pages, sinks: Tensor | None = None) -> Tensor:
        q_1HTD = q.transpose(0, 1).unsqueeze(0)
        outs = []
        for group in self.groups:
            if isinstance(pages, QuantizedPages):
                scale = _gather(pages.scale, group)
                floats = _gather(pages.data.view(torch.uint8), group).view(E4M3).view(*scale.shape, -1).float()
                group.gathered.view_as(floats).copy_(floats * scale.unsqueeze(2))
            else:
                _gather(pages, group, group.gathered)
            outs += [self._attend(q_1HTD[:, :, b.start : b.stop], b, sinks) for b in group.blocks]
        out = outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)
        return out.squeeze(0).transpose(0, 1).contiguous()

    def _attend(self, q: Tensor, b: _Block, sinks: Tensor | None) -> Tensor:
        """Attend: q [1, Hq, queries, D] -> the same shape."""
        if self.kind.softcap or sinks is not None:
            return self._attend_by_scores(q, b, sinks)
        if q.dtype.itemsize == 2 and b.is_decode:
            return self._half_decode(q, b)
        return F.scaled_dot_product_attention(
            q, b.k, b.v, b.mask, is_causal=b.is_causal, scale=self.kind.scale, enable_gqa=True
        )

    def _attend_by_scores(self, q: Tensor, b: _Block, sinks: Tensor | None) -> Tensor:
        """Attend as `_attend`, with the soft cap and sinks."""
        _, num_kv_heads, num_keys, head_dim = b.k.shape
        by_kv_head = None if sinks is None else sinks.view(num_kv_heads, -1, 1)
        outs = []
        for first, part in enumerate(torch.split(q, SCORED_QUERIES, dim=2)):
            rows = part.reshape(1, num_kv_heads, -1, head_dim).float()
            scores = soft_cap(rows @ b.k.float().mT * self.kind.scale, self.kind.softcap)
            scores = scores.view(num_kv_heads, -1, part.shape[2], num_keys)
            if b.is_causal:
                ahead = torch.ones(scores.shape[2:], dtype=torch.bool).triu_(1 + first * SCORED_QUERIES)
                scores.masked_fill_(ahead, float("-inf"))
            elif b.mask is not None:
                scores += b.mask[first * SCORED_QUERIES :][: part.shape[2]]
            weights = softmax_with_sinks(scores, by_kv_head).view(1, num_kv_heads, -1, num_keys)
            outs.append((weights @ b.v.float()).view(part.shape).to(q.dtype))
        return torch.cat(outs, dim=2)

    def _half_decode(self, q: Tensor, b: _Block) -> Tensor:
        """Attend with one query [1, Hq, 1, D], where the query heads of a KV head are the rows of one matrix.

        With a single row, torch's bfloat16 kernel takes five times as long (114 instead of 21 us for 200 tokens).
        """
        _, num_kv_heads, _, head_dim = b.k.shape
        q = q.reshape(1, num_kv_heads, -1, head_dim)
        size = q.shape[2]
        if size == 1:
            q = q.expand(-1, -1, 2, -1)
        out = F.scaled_dot_product_attention(q, b.k, b.v, scale=self.kind.scale)
        return out[:, :, :size].reshape(1, -1, 1, head_dim)


def _gather(x: Tensor, group: _Group, out: Tensor | None = None) -> Tensor:
    """Return what the heads of a group have in their pages, from x [P, 2, Hk, ...] -> [n, ...] in two dimensions."""
    width = x[0, 0, 0].numel()
    # Rows begin at each element, since the distance between pages need not be a multiple of a row.
    rows = x.as_strided(((len(x) - 1) * x.stride(0) + x[0].numel() - width + 1, width), (1, 1))
    return torch.index_select(rows, 0, group.pages * x.stride(0) + group.heads * width, out=out)


def _mask_band(query_lens: list[int], kv_lens: list[int], window: Window, dtype: torch.dtype) -> Tensor | None:
    """Return [r, c + r] of 0 and -inf, where row i ends at column c + i: every mask is a slice of it.

    r is the longest query block that needs a mask, c the longest context before such a block.
    """
    masked = [(q, kv) for q, kv in zip(query_lens, kv_lens, strict=True) if q > 1 and not _is_plain(q, kv, window)]
    if not masked:
        return None
    rows = min(QUERY_BLOCK, max(q for q, _ in masked))
    context = max(kv for _, kv in masked) if window is None else min(max(kv for _, kv in masked), window)
    band = torch.full((rows, context + rows), float("-inf"), dtype=dtype).triu_(context + 1)
    return band if window is None else band + torch.full_like(band, float("-inf")).tril_(context - window)


def _first_visible(query_len: int, kv_len: int, window: Window) -> int:
    """Return the first position that the last `query_len` queries of a sequence attend to."""
    return 0 if window is None else max(kv_len - query_len + 1 - window, 0)


def _is_plain(query_len: int, kv_len: int, window: Window) -> bool:
    """Return whether this is a whole prompt within the window."""
    return query_len == kv_len and (window is None or kv_len <= window)


def _blocks(kv: Tensor, start: int, query_len: int, kv_len: int, window: Window, band: Tensor | None) -> list[_Block]:
    """Return the blocks of one sequence, whose queries begin at `start` of the batch; kv [2, 1, Hk, >= kv_len, D]."""
    if query_len == 1 or _is_plain(query_len, kv_len, window):
        k, v = kv[:, :, :, _first_visible(query_len, kv_len, window) : kv_len]
        return [_Block(start, start + query_len, k, v, None, query_len > 1)]
    assert band is not None, "queries that attend to different keys need the mask band"
    blocks = []
    for offset in range(0, query_len, len(band)):
        size = min(len(band), query_len - offset)
        stop = kv_len - query_len + offset + size
        first = _first_visible(size, stop, window)
        k, v = kv[:, :, :, first:stop]
        context = band.shape[1] - len(band)
        mask = band[:size, context + size - (stop - first) : context + size]
        blocks.append(_Block(start + offset, start + offset + size, k, v, mask, False))
    return blocks


def _split(sizes: list[int], limit: int) -> list[list[int]]:
    """Split the indices of `sizes` into runs, each of one index or with a sum within `limit`."""
    runs: list[list[int]] = [[]]
    total = 0
    for i, size in enumerate(sizes):
        if runs[-1] and total + size > limit:
            runs.append([])
            total = 0
        runs[-1].append(i)
        total += size
    return runs
