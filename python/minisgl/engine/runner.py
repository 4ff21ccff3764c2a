"""How a planned step reaches the device: `Engine` takes the first runner that fits, and all give the same tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
from torch import Tensor

from minisgl.core import Batch, BatchPlan, Context
from minisgl.engine.graphs.capture import TAILS
from minisgl.engine.prepare import prepare_batch
from minisgl.ops.logprobs import rows_per_pass

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    import numpy.typing as npt

    from minisgl.attention.backend import AttentionBackend
    from minisgl.core import Ints, Scored
    from minisgl.device.device import Device, Pending
    from minisgl.distributed.communicator import Communicator
    from minisgl.distributed.tensor_parallel import VocabParallel
    from minisgl.engine.penalties_state import LogitAdjuster
    from minisgl.engine.state import RowState
    from minisgl.kvcache.mha_pool import MHAKVPool
    from minisgl.models.llama import LlamaForCausalLM
    from minisgl.ops.table import OpTable


NO_TOKENS: Final = torch.empty(2, 0, dtype=torch.int32)
_Computed = tuple[Tensor | None, Tensor | None]
"""Logits of the sequences that sample, if any, and the columns of the plan's `targets`, if there are any."""


class Runner(Protocol):
    """One way to execute plans."""

    name: str

    def fits(self, plan: BatchPlan) -> bool:
        """Whether this runner can execute `plan`."""

    def prepare(self, plan: BatchPlan) -> Any:
        """What can be done before the step's turn; to be kept alive until its result is there."""

    def launch(self, prepared: Any) -> Pending:
        """Start the step behind those launched before; what is pending is an `Unchosen` if the plan `lacks_masks`.

        Its result is int32, down each column a token, whether its logits were sound and, if anybody wants them, its
        `StepResult.scores`. There is a column for each sampled sequence, then one for each of the plan's `targets`.
        """


class Unchosen:
    """A step of which all but the choice of tokens has been started: that needs masks, which `choose` brings."""

    def __init__(self, start: Callable[[Ints], Pending]) -> None:
        self._start = start
        self._pending: Pending | None = None

    @property
    def awaits_masks(self) -> bool:
        return self._pending is None

    def choose(self, masks: Ints) -> None:
        assert self._pending is None, "its tokens are chosen already"
        self._pending = self._start(masks)

    def wait(self) -> npt.NDArray[np.int32]:
        assert self._pending is not None, "its masks have not come"
        return self._pending.wait()


def lacks_masks(flags: int, masks: Ints) -> bool:
    """Whether a step whose sampling slots have `flags` needs masks that its plan has not."""
    return bool(flags & BatchPlan.MASKED) and not len(masks)


@dataclass(frozen=True, slots=True)
class Parts:
    """What all runners of an engine share."""

    device: Device
    ops: OpTable
    model: LlamaForCausalLM
    kv_cache: MHAKVPool
    attention: AttentionBackend
    state: RowState
    adjuster: LogitAdjuster
    comm: Communicator
    vocab: VocabParallel

    @property
    def flops_per_token(self) -> float:
        """Of this rank, without attention; experts count as if all were chosen."""
        return 2.0 * self.model.num_parameters / self.comm.info.size

    def run(self, batch: Batch) -> Tensor:
        """Logits [S, this rank's part of V] of a step, its page writes and sampling states applied first."""
        return self.forward(*self.begin(batch))

    def begin(self, batch: Batch) -> tuple[Tensor, Batch, Tensor]:
        """Apply a step's page writes and sampling states; what `forward` and `hidden` take."""
        state, page_size = self.state, self.kv_cache.page_size
        state.apply(batch)
        rows = batch.token_rows.long()
        input_ids = torch.where(batch.input_ids < 0, state.last_token[rows], batch.input_ids)
        pages = state.page_table[rows, (batch.positions // page_size).long()]
        out_loc = pages.long() * page_size + batch.positions % page_size
        return input_ids, batch, out_loc

    def forward(self, input_ids: Tensor, batch: Batch, out_loc: Tensor) -> Tensor:
        """Logits [S, this rank's part of V] of a step whose page writes have been applied; out_loc [T] int64."""
        return self.model.forward(input_ids, self._context(batch, out_loc))

    def hidden(self, input_ids: Tensor, batch: Batch, out_loc: Tensor) -> tuple[Tensor, Tensor]:
        """What `forward` makes its logits of: (x, residual) [S, H]."""
        return self.model.hidden(input_ids, self._context(batch, out_loc))

    def _context(self, batch: Batch, out_loc: Tensor) -> Context:
        table = self.state.page_table
        metadata = self.attention.prepare(batch, table)
        return Context(batch, table, self.kv_cache, self.attention, metadata, out_loc)

    def sample(self, logits: Tensor, batch: Batch) -> Tensor:
        """Choose and commit tokens -> int32 [2, S], or [2 + StepResult.WIDTH, S] if log-probabilities are wanted.

        Those are the model's own, whatever changes the logits here. Several ranks exchange the best of each, unless
        some row asks for more than a temperature: what filters keep depends on all logits, and may be any number of
        them; so then these are gathered, and everything is as on one rank.
        """
        rows, positions, flags = batch.sample_rows, batch.sample_positions, batch.sample_flags
        if not (self.vocab.is_whole or batch.flags & TAILS[-1] or batch.scored):
            own = self.ops.candidates(logits, rows, positions, self.state, self.vocab.shard.start)
            out = self.vocab.best(own)
            self.state.last_token[rows] = out[0]
            return out
        logits = self.vocab.gather(logits)
        changed = logits
        if batch.flags & (BatchPlan.ADJUSTED | BatchPlan.MASKED):
            changed = self.ops.adjust_logits(logits, flags, batch.mask_places, rows, positions, self.adjuster)
        is_filtered = bool(batch.flags & BatchPlan.FILTERED)
        out = self.ops.sample_rows(changed, rows, positions, self.state, is_filtered)
        if batch.flags & BatchPlan.ADJUSTED:
            self.ops.count_tokens(out[0], flags, rows, self.adjuster)
        if not batch.flags & BatchPlan.LOGPROBS and batch.scored is None:
            return out
        return torch.cat([out, self.ops.token_scores(logits, out[0], flags)])

    def score(self, x: Tensor, residual: Tensor, scored: Scored) -> Tensor:
        """Columns [2 + StepResult.WIDTH, N] int32 for the targets; x and residual [K, H].

        A vocabulary of logits for each token of a long prompt would not fit: they are made and used pass by pass.
        """
        step, parts = rows_per_pass(self.model.config.vocab_size), []
        for start in range(0, len(scored.targets), step):
            at, targets = scored.scored_at[start : start + step], scored.targets[start : start + step]
            logits = self.vocab.gather(self.model.logits(x[at], residual[at]))
            parts.append(self.ops.token_scores(logits, targets, torch.full_like(targets, BatchPlan.LOGPROBS)))
        sound = torch.ones_like(scored.targets)
        return torch.cat([torch.stack([scored.targets, sound]), torch.cat(parts, 1)])


class EagerRunner:
    """Any step, op by op."""

    name = "eager"

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self._flops_per_token = parts.flops_per_token

    def fits(self, plan: BatchPlan) -> bool:
        return True

    def prepare(self, plan: BatchPlan) -> Batch:
        return prepare_batch(plan, self.parts.device)

    def launch(self, batch: Batch) -> Pending:
        submit, flops = self.parts.device.submit, self._flops_per_token * batch.num_tokens
        if not lacks_masks(batch.flags, batch.masks):
            return submit(lambda: self._choose(batch, self._compute(batch), batch.masks), flops)
        computed: list[_Computed] = []

        def compute() -> Tensor:
            computed.append(self._compute(batch))
            return NO_TOKENS

        submit(compute, flops)
        return Unchosen(lambda masks: submit(lambda: self._choose(batch, computed.pop(), masks), 0.0))

    @torch.inference_mode()
    def logits_of(self, plan: BatchPlan) -> Tensor:
        """What a plan's tokens would be chosen by: [S, V] in the model's dtype, for checks."""
        return self.parts.vocab.gather(self.parts.run(self.prepare(plan)))

    @torch.inference_mode()
    def _compute(self, batch: Batch) -> _Computed:
        parts = self.parts
        if batch.scored is None:
            logits = parts.run(batch)
            return logits if len(batch.sample_rows) else None, None
        scored = batch.scored
        x, residual = parts.hidden(*parts.begin(replace(batch, logit_tokens=scored.logit_tokens)))
        columns = parts.score(x, residual, scored)
        if not len(batch.sample_rows):
            return None, columns
        return parts.model.logits(x[scored.sampled_at], residual[scored.sampled_at]), columns

    @torch.inference_mode()
    def _choose(self, batch: Batch, computed: _Computed, masks: Ints) -> Tensor:
        logits, columns = computed
        self.parts.adjuster.apply(batch.adjusts, masks)
        parts = [] if logits is None else [self.parts.sample(logits, batch)]
        if columns is not None:
            parts.append(columns)
        return torch.cat(parts, 1) if parts else NO_TOKENS
