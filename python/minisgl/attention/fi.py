"""Attention by FlashInfer, the extra `fi`, which compiles kernels on first use (nvcc, minutes)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

import flashinfer  # type: ignore[import-not-found, unused-ignore]
import numpy as np
import torch

from minisgl.attention.backend import AttentionBackend, build_layout
from minisgl.ops.quantized import Pages, QuantizedPages
from minisgl.rounding import ceil_div

if TYPE_CHECKING:
    from torch import Tensor

    from minisgl.attention.backend import AttentionSpec, Window
    from minisgl.core import Batch, Context, Ints, SeqLayout
    from minisgl.ops.table import OpTable

WORKSPACE_BYTES: Final = 256 << 20  # for partial results; FlashInfer recommends 128 MB, which many heads exceed
TENSOR_CORE_GROUP: Final = 4  # from this many query heads per KV head on, tensor cores pay


class FlashInferAttention(AttentionBackend):
    """FlashInfer's decode kernels for pure decode steps, its prefill kernels for all others; one wrapper per window.

    Our pages are FlashInfer's paged cache in layout "HND". Graphs cannot capture it: each step is planned on the host
    from the layout's host copies, and the plan determines the grid. A plan is valid until the next `prepare`.
    """

    name = "fi"
    needs_host_lengths = True

    def __init__(self, spec: AttentionSpec, ops: OpTable) -> None:
        super().__init__(spec, ops)
        self._device = torch.device(spec.device_type, torch.cuda.current_device())
        group = spec.num_heads // spec.num_kv_heads
        self._planned = torch.cuda.Event()
        # Plans write to the wrappers' buffers, even in threads of `_build`, so these must not be inference tensors.
        with torch.inference_mode(False):
            workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=self._device)
            self._prefill = {
                window: flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND") for window in spec.windows
            }
            self._decode = {
                window: flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                    workspace, "HND", use_tensor_cores=group >= TENSOR_CORE_GROUP
                )
                for window in spec.windows
            }
            self._build()

    def prepare(self, batch: Batch, page_table: Tensor) -> dict[Window, Any]:
        """Plan this step; return the wrappers by window."""
        # All plans use one pinned buffer, which is free once the copy of the last plan is done.
        self._planned.synchronize()
        wrappers = self._plan(batch.layout, page_table)
        self._planned.record()
        return wrappers

    def forward(self, q: Tensor, layer_pages: Pages, ctx: Context, window: Window = None) -> Tensor:
        assert not isinstance(layer_pages, QuantizedPages), "refused by `Requirements`"
        return self._run(ctx.attn_metadata[window], q, layer_pages)

    def _plan(self, layout: SeqLayout, page_table: Tensor) -> dict[Window, Any]:
        s = self.spec
        num_pages = ceil_div(layout.kv_lens_host, s.page_size)
        indptr = _offsets(num_pages)
        # Entry j of sequence b is at index[indptr[b] + j] of the flat table: one gather on the device.
        first = layout.rows_host.astype(np.int64) * page_table.shape[1] - indptr[:-1]
        index = np.arange(indptr[-1]) + np.repeat(first, num_pages)
        indices = page_table.view(-1).index_select(0, torch.from_numpy(index).to(self._device, non_blocking=True))
        last_page_len = layout.kv_lens_host - (num_pages - 1) * s.page_size
        paged = (torch.from_numpy(indptr), indices, torch.from_numpy(last_page_len))
        options = {"sm_scale": s.scale, "q_data_type": s.dtype, "kv_data_type": s.dtype}
        shape = (s.num_heads, s.num_kv_heads, s.head_dim, s.page_size)
        offsets, longest = torch.from_numpy(_offsets(layout.query_lens_host)), int(layout.query_lens_host.max())
        for window in s.windows:
            options["window_left"] = -1 if window is None else window - 1  # keys before a query's own
            if layout.is_decode:
                self._decode[window].plan(*paged, *shape, **options)
            else:
                self._prefill[window].plan(
                    offsets, *paged, *shape, causal=True, max_token_per_sequence=longest, **options
                )
        return self._decode if layout.is_decode else self._prefill

    def _run(self, wrapper: Any, q: Tensor, layer_pages: Tensor) -> Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        wrapper.run(q, layer_pages, out=out)
        return out

    def _build(self) -> None:
        """Compile the kernels of both kinds of steps in parallel, so that they fail now and not under load."""
        s, device = self.spec, self._device
        pages = torch.zeros(2, 2, s.num_kv_heads, s.page_size, s.head_dim, dtype=s.dtype, device=device)
        table = torch.arange(2, dtype=torch.int32, device=device).view(1, 2)

        def upload(*arrays: Ints) -> list[Tensor]:
            return [torch.from_numpy(a).to(device) for a in arrays]

        def step(tokens: int) -> None:
            with torch.cuda.device(device):
                lens = np.array([tokens], np.int32)
                q = torch.zeros(tokens, s.num_heads, s.head_dim, dtype=s.dtype, device=device)
                for wrapper in self._plan(build_layout(np.zeros(1, np.int32), lens, lens, upload), table).values():
                    self._run(wrapper, q, pages)

        with ThreadPoolExecutor(2) as pool:
            for future in [pool.submit(step, tokens) for tokens in (1, 2)]:
                future.result()
        torch.cuda.synchronize(device)


def _offsets(lens: Ints) -> Ints:
    """Return [0, lens[0], lens[0] + lens[1], ...], int32 [B + 1]."""
    offsets = np.zeros(len(lens) + 1, np.int32)
    np.cumsum(lens, out=offsets[1:])
    return offsets
