"""Contract of the attention backends."""

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
    from minisgl.ops.table import OpTable

Window = int | None
"""How many positions a query sees, its own and those right before it; None: all of them."""


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What a model and a pool ask of a backend. `dtype` is that of queries and cache.

    `max_rows` bounds the sequences of a step: the most requests that run at once, and one for padding. `windows` are
    those that the layers have, each once. Scores are multiplied by `scale`, 1 / sqrt(head_dim) unless `score_scale` is
    given.
    """

    device_type: str
    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    max_rows: int = 257
    windows: tuple[Window, ...] = (None,)
    score_scale: float | None = None

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5) if self.score_scale is None else self.score_scale


@dataclass(frozen=True, slots=True)
class Requirements:
    """What a backend can do; None means anything. Lives beside the registration, so asking imports no kernels."""

    device_types: tuple[str, ...] | None = None
    dtypes: tuple[torch.dtype, ...] | None = None
    head_dims: tuple[int, ...] | None = None
    page_sizes: tuple[int, ...] | None = None
    windows: bool = True

    def refusal(self, spec: AttentionSpec) -> str | None:
        """Why `spec` cannot be served; None when it can."""
        for word, value, allowed in (
            ("device", spec.device_type, self.device_types),
            ("dtype", spec.dtype, self.dtypes),
            ("head dimension", spec.head_dim, self.head_dims),
            ("page size", spec.page_size, self.page_sizes),
        ):
            if allowed is not None and value not in allowed:
                return f"{word} {value} is not one of {', '.join(str(a) for a in allowed)}"
        if not self.windows and spec.windows != (None,):
            return "layers that see a window only are not supported"
        return None


@dataclass(frozen=True, slots=True)
class HeadTransform:
    """What one layer does to the heads of q and k before attention: a norm with these weights [D], or none, and RoPE.

    `cos_sin` is [max positions, D] float32, see `ops/reference.py: rope`. `window` is what the layer's queries see.
    """

    q_weight: Tensor | None
    k_weight: Tensor | None
    eps: float
    cos_sin: Tensor
    window: Window = None


class AttentionBackend(ABC):
    """Causal attention of a mixed batch over the paged cache.

    `attend` is what a layer calls; `forward` finds the K/V of this step's tokens in the pages already. Slots at or
    beyond a sequence's kv_len, and pages of nobody, may hold anything, NaN included. The result of one sequence
    depends on the others at most in how its sums are split, that is in the last bits. `prepare` runs once per step, in
    step order and after the step's page-table writes; `attend` once per layer.
    """

    name: ClassVar[str]
    # Whether pure decode steps use device data alone (never the layout's host copies), so that a graph can replay them.
    is_capturable: bool = False
    captures_prompts: bool = False  # the same of steps with prompts; of lengths on the host only "> 1" is true then

    def __init__(self, spec: AttentionSpec, ops: OpTable) -> None:
        self.spec = spec
        self.ops = ops

    @abstractmethod
    def prepare(self, batch: Batch, page_table: Tensor) -> Any:
        """What all layers of this step share, to be handed over as `ctx.attn_metadata`; None if nothing.

        page_table is [rows, pages per row] int32.
        """

    def attend(self, qkv: Tensor, heads: HeadTransform, layer_pages: Tensor, ctx: Context) -> Tensor:
        """Transform and store this step's keys and values, then attend: qkv [T, (Hq + 2 Hk) D] -> [T, Hq, D].

        May overwrite qkv.
        """
        q = self.ops.norm_rope_store(
            qkv,
            heads.q_weight,
            heads.k_weight,
            heads.eps,
            heads.cos_sin,
            ctx.batch.positions,
            layer_pages,
            ctx.out_loc,
        )
        return self.forward(q, layer_pages, ctx, heads.window)

    @abstractmethod
    def forward(self, q: Tensor, layer_pages: Tensor, ctx: Context, window: Window = None) -> Tensor:
        """q [T, Hq, D], layer_pages [P, 2, Hk, page, D] -> contiguous [T, Hq, D]; `window` is one of the spec's."""


class ReferenceAttention(AttentionBackend):
    """`paged_attention` of the op table."""

    name = "reference"

    def prepare(self, batch: Batch, page_table: Tensor) -> None:
        return None

    def forward(self, q: Tensor, layer_pages: Tensor, ctx: Context, window: Window = None) -> Tensor:
        return self.ops.paged_attention(q, layer_pages, ctx.page_table, ctx.batch.layout, self.spec.scale, window)


def build_layout(rows: Ints, query_lens: Ints, kv_lens: Ints, upload: Callable[..., list[Tensor]]) -> SeqLayout:
    """The layout of B sequences; all arrays are int32 [B], 1 <= query_lens <= kv_lens.

    `upload` copies int32 arrays to the device.
    """
    rows, query_lens, kv_lens = (np.ascontiguousarray(a, np.int32) for a in (rows, query_lens, kv_lens))
    cu_query_lens = np.zeros(len(rows) + 1, np.int32)
    np.cumsum(query_lens, out=cu_query_lens[1:])
    return SeqLayout(rows, query_lens, kv_lens, *upload(rows, kv_lens, cu_query_lens))
