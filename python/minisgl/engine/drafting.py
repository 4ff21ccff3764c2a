"""The device's state of rows that draft: their true lengths and tokens, and which drafts are accepted."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from minisgl.core.layout import HISTORY_HEAD, NO_PROPOSALS, PROPOSED, words
from minisgl.settings.options import MAX_DRAFTS

if TYPE_CHECKING:
    from minisgl.core.plan import Batch, BatchPlan, DraftColumns, Ints
    from minisgl.device.device import Device
    from minisgl.layers.parameter import Parameter
    from minisgl.speculative import Drafter


@runtime_checkable
class DraftingModel(Protocol):
    """A drafter that is a model, as steps use it; see `draft_model.py: DraftModel`."""

    layers: tuple[int, ...]
    parameters: tuple[Parameter, ...]

    def read_prompts(self, plan: BatchPlan) -> None: ...

    def draft(self, plan: BatchPlan, drafting: Drafting) -> None: ...

    def draft_rows(self, inputs: Tensor, max_drafts: int, flags: int, drafting: Drafting) -> None: ...

    def extend(
        self, batch: Batch, input_ids: Tensor, states: list[Tensor], out: Tensor, drafting: Drafting
    ) -> None: ...


class Drafting:
    """The state of each row that the device keeps from step to step while the row's sequences have DRAFTS.

    lengths  [rows] int32, tokens of the sequence; the newest, `last_token`, is the only one without K/V
    history  [rows, tokens] int32, these tokens; the newest may be missing, -1 is an unknown token
    drafts   [rows, MAX_DRAFTS] int32, what may follow

    If `drafts_always`, the model also drafts for rows that have proposals, which then replace its drafts: a benchmark
    that decides which drafts are right has their costs, too.
    """

    drafts_always = False

    def __init__(self, rows: int, max_tokens: int, last_token: Tensor, drafter: Drafter, device: Device) -> None:
        self.last_token = last_token
        self.drafter = drafter
        self.model: DraftingModel | None = drafter if isinstance(drafter, DraftingModel) else None
        self._device = device

        def empty(*shape: int) -> Tensor:  # uninitialised, since untouched memory is free on a CPU
            return torch.empty(*shape, dtype=torch.int32, device=last_token.device)

        self.lengths = empty(rows).zero_()
        self.history = empty(rows, max_tokens + MAX_DRAFTS)
        self.drafts = empty(rows, MAX_DRAFTS).zero_()

    def forget(self) -> None:
        """Forget the rows: no draft is out of the vocabulary."""
        self.lengths.zero_()
        self.drafts.zero_()

    def remember(self, plan: BatchPlan) -> None:
        """Apply the history records of a plan."""
        if len(plan.histories):
            rows, positions, tokens, ends = self._device.upload(*_known(plan.histories))
            self.history[rows.long(), positions.long()] = tokens
            self.lengths[ends[0].long()] = ends[1]

    def asked(self, plan: BatchPlan) -> BatchPlan:
        """Return the plan for which the model drafts; `propose` follows."""
        return replace(plan, proposals=NO_PROPOSALS) if self.drafts_always else plan

    def propose(self, plan: BatchPlan) -> None:
        """Apply the proposals of a plan."""
        if len(plan.proposals):
            fields = (plan.proposals[name] for name in ("row", "first", "tokens"))
            rows, begins, proposed = self._device.upload(*fields)
            offset = (self.lengths[rows.long()] - begins).unsqueeze(1)
            index = offset + torch.arange(MAX_DRAFTS, device=proposed.device)
            drafts = proposed.gather(1, index.clamp(0, PROPOSED - 1).long())
            at = self.lengths[rows.long()].unsqueeze(1) + torch.arange(MAX_DRAFTS, device=drafts.device)
            self.drafts[rows.long()] = self.history[rows.long().unsqueeze(1), at.long()] = drafts

    def complete(self, batch: Batch) -> Batch:
        """Return `batch`, which has drafts, with the true positions, and the tokens of its drafts."""
        assert batch.drafts is not None, "no sequence has DRAFTS"
        index, rows, layout = batch.drafts.draft_index, batch.token_rows.long(), batch.layout
        ids = torch.where(index > 0, self.drafts[rows, (index - 1).clamp(min=0).long()], batch.input_ids)
        positions = torch.where(index < 0, batch.positions, self.lengths[rows] - 1 + index)
        return replace(
            batch,
            input_ids=ids,
            positions=positions,
            layout=replace(layout, kv_lens=positions[layout.cu_query_lens[1:].long() - 1] + 1),
            sampling=replace(batch.sampling, positions=positions[batch.logit_tokens] + 1),
        )

    def verify(self, out: Tensor, columns: DraftColumns, inputs: Tensor) -> Tensor:
        """Confirm the tokens up to the first that differs from its draft, and draft what follows.

        out [2 or more, C] int32 has the sampled tokens, and whether their logits are finite; inputs [S] int32 are the
        tokens before them, drafts included. Returns `out` with two more lines after these two, see `StepResult`.
        """
        rows, index = columns.rows, torch.arange(columns.columns.shape[1], device=out.device)
        tokens, is_finite = out[0][columns.columns], out[1][columns.columns] != 0
        is_accepted = (tokens[:, :-1] == inputs[columns.columns[:, 1:]]) & is_finite[:, :-1]
        is_accepted &= index[1:] <= columns.counts.unsqueeze(1)
        count = 1 + is_accepted.int().cumprod(1).sum(1)
        newest = self.lengths[rows]
        at = newest.long().unsqueeze(1) + index
        self.history[rows, newest.long() - 1] = inputs[columns.columns[:, 0]]  # the host may not have known it
        self.history[rows.unsqueeze(1), at] = tokens  # rejected drafts are beyond the length
        self.lengths[rows] = newest + count.int()
        self.last_token[rows] = tokens.gather(1, count.unsqueeze(1) - 1).squeeze(1)
        self.drafts[rows], ready = self.drafter.propose(self.history, rows, self.lengths[rows], columns.longest)
        lines = torch.zeros(2, out.shape[1], dtype=torch.int32, device=out.device)
        lines[0] = 1
        is_confirmed = torch.minimum(index, columns.counts.unsqueeze(1)) < count.unsqueeze(1)
        lines[0, columns.columns] = is_confirmed.int()
        lines[1, columns.columns[:, 0]] = ready
        return torch.cat([out[:2], lines, out[2:]])


def _known(records: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Return rows, positions and tokens of history records (-1: unknown), and [rows, lengths]."""
    parts, ends = [], []
    while len(records):
        count, row, first, length = records[: words(HISTORY_HEAD)].tolist()
        tokens = records[words(HISTORY_HEAD) : count]
        stop = max(first + len(tokens), length)
        entries = np.full((3, stop - first), -1, np.int32)
        entries[0], entries[1] = row, np.arange(first, stop)
        entries[2, : len(tokens)] = tokens
        parts.append(entries)
        ends.append((row, length))
        records = records[count:]
    rows, positions, known = np.concatenate(parts, 1)
    return rows, positions, known, np.array(ends, np.int32).T
