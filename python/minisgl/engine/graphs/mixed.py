"""Captures steps with prompts or drafts as CUDA graphs, where launching op by op takes longer than computing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from torch import Tensor

from minisgl.core import TILE_TOKENS, BatchPlan
from minisgl.engine.batch import Expanded, expand, make_batch
from minisgl.engine.graphs.capture import TAILS, tail_of
from minisgl.engine.graphs.drafts import DraftGraphs
from minisgl.engine.graphs.mixed_inputs import MAX_CHUNKS, MAX_DRAFTED, MAX_PAGE_WRITES, MixedInputs
from minisgl.engine.runner import ForwardOutput
from minisgl.engine.trial import trial_plan
from minisgl.layout import MAX_DRAFT_TOKENS, Flag

if TYPE_CHECKING:
    from collections.abc import Callable

    from minisgl.core import Ints
    from minisgl.device.cuda import CudaDevice
    from minisgl.device.device import Pending
    from minisgl.engine.graphs.capture import Capture
    from minisgl.engine.runner import Parts
    from minisgl.layers.linear import Stream

# From 256 on, every whole tile of a GEMM. Padding then costs little: the scheduler fills tiles where it can
# (`scheduler/budget.py`), and a GEMM takes as long for half a tile as for a whole one.
TOKEN_SIZES: Final = (32, 48, 64, 96, 128, 192, *range(2 * TILE_TOKENS, 11 * TILE_TOKENS + 1, TILE_TOKENS))
LARGE_SIZES: Final = (*range(1536, 4097, 256), *range(4608, 8193, 512))  # for models with small layers
# Of steps with drafts and without prompts.
DRAFT_SIZES: Final = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64, 80, 96, 128, 160, 192, 256, 320, 384, 448, 512)
LARGE_DRAFT_SIZES: Final = (640, 768, 1024, MAX_DRAFT_TOKENS)
LAUNCH_FLOPS: Final = 3.6e11  # of an H200 in 0.6 ms; a host takes 0.4 to 0.8 ms to launch a layer op by op
# Of tokens to sample; the largest possible number is added.
TAIL_SIZES: Final = (8, 16, 32, 64, 128, 192, 256, 320, 512, 768, 1024)
MAX_CONTEXT: Final = 8192  # of prompts: the tiles of attention are chosen for short contexts


@dataclass(frozen=True, slots=True)
class _Captured:
    """One number of tokens: a graph that leaves the hidden states from which tokens are sampled."""

    forward: torch.cuda.CUDAGraph
    size: int
    chunks: int  # of prompts, one of them for padding; 0 without prompts
    samples: int  # with prompts fewer than the tokens: else the model would not select hidden states


def token_sizes(max_tokens: int, large: float) -> list[int]:
    """Numbers of tokens to capture: `TOKEN_SIZES`, and `LARGE_SIZES` up to `large`, which launch longer than compute.

    Each costs the start one launch, one capture and its arithmetic.
    """
    return [t for t in (*TOKEN_SIZES, *(t for t in LARGE_SIZES if t <= large)) if t <= max_tokens]


def draft_sizes(most: int, large: float) -> list[int]:
    """Numbers of tokens to capture, `most` at most, for steps with drafts and without prompts."""
    return [t for t in (*DRAFT_SIZES, *(t for t in LARGE_DRAFT_SIZES if t <= large)) if t <= most]


class MixedGraphRunner:
    """Runs steps with prompts, decoding sequences and drafts, padded to one of `token_sizes` as `MixedInputs` says.

    Steps with drafts and without prompts have graphs of their own, `DRAFT_SIZES`, which read the keys of a sequence
    once. They sample behind every token, and their tail confirms drafts and asks the drafter. A drafter with a model
    has graphs for its drafts. It reads prompts, and what a step computed, op by op: that is one pass, which is launched
    while the device computes.

    Sampling is captured by the number of sequences that sample, once for all sizes, since it reads the hidden states
    from one place. Prompt logprobs run eagerly.

    A graph pays even where the device would finish sooner without padding: launching a step op by op takes 13 to 30 ms
    (36 layers, with other processes running), in which the scheduler neither receives nor replies.
    """

    name = "cuda graph with prompts"

    def __init__(self, parts: Parts, capture: Capture, max_tokens: int, max_decodes: int, max_queries: int) -> None:
        self.parts = parts
        self.device: CudaDevice = parts.device  # type: ignore[assignment]
        large = LAUNCH_FLOPS * parts.model.config.num_layers / parts.flops_per_token
        sizes = token_sizes(max_tokens, large)
        drafted = draft_sizes(0 if parts.drafting is None else max_decodes * max_queries, large)
        most_drafted = max(drafted, default=0)
        most_tokens = max([*sizes, most_drafted])
        self._inputs = MixedInputs(most_tokens, max_decodes, most_drafted, max_queries, parts)
        self._hidden: Stream | None = None
        self._model = None
        if parts.drafting is not None and (model := parts.drafting.model) is not None:
            self._model, self._drafts = model, DraftGraphs(parts, parts.drafting, model, capture, max_decodes)
        self._states: dict[int, Tensor] = {}  # [most_tokens, H], outputs of the layers that the model reads
        self._most_tokens = most_tokens
        graphs = [self._capture(size, True, capture) for size in reversed(sizes)]
        graphs += [self._capture(size, False, capture) for size in reversed(drafted)]
        self._graphs = graphs[::-1]
        most = max((captured.samples for captured in graphs), default=0)
        self._tail_sizes = sorted({min(rows, most) for rows in (*TAIL_SIZES, most) if most})
        kinds = (False,) if parts.drafting is None else (False, True)
        self._tails = {key: capture(partial(self._sample, *key)) for key in product(self._tail_sizes, TAILS, kinds)}

    def fits(self, plan: BatchPlan) -> bool:
        flags, stops = plan.slots["flags"], plan.slots["stop"]
        is_chunk = (flags & Flag.FROM_DEVICE) == 0
        return bool(
            self._choose(plan) is not None
            and not (flags & Flag.PROMPT_LOGPROBS).any()
            and len(plan.page_writes) <= MAX_PAGE_WRITES
            and stops[is_chunk].max(initial=0) <= MAX_CONTEXT
        )

    def _choose(self, plan: BatchPlan) -> _Captured | None:
        """The smallest graph that fits a plan, if any; those without prompts are the first."""
        flags = plan.slots["flags"]
        tokens = int((plan.slots["stop"] - plan.slots["start"]).sum())
        decodes = int(np.count_nonzero(flags & Flag.FROM_DEVICE))
        samples = len(plan.sampled_flags)
        chunks = max(len(flags) - decodes, len(plan.row_states))
        if decodes > self._inputs.decodes:
            return None
        fitting = (c for c in self._graphs if c.size >= tokens and c.samples >= samples)
        return next((c for c in fitting if (c.chunks > chunks if c.chunks else plan.has_drafts and not chunks)), None)

    def launch(self, plan: BatchPlan) -> ForwardOutput:
        captured, x, drafting = self._choose(plan), expand(plan), self.parts.drafting
        assert captured is not None, "the plan does not fit"
        if drafting is not None:
            drafting.remember(plan)
        follow = self._draft(plan)
        self._upload(captured.size, captured.chunks > 0, plan, x)
        captured.forward.replay()
        count = len(x.sample_rows)

        def sample(masks: Ints) -> Pending:
            self.parts.penalties.apply(plan.penalties, masks)
            rows = next(rows for rows in self._tail_sizes if rows >= count)
            graph, out = self._tails[rows, tail_of(x.flags), plan.has_drafts]

            def work() -> Tensor:
                graph.replay()
                follow(out[:, :count])
                return out

            padded = self.device.submit(work, 0.0)
            return lambda: padded()[:, :count]

        return ForwardOutput(plan, sample)

    @torch.inference_mode()
    def _draft(self, plan: BatchPlan) -> Callable[[Tensor], None]:
        """Run the drafter's model before a step; what runs it behind the step takes the sampled columns."""
        parts, model, drafting = self.parts, self._model, self.parts.drafting
        if model is None or drafting is None:
            return lambda out: None
        batch = replace(make_batch(plan, parts.device), passes=model.passes(plan, has_drafts=False))
        if plan.has_drafts:
            parts.state.apply(batch.page_writes, batch.row_states)
            self._drafts.draft(plan)
        input_ids, batch, _ = parts.begin(batch)
        states = [self._states[layer][: len(input_ids)] for layer in model.layers]
        return torch.inference_mode()(lambda out: model.follow(batch, input_ids, states, out, drafting))

    def _upload(self, size: int, has_chunks: bool, plan: BatchPlan, x: Expanded) -> None:
        used = self._inputs.fill(size, has_chunks, plan, x)
        self.device.upload_into(self._inputs.on_device[:used], self._inputs.on_host[:used])

    def _capture(self, size: int, has_chunks: bool, capture: Capture) -> _Captured:
        chunks, samples = 0, size
        if has_chunks:
            chunks, most = min(size // 2, MAX_CHUNKS) + 1, 0 if self.parts.drafting is None else MAX_DRAFTED
            samples = min(size - 1, self._inputs.decodes + chunks - 1 + most)
        plan = trial_plan([(0, 0, size, Flag.SAMPLES)])
        self._upload(size, has_chunks, plan, expand(plan))

        def work() -> None:
            inputs = self._inputs.begin(size, chunks, samples)
            taps = dict.fromkeys(self._model.layers if self._model else (), inputs[0])  # the model replaces the values
            hidden = self.parts.hidden(*inputs, taps)
            for layer, state in taps.items():
                if layer not in self._states:
                    self._states[layer] = state.new_empty(self._most_tokens, state.shape[1])
                self._states[layer][:size].copy_(state)
            if self._hidden is None:
                self._hidden = hidden.each(lambda x: x.new_empty(self._inputs.columns, x.shape[1]))
            for own, shared in zip(hidden, self._hidden, strict=True):
                if own is not None and shared is not None:
                    shared[:samples].copy_(own)

        return _Captured(capture(work)[0], size, chunks, samples)

    def _sample(self, rows: int, tail: int, has_drafts: bool) -> Tensor:
        assert self._hidden is not None
        sampling = self._inputs.sampling(rows, tail, has_drafts)
        out = self.parts.sample(self.parts.model.logits(self._hidden.each(lambda x: x[:rows])), sampling)
        if has_drafts:
            out = self._inputs.settle(out)
            self.parts.count(out, sampling)
        return out
