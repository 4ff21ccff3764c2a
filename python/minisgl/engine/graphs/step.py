"""Captures steps as CUDA graphs: one launch instead of hundreds, and a graph for each useful size."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from torch import Tensor

from minisgl.core.layout import NO_SEQUENCES, Flag
from minisgl.core.plan import BatchPlan
from minisgl.engine.batch import make_batch
from minisgl.engine.draft_model import DraftModel
from minisgl.engine.graphs.capture import TAILS, tail_of
from minisgl.engine.graphs.drafts import DraftGraphs
from minisgl.engine.graphs.inputs import MAX_CAPTURES, MAX_PAGE_WRITES, MAX_ROW_STATES, StepInputs
from minisgl.engine.graphs.sizes import LAUNCH_FLOPS, TAIL_SIZES, Size, decode_sizes, draft_sizes, prompt_sizes
from minisgl.engine.runner import ForwardOutput
from minisgl.layers.linear import Stream
from minisgl.ops.deferred import finished

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from minisgl.core.plan import Ints
    from minisgl.device.device import Pending
    from minisgl.engine.graphs.capture import Capture
    from minisgl.engine.runner import Parts

MAX_CONTEXT: Final = 8192  # of prompts: the tiles of attention are chosen for short contexts

_Tail = tuple[torch.cuda.CUDAGraph, Tensor]
_Tails = dict[tuple[int, int, bool], _Tail]
"""The graphs that sample, and their results, by tokens to sample, kind (`TAILS`), and whether they confirm drafts."""


@dataclass(frozen=True, slots=True)
class _Captured:
    """The forward pass of a step, and the tails that may follow it, which sample `counts` tokens."""

    size: Size
    columns: int  # the largest of the counts that a step of this size may take
    forward: torch.cuda.CUDAGraph
    counts: tuple[int, ...]
    tails: Mapping[tuple[int, int, bool], _Tail]


class CapturedRunner:
    """Runs steps padded to one of some sizes.

    A graph's first kernel reads the plan, and its last one writes the result (`StepInputs`), so a step is a copy beside
    the step before, and two launches.

    Where each sequence decodes one token, the forward pass ends with the logits, and each size has its own tails.
    Other steps leave hidden states in one place, and share tails by the number of tokens that they sample. A step with
    drafts and without prompts samples after every token; then its tail confirms drafts and asks the drafter. A drafter
    with a model has graphs for its drafts. It reads prompts, and what a step computed, op by op: that is one pass,
    which is launched while the device computes. Prompt logprobs run eagerly.

    A graph pays even where the device would finish sooner without padding: launching a step op by op takes 13 to 30 ms
    (36 layers, with other processes running), in which the scheduler neither receives nor replies.
    """

    name = "cuda graph"

    def __init__(
        self,
        parts: Parts,
        capture: Capture,
        max_rows: int,
        max_tokens: int,
        max_queries: int,
        progress: Callable[[int, int], None] = lambda done, count: None,
    ) -> None:
        """Capture decode steps of up to `max_rows` rows, and steps with prompts of up to `max_tokens` tokens, if any.

        `max_queries` is the largest number of tokens of a decoding sequence: more than 1 with drafts.
        """
        self.parts = parts
        self._max_rows = max_rows
        large = LAUNCH_FLOPS * parts.model.config.num_layers / parts.flops_per_token
        sizes = decode_sizes(max_rows) + (draft_sizes(max_rows, max_queries, large) if parts.drafting else [])
        sizes += prompt_sizes(max_tokens, max_rows, max_queries, large)
        if parts.adapters is not None:
            sizes = [size._replace(has_adapters=has) for size in sizes for has in (False, True)]
        max_samples = max((size.samples for size in sizes if not size.is_plain), default=0)
        self._counts = tuple(sorted({min(count, max_samples) for count in (*TAIL_SIZES, max_samples) if max_samples}))
        self._io = StepInputs(parts, sizes, max(max_samples, max_rows), max_rows)
        self._hidden: list[Tensor] = []
        self._model = None
        if parts.drafting is not None and isinstance(model := parts.drafting.model, DraftModel):
            self._model, self._drafts = model, DraftGraphs(parts, parts.drafting, model, capture, max_rows)
        self._states: dict[int, Tensor] = {}  # [max tokens, H], outputs of the layers that the model reads
        self._max_tokens = max(size.tokens for size in sizes)
        self._shared: _Tails = {}
        graphs = []
        for done, size in enumerate(reversed(sizes), 1):
            graphs.append(self._capture(size, capture))
            progress(done, len(sizes))
        self._graphs = graphs[::-1]
        kinds = (False,) if parts.drafting is None else (False, True)
        for count, tail, has_drafts in product(self._counts, TAILS, kinds):
            self._shared[count, tail, has_drafts] = capture(partial(self._sample, None, count, tail, has_drafts))

    def fits(self, plan: BatchPlan) -> bool:
        return self._choose(plan) is not None

    def _choose(self, plan: BatchPlan) -> _Captured | None:
        """The smallest graph that fits a plan, if any; those without prompts are the first."""
        sequences = plan.sequences
        flags = sequences["flags"]
        is_chunk = (flags & Flag.FROM_DEVICE) == 0
        chunks, samples = int(np.count_nonzero(is_chunk)), len(plan.sampled_flags)
        tokens = int((sequences["stop"] - sequences["start"]).sum())
        if chunks and ((flags & Flag.PROMPT_LOGPROBS).any() or sequences["stop"][is_chunk].max() > MAX_CONTEXT):
            return None
        if len(plan.page_writes) > MAX_PAGE_WRITES or len(plan.row_states) > MAX_ROW_STATES:
            return None
        if len(plan.captures) > MAX_CAPTURES:
            return None
        if len(flags) - chunks > self._max_rows:
            return None
        for captured in self._graphs:
            size = captured.size
            if (
                size.tokens >= tokens
                and size.samples >= samples
                and size.fits(chunks, plan.has_drafts, plan.has_adapters)
            ):
                return captured
        return None

    def launch(self, plan: BatchPlan) -> ForwardOutput:
        captured, drafting = self._choose(plan), self.parts.drafting
        assert captured is not None, "the plan fits no captured step"
        if drafting is not None:
            drafting.remember(plan)
        extend = self._draft(plan)
        count = self._io.write(plan, captured.size, captured.columns)
        captured.forward.replay()
        kind = tail_of(int(np.bitwise_or.reduce(plan.sampled_flags, initial=0)))

        def sample(masks: Ints) -> Pending:
            self.parts.penalties.apply(plan.penalties, masks)
            rows = next(rows for rows in captured.counts if rows >= count)
            graph, out = captured.tails[rows, kind, plan.has_drafts]
            graph.replay()
            result = self._io.result(len(out), count)
            extend(out[:, :count])
            return result

        return ForwardOutput(plan, sample)

    @torch.inference_mode()
    def _draft(self, plan: BatchPlan) -> Callable[[Tensor], None]:
        """Run the drafter's model before a step. Return what runs it after the step, given the sampled columns."""
        parts, model, drafting = self.parts, self._model, self.parts.drafting
        if drafting is None:
            return lambda out: None
        if model is None or not (plan.has_drafts or len(plan.tokens)):
            drafting.propose(plan)
            return lambda out: None
        batch = make_batch(plan, parts.device)
        parts.state.apply(batch.page_writes, batch.row_states)
        model.read_prompts(plan)
        if plan.has_drafts:
            self._drafts.draft(drafting.asked(plan))
        drafting.propose(plan)
        input_ids, batch, _ = parts.begin(batch)
        states = [self._states[layer][: len(input_ids)] for layer in model.layers]
        return torch.inference_mode()(lambda out: model.extend(batch, input_ids, states, out, drafting))

    # -- capture

    def _capture(self, size: Size, capture: Capture) -> _Captured:
        counts = (size.samples,) if size.is_plain else self._counts
        columns = next(count for count in counts if count >= size.samples)
        batch, out_loc = self._io.batch(size)
        self._io.write(BatchPlan(0, NO_SEQUENCES), size, columns)  # for the run before the capture

        def forward() -> Tensor | None:
            self._io.prepare(size, columns)
            layers = () if self._model is None or size.is_plain else self._model.layers
            taps = dict.fromkeys(layers, batch.input_ids)  # the model replaces the values
            hidden = self.parts.hidden(batch.input_ids, batch, out_loc, taps)
            if size.is_plain:
                return self.parts.model.logits(hidden)
            for layer, state in taps.items():
                if layer not in self._states:
                    self._states[layer] = state.new_empty(self._max_tokens, state.shape[1])
                self._states[layer][: size.tokens].copy_(state)
            left = [finished(x) for x in (hidden.x, hidden.residual) if x is not None]
            self._hidden = self._hidden or [x.new_empty(self._counts[-1], x.shape[1]) for x in left]
            for own, shared in zip(left, self._hidden, strict=True):
                shared[: size.samples].copy_(own)
            return None

        graph, logits = capture(forward)
        if not size.is_plain:
            return _Captured(size, columns, graph, counts, self._shared)
        work = {tail: partial(self._sample, logits, columns, tail, has_drafts=False) for tail in TAILS}
        tails = {(columns, tail, False): capture(sample) for tail, sample in work.items()}
        return _Captured(size, columns, graph, counts, tails)

    def _sample(self, logits: Tensor | None, count: int, tail: int, has_drafts: bool) -> Tensor:
        """Sample `count` tokens, without logits from the shared hidden states."""
        sampling = self._io.sampling(count, tail, has_drafts)
        if logits is None:
            x, *residual = (x[:count] for x in self._hidden)
            stream = Stream(x, residual[0] if residual else None)
            if self.parts.adapters is not None:
                stream = stream._replace(adapters=self.parts.adapters_of(sampling.rows))
            logits = self.parts.model.logits(stream)
        out = self.parts.sample(logits, sampling)
        if has_drafts:
            out = self._io.verify(out)
            self.parts.count(out, sampling)
        self._io.publish(out)
        return out
