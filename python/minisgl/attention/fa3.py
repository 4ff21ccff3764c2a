"""Attention by the forward kernels of FlashAttention-3 (arXiv:2407.08608) from the package fa3-fwd, the extra `fa3`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import fa3_fwd_interface  # type: ignore[import-not-found, unused-ignore]  # noqa: F401  declares torch.ops.fa3_fwd
import numpy as np
import torch
from torch import Tensor

from minisgl.attention.backend import AttentionBackend, StepAttention
from minisgl.core.layout import SEQUENCE
from minisgl.core.plan import SeqLayout
from minisgl.core.rounding import ceil_div, round_up
from minisgl.ops.quantized import Pages, QuantizedPages

if TYPE_CHECKING:
    from minisgl.attention.backend import AttentionSpec
    from minisgl.core.layout import Records
    from minisgl.core.plan import Batch
    from minisgl.ops.table import OpTable

TILE: Final = 128  # keys per tile; page sizes are multiples
# The wheel has only kernels that load pages by TMA. They are selected if the largest number of queries times the group
# size exceeds a tile of queries (192 for head dimension 64). A larger number costs nothing.
MIN_QUERY_BOUND: Final = 256
# Up to this many rows (tokens times query heads, 128 per tile) there are fewer tiles than SMs, so that splitting the
# keys pays. The limit also bounds the memory of partial results, MAX_SPLITS * SPLIT_ROWS * D float32.
SPLIT_ROWS: Final = 16384
MAX_SPLITS: Final = 16


class FA3Attention(AttentionBackend):
    """One kernel for decode, prompts and mixed batches on Hopper: the fastest for prompts, slow for decode.

    The kernel multiplies values between a sequence's end and the end of the tile by zero, so NaN there would spread:
    `forward` zeroes these values first. They belong to this sequence, because sequences share only whole pages. Graphs
    cannot capture it: the slots to zero and the sizes that select the kernel come from the host.
    """

    name = "fa3"

    def __init__(self, spec: AttentionSpec, ops: OpTable) -> None:
        super().__init__(spec, ops)
        self._device = torch.device(spec.device_type, torch.cuda.current_device())
        self._zero = torch.zeros((), dtype=spec.dtype, device=self._device)
        self._steps = torch.arange(TILE - 1, device=self._device)
        self._try()

    def prepare(self, batch: Batch, page_table: Tensor, out_loc: Tensor) -> StepAttention:
        return _Step(self.ops, batch, page_table, out_loc, self._plan(batch.sequences, batch.layout, page_table))

    def _plan(self, sequences: Records, layout: SeqLayout, page_table: Tensor) -> _Plan:
        kind = self.spec.kind
        query_lens, kv_lens = sequences["stop"] - sequences["start"], sequences["stop"]
        longest = ceil_div(int(kv_lens.max()), self.spec.page_size)
        rows = int(query_lens.sum()) * kind.heads
        return _Plan(
            layout=layout,
            page_table=page_table[:, :longest].index_select(0, layout.rows),
            scale=kind.scale,
            softcap=kind.softcap,
            query_bound=max(int(query_lens.max()), MIN_QUERY_BOUND),
            num_splits=MAX_SPLITS if rows <= SPLIT_ROWS else 1,
            zero=self._zero,
            tails=self._tails(sequences, page_table),
        )

    def _tails(self, sequences: Records, page_table: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the slots from each sequence's end to the end of its last tile. Short tails repeat slots."""
        sequences = sequences[sequences["stop"] % TILE != 0]
        if not len(sequences):
            return None
        size, rows, kv_lens = self.spec.page_size, sequences["row"].astype(np.int64), sequences["stop"].astype(np.int64)
        begin = kv_lens % size
        where = np.stack([rows * page_table.shape[1] + kv_lens // size, begin, round_up(begin, TILE)])
        entries, begins, ends = torch.from_numpy(where).to(self._device, non_blocking=True)
        pages = page_table.view(-1).index_select(0, entries).long()
        return pages[:, None], torch.minimum(begins[:, None] + self._steps, ends[:, None] - 1)

    def _try(self) -> None:
        """Run a decode and a prompt once, so that an incompatible wheel fails now and not under load."""
        spec, kind, device = self.spec, self.spec.kind, self._device
        pages = torch.zeros(2, *kind.states[0].page_shape(spec.page_size), dtype=spec.dtype, device=device)
        table = torch.arange(2, dtype=torch.int32, device=device).view(2, 1)
        rows, lens, ends = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 1], [1, 3], [0, 1, 4]))
        plan = self._plan(np.array([(0, 0, 1, 0), (1, 0, 3, 0)], SEQUENCE), SeqLayout(rows, lens, ends), table)
        plan.run(torch.zeros(4, kind.heads, kind.head_dim, dtype=spec.dtype, device=device), pages)
        torch.cuda.synchronize(device)


@dataclass(frozen=True, slots=True)
class _Plan:
    """What all layers of a step share."""

    layout: SeqLayout
    page_table: Tensor  # [B, pages of the longest], int32
    scale: float
    softcap: float
    query_bound: int
    num_splits: int
    zero: Tensor
    tails: tuple[Tensor, Tensor] | None  # pages [B', 1] and offsets in them [B', TILE - 1]

    def run(self, q: Tensor, pages: Tensor) -> Tensor:
        """Attend as `StepAttention.forward` does."""
        k, v = (pages[:, i].transpose(1, 2) for i in range(2))  # [P, page, Hk, D]
        if self.tails is not None:
            v.index_put_(self.tails, self.zero)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        # Call the op directly, to avoid the overhead of the Python wrapper in each layer.
        torch.ops.fa3_fwd.fwd(
            q,
            k,
            v,
            out=out,
            cu_seqlens_q=self.layout.cu_query_lens,
            seqused_k=self.layout.kv_lens,
            max_seqlen_q=self.query_bound,
            page_table=self.page_table,
            softmax_scale=self.scale,
            softcap=self.softcap,
            is_causal=True,
            num_splits=self.num_splits,
        )
        return out


@dataclass(frozen=True, slots=True)
class _Step(StepAttention):
    plan: _Plan

    def forward(self, q: Tensor, pages: Pages, sinks: Tensor | None = None) -> Tensor:
        assert not isinstance(pages, QuantizedPages), "FA3 cannot read quantized pages"
        assert sinks is None, "FA3 has no sinks"
        return self.plan.run(q, pages)
