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

# From 128 on whole tiles of matrix products, which the scheduler fills where it may (`scheduler/budget.py`).
TOKEN_SIZES: Final = (32, 48, 64, 96, 128, 192, 256, 384, 512, 640, 768, 1024)
TAIL_SIZES: Final = (8, 32, 64, 128, 192, 256)  # sequences that get a token; and as many as there can be
MAX_CHUNKS: Final = 64
MAX_PAGE_WRITES: Final = 512
MAX_CONTEXT: Final = 8192  # of prompts, whose tiles are chosen for short ones
SLACK: Final = 1.03  # of the time of the same step without a graph: what timing may be off by
REPEATS: Final = 5


class _Inputs:
    """The static input of all sizes: an int32 buffer and its parts by name, the same on host and device.

    Sequences are the `decodes` that decode, in the first places and the first tokens, then chunks of prompts. The
    arrays of tokens come last, so that a small step is a small upload.
    """

    def __init__(self, tokens: int, decodes: int, device: torch.device) -> None:
        self.decodes = decodes
        chunks = MAX_CHUNKS + 1
        seqs = decodes + chunks
        widths = dict.fromkeys(("logit_tokens", "sample_rows", "sample_positions", "sample_flags", "mask_places"), seqs)
        widths |= {"rows": seqs, "kv_lens": seqs, "cu_query_lens": seqs + 1}
        widths |= {"pages": 3 * MAX_PAGE_WRITES, "row_writes": BatchPlan.ROW_WIDTH * chunks}
        ends: list[int] = np.cumsum([0, *(-(-w // 4) * 4 for w in widths.values())]).tolist()
        self._tokens_at = ends[-1]
        self.host = np.zeros(ends[-1] + 3 * tokens, np.int32)
        self.device = torch.zeros(len(self.host), dtype=torch.int32, device=device)
        places = {name: (lo, lo + widths[name]) for name, lo in zip(widths, ends[:-1], strict=True)}
        self.on_host = {name: self.host[lo:hi] for name, (lo, hi) in places.items()}
        self.on_device = {name: self.device[lo:hi] for name, (lo, hi) in places.items()}

    def used(self, size: int) -> int:
        """Numbers that a step of `size` tokens needs."""
        return self._tokens_at + 3 * size

    def tokens_on_host(self, size: int) -> Ints:
        """Ids, positions and rows: [3, size]."""
        return self.host[self._tokens_at : self.used(size)].reshape(3, size)

    def tokens_on_device(self, size: int) -> Tensor:
        return self.device[self._tokens_at : self.used(size)].view(3, size)


@dataclass(frozen=True, slots=True)
class _Captured:
    """One number of tokens: a graph that leaves the hidden states of those by which tokens are chosen."""

    forward: torch.cuda.CUDAGraph
    chunks: int  # of prompts, one of them for padding
    samples: int  # fewer than tokens, since a model takes as many to be all of them
    least: int  # tokens from which this is no slower than the same step without padding and a graph


class TokenGraphRunner:
    """Steps of few tokens, those of prompts and of sequences that decode, padded to one of `TOKEN_SIZES`.

    One chunk more than planned, in the page table's last row, takes the tokens that are too many; sequences that are
    too many have none. Choosing tokens is captured by the number of those, for all sizes together, since it takes the
    hidden states from one place. Log-probabilities of prompts run eagerly. What is faster eagerly runs so.
    """

    name = "cuda graph of tokens"

    def __init__(self, parts: Parts, eager: Runner, capture: Capture, max_tokens: int, max_decodes: int) -> None:
        self.parts = parts
        self.device: CudaDevice = parts.device  # type: ignore[assignment]
        self._idle_row = len(parts.state.page_table) - 1
        self._trash_page = parts.kv_cache.num_pages - 1
        sizes = [t for t in TOKEN_SIZES if t <= max_tokens]
        largest = max(sizes, default=0)
        self._inputs = _Inputs(largest, min(max_decodes, largest), parts.device.torch_device)
        self._hidden: tuple[Tensor, Tensor] | None = None
        self._graphs: dict[int, _Captured] = {}
        for size in reversed(sizes):
            self._graphs[size] = self._capture(size, capture)
        self._graphs = dict(reversed(self._graphs.items()))
        most = max((captured.samples for captured in self._graphs.values()), default=0)
        self._tail_sizes = sorted({min(rows, most) for rows in (*TAIL_SIZES, most) if most})
        self._tails = {
            (rows, tail): capture(partial(self._sample, rows, tail)) for rows in self._tail_sizes for tail in TAILS
        }
        self._keep_faster(eager)

    def fits(self, plan: BatchPlan) -> bool:
        flags, stops = plan.slots[:, 3], plan.slots[:, 2]
        is_chunk = (flags & BatchPlan.FROM_DEVICE) == 0
        return bool(
            self._size(plan) is not None
            and not (flags & BatchPlan.SCORED).any()
            and len(plan.pages) <= MAX_PAGE_WRITES
            and stops[is_chunk].max(initial=0) <= MAX_CONTEXT
        )

    def _size(self, plan: BatchPlan) -> int | None:
        """The size for a plan, if its graph has room for it and is worth the padding."""
        flags = plan.slots[:, 3]
        tokens = int((plan.slots[:, 2] - plan.slots[:, 1]).sum())
        decodes = int(np.count_nonzero(flags & BatchPlan.FROM_DEVICE))
        samples = int(np.count_nonzero(flags & BatchPlan.SAMPLES))
        chunks = max(len(flags) - decodes, len(plan.rows))
        for size, captured in self._graphs.items():
            if size >= tokens and captured.chunks > chunks and captured.samples >= samples:
                return size if decodes <= self._inputs.decodes and tokens >= captured.least else None
        return None

    def prepare(self, plan: BatchPlan) -> BatchPlan:
        return plan

    def launch(self, plan: BatchPlan) -> Pending:
        size = self._size(plan)
        assert size is not None
        inputs, x = self._inputs, expand(plan)
        self._fill(size, plan, x)
        used = inputs.used(size)
        self.device.upload_into(inputs.device[:used], inputs.host[:used])
        self._graphs[size].forward.replay()
        count = len(x.sample_rows)

        def choose(masks: Ints) -> Pending:
            self.parts.adjuster.apply(plan.adjusts, masks)
            graph, out = self._tails[next(rows for rows in self._tail_sizes if rows >= count), tail_of(x.flags)]

            def work() -> Tensor:
                graph.replay()
                return out

            return _First(self.device.submit(work, 0.0), count)

        return Unchosen(choose) if lacks_masks(x.flags, plan.masks) else choose(plan.masks)

    def _fill(self, size: int, plan: BatchPlan, x: Expanded) -> None:
        host, tokens, used = self._inputs.on_host, self._inputs.tokens_on_host(size), len(x.input_ids)

        def put(into: Ints, values: Ints, rest: int) -> None:
            into[: len(values)] = values
            into[len(values) :] = rest

        put(tokens[0], x.input_ids, 0)
        put(tokens[1], x.positions, 0)
        put(tokens[2], x.token_rows, self._idle_row)
        put(host["logit_tokens"], x.logit_tokens, 0)
        put(host["sample_rows"], x.sample_rows, self._idle_row)
        put(host["sample_positions"], x.sample_positions, 1)
        put(host["sample_flags"], x.sample_flags, 0)
        put(host["mask_places"], x.mask_places, 0)
        decodes, first = int(np.count_nonzero(plan.slots[:, 3] & BatchPlan.FROM_DEVICE)), self._inputs.decodes
        put(host["rows"][:first], x.rows[:decodes], self._idle_row)
        put(host["rows"][first:], x.rows[decodes:], self._idle_row)
        put(host["kv_lens"][:first], x.kv_lens[:decodes], 0)
        put(host["kv_lens"][first:], x.kv_lens[decodes:], 0)
        host["kv_lens"][first + len(x.rows) - decodes] = size - used
        put(host["cu_query_lens"][first:], np.cumsum([decodes, *x.query_lens[decodes:]], dtype=np.int32), size)
        pages, rows = host["pages"].reshape(-1, 3), host["row_writes"].reshape(-1, BatchPlan.ROW_WIDTH)
        pages[: len(plan.pages)] = plan.pages
        pages[len(plan.pages) :] = (self._idle_row, 0, self._trash_page)
        rows[: len(plan.rows)] = plan.rows
        rows[len(plan.rows) :] = 0
        rows[len(plan.rows) :, 0] = self._idle_row

    def _capture(self, size: int, capture: Capture) -> _Captured:
        chunks = min(size // 2, MAX_CHUNKS) + 1
        samples = min(size - 1, self._inputs.decodes + chunks - 1)
        plan = _trial(size)
        self._fill(size, plan, expand(plan))
        self.device.upload_into(self._inputs.device, self._inputs.host)

        def work() -> None:
            # The batch is made here, since its conversions of the inputs belong into the graph.
            hidden = self.parts.hidden(*self.parts.begin(self._batch(size, chunks, samples)))
            if self._hidden is None:  # the first of all, which has the most, and before its capture
                self._hidden = hidden[0].clone(), hidden[1].clone()
            for own, shared in zip(hidden, self._hidden, strict=True):
                shared[:samples].copy_(own)

        return _Captured(capture(work)[0], chunks, samples, 0)

    def _sample(self, rows: int, tail: int) -> Tensor:
        assert self._hidden is not None
        x, residual = (t[:rows] for t in self._hidden)
        batch = self._batch(1, 1, rows, tail)
        return self.parts.sample(self.parts.model.logits(x, residual), batch)

    def _batch(self, size: int, chunks: int, samples: int, flags: int = 0) -> Batch:
        """The static inputs as a batch. Host lengths only bound those of prompts: kernels look at the device's."""
        x, seqs = self._inputs.on_device, self._inputs.decodes + chunks
        input_ids, positions, token_rows = self._inputs.tokens_on_device(size)
        lens = np.ones(seqs, np.int32)
        lens[self._inputs.decodes :] = 2
        lens[self._inputs.decodes] = size
        layout = SeqLayout(lens, lens, lens, x["rows"][:seqs], x["kv_lens"][:seqs], x["cu_query_lens"][: seqs + 1])
        return Batch(
            step=0,
            layout=layout,
            input_ids=input_ids,
            positions=positions,
            token_rows=token_rows,
            logit_tokens=x["logit_tokens"][:samples].long(),
            sample_rows=x["sample_rows"][:samples].long(),
            sample_positions=x["sample_positions"][:samples],
            page_writes=x["pages"].view(-1, 3).long(),
            row_writes=x["row_writes"].view(-1, BatchPlan.ROW_WIDTH)[:chunks],
            adjusts=np.empty(0, np.int32),
            masks=NO_MASKS,
            flags=flags,
            sample_flags=x["sample_flags"][:samples],
            mask_places=x["mask_places"][:samples],
            scored=None,
        )

    def _keep_faster(self, eager: Runner) -> None:
        """Time prompts of each size both ways, and find how many tokens must be real to be worth padding the others."""
        fewer, fewer_s = 0, None
        for size, captured in list(self._graphs.items()):
            plan = _trial(size)
            eager_s, graph_s = self._seconds(eager, plan), self._seconds(self, plan)
            per_token = 0.0 if fewer_s is None else max(0.0, (eager_s - fewer_s) / (size - fewer))
            gain = SLACK * eager_s - graph_s
            least = size + 1 if gain < 0 else 0 if per_token == 0 else size - int(gain / per_token)
            least = self.parts.comm.exchange(least)[0]  # what rank 0 finds, since all must run steps in the same way
            if least <= size:
                self._graphs[size] = replace(captured, least=least)
            else:
                del self._graphs[size]
            fewer, fewer_s = size, eager_s

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


class _First:
    """The first `count` columns of a padded result."""

    def __init__(self, pending: Pending, count: int) -> None:
        self._pending, self._count = pending, count

    def wait(self) -> npt.NDArray[np.int32]:
        return self._pending.wait()[:, : self._count]
