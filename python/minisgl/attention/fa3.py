"""Attention by the forward kernels of FlashAttention-3 (arXiv:2407.08608) from the package fa3-fwd, the extra `fa3`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import fa3_fwd_interface  # type: ignore[import-not-found, unused-ignore]  # noqa: F401  declares torch.ops.fa3_fwd
import numpy as np
import torch

from minisgl.attention.backend import AttentionBackend, build_layout
from minisgl.ops.quantized import Pages, QuantizedPages
from minisgl.rounding import ceil_div, round_up

if TYPE_CHECKING:
    from torch import Tensor

    from minisgl.attention.backend import AttentionSpec, Window
    from minisgl.core import Batch, Context, Ints, SeqLayout
    from minisgl.ops.table import OpTable

TILE: Final = 128  # keys per tile; page sizes are multiples
# The wheel has only kernels that load pages by TMA. They are selected if the largest number of queries times the group
# size exceeds a tile of queries (192 for head dimension 64). A larger number costs nothing.
MIN_QUERY_BOUND: Final = 256
# Up to this many rows (tokens times query heads, 128 per tile) there are fewer tiles than SMs, so that splitting the
# keys pays. The limit also bounds the memory of partial results, MAX_SPLITS * SPLIT_ROWS * D float32.
SPLIT_ROWS: Final = 16384
MAX_SPLITS: Final = 16


@dataclass(frozen=True, slots=True)
class _Plan:
    """The arguments that all layers of a step share."""

    page_table: Tensor  # [B, pages of the longest], int32
    kv_lens: Tensor
    cu_query_lens: Tensor
    query_bound: int
    num_splits: int
    tails: tuple[Tensor, Tensor] | None  # pages [B', 1] and offsets in them [B', TILE - 1]


class FA3Attention(AttentionBackend):
    """One kernel for decode, prompts and mixed batches on Hopper: the fastest for prompts, slow for decode.

    The kernel multiplies values between a sequence's end and the end of the tile by zero, so NaN there would spread:
    `forward` zeroes these values first. They belong to this sequence, because sequences share only whole pages. Graphs
    cannot capture it: the slots to zero and the sizes that select the kernel come from the host.
    """

    name = "fa3"
    needs_host_lengths = True

    def __init__(self, spec: AttentionSpec, ops: OpTable) -> None:
        super().__init__(spec, ops)
        self._device = torch.device(spec.device_type, torch.cuda.current_device())
        self._zero = torch.zeros((), dtype=spec.dtype, device=self._device)
        self._steps = torch.arange(TILE - 1, device=self._device)
        self._try()

    def prepare(self, batch: Batch, page_table: Tensor) -> _Plan:
        return self._plan(batch.layout, page_table)

    def forward(self, q: Tensor, layer_pages: Pages, ctx: Context, window: Window = None) -> Tensor:
        assert not isinstance(layer_pages, QuantizedPages), "refused by `Requirements`"
        return self._run(q, layer_pages, ctx.attn_metadata)

    def _plan(self, layout: SeqLayout, page_table: Tensor) -> _Plan:
        s = self.spec
        longest = ceil_div(int(layout.kv_lens_host.max()), s.page_size)
        rows = int(layout.query_lens_host.sum()) * s.num_heads
        return _Plan(
            page_table=page_table[:, :longest].index_select(0, layout.rows),
            kv_lens=layout.kv_lens,
            cu_query_lens=layout.cu_query_lens,
            query_bound=max(int(layout.query_lens_host.max()), MIN_QUERY_BOUND),
            num_splits=MAX_SPLITS if rows <= SPLIT_ROWS else 1,
            tails=self._tails(layout, page_table),
        )

    def _tails(self, layout: SeqLayout, page_table: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the slots from each sequence's end to the end of its last tile. Short tails repeat slots."""
        has_tail = layout.kv_lens_host % TILE != 0
        if not has_tail.any():
            return None
        rows, kv_lens = layout.rows_host[has_tail].astype(np.int64), layout.kv_lens_host[has_tail].astype(np.int64)
        begin = kv_lens % self.spec.page_size
        where = np.stack([rows * page_table.shape[1] + kv_lens // self.spec.page_size, begin, round_up(begin, TILE)])
        entries, begins, ends = torch.from_numpy(where).to(self._device, non_blocking=True)
        pages = page_table.view(-1).index_select(0, entries).long()
        return pages[:, None], torch.minimum(begins[:, None] + self._steps, ends[:, None] - 1)

    def _run(self, q: Tensor, layer_pages: Tensor, plan: _Plan) -> Tensor:
        k, v = (layer_pages[:, i].transpose(1, 2) for i in range(2))  # [P, page, Hk, D]
        if plan.tails is not None:
            v.index_put_(plan.tails, self._zero)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        # Call the op directly, to avoid the overhead of the Python wrapper in each layer.
        torch.ops.fa3_fwd.fwd(
            q,
            k,
            v,
            out=out,
            cu_seqlens_q=plan.cu_query_lens,
            seqused_k=plan.kv_lens,
            max_seqlen_q=plan.query_bound,
            page_table=plan.page_table,
            softmax_scale=self.spec.scale,
            is_causal=True,
            num_splits=plan.num_splits,
        )
        return out

    def _try(self) -> None:
        """Run a decode and a prompt once, so that an incompatible wheel fails now and not under load."""
        s, device = self.spec, self._device

        def upload(*arrays: Ints) -> list[Tensor]:
            return [torch.from_numpy(a).to(device) for a in arrays]

        pages = torch.zeros(2, 2, s.num_kv_heads, s.page_size, s.head_dim, dtype=s.dtype, device=device)
        table = torch.arange(2, dtype=torch.int32, device=device).view(2, 1)
        lens = np.array([1, 3], np.int32)
        plan = self._plan(build_layout(np.arange(2, dtype=np.int32), lens, lens, upload), table)
        self._run(torch.zeros(4, s.num_heads, s.head_dim, dtype=s.dtype, device=device), pages, plan)
        torch.cuda.synchronize(device)
