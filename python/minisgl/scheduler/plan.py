"""One step: what it computes, the plan that says so to the engine, and its state while in flight."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from minisgl.core.layout import (
    NO_INTS,
    NO_MASKS,
    NO_MOVES,
    NO_PAGE_WRITES,
    NO_PROPOSALS,
    NO_ROW_STATES,
    SEQUENCE,
    Flag,
)
from minisgl.core.plan import BatchPlan
from minisgl.scheduler.writes import sampling_flags

if TYPE_CHECKING:
    import numpy.typing as npt

    from minisgl.core.layout import Ints, Records
    from minisgl.core.params import Limits
    from minisgl.core.plan import StepCosts, StepResult
    from minisgl.kvcache.arena import Blocks
    from minisgl.kvcache.snapshots import Bounded
    from minisgl.kvcache.tiers import TierSpec
    from minisgl.scheduler.req import Req
    from minisgl.scheduler.rows import Index, Rows


class StepOutput(Protocol):
    """A launched batch."""

    @property
    def awaits_masks(self) -> bool:
        """Whether sampling waits for masks that the plan did not have."""

    def sample(self, masks: Ints) -> None:
        """Start sampling with these masks [M, W], before the next step is launched."""

    def wait(self) -> StepResult:
        """Block until the step is done, and return its result."""


class StepEngine(Protocol):
    """What the scheduler needs of an engine (`engine.Engine`, or a fake one in tests)."""

    blocks: Blocks  # of memory for the state of texts
    page_size: int
    max_running_requests: int
    limits: Limits
    eos_token_ids: frozenset[int]
    is_async: bool  # computes while the host plans, and may get masks after a launch
    tiers: list[TierSpec]  # below the pool, the fastest first
    adapter_slots: int  # of device memory
    bounded: Sequence[Bounded]  # what rows of the model have besides pages of FULL

    def launch(self, plan: BatchPlan) -> StepOutput:
        """Start a step after those launched before."""

    def read_adapter(self, source: str) -> None:
        """Read an adapter (`params.Adapter.source`) into host memory; any thread may. Raises `ConfigError`."""

    def step_costs(self) -> StepCosts | None:
        """Return the costs of a step measured at the start; None if they were not."""

    def shutdown(self) -> None:
        """Leave the other ranks."""

    def describe(self) -> dict[str, str | int | float]:
        """Return facts for the banner and /server_info."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Positions [start, stop) of a request's prompt. The last chunk `samples` the first token."""

    req: Req
    start: int
    stop: int
    samples: bool

    @property
    def has_prompt_logprobs(self) -> bool:
        """Whether the request asks for log-probabilities of its prompt."""
        return self.req.prompt_logprobs is not None

    @property
    def num_prompt_logprobs(self) -> int:
        """How many log-probabilities of the prompt this chunk computes: none for the last token, which samples."""
        return self.stop - self.start - self.samples if self.has_prompt_logprobs else 0


@dataclass(frozen=True, slots=True)
class PlannedDrafts:
    """Which of the running rows [D] have DRAFTS, and how many drafts after their newest token; 0 for the others.

    `proposals` are those of rows whose drafts come from the host.
    """

    is_drafted: npt.NDArray[np.bool_]
    counts: Ints
    proposals: Records


@dataclass(frozen=True, slots=True)
class Step:
    """The work of one step: a token for each of the `running` rows [D], oldest first, then chunks of prompts.

    `drafts` says what the running rows compute besides.
    """

    running: Index
    chunks: list[Chunk]
    drafts: PlannedDrafts | None = None

    def prompts(self) -> list[Req]:
        """Return the requests whose prompt this step completes."""
        return [c.req for c in self.chunks if c.samples]

    def prompt_logprobs(self) -> list[tuple[Req, int]]:
        """Return (request, number of prompt log-probabilities that this step computes), in sequence order."""
        return [(c.req, c.num_prompt_logprobs) for c in self.chunks if c.has_prompt_logprobs]

    def sampled_rows(self) -> Index:
        """Return the rows that sample a token, in sequence order."""
        if not self.chunks:
            return self.running
        return np.concatenate([self.running, np.array([r.row for r in self.prompts()], np.intp)])

    def make_plan(self, number: int, rows: Rows, histories: Ints = NO_INTS, moves: Records = NO_MOVES) -> BatchPlan:
        """Return the step as host integers, with all writes to the device's per-row state since the last plan.

        Masks are added by `Grammars.plan_masks`.
        """
        n = len(self.running)
        sequences = np.empty(n + len(self.chunks), SEQUENCE)
        decodes, start = sequences[:n], rows.cached_len[self.running]
        decodes["row"] = self.running
        decodes["start"] = start
        decodes["stop"] = start + 1
        decodes["flags"] = rows.flags[self.running]
        proposals = NO_PROPOSALS
        if self.drafts is not None:
            proposals = self.drafts.proposals
            decodes["stop"] += self.drafts.counts
            decodes["flags"] |= Flag.DRAFTS * self.drafts.is_drafted
        for i, c in enumerate(self.chunks, n):
            flags = Flag.SAMPLES * c.samples | Flag.PROMPT_LOGPROBS * c.has_prompt_logprobs | sampling_flags(c.req)
            sequences[i] = c.req.row, c.start, c.stop, flags
        tokens = ids = NO_INTS
        if self.chunks:
            tokens = np.concatenate([c.req.ids[c.start : c.stop] for c in self.chunks])
            chunks = [c for c in self.chunks if c.has_prompt_logprobs]
            ids = np.concatenate([NO_INTS, *(c.req.ids[c.start + 1 : c.stop + 1] for c in chunks)])
        # A step that only moves pages writes no state: nothing of it reads any.
        writes = rows.writes.pop() if len(sequences) else (NO_PAGE_WRITES, NO_ROW_STATES, NO_INTS)
        copies = rows.writes.pop_copies()
        return BatchPlan(number, sequences, tokens, *writes, NO_MASKS, ids, histories, proposals, moves, *copies)


@dataclass(frozen=True, slots=True)
class Launched:
    """A step in flight. Holding it keeps its buffers alive until it is collected."""

    plan: BatchPlan
    sampled: Index  # the rows that sample a token, in sequence order
    prompts: list[Req]  # the last of them: requests that sample their first token since admission
    prompt_logprobs: list[tuple[Req, int]]  # (request, number of prompt log-probabilities), in sequence order
    output: StepOutput

    def confirmed(self, result: StepResult) -> Iterator[ConfirmedTokens]:
        """Return the confirmed tokens: the first of each row, then the second of those that have one, and so on."""
        columns = np.arange(len(result.tokens))
        if result.confirmed is None:
            yield ConfirmedTokens(self.sampled, columns, result.tokens, result.finite)
            return
        widths = self.plan.widths
        sequences = np.repeat(np.arange(len(widths)), widths)
        offsets = columns - np.repeat(np.cumsum(widths) - widths, widths)
        confirmed = np.flatnonzero(result.confirmed)
        offsets = offsets[confirmed]
        for offset in range(int(offsets.max(initial=0)) + 1):
            at = confirmed[offsets == offset]
            yield ConfirmedTokens(self.sampled[sequences[at]], at, result.tokens[at], result.finite[at])


@dataclass(frozen=True, slots=True)
class ConfirmedTokens:
    """One confirmed token of each of some rows, and the columns of the result in which they stand."""

    rows: Index
    columns: Index
    tokens: Ints
    finite: Ints
