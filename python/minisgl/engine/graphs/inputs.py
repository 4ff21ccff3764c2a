"""What captured steps read and write: rings, and what the first kernel derives from a plan."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from minisgl.core.layout import (
    FULL,
    NEWEST,
    NO_SEQUENCES,
    NOT_DRAFTED,
    PAGE_WRITE,
    ROW_STATE,
    SEQUENCE,
    Flag,
    as_words,
    words,
)
from minisgl.core.plan import Batch, BatchPlan, Sampling, SeqLayout, StepResult
from minisgl.core.rounding import round_up
from minisgl.engine.batch import expand
from minisgl.kernels.triton import drafts, step
from minisgl.kernels.triton.step import (
    DRAFT_INDEX,
    END,
    FIRST,
    FLAGS,
    HEAD,
    ID,
    INPUTS,
    MASK_INDEX,
    POSITION,
    RING,
    ROW,
    TOKEN,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from minisgl.core.layout import Records
    from minisgl.core.plan import Ints
    from minisgl.device.cuda import CudaDevice
    from minisgl.device.device import Pending
    from minisgl.engine.graphs.sizes import Size
    from minisgl.engine.runner import Parts

MAX_PAGE_WRITES: Final = 2048
MAX_ROW_STATES: Final = 256
MAX_CAPTURES: Final = 128


class StepInputs:
    """The rings of captured steps, and the tensors at fixed addresses that their kernels read.

    The plan is padded to the size of the step with the dummy row, the page table's last, and then expanded as for the
    eager runner: so the first kernel (`kernels/triton/step.py`) only has to find what the device alone knows.
    """

    def __init__(self, parts: Parts, sizes: Sequence[Size], samples: int, max_rows: int) -> None:
        """`samples`: the most tokens that a tail samples; `max_rows`: the most sequences that decode."""
        self._parts = parts
        self._device: CudaDevice = parts.device  # type: ignore[assignment]
        self._max_rows = max_rows
        self._dummy_row = len(parts.state.last_token) - 1
        limits = samples, max(map(self._sequences_of, sizes)), max(size.tokens for size in sizes)
        self._room = step.Counts(*(round_up(count, 4) for count in limits))
        longest = self._room.words + words(PAGE_WRITE) * MAX_PAGE_WRITES + words(ROW_STATE) * MAX_ROW_STATES
        lines, is_pinned = 4 + StepResult.WIDTH, torch.cuda.is_available()
        self._host = torch.zeros(RING, longest, dtype=torch.int32, pin_memory=is_pinned)
        self._out = torch.zeros(RING, lines, samples, dtype=torch.int32, pin_memory=is_pinned)
        self._host_array, self._out_array = self._host.numpy(), self._out.numpy()
        self._events = [torch.cuda.Event() for _ in range(RING)]
        self._turn = 0

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=parts.device.torch_device)

        # A blocking copy: what clears memory in the stream of the steps might run after the first copies ahead of them.
        self._in, self._turn_on_device = self._host.to(parts.device.torch_device, copy=True), zeros(1)
        self._inputs = zeros(INPUTS, sum(self._room))
        self._sample_rows = zeros(samples, dtype=torch.int64)
        self._out_loc = zeros(len(parts.state.page_tables), self._room.tokens, dtype=torch.int64)
        # Captures of recurrent states; unused lines have row -1. They are rare: the steps' stream copies them.
        self._captures, self._num_captures = zeros(MAX_CAPTURES, 3).fill_(-1), 0
        self._host_captures = torch.zeros(RING, MAX_CAPTURES, 3, dtype=torch.int32, pin_memory=is_pinned)
        ends = accumulate(self._room, initial=0)
        self._samples, self._sequences, self._tokens = (self._inputs[:, slice(*pair)] for pair in pairwise(ends))

    def _sequences_of(self, size: Size) -> int:
        """Return how many sequences the inputs have: all that `verify` reads, and one without tokens at the end."""
        return 1 + (size.sequences if size.is_plain else max(size.sequences, self._max_rows))

    def _counts(self, size: Size, columns: int) -> step.Counts:
        return step.Counts(columns, self._sequences_of(size), size.tokens)

    # -- on the host

    def write(self, plan: BatchPlan, size: Size, columns: int) -> int:
        """Write a plan to the ring's next slot, padded to `columns` sampled tokens; the number that it samples."""
        index = self._turn % RING
        self._turn += 1
        self._events[index].synchronize()  # the step that used this slot last has been executed
        counts, slot = self._counts(size, columns), self._host_array[index]
        padded = replace(plan, sequences=self._padded(plan.sequences, size))
        sequences, x = padded.sequences, expand(padded)
        slot[:2] = len(plan.page_writes), plan.row_states.nbytes // 4
        more_at = HEAD + 4 * sum(counts)
        entries, more = slot[HEAD:more_at].reshape(4, -1), slot[more_at : counts.words].reshape(3, -1)
        at, count, first_token = x.logit_tokens, len(x.logit_tokens), columns + len(sequences)
        entries[:, :count] = x.sample_rows, x.input_ids[at], x.draft_index[at], x.positions[at]
        entries[:, count:columns] = np.array([[self._dummy_row], [NEWEST], [NOT_DRAFTED], [0]])
        more[:, :count] = x.sample_flags, x.mask_index, at
        more[:, count:columns] = 0
        last = np.where(
            (sequences["flags"] & Flag.DRAFTS) != 0, sequences["stop"] - sequences["start"] - 1, NOT_DRAFTED
        )
        entries[:, columns:first_token] = (
            sequences["row"],
            last,
            last,
            sequences["stop"] - 1,
        )  # their tokens are not read
        more[0, columns:] = x.cu_query_lens[:-1]
        entries[:, first_token:] = x.token_rows, x.input_ids, x.draft_index, x.positions
        stop = counts.words
        for records in (plan.page_writes, plan.row_states):
            start, stop = stop, stop + records.nbytes // 4
            slot[start:stop] = as_words(records).ravel()
        self._device.copy_ahead(self._in[index, :stop], self._host[index, :stop])
        if len(copies := plan.captures) or self._num_captures:
            lines = self._host_captures[index].numpy()
            lines[:], self._num_captures = -1, len(copies)
            lines[: len(copies)] = np.stack([copies["row"], copies["position"], copies["target"]], 1)
            self._captures.copy_(self._host_captures[index], non_blocking=True)
        return count

    def _padded(self, sequences: Records, size: Size) -> Records:
        """Return the sequences with those of the dummy row.

        Unused decoding sequences have no token where chunks of prompts follow. Else each has as many as a row may have:
        the dummy row is not longer than others.
        """
        decodes = int(np.count_nonzero(sequences["flags"] & Flag.FROM_DEVICE))
        missing = size.tokens - int((sequences["stop"] - sequences["start"]).sum())
        unused = size.shape.decodes - decodes if size.shape.chunks else 0
        pads = np.zeros(self._sequences_of(size) - len(sequences), SEQUENCE)
        pads["row"], pads["flags"] = self._dummy_row, Flag.FROM_DEVICE
        if size.shape.chunks:
            pads["stop"][unused] = missing
        else:
            width = size.shape.queries
            pads["stop"] = np.clip(missing - width * np.arange(len(pads)), 0, width)
        parts = sequences[:decodes], pads[:unused], sequences[decodes:], pads[unused:]
        return np.concatenate([as_words(part) for part in parts]).view(SEQUENCE).ravel()  # records take 10 us

    def result(self, lines: int, count: int) -> Pending:
        """The first `count` columns that the step sampled, whose kernels are all submitted."""
        index = (self._turn - 1) % RING
        event = self._events[index]
        event.record()

        def wait() -> Ints:
            event.synchronize()
            return self._out_array[index, :lines, :count].copy()

        return wait

    # -- while a graph is captured

    def prepare(self, size: Size, columns: int) -> None:
        """Fill what `batch` and, for up to `columns` tokens, `sampling` return from the ring."""
        state, drafting = self._parts.state, self._parts.drafting
        own = (drafting.lengths, drafting.drafts) if drafting else (state.last_token, state.page_tables[FULL])
        step.prepare_inputs(
            self._in, self._turn_on_device, state.page_tables, state.table, state.last_token, *own, self._inputs,
            self._sample_rows, self._out_loc, self._counts(size, columns), self._room, self._parts.page_size,
        )  # fmt: skip

    def batch(self, size: Size) -> tuple[Batch, Tensor]:
        """The inputs of a captured step: what `Parts.begin` returns, without the tokens."""
        tokens, sequences = self._tokens[:, : size.tokens], self._sequences
        count, nothing = size.sequences, self._inputs[:0]
        batch = Batch(
            shape=size.shape,
            sequences=NO_SEQUENCES,
            layout=SeqLayout(sequences[ROW, :count], sequences[END, :count], sequences[FIRST, : count + 1]),
            input_ids=tokens[ID],
            positions=tokens[POSITION],
            token_rows=tokens[ROW],
            logit_tokens=self._samples[TOKEN, : size.samples],
            sampling=self.sampling(size.samples, 0, False),
            page_writes=nothing,
            row_states=nothing,
            captures=self._captures,
            has_adapters=size.has_adapters,
        )
        return batch, self._out_loc[:, : size.tokens]

    def sampling(self, samples: int, flags: int, has_drafts: bool) -> Sampling:
        """The inputs of sampling."""
        x = self._samples[:, :samples]
        return Sampling(
            rows=self._sample_rows[:samples],
            positions=x[END],
            row_flags=x[FLAGS],
            mask_index=x[MASK_INDEX],
            flags=flags,
            drafted=x[DRAFT_INDEX] if has_drafts else None,
            inputs=x[ID] if has_drafts else None,
        )

    def verify(self, out: Tensor) -> Tensor:
        """Do what `Drafting.verify` does."""
        drafting, samples = self._parts.drafting, out.shape[1]
        assert drafting is not None, "the plan has DRAFTS, but there is no drafter"
        x = self._sequences
        rows, cu_query_lens = x[ROW, : self._max_rows], x[FIRST, : self._max_rows + 1]
        lines = out.new_zeros(2, samples + 1)  # the last column is for unused sequences
        lines[0] = 1
        state = drafting.lengths, drafting.history, drafting.last_token
        drafts.verify(out, self._tokens[ID], x[DRAFT_INDEX], rows, cu_query_lens, *state, lines[0])
        rows, longest = rows.long(), drafting.history.shape[1]
        found, ready = drafting.drafter.propose(drafting.history, rows, drafting.lengths[rows], longest)
        drafting.drafts[rows] = found
        lines[1].scatter_(0, cu_query_lens[:-1].clamp(max=samples).long(), ready)
        return torch.cat([out[:2], lines[:, :samples], out[2:]])

    def publish(self, out: Tensor) -> None:
        """Write the result [n, S] int32 to the ring."""
        step.publish(out, self._out, self._turn_on_device)
