"""The inputs of captured steps with prompts: one buffer for all sizes, filled from a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from minisgl.core import Batch, BatchPlan, Sampling, SeqLayout
from minisgl.layout import PAGE_WRITE, ROW_STATE, Flag, words
from minisgl.rounding import round_up

if TYPE_CHECKING:
    from torch import Tensor

    from minisgl.core import Ints
    from minisgl.engine.batch import Expanded
    from minisgl.engine.runner import Parts

MAX_CHUNKS: Final = 64
MAX_PAGE_WRITES: Final = 512


class MixedInputs:
    """An int32 buffer and its named parts, equal on host and device.

    The `decodes` decoding sequences come first and have the first tokens; chunks of prompts follow. Unused slots point
    at the dummy row, the page table's last: unused decode slots have `kv_len` 0, and the chunk behind the last one
    takes the padding tokens. The arrays of tokens come last, so that a small step is a small upload.
    """

    def __init__(self, max_tokens: int, max_decodes: int, parts: Parts) -> None:
        self._dummy_row = len(parts.state.page_table) - 1
        self._dummy_page = parts.kv_cache.num_pages - 1
        self.decodes = min(max_decodes, max_tokens)
        chunks = MAX_CHUNKS + 1
        seqs = self.decodes + chunks
        widths = dict.fromkeys(("logit_tokens", "sample_rows", "sample_positions", "sample_flags", "mask_index"), seqs)
        widths |= {"rows": seqs, "kv_lens": seqs, "cu_query_lens": seqs + 1}
        widths |= {"page_writes": words(PAGE_WRITE) * MAX_PAGE_WRITES, "row_states": words(ROW_STATE) * chunks}
        ends: list[int] = np.cumsum([0, *(round_up(w, 4) for w in widths.values())]).tolist()
        self._places = {name: slice(lo, lo + widths[name]) for name, lo in zip(widths, ends[:-1], strict=True)}
        self._tokens_at = ends[-1]
        self.on_host = np.zeros(ends[-1] + 3 * max_tokens, np.int32)
        self.on_device = torch.zeros(len(self.on_host), dtype=torch.int32, device=parts.device.torch_device)

    def fill(self, size: int, plan: BatchPlan, x: Expanded) -> int:
        """Write a plan and its expansion to the host's buffer, padded to `size` tokens; the ints to upload."""
        host = {name: self.on_host[place] for name, place in self._places.items()}
        end = self._tokens_at + 3 * size
        tokens = self.on_host[self._tokens_at : end].reshape(3, size)
        _put(tokens[0], x.input_ids, 0)
        _put(tokens[1], x.positions, 0)
        _put(tokens[2], x.token_rows, self._dummy_row)
        _put(host["logit_tokens"], x.logit_tokens, 0)
        _put(host["sample_rows"], x.sample_rows, self._dummy_row)
        _put(host["sample_positions"], x.sample_positions, 1)
        _put(host["sample_flags"], x.sample_flags, 0)
        _put(host["mask_index"], x.mask_index, 0)
        decodes, first = int(np.count_nonzero(plan.slots["flags"] & Flag.FROM_DEVICE)), self.decodes
        _put(host["rows"][:first], x.rows[:decodes], self._dummy_row)
        _put(host["rows"][first:], x.rows[decodes:], self._dummy_row)
        _put(host["kv_lens"][:first], x.kv_lens[:decodes], 0)
        _put(host["kv_lens"][first:], x.kv_lens[decodes:], 0)
        host["kv_lens"][first + len(x.rows) - decodes] = size - len(x.input_ids)
        _put(host["cu_query_lens"][first:], np.cumsum([decodes, *x.query_lens[decodes:]], dtype=np.int32), size)
        pages, states = host["page_writes"].view(PAGE_WRITE), host["row_states"].view(ROW_STATE)
        pages[: len(plan.page_writes)] = plan.page_writes
        pages[len(plan.page_writes) :] = (self._dummy_row, 0, self._dummy_page)
        states[: len(plan.row_states)] = plan.row_states
        states[len(plan.row_states) :] = 0
        states["row"][len(plan.row_states) :] = self._dummy_row
        return end

    def batch(self, size: int, chunks: int, samples: int) -> Batch:
        """The device's buffer as a batch of `size` tokens, `chunks` chunks and `samples` sequences that sample.

        To be called while a graph is captured, since its conversions belong into the graph. Lengths on the host are
        bounds of the prompts' lengths only: kernels read the device's.
        """
        x, seqs = self._views(), self.decodes + chunks
        tokens = self.on_device[self._tokens_at : self._tokens_at + 3 * size].view(3, size)
        lens: Ints = np.ones(seqs, np.int32)
        lens[self.decodes :] = 2
        lens[self.decodes] = size
        return Batch(
            layout=SeqLayout(lens, lens, lens, x["rows"][:seqs], x["kv_lens"][:seqs], x["cu_query_lens"][: seqs + 1]),
            input_ids=tokens[0],
            positions=tokens[1],
            token_rows=tokens[2],
            logit_tokens=x["logit_tokens"][:samples].long(),
            sampling=self.sampling(samples, 0),
            page_writes=x["page_writes"].view(-1, words(PAGE_WRITE)),
            row_states=x["row_states"].view(-1, words(ROW_STATE))[:chunks],
        )

    def sampling(self, samples: int, flags: int) -> Sampling:
        """The device's buffer as the inputs of sampling; to be called while a graph is captured."""
        x = self._views()
        return Sampling(
            rows=x["sample_rows"][:samples].long(),
            positions=x["sample_positions"][:samples],
            row_flags=x["sample_flags"][:samples],
            mask_index=x["mask_index"][:samples],
            flags=flags,
        )

    def _views(self) -> dict[str, Tensor]:
        return {name: self.on_device[place] for name, place in self._places.items()}


def _put(into: Ints, values: Ints, rest: int) -> None:
    """Write `values`, then `rest` up to the end."""
    into[: len(values)] = values
    into[len(values) :] = rest
