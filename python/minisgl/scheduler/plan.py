"""One step: what it computes, the same as host integers, and what is kept of it while it is in flight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from minisgl.core import NO_MASKS, NOTHING, BatchPlan

if TYPE_CHECKING:
    from minisgl.core import Ints
    from minisgl.scheduler.engine_protocol import StepOutput
    from minisgl.scheduler.req import Req
    from minisgl.scheduler.rows import Index, Rows


@dataclass(frozen=True, slots=True)
class Chunk:
    """Positions [start, stop) of a request's prompt. The last one `samples`: its logits choose the first token."""

    req: Req
    start: int
    stop: int
    samples: bool

    @property
    def is_scored(self) -> bool:
        """Whether the log-probabilities of the tokens that follow are wanted."""
        return self.req.prompt_scores is not None

    @property
    def num_targets(self) -> int:
        """How many tokens' log-probabilities it finds out: the last token of a prompt is followed by a sampled one."""
        return self.stop - self.start - self.samples if self.is_scored else 0


@dataclass(frozen=True, slots=True)
class Step:
    """What one step computes: a token of each of the `running` rows [D], oldest first, then chunks of prompts."""

    running: Index
    chunks: list[Chunk]

    def prompts(self) -> list[Req]:
        """The requests whose prompt it completes."""
        return [c.req for c in self.chunks if c.samples]

    def scored(self) -> list[tuple[Req, int]]:
        """The requests of whose prompts it finds out log-probabilities, and how many, in slot order."""
        return [(c.req, c.num_targets) for c in self.chunks if c.is_scored]

    def sampled_rows(self) -> Index:
        """The rows that get a token, in slot order."""
        if not self.chunks:
            return self.running
        return np.concatenate([self.running, np.array([r.row for r in self.prompts()], np.intp)])

    def make_plan(self, number: int, rows: Rows) -> BatchPlan:
        """The step as host integers, with everything that the device must learn before."""
        n = len(self.running)
        slots = np.empty((n + len(self.chunks), 4), np.int32)
        start = rows.cached_len[self.running]
        slots[:n, 0] = self.running
        slots[:n, 1] = start
        slots[:n, 2] = start + 1
        slots[:n, 3] = rows.flags[self.running]
        for i, c in enumerate(self.chunks, n):
            flags = BatchPlan.SAMPLES * c.samples | BatchPlan.SCORED * c.is_scored | sampling_flags(c.req)
            slots[i] = c.req.row, c.start, c.stop, flags
        tokens = targets = NOTHING
        if self.chunks:
            tokens = np.concatenate([c.req.ids[c.start : c.stop] for c in self.chunks])
            scored = [c for c in self.chunks if c.is_scored]
            targets = np.concatenate([NOTHING, *(c.req.ids[c.start + 1 : c.stop + 1] for c in scored)])
        return BatchPlan(number, slots, tokens, *rows.writes.take(), self._masks(rows), targets)

    def _masks(self, rows: Rows) -> Ints:
        """What the constrained rows may sample; nothing yet if that depends on a token in flight."""
        if not rows.num_constrained or rows.depend_on_tokens_in_flight(self.running):
            return NO_MASKS
        return rows.masks(self.sampled_rows())


@dataclass(frozen=True, slots=True)
class Launched:
    """A batch in flight. Holding it keeps the plan's buffers and the batch's tensors alive until it is collected."""

    plan: BatchPlan
    sampled: Index  # the rows that get a token, in slot order
    prompts: list[Req]  # those of which this is the first token since they were admitted
    scored: list[tuple[Req, int]]  # of whose prompts it finds out log-probabilities, and how many
    batch: Any
    output: StepOutput


def noise_key(seed: int | None, base_seed: int, uid: int) -> int:
    """The 64-bit key of a request's sampling noise: a function of its own seed if it has one, else of (base_seed, uid).

    splitmix64's finalizer (Steele, Lea & Flood, OOPSLA 2014) spreads neighbouring seeds.
    """
    mask = 2**64 - 1

    def mix(x: int) -> int:
        x = (x + 0x9E3779B97F4A7C15) & mask
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    key = mix(seed & mask) if seed is not None else mix(mix(base_seed & mask) ^ (uid & mask))
    return key - 2**64 if key >= 2**63 else key


def adjust_record(req: Req, row: int, eos_token_ids: frozenset[int]) -> Ints:
    """What the engine must know to adjust the logits of a row, int32:

    length of the record, row, presence, frequency and repetition penalty (float bits), first position at which the
    request may end, how many biases, prompt ids and ids generated so far it has; then the biased ids (~id for one that
    ends the request), their biases (float bits), and the other two lists.
    """
    p = req.sampling_params
    ends = [] if p.min_tokens == 0 else [*p.stop_token_ids, *(() if p.ignore_eos else sorted(eos_token_ids))]
    biases = dict.fromkeys(ends, 0.0)
    for token, bias in p.logit_bias:
        biases[token] = biases.get(token, 0.0) + bias
    bias_ids = np.array([~token if token in ends else token for token in biases], np.int32)
    bias_bits = np.array(list(biases.values()), np.float32).view(np.int32)
    lists = [bias_ids, bias_bits, req.ids[: req.prompt_len], req.ids[req.prompt_len :]]
    penalties = np.array([p.presence_penalty, p.frequency_penalty, p.repetition_penalty], np.float32).view(np.int32)
    head = [row, *penalties.tolist(), req.prompt_len + p.min_tokens, *(len(x) for x in lists[1:])]
    record = np.concatenate([np.array([0, *head], np.int32), *lists])
    record[0] = len(record)
    return record


def decode_flags(req: Req) -> int:
    """The flags of a decode slot of `req` in a plan."""
    return BatchPlan.SAMPLES | BatchPlan.FROM_DEVICE | sampling_flags(req)


def sampling_flags(req: Req) -> int:
    """How the logits of `req` are treated before a token is chosen."""
    p = req.sampling_params
    flags = BatchPlan.ADJUSTED * p.is_adjusted | BatchPlan.FILTERED * p.is_filtered
    return flags | BatchPlan.LOGPROBS * (p.logprobs is not None) | BatchPlan.MASKED * (p.grammar is not None)
