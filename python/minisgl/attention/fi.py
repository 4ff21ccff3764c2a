"""Attention by FlashInfer, the extra `fi`, which compiles kernels on first use (nvcc, minutes)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import flashinfer  # type: ignore[import-not-found, unused-ignore]
import numpy as np
import torch
from torch import Tensor

from minisgl.attention.backend import AttentionBackend, StepAttention
from minisgl.core.layout import SEQUENCE
from minisgl.core.rounding import ceil_div
from minisgl.ops.quantized import Pages, QuantizedPages

if TYPE_CHECKING:
    from minisgl.attention.backend import AttentionSpec
    from minisgl.core.layout import Ints, Records
    from minisgl.core.plan import Batch
    from minisgl.ops.table import OpTable

WORKSPACE_BYTES: Final = 256 << 20  # for partial results; FlashInfer recommends 128 MB, which many heads exceed
TENSOR_CORE_GROUP: Final = 4  # from this many query heads per KV head on, tensor cores pay


@cache
def _workspace(device: torch.device) -> Tensor:
    """Return the memory for partial results, which all wrappers share: they run one after the other."""
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


class FlashInferAttention(AttentionBackend):
    """FlashInfer's decode kernels for pure decode steps, its prefill kernels for all others.

    Our pages are FlashInfer's paged cache in layout "HND". Graphs cannot capture it: each step is planned on the host
    from the plan's sequences, and that determines the grid. A plan is valid until the next `prepare`.
    """

    name = "fi"

    def __init__(self, spec: AttentionSpec, ops: OpTable) -> None:
        super().__init__(spec, ops)
        self._device = torch.device(spec.device_type, torch.cuda.current_device())
        has_tensor_cores = spec.kind.heads // spec.kind.kv_heads >= TENSOR_CORE_GROUP
        self._planned = torch.cuda.Event()
        # Plans write to the wrappers' buffers, even in threads of `_build`, so these must not be inference tensors.
        with torch.inference_mode(False):
            workspace = _workspace(self._device)
            self._prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
            self._decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                workspace, "HND", use_tensor_cores=has_tensor_cores
            )
            self._build()

    def prepare(self, batch: Batch, page_table: Tensor, out_loc: Tensor) -> StepAttention:
        # All plans use one pinned buffer, which is free once the copy of the last plan is done.
        self._planned.synchronize()
        wrapper = self._plan(batch.sequences, page_table)
        self._planned.record()
        return _Step(self.ops, batch, page_table, out_loc, wrapper)

    def _plan(self, sequences: Records, page_table: Tensor) -> Any:
        """Plan a step; return its wrapper."""
        kind, size, dtype = self.spec.kind, self.spec.page_size, self.spec.dtype
        query_lens, kv_lens = sequences["stop"] - sequences["start"], sequences["stop"]
        num_pages = ceil_div(kv_lens, size)
        indptr = _offsets(num_pages)
        # Entry j of sequence b is at index[indptr[b] + j] of the flat table: one gather on the device.
        first = sequences["row"].astype(np.int64) * page_table.shape[1] - indptr[:-1]
        index = np.arange(indptr[-1]) + np.repeat(first, num_pages)
        indices = page_table.view(-1).index_select(0, torch.from_numpy(index).to(self._device, non_blocking=True))
        last_page_len = kv_lens - (num_pages - 1) * size
        paged = (torch.from_numpy(indptr), indices, torch.from_numpy(last_page_len))
        shape = (kind.heads, kind.kv_heads, kind.head_dim, size)
        options = {
            "sm_scale": kind.scale,
            "logits_soft_cap": kind.softcap,
            "q_data_type": dtype,
            "kv_data_type": dtype,
            "window_left": -1 if kind.window is None else kind.window - 1,  # keys before a query's own
        }
        longest = int(query_lens.max())
        if longest == 1:
            self._decode.plan(*paged, *shape, **options)
            return self._decode
        options |= {"causal": True, "max_token_per_sequence": longest}
        self._prefill.plan(torch.from_numpy(_offsets(query_lens)), *paged, *shape, **options)
        return self._prefill

    def _build(self) -> None:
        """Compile the kernels of both kinds of steps in parallel, so that they fail now and not under load."""
        spec, kind, device = self.spec, self.spec.kind, self._device
        pages = torch.zeros(2, *kind.states[0].page_shape(spec.page_size), dtype=spec.dtype, device=device)
        table = torch.arange(2, dtype=torch.int32, device=device).view(1, 2)

        def step(tokens: int) -> None:
            with torch.cuda.device(device):
                q = torch.zeros(tokens, kind.heads, kind.head_dim, dtype=spec.dtype, device=device)
                _run(self._plan(np.array([(0, 0, tokens, 0)], SEQUENCE), table), q, pages)

        with ThreadPoolExecutor(2) as pool:
            for future in [pool.submit(step, tokens) for tokens in (1, 2)]:
                future.result()
        torch.cuda.synchronize(device)


@dataclass(frozen=True, slots=True)
class _Step(StepAttention):
    wrapper: Any

    def forward(self, q: Tensor, pages: Pages, sinks: Tensor | None = None) -> Tensor:
        assert not isinstance(pages, QuantizedPages), "FlashInfer cannot read quantized pages"
        assert sinks is None, "FlashInfer has no sinks"
        return _run(self.wrapper, q, pages)


def _run(wrapper: Any, q: Tensor, pages: Tensor) -> Tensor:
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    wrapper.run(q, pages, out=out)
    return out


def _offsets(lens: Ints) -> Ints:
    """Return [0, lens[0], lens[0] + lens[1], ...], int32 [B + 1]."""
    offsets = np.zeros(len(lens) + 1, np.int32)
    np.cumsum(lens, out=offsets[1:])
    return offsets
