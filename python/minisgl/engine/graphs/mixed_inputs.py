"""The inputs of captured steps with prompts or drafts: one buffer for all sizes, filled from a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from minisgl.core import Batch, BatchPlan, Sampling, SeqLayout, StepShape
from minisgl.layout import FULL, NO_SLOTS, PAGE_WRITE, ROW_STATE, Flag, words
from minisgl.rounding import round_up
from minisgl.triton import drafts

if TYPE_CHECKING:
    from torch import Tensor

    from minisgl.core import Ints
    from minisgl.engine.batch import Expanded
    from minisgl.engine.runner import Parts

MAX_CHUNKS: Final = 64
MAX_PAGE_WRITES: Final = 512
MAX_DRAFTED: Final = 512  # tokens of the slots with DRAFTS, besides one for each decoding sequence


class MixedInputs:
    """An int32 buffer and its named parts, equal on host and device, and what the device derives from them.

    The decoding sequences, `decodes` at most, come first and have the first tokens; chunks of prompts follow. Unused
    slots point at the dummy row, the page table's last: unused decode slots have no tokens and `kv_len` 0, and the
    chunk behind the last one takes the padding tokens. A step without prompts has no unused decode slots before this
    one. The arrays of tokens come last, so that a small step is a small upload.
    """

    def __init__(self, max_tokens: int, max_decodes: int, max_drafted: int, max_queries: int, parts: Parts) -> None:
        """`max_drafted`: tokens of a step with drafts and without prompts; `max_queries`: of a decoding sequence."""
        self._parts = parts
        self._dummy_row = len(parts.state.last_token) - 1
        self._dummy_page = parts.stores[FULL].num_pages - 1
        self._max_queries = max_queries
        self.decodes = min(max_decodes, max_tokens)
        chunks = MAX_CHUNKS + 1
        seqs = self.decodes + chunks
        columns = self.columns = seqs if parts.drafting is None else max(max_drafted, seqs + MAX_DRAFTED)
        widths = dict.fromkeys(("logit_tokens", "sample_rows", "sample_flags", "mask_index"), columns)
        widths |= {"rows": seqs, "cu_query_lens": seqs + 1}
        widths |= {"page_writes": words(PAGE_WRITE) * MAX_PAGE_WRITES, "row_states": words(ROW_STATE) * chunks}
        ends: list[int] = np.cumsum([0, *(round_up(w, 4) for w in widths.values())]).tolist()
        self._places = {name: slice(lo, lo + widths[name]) for name, lo in zip(widths, ends[:-1], strict=True)}
        self._tokens_at = ends[-1]
        self.on_host = np.zeros(ends[-1] + 3 * max_tokens, np.int32)
        self.on_device = torch.zeros(len(self.on_host), dtype=torch.int32, device=parts.device.torch_device)

        def ints(count: int) -> Tensor:
            return torch.zeros(count, dtype=torch.int32, device=parts.device.torch_device)

        out_loc = ints(len(parts.stores) * max_tokens).long().view(-1, max_tokens)
        self._placed = drafts.Placed(
            ints(max_tokens), ints(max_tokens), out_loc, ints(seqs), ints(columns), ints(columns), ints(columns)
        )

    def fill(self, size: int, has_chunks: bool, plan: BatchPlan, x: Expanded) -> int:
        """Write a plan and its expansion to the host's buffer, padded to `size` tokens; the ints to upload."""
        host = {name: self.on_host[place] for name, place in self._places.items()}
        end = self._tokens_at + 3 * size
        tokens = self.on_host[self._tokens_at : end].reshape(3, size)
        _put(tokens[0], x.input_ids, 0)
        _put(tokens[1], x.positions, np.arange(size - len(x.positions), dtype=np.int32))
        _put(tokens[2], x.token_rows, self._dummy_row)
        _put(host["logit_tokens"], x.logit_tokens, 0)
        _put(host["sample_rows"], x.sample_rows, self._dummy_row)
        _put(host["sample_flags"], x.sample_flags, 0)
        _put(host["mask_index"], x.mask_index, 0)
        decodes = int(np.count_nonzero(plan.slots["flags"] & Flag.FROM_DEVICE))
        first, rows, ends = self.decodes if has_chunks else decodes, plan.slots["row"], x.cu_query_lens
        _put(host["rows"][:first], rows[:decodes], self._dummy_row)
        _put(host["rows"][first:], rows[decodes:], self._dummy_row)
        _put(host["cu_query_lens"][:first], ends[:decodes], ends[decodes])
        _put(host["cu_query_lens"][first:], ends[decodes:], size)
        pages, states = host["page_writes"].view(PAGE_WRITE), host["row_states"].view(ROW_STATE)
        pages[: len(plan.page_writes)] = plan.page_writes
        pages[len(plan.page_writes) :] = (FULL, self._dummy_row, 0, self._dummy_page)
        states[: len(plan.row_states)] = plan.row_states
        states[len(plan.row_states) :] = 0
        states["row"][len(plan.row_states) :] = self._dummy_row
        return end

    def begin(self, size: int, chunks: int, samples: int) -> tuple[Tensor, Batch, Tensor]:
        """Do what `Parts.begin` does, in a step of `size` tokens, `chunks` chunks and `samples` sampled tokens.

        To be called while a graph is captured. Without chunks every token is sampled.
        """
        x, state, drafting = self._views(), self._parts.state, self._parts.drafting
        seqs = self.decodes + chunks if chunks else min(size, self.decodes) + 1
        tokens = self.on_device[self._tokens_at : self._tokens_at + 3 * size].view(3, size)
        cu_query_lens, placed = x["cu_query_lens"][: seqs + 1], self._placed
        drafts.place_tokens(
            tokens,
            cu_query_lens,
            x["logit_tokens"][:samples],
            x["page_writes"].view(-1, words(PAGE_WRITE)),
            state.page_tables,
            state.last_token,
            *((state.last_token, state.page_tables[FULL]) if drafting is None else (drafting.lengths, drafting.drafts)),
            placed,
            self._parts.page_size,
        )
        row_states = x["row_states"].view(-1, words(ROW_STATE))[:chunks]
        state.fill(row_states)
        batch = Batch(
            shape=StepShape(seqs - chunks, self._max_queries, chunks, chunks and size, chunks and size),
            slots=NO_SLOTS,
            layout=SeqLayout(x["rows"][:seqs], placed.kv_lens[:seqs], cu_query_lens),
            input_ids=placed.ids[:size],
            positions=placed.positions[:size],
            token_rows=tokens[2],
            logit_tokens=x["logit_tokens"][:samples].long(),
            sampling=self.sampling(samples, 0, False),
            page_writes=row_states[:0],
            row_states=row_states,
        )
        return batch.input_ids, batch, placed.out_loc[:, :size]

    def sampling(self, samples: int, flags: int, has_drafts: bool) -> Sampling:
        """The device's buffer as the inputs of sampling; to be called while a graph is captured."""
        x = self._views()
        return Sampling(
            rows=x["sample_rows"][:samples].long(),
            positions=self._placed.sample_positions[:samples],
            row_flags=x["sample_flags"][:samples],
            mask_index=x["mask_index"][:samples],
            flags=flags,
            drafted=self._placed.drafted[:samples] if has_drafts else None,
            inputs=self._placed.inputs[:samples] if has_drafts else None,
        )

    def settle(self, out: Tensor) -> Tensor:
        """As `Drafting.settle`; to be called while a graph is captured."""
        drafting, x, samples = self._parts.drafting, self._views(), out.shape[1]
        assert drafting is not None, "a plan with DRAFTS, but no drafter"
        codes = self.on_device[self._tokens_at :]
        rows, cu_query_lens = x["rows"][: self.decodes], x["cu_query_lens"][: self.decodes + 1]
        lines = out.new_zeros(2, samples + 1)  # the last column is for unused slots
        lines[0] = 1
        state = drafting.lengths, drafting.history, drafting.last_token
        drafts.settle(out, self._placed.ids, codes, rows, cu_query_lens, *state, lines[0])
        rows, longest = rows.long(), drafting.history.shape[1]
        found, ready = drafting.drafter.propose(drafting.history, rows, drafting.lengths[rows], longest)
        drafting.drafts[rows] = found
        lines[1].scatter_(0, cu_query_lens[:-1].clamp(max=samples).long(), ready)
        return torch.cat([out[:2], lines[:, :samples], out[2:]])

    def _views(self) -> dict[str, Tensor]:
        return {name: self.on_device[place] for name, place in self._places.items()}


def _put(into: Ints, values: Ints, rest: int | Ints) -> None:
    """Write `values`, then `rest` up to the end."""
    into[: len(values)] = values
    into[len(values) :] = rest
