"""Drafters with a model: a small model with the same vocabulary, or a head on the target's hidden states."""

from __future__ import annotations

from abc import ABC, abstractmethod
from copy import copy
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Final

import numpy as np
import torch
from torch import Tensor

from minisgl.core.layout import NO_SEQUENCES, Flag
from minisgl.core.plan import Batch, BatchPlan, Sampling, SeqLayout, StepShape
from minisgl.distributed.tensor_parallel import VocabParallel
from minisgl.engine.batch import make_batch
from minisgl.engine.resolve import make_mixers
from minisgl.layers.builder import Builder
from minisgl.models.llama import LlamaForCausalLM
from minisgl.models.weight import load_layers, load_model
from minisgl.ops.deferred import finished
from minisgl.ops.quantized import Format, target_format
from minisgl.settings.options import MAX_DRAFTS
from minisgl.speculative.eagle3 import Eagle3Head
from minisgl.speculative.mtp import NextTokensLayer

if TYPE_CHECKING:
    from collections.abc import Callable

    from minisgl.core.plan import Ints
    from minisgl.engine.config import EngineSpec
    from minisgl.engine.drafting import Drafting
    from minisgl.engine.runner import Parts
    from minisgl.layers.parameter import Parameter

SAMPLED_ALIKE: Final = Flag.PENALIZED | Flag.FILTERED  # flags for which drafts are sampled like the target's tokens


class DraftModel(ABC):
    """Drafts the tokens that a model would sample with the target's noise.

    The model's K/V is in the target's pages, so page tables, cached prefixes, preemption, tiers and ranks need nothing
    else. A step with DRAFTS begins with a pass for each draft, because by then the row has the pages
    that the passes write. Steps that only decode do not run the model, and leave holes in its K/V.
    """

    ahead: ClassVar[int]  # position p depends on the tokens up to p + ahead
    first: ClassVar[int]  # the draft that the first pass makes; -1: it fills a hole
    layers: tuple[int, ...] = ()  # the target's layers whose outputs `extend` gets
    parameters: tuple[Parameter, ...]

    def __init__(self, parts: Parts, spec: EngineSpec) -> None:
        """`parts` has the attention backend and the vocabulary of the drafter; `spec` has its model."""
        state = copy(parts.state)  # the same sampling parameters, but a separate last token
        state.last_token = torch.zeros_like(state.last_token)
        self.parts, self.spec = replace(parts, state=state), spec
        self._vocab_size = parts.model.config.vocab_size

    def propose(self, history: Tensor, rows: Tensor, lengths: Tensor, longest: int) -> tuple[Tensor, Tensor]:
        """`Drafter.propose`. The drafts of the next step are made when that step begins."""
        return history.new_zeros(len(rows), MAX_DRAFTS), torch.full_like(lengths, MAX_DRAFTS)

    def read_prompts(self, plan: BatchPlan) -> None:
        """Run what is to be run over a step's prompts before the step."""
        return

    def draft(self, plan: BatchPlan, drafting: Drafting) -> None:
        """Make the drafts of a step, whose pages are allocated, except those that the host proposes."""
        rows = drafted_rows(plan)
        if rows.size:
            flags = int(np.bitwise_or.reduce(rows[2]))
            self.draft_rows(self.parts.device.upload(rows)[0], int(rows[1].max()), flags, drafting)

    def draft_rows(self, inputs: Tensor, max_drafts: int, flags: int, drafting: Drafting) -> None:
        """Make `drafting.drafts` of rows whose lengths only the device knows: each pass makes one token per row.

        inputs [3, R] int32 are those of `drafted_rows`; `max_drafts` is the largest number of drafts, `flags` the union
        of the flags. A pass that makes no draft for a row has the dummy row (the last one) instead.
        """
        history, dummy_row = drafting.history, len(self.parts.state.last_token) - 1
        wanted, counts, row_flags = inputs[0].long(), inputs[1], inputs[2]
        lengths = drafting.lengths[wanted].long()
        history[wanted, (lengths - 1).clamp(min=0)] = drafting.last_token[wanted]
        shape = StepShape(len(wanted), 1)
        ends = torch.arange(len(wanted) + 1, dtype=torch.int32, device=inputs.device)
        for i in range(self.first, max_drafts):
            takes_part = counts > max(i, 0)
            rows = torch.where(takes_part, wanted, dummy_row)
            at = torch.where(takes_part, lengths - 1 + i - self.ahead, 0).int()  # positions
            ids = history[rows, at.long() + self.ahead].clamp(0, self._vocab_size - 1)
            sampling = Sampling(rows, at + 1 + self.ahead, row_flags, torch.zeros_like(at), flags)
            layout, nothing = SeqLayout(rows.int(), at + 1, ends), inputs[0, :0]
            batch = Batch(
                shape, NO_SEQUENCES, layout, ids, at, layout.rows, ends[:-1].long(), sampling, nothing, nothing
            )
            logits = self._logits(ids, batch)
            if i >= 0:
                history[rows, sampling.positions.long()] = self.sample(logits, sampling)
        following = lengths.unsqueeze(1) + torch.arange(MAX_DRAFTS, device=inputs.device)
        drafting.drafts[wanted] = history[wanted.unsqueeze(1), following].clamp(0, self._vocab_size - 1)

    @abstractmethod
    def _logits(self, ids: Tensor, batch: Batch) -> Tensor:
        """Compute logits [S, V] of a pass from token ids [T], those at position + `ahead`."""

    def extend(self, batch: Batch, input_ids: Tensor, states: list[Tensor], out: Tensor, drafting: Drafting) -> None:
        """Process a step's tokens [T], the outputs [T, H] of `layers`, and the result `out` of `Drafting.verify`."""
        return

    def sample(self, logits: Tensor, sampling: Sampling) -> Tensor:
        """Sample tokens [S] int32 from logits [S, V]; penalties do not count earlier drafts."""
        parts, (rows, positions, flags) = self.parts, (sampling.rows, sampling.positions, sampling.row_flags)
        if sampling.flags & Flag.PENALIZED:
            flags = flags & Flag.PENALIZED
            logits = parts.ops.apply_penalties(logits, flags, sampling.mask_index, rows, positions, parts.penalties)
        return parts.ops.sample_rows(logits, rows, positions, parts.state, bool(sampling.flags & Flag.FILTERED))[0]


class SmallModel(DraftModel):
    """A separate model. A position has the K/V of its own token, so the preceding step leaves at most one hole.

    There is a hole if all drafts were accepted: then a first pass fills it.
    """

    ahead, first = 0, -1

    def __init__(self, parts: Parts, spec: EngineSpec) -> None:
        super().__init__(parts, spec)
        self.parameters = parts.model.parameters

    def read_prompts(self, plan: BatchPlan) -> None:
        chunks = plan.sequences[(plan.sequences["flags"] & Flag.FROM_DEVICE) == 0]
        if len(chunks):
            chunks["flags"] = 0
            batch = make_batch(BatchPlan(plan.step, chunks, plan.tokens), self.parts.device)
            self._logits(batch.input_ids.clamp(0, self._vocab_size - 1), batch)

    def _logits(self, ids: Tensor, batch: Batch) -> Tensor:
        stream = self.parts.hidden(ids, batch, self.parts.out_loc(batch))
        return self.parts.vocab.gather(self.parts.model.logits(stream)) if len(stream.x) else finished(stream.x)


class HeadModel(DraftModel):
    """A layer on the target's hidden states. `extend` runs it over a step's tokens for the first draft."""

    ahead, first = 1, 1

    def __init__(
        self, parts: Parts, spec: EngineSpec, head: Eagle3Head | NextTokensLayer, layers: tuple[int, ...]
    ) -> None:
        super().__init__(parts, spec)
        self.layers, self.parameters = layers, head.parameters
        assert isinstance(parts.model, LlamaForCausalLM), "transformers' models have no heads that draft"
        self.head, self._embed = head, parts.model.model.embed_tokens
        weight = self._embed.weight
        self._hidden = weight.new_zeros(len(parts.state.last_token), weight.shape[1])

    def _logits(self, ids: Tensor, batch: Batch) -> Tensor:
        rows = batch.sampling.rows
        logits, self._hidden[rows] = self._run(ids, self._hidden[rows], batch, batch.logit_tokens)
        return logits

    def _run(self, ids: Tensor, features: Tensor, batch: Batch, keep: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits [S, V], -inf outside of the draft vocabulary, and hidden states [S, H] of the tokens `keep`."""
        ctx = self.parts.context(batch, self.parts.out_loc(batch))
        own, hidden = self.head.forward(self._embed.summed(ids), features, ctx, keep)
        drafted = self.parts.vocab.gather(own)
        if self.head.draft_ids is None:
            return drafted, hidden
        logits = drafted.new_full((len(keep), self._vocab_size), float("-inf"))
        logits[:, self.head.draft_ids] = drafted
        return logits, hidden

    def extend(self, batch: Batch, input_ids: Tensor, states: list[Tensor], out: Tensor, drafting: Drafting) -> None:
        sampling, history = batch.sampling, drafting.history
        tokens = out[0, : len(sampling.rows)]
        ids, ends = input_ids.roll(-1), batch.layout.cu_query_lens[1:].long() - 1
        # The token after a chunk came with the plan.
        ids[ends] = history[batch.layout.rows.long(), batch.positions[ends].long() + 1].clamp(0, self._vocab_size - 1)
        ids[batch.logit_tokens] = tokens
        # The column of each row's newest token.
        columns = torch.arange(len(tokens), device=out.device)
        if batch.drafts is not None:
            columns = columns * out[2, : len(tokens)]
        newest = torch.zeros(len(history), dtype=torch.int64, device=out.device)
        newest = newest.scatter_reduce_(0, sampling.rows, columns, "amax")[sampling.rows]
        features = self.head.join(states)
        logits, hidden = self._run(ids, features, batch, batch.logit_tokens[newest])
        if len(tokens):
            sampling = replace(sampling, positions=sampling.positions[newest] + 1)
            self._hidden[sampling.rows] = hidden
            history[sampling.rows, sampling.positions.long()] = self.sample(logits, sampling)


def drafted_rows(plan: BatchPlan) -> Ints:
    """Return [3, D] of the sequences with DRAFTS: rows, drafts to make (0 for those of the host), flags."""
    sequences = plan.sequences[(plan.sequences["flags"] & Flag.DRAFTS) != 0]
    counts = np.where(np.isin(sequences["row"], plan.proposals["row"]), 0, sequences["stop"] - sequences["start"] - 1)
    return np.stack([sequences["row"], counts, sequences["flags"] & SAMPLED_ALIKE]).astype(np.int32)


def draft_spec(spec: EngineSpec) -> EngineSpec:
    """Return the drafter's spec, for a spec that has a `draft`; only a layer of the checkpoint itself is quantized."""
    assert spec.draft is not None, "the drafter has no model"
    quantization = spec.quantization if spec.draft.names else None
    return replace(spec, model=spec.draft.model, quantization=quantization, draft=None)


def make_draft_model(parts: Parts, spec: EngineSpec, supports_format: Callable[[Format], bool]) -> DraftModel:
    """Load the drafter of a spec that has a `draft`, which keeps its state in the store of `parts`, the target's."""
    source, device, own = spec.draft, parts.device, draft_spec(spec)
    assert source is not None, "the drafter has no model"
    parts = replace(parts, vocab=VocabParallel(parts.comm, source.model.vocab_size))
    if source.kind == "draft":
        weights = source.folder, source.model, spec.dtype, device, parts.ops, spec.dummy_weight
        model = load_model(*weights, comm=parts.comm, supports_format=supports_format)
        parts.store.add(model.states)
        mixers = make_mixers(own, model.mixers, device.type, parts.ops)
        return SmallModel(replace(parts, model=model, mixers=mixers), own)
    head: Eagle3Head | NextTokensLayer
    if source.kind == "mtp":
        assert isinstance(parts.model, LlamaForCausalLM), "transformers' models have no such layer"
        kind = target_format(device.type, spec.quantization or "", source.model.hidden_size)
        head = load_layers(
            partial(NextTokensLayer, target=parts.model),
            *(source.folder, source.model, spec.dtype, device, parts.ops, spec.dummy_weight, None, parts.comm),
            *(kind, supports_format, source.names),
        )
    else:
        head = Eagle3Head(Builder(parts.ops, spec.dtype, device.torch_device, parts.comm), source)
        head.load(source, spec.model.vocab_size, device, spec.dummy_weight)
    parts.store.add(head.states)
    mixers = make_mixers(own, head.mixers, device.type, parts.ops)
    return HeadModel(replace(parts, mixers=mixers), own, head, source.layers)
