"""Small steps with prompts in them as CUDA graphs: launching them op by op takes longer than computing them."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from minisgl.core import NO_MASKS, Batch, BatchPlan, SeqLayout
from minisgl.engine.capture import TAILS, tail_of
from minisgl.engine.prepare import Expanded, expand
from minisgl.engine.runner import Unchosen, lacks_masks

if TYPE_CHECKING:
    from minisgl.core import Ints
    from minisgl.engine.capture import Capture
    from minisgl.engine.runner import Parts, Runner
    from minisgl.utils.cuda import CudaDevice
    from minisgl.utils.device import Pending

TOKEN_SIZES: Final = (32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
MAX_SEQS: Final = 64
MAX_PAGE_WRITES: Final = 512
# Decoding sequences are computed by the kernel for prompts here, which reads a sequence's keys one after the other.
MAX_DECODE_CONTEXT: Final = 2048
MAX_CONTEXT: Final = 8192
WORTH: Final = 0.8  # of the time of the same step without a graph, to pay for padding
REPEATS: Final = 5


class _Inputs:
    """The static input of one size: an int32 buffer and its parts by name, the same on host and device."""

    def __init__(self, tokens: int, seqs: int, device: torch.device) -> None:
        self.tokens, self.seqs = tokens, seqs
        widths = {"input_ids": tokens, "positions": tokens, "token_rows": tokens}
        widths |= dict.fromkeys(("device_tokens", "logit_tokens", "sample_rows", "sample_positions"), seqs)
        widths |= {"sample_flags": seqs, "mask_places": seqs}
        widths |= {"rows": seqs, "kv_lens": seqs, "cu_query_lens": seqs + 1}
        widths |= {"pages": 3 * MAX_PAGE_WRITES, "row_writes": BatchPlan.ROW_WIDTH * seqs}
        ends = np.cumsum([0, *(-(-w // 4) * 4 for w in widths.values())])
        self.host = np.zeros(int(ends[-1]), np.int32)
        self.device = torch.zeros(int(ends[-1]), dtype=torch.int32, device=device)
        places = {name: (int(lo), int(lo) + widths[name]) for name, lo in zip(widths, ends[:-1], strict=True)}
        self.on_host = {name: self.host[lo:hi] for name, (lo, hi) in places.items()}
        self.on_device = {name: self.device[lo:hi] for name, (lo, hi) in places.items()}


@dataclass(frozen=True, slots=True)
class _Captured:
    inputs: _Inputs
    forward: torch.cuda.CUDAGraph
    tails: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]]  # choosing tokens in all `TAILS`, with what comes out


class TokenGraphRunner:
    """Steps of few tokens, padded to one of `TOKEN_SIZES`.

    One sequence more than planned, in the page table's last row, takes the tokens that are too many; sequences that
    are too many have none. Log-probabilities of prompts run eagerly. A size is kept where it beats that.
    """

    name = "cuda graph of tokens"

    def __init__(self, parts: Parts, eager: Runner, capture: Capture, max_tokens: int) -> None:
        self.parts = parts
        self.device: CudaDevice = parts.device  # type: ignore[assignment]
        self._idle_row = len(parts.state.page_table) - 1
        self._trash_page = parts.kv_cache.num_pages - 1
        self._graphs: dict[int, _Captured] = {}
        for tokens in [t for t in TOKEN_SIZES if t <= max_tokens]:
            captured = self._capture(tokens, min(tokens // 2, MAX_SEQS, self._idle_row + 1), capture)
            plan = _trial(tokens - 1)
            self._graphs[tokens] = captured
            is_worth = self._seconds(self, plan) <= WORTH * self._seconds(eager, plan)
            if not parts.comm.exchange(is_worth)[0]:  # what rank 0 finds, since all must run steps in the same way
                del self._graphs[tokens]

    def fits(self, plan: BatchPlan) -> bool:
        flags, stops = plan.slots[:, 3], plan.slots[:, 2]
        return bool(
            self._size(plan) is not None
            and not (flags & BatchPlan.SCORED).any()
            and len(plan.pages) <= MAX_PAGE_WRITES
            and stops.max() <= MAX_CONTEXT
            and stops[(flags & BatchPlan.FROM_DEVICE) != 0].max(initial=0) <= MAX_DECODE_CONTEXT
        )

    def _size(self, plan: BatchPlan) -> int | None:
        """The smallest size with room for the plan, one more token and one more sequence."""
        tokens, seqs = int((plan.slots[:, 2] - plan.slots[:, 1]).sum()), len(plan.slots)
        for size, captured in self._graphs.items():
            if size > tokens and captured.inputs.seqs > max(seqs, len(plan.rows)):
                return size
        return None

    def prepare(self, plan: BatchPlan) -> BatchPlan:
        return plan

    def launch(self, plan: BatchPlan) -> Pending:
        size = self._size(plan)
        assert size is not None
        captured, x = self._graphs[size], expand(plan)
        self._fill(captured.inputs, plan, x)
        self.device.upload_into(captured.inputs.device, captured.inputs.host)
        captured.forward.replay()

        def choose(masks: Ints) -> Pending:
            self.parts.adjuster.apply(plan.adjusts, masks)
            graph, out = captured.tails[tail_of(x.flags)]

            def work() -> Tensor:
                graph.replay()
                return out

            return _First(self.device.submit(work, 0.0), len(x.sample_rows))

        return Unchosen(choose) if lacks_masks(x.flags, plan.masks) else choose(plan.masks)

    def _fill(self, inputs: _Inputs, plan: BatchPlan, x: Expanded) -> None:
        host, spare = inputs.on_host, inputs.tokens - 1
        used = len(x.input_ids)

        def put(name: str, values: Ints, rest: int) -> None:
            host[name][: len(values)] = values
            host[name][len(values) :] = rest

        put("input_ids", x.input_ids, 0)
        put("positions", x.positions, 0)
        put("token_rows", x.token_rows, self._idle_row)
        put("device_tokens", x.device_tokens, spare)
        put("logit_tokens", x.logit_tokens, spare)
        put("sample_rows", x.sample_rows, self._idle_row)
        put("sample_positions", x.sample_positions, 1)
        put("sample_flags", x.sample_flags, 0)
        put("mask_places", x.mask_places, 0)
        put("rows", x.rows, self._idle_row)
        put("kv_lens", x.kv_lens, 0)
        host["kv_lens"][len(x.rows)] = inputs.tokens - used
        host["cu_query_lens"][0] = 0
        np.cumsum(x.query_lens, out=host["cu_query_lens"][1 : len(x.rows) + 1])
        host["cu_query_lens"][len(x.rows) + 1 :] = inputs.tokens
        pages, rows = host["pages"].reshape(-1, 3), host["row_writes"].reshape(-1, BatchPlan.ROW_WIDTH)
        pages[: len(plan.pages)] = plan.pages
        pages[len(plan.pages) :] = (self._idle_row, 0, self._trash_page)
        rows[: len(plan.rows)] = plan.rows
        rows[len(plan.rows) :] = 0
        rows[len(plan.rows) :, 0] = self._idle_row

    def _capture(self, tokens: int, seqs: int, capture: Capture) -> _Captured:
        inputs = _Inputs(tokens, seqs, self.device.torch_device)
        plan = _trial(tokens - 1)
        self._fill(inputs, plan, expand(plan))
        self.device.upload_into(inputs.device, inputs.host)
        forward, logits = capture(lambda: self.parts.run(_batch(inputs)))
        return _Captured(
            inputs, forward, {tail: capture(partial(self._sample, logits, inputs, tail)) for tail in TAILS}
        )

    def _sample(self, logits: Tensor, inputs: _Inputs, tail: int) -> Tensor:
        # The batch is made here, since its conversions of the inputs belong into the graph.
        return self.parts.sample(logits, replace(_batch(inputs), flags=tail))

    def _seconds(self, runner: Runner, plan: BatchPlan) -> float:
        times = []
        for _ in range(REPEATS):
            started = time.perf_counter()
            waits = [runner.launch(runner.prepare(plan)) for _ in range(2)]
            for wait in waits:
                wait.wait()
            times.append(time.perf_counter() - started)
        return statistics.median(times)


def _trial(tokens: int) -> BatchPlan:
    """A prompt of `tokens` in row 0, whose pages are nobody's yet."""
    none = np.empty(0, np.int32)
    slots = np.array([(0, 0, tokens, BatchPlan.SAMPLES)], np.int32)
    rows = none.reshape(0, BatchPlan.ROW_WIDTH)
    return BatchPlan(0, slots, np.zeros(tokens, np.int32), none.reshape(0, 3), rows, none)


def _batch(inputs: _Inputs) -> Batch:
    """The static inputs as a batch. Host lengths say only that there are prompts: kernels look at the device's."""
    x, twos, ones = inputs.on_device, np.full(inputs.seqs, 2, np.int32), np.ones(inputs.seqs, np.int32)
    return Batch(
        step=0,
        layout=SeqLayout(ones, twos, ones, x["rows"], x["kv_lens"], x["cu_query_lens"]),
        input_ids=x["input_ids"],
        positions=x["positions"],
        token_rows=x["token_rows"],
        device_tokens=x["device_tokens"].long(),
        logit_tokens=x["logit_tokens"].long(),
        sample_rows=x["sample_rows"].long(),
        sample_positions=x["sample_positions"],
        page_writes=x["pages"].view(-1, 3).long(),
        row_writes=x["row_writes"].view(-1, BatchPlan.ROW_WIDTH),
        adjusts=np.empty(0, np.int32),
        masks=NO_MASKS,
        flags=0,
        sample_flags=x["sample_flags"],
        mask_places=x["mask_places"],
        scored=None,
    )


class _First:
    """The first `count` columns of a padded result."""

    def __init__(self, pending: Pending, count: int) -> None:
        self._pending, self._count = pending, count

    def wait(self) -> npt.NDArray[np.int32]:
        return self._pending.wait()[:, : self._count]
