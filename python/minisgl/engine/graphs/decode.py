"""Captures decode steps as CUDA graphs: one launch instead of hundreds, and a graph for each useful batch size."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from torch import Tensor

from minisgl.core import Batch, BatchPlan, Sampling, SeqLayout, StepShape
from minisgl.engine.graphs.capture import TAILS, tail_of
from minisgl.engine.runner import ForwardOutput
from minisgl.layout import NO_SLOTS, Flag
from minisgl.triton import decode_io

if TYPE_CHECKING:
    from collections.abc import Callable

    from minisgl.core import Ints
    from minisgl.device.device import Pending
    from minisgl.engine.graphs.capture import Capture
    from minisgl.engine.runner import Parts

MAX_PAGE_WRITES: Final = 1024  # of one captured step; a step with more runs eagerly


def graph_sizes(max_rows: int) -> list[int]:
    """Batch sizes to capture: closely spaced where a padded row costs much of a step, widely where it costs little."""
    sizes = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 40, 48, 56, 64]
    sizes += [*range(80, 129, 16), *range(160, 257, 32), *range(320, 513, 64), *range(640, 4097, 128)]
    return sorted({min(size, max_rows) for size in sizes})


@dataclass(frozen=True, slots=True)
class _Captured:
    """One batch size: the graph of the forward pass, and for each of `TAILS` its graph and the height of its result."""

    forward: torch.cuda.CUDAGraph
    tails: dict[int, tuple[torch.cuda.CUDAGraph, int]]


class GraphRunner:
    """Runs steps that only decode, with rows that the device knows already.

    The graphs read the plan from a ring in pinned memory and write their tokens to another (`triton/decode_io.py`), so
    a step is a few numpy copies and two graph launches. The page table's last row, the dummy row, pads a batch. Masks
    change in every step and are large: only masks are copied.
    """

    name = "cuda graph"

    def __init__(
        self, parts: Parts, sizes: list[int], capture: Capture, progress: Callable[[int, int], None] | None = None
    ) -> None:
        self.parts = parts
        capacity = self.capacity = max(sizes)
        self._in, self._out = decode_io.input_ring(capacity, MAX_PAGE_WRITES), decode_io.output_ring(capacity)
        self._in_host, self._out_host = self._in.numpy(), self._out.numpy()
        self._events = [torch.cuda.Event() for _ in range(decode_io.RING)]
        self._turn = 0
        device = parts.device.torch_device
        self._turn_on_device = torch.zeros(1, dtype=torch.int32, device=device)
        self._size_of = np.searchsorted(sizes, np.arange(capacity + 1))
        self._sizes = sizes

        def ints(dtype: torch.dtype) -> Tensor:
            return torch.zeros(capacity, dtype=dtype, device=device)

        self._rows = ints(torch.int64)
        self._out_loc = torch.zeros(len(parts.stores), capacity, dtype=torch.int64, device=device)
        self._kv_lens, self._positions, self._input_ids = (ints(torch.int32) for _ in range(3))
        self._flags = ints(torch.int32)
        self._mask_index = ints(torch.int32)
        self._rows32, self._token_ends = ints(torch.int32), torch.arange(capacity + 1, dtype=torch.int32, device=device)
        self._graphs: dict[int, _Captured] = {}
        for done, size in enumerate(reversed(sizes), 1):
            self._graphs[size] = self._capture(size, capture)
            if progress is not None:
                progress(done, len(sizes))
        self._turn_on_device.zero_()  # the run before each capture advances it

    def fits(self, plan: BatchPlan) -> bool:
        is_known = (plan.slots["flags"] & Flag.FROM_DEVICE).all()
        return bool(
            is_known
            and not plan.has_drafts
            and len(plan.slots) <= self.capacity
            and len(plan.page_writes) <= MAX_PAGE_WRITES
            and not len(plan.row_states)
            and not len(plan.penalties)
        )

    def launch(self, plan: BatchPlan) -> ForwardOutput:
        index = self._turn % len(self._events)
        self._turn += 1
        event, count = self._events[index], len(plan.slots)
        event.synchronize()  # the step that used this slot of the rings last has been executed
        decode_io.write_input(self._in_host[index], plan, self.capacity)
        flags = int(np.bitwise_or.reduce(plan.slots["flags"]))
        captured = self._graphs[self._sizes[self._size_of[count]]]
        captured.forward.replay()

        def sample(masks: Ints) -> Pending:
            self.parts.penalties.apply(plan.penalties, masks)
            tail, lines = captured.tails[tail_of(flags)]
            tail.replay()
            event.record()

            def wait() -> Ints:
                event.synchronize()
                return self._out_host[index, :lines, :count].copy()

            return wait

        return ForwardOutput(plan, sample)

    # -- capture

    def _capture(self, size: int, capture: Capture) -> _Captured:
        batch = self._batch(size)
        forward, logits = capture(lambda: self._forward(batch))
        tails = {tail: capture(partial(self._sample, logits, replace(batch.sampling, flags=tail))) for tail in TAILS}
        return _Captured(forward, tails)

    def _forward(self, batch: Batch) -> Tensor:
        parts, out_loc = self.parts, self._out_loc[:, : batch.num_tokens]
        state, size = parts.state, parts.page_size
        decode_io.begin_decode(
            self._in, self._turn_on_device, state.page_tables, state.last_token, batch, out_loc, size, self.capacity
        )
        return parts.model.logits(parts.hidden(batch.input_ids, batch, out_loc))

    def _sample(self, logits: Tensor, sampling: Sampling) -> int:
        out = self.parts.sample(logits, sampling)
        decode_io.publish(out, self._out, self._turn_on_device, self.capacity)
        return len(out)

    def _batch(self, size: int) -> Batch:
        """The inputs of a captured step: views of what `begin_decode` fills. It also writes the pages."""
        rows, kv_lens = self._rows32[:size], self._kv_lens[:size]
        nothing = self._rows32[:0]
        return Batch(
            shape=StepShape(size, 1),
            slots=NO_SLOTS,
            layout=SeqLayout(rows, kv_lens, self._token_ends[: size + 1]),
            input_ids=self._input_ids[:size],
            positions=self._positions[:size],
            token_rows=rows,
            logit_tokens=self._token_ends[:size].long(),
            sampling=Sampling(self._rows[:size], kv_lens, self._flags[:size], self._mask_index[:size], flags=0),
            page_writes=nothing,
            row_states=nothing,
        )
