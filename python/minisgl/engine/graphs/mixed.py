"""Captures steps with prompts as CUDA graphs, where launching op by op takes longer than computing."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from torch import Tensor

from minisgl.core import TILE_TOKENS, BatchPlan
from minisgl.engine.batch import Expanded, expand
from minisgl.engine.graphs.capture import TAILS, tail_of
from minisgl.engine.graphs.mixed_inputs import MAX_CHUNKS, MAX_PAGE_WRITES, MixedInputs
from minisgl.engine.runner import ForwardOutput
from minisgl.engine.trial import trial_plan
from minisgl.layout import Flag

if TYPE_CHECKING:
    from minisgl.core import Ints
    from minisgl.device.cuda import CudaDevice
    from minisgl.device.device import Pending
    from minisgl.engine.graphs.capture import Capture
    from minisgl.engine.runner import Parts

# From 256 on, every whole tile of a GEMM. Padding then costs little: the scheduler fills tiles where it can
# (`scheduler/budget.py`), and a GEMM takes as long for half a tile as for a whole one.
TOKEN_SIZES: Final = (32, 48, 64, 96, 128, 192, *range(2 * TILE_TOKENS, 11 * TILE_TOKENS + 1, TILE_TOKENS))
LARGE_SIZES: Final = (*range(1536, 4097, 256), *range(4608, 8193, 512))  # for models with small layers
LAUNCH_FLOPS: Final = 3.6e11  # of an H200 in 0.6 ms; a host takes 0.4 to 0.8 ms to launch a layer op by op
TAIL_SIZES: Final = (8, 32, 64, 128, 192, 256)  # sequences that sample; the largest possible number is added
MAX_CONTEXT: Final = 8192  # of prompts: the tiles of attention are chosen for short contexts


@dataclass(frozen=True, slots=True)
class _Captured:
    """One number of tokens: a graph that leaves the hidden states from which tokens are sampled."""

    forward: torch.cuda.CUDAGraph
    chunks: int  # of prompts, one of them for padding
    samples: int  # fewer than the tokens: for an equal number the model would not select hidden states


def token_sizes(max_tokens: int, flops_per_token: float, num_layers: int) -> list[int]:
    """Numbers of tokens to capture: `TOKEN_SIZES`, and `LARGE_SIZES` that take longer to launch than to compute.

    Each costs the start one launch, one capture and its arithmetic.
    """
    large = LAUNCH_FLOPS * num_layers / flops_per_token
    return [t for t in (*TOKEN_SIZES, *(t for t in LARGE_SIZES if t <= large)) if t <= max_tokens]


class MixedGraphRunner:
    """Runs steps with prompts and decoding sequences, padded to one of `token_sizes` as `MixedInputs` says.

    Sampling is captured by the number of sequences that sample, once for all sizes, since it reads the hidden states
    from one place. Prompt logprobs run eagerly.

    A graph pays even where the device would finish sooner without padding: launching a step op by op takes 13 to 30 ms
    (36 layers, with other processes running), in which the scheduler neither receives nor replies.
    """

    name = "cuda graph with prompts"

    def __init__(self, parts: Parts, capture: Capture, max_tokens: int, max_decodes: int) -> None:
        self.parts = parts
        self.device: CudaDevice = parts.device  # type: ignore[assignment]
        sizes = token_sizes(max_tokens, parts.flops_per_token, parts.model.config.num_layers)
        self._inputs = MixedInputs(max(sizes, default=0), max_decodes, parts)
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

    def fits(self, plan: BatchPlan) -> bool:
        flags, stops = plan.slots["flags"], plan.slots["stop"]
        is_chunk = (flags & Flag.FROM_DEVICE) == 0
        return bool(
            self._size(plan) is not None
            and not plan.has_drafts
            and not (flags & Flag.PROMPT_LOGPROBS).any()
            and len(plan.page_writes) <= MAX_PAGE_WRITES
            and stops[is_chunk].max(initial=0) <= MAX_CONTEXT
        )

    def _size(self, plan: BatchPlan) -> int | None:
        """The smallest captured size that fits a plan, if any."""
        flags = plan.slots["flags"]
        tokens = int((plan.slots["stop"] - plan.slots["start"]).sum())
        decodes = int(np.count_nonzero(flags & Flag.FROM_DEVICE))
        samples = int(np.count_nonzero(flags & Flag.SAMPLES))
        chunks = max(len(flags) - decodes, len(plan.row_states))
        if decodes > self._inputs.decodes:
            return None
        fitting = (s for s, c in self._graphs.items() if s >= tokens and c.chunks > chunks and c.samples >= samples)
        return next(fitting, None)

    def launch(self, plan: BatchPlan) -> ForwardOutput:
        size = self._size(plan)
        assert size is not None, "the plan does not fit"
        x = expand(plan)
        self._upload(size, plan, x)
        self._graphs[size].forward.replay()
        count = len(x.sample_rows)

        def sample(masks: Ints) -> Pending:
            self.parts.penalties.apply(plan.penalties, masks)
            graph, out = self._tails[next(rows for rows in self._tail_sizes if rows >= count), tail_of(x.flags)]

            def work() -> Tensor:
                graph.replay()
                return out

            padded = self.device.submit(work, 0.0)
            return lambda: padded()[:, :count]

        return ForwardOutput(plan, sample)

    def _upload(self, size: int, plan: BatchPlan, x: Expanded) -> None:
        used = self._inputs.fill(size, plan, x)
        self.device.upload_into(self._inputs.on_device[:used], self._inputs.on_host[:used])

    def _capture(self, size: int, capture: Capture) -> _Captured:
        chunks = min(size // 2, MAX_CHUNKS) + 1
        samples = min(size - 1, self._inputs.decodes + chunks - 1)
        plan = trial_plan([(0, 0, size, Flag.SAMPLES)])
        self._upload(size, plan, expand(plan))

        def work() -> None:
            hidden = self.parts.hidden(*self.parts.begin(self._inputs.batch(size, chunks, samples)))
            if self._hidden is None:  # the run before the first capture, which has the most sequences
                self._hidden = hidden[0].clone(), hidden[1].clone()
            for own, shared in zip(hidden, self._hidden, strict=True):
                shared[:samples].copy_(own)

        return _Captured(capture(work)[0], chunks, samples)

    def _sample(self, rows: int, tail: int) -> Tensor:
        assert self._hidden is not None
        x, residual = (t[:rows] for t in self._hidden)
        return self.parts.sample(self.parts.model.logits(x, residual), self._inputs.sampling(rows, tail))
