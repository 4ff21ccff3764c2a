"""The interface of attention backends, and the reference backend as the smallest implementation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from minisgl.core import SeqLayout

if TYPE_CHECKING:
    from torch import Tensor

    from minisgl.core import Batch, Context, Ints
    from minisgl.ops.quantized import Pages
    from minisgl.ops.reference import HeadTransform
    from minisgl.ops.table import OpTable

Window = int | None
"""The number of positions that a query attends to, its own included; None means all."""


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The requirements of a model and a KV pool. `dtype` is that of queries and, unless `fp8_cache`, of the cache.

    `max_rows` is the largest number of sequences in a step: the running requests, and one row for padding.
    `max_queries` is the largest number of tokens that a decoding sequence computes: more than 1 with drafts. `windows`
    has the distinct windows of the layers. Scores are multiplied by `scale`, which is 1 / sqrt(head_dim) unless
    `score_scale` is given.
    """

    device_type: str
    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    max_rows: int = 257
    max_queries: int = 1
    windows: tuple[Window, ...] = (None,)
    score_scale: float | None = None
    fp8_cache: bool = False  # pages are `QuantizedPages`

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5) if self.score_scale is None else self.score_scale


class AttentionBackend(ABC):
    """Causal attention of a mixed batch over the paged cache.

    `prepare` runs once per step, in the order of steps and after the step's page-table writes. Then each layer calls
    `attend` once. When `forward` runs, the pages have the K/V of this step's tokens. Slots at or beyond a sequence's
    kv_len and unowned pages may have any values, NaN included. Other sequences of the batch may change only the last
    bits of a sequence's result, by the split of its sums.
    """

    name: ClassVar[str]
    # Whether pure decode steps read only device data (never the layout's host copies), so that a graph can replay them.
    is_capturable: bool = False
    captures_prompts: bool = False  # the same for steps with prompts; a graph knows of their host lengths only "> 1"
    # Whether the host copies of the layout must be exact. With drafts they are upper bounds: then it cannot decode.
    needs_host_lengths: bool = False

    def __init__(self, spec: AttentionSpec, ops: OpTable) -> None:
        self.spec = spec
        self.ops = ops

    @abstractmethod
    def prepare(self, batch: Batch, page_table: Tensor) -> Any:
        """Return what all layers of this step share; they get it as `ctx.attn_metadata`.

        page_table is [rows, pages per row] int32.
        """

    def attend(self, qkv: Tensor, heads: HeadTransform, layer_pages: Pages, ctx: Context) -> Tensor:
        """Normalise and rotate q and k, store k and v, and attend: qkv [T, (Hq + 2 Hk) D] -> [T, Hq, D].

        May overwrite qkv.
        """
        q = self.ops.norm_rope_store(qkv, heads, ctx.batch.positions, layer_pages, ctx.out_loc)
        return self.forward(q, layer_pages, ctx, heads.window)

    @abstractmethod
    def forward(self, q: Tensor, layer_pages: Pages, ctx: Context, window: Window = None) -> Tensor:
        """Attend: q [T, Hq, D], layer_pages [P, 2, Hk, page, D] -> contiguous [T, Hq, D].

        `window` is one of the spec's windows.
        """


class ReferenceAttention(AttentionBackend):
    """The op table's `paged_attention`: slow, but correct on every device."""

    name = "reference"

    def prepare(self, batch: Batch, page_table: Tensor) -> None:
        return None

    def forward(self, q: Tensor, layer_pages: Pages, ctx: Context, window: Window = None) -> Tensor:
        return self.ops.paged_attention(q, layer_pages, ctx.page_table, ctx.batch.layout, self.spec.scale, window)


def build_layout(rows: Ints, query_lens: Ints, kv_lens: Ints, upload: Callable[..., list[Tensor]]) -> SeqLayout:
    """Return the layout of B sequences from int32 [B] arrays with 1 <= query_lens <= kv_lens.

    `upload` copies int32 arrays to the device.
    """
    rows, query_lens, kv_lens = (np.ascontiguousarray(a, np.int32) for a in (rows, query_lens, kv_lens))
    cu_query_lens = np.zeros(len(rows) + 1, np.int32)
    np.cumsum(query_lens, out=cu_query_lens[1:])
    return SeqLayout(rows, query_lens, kv_lens, *upload(rows, kv_lens, cu_query_lens))
