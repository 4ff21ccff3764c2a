"""One step: what it computes, the same as host integers, and what is kept of it while it is in flight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from minisgl.core import BatchPlan
from minisgl.layout import NO_INTS, NO_MASKS, PENALTY_HEAD, SLOT, Flag, words

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
    def has_prompt_logprobs(self) -> bool:
        """Whether the log-probabilities of the tokens that follow are wanted."""
        return self.req.prompt_logprobs is not None

    @property
    def num_prompt_logprobs(self) -> int:
        """How many tokens' log-probabilities it finds out: the last token of a prompt is followed by a sampled one."""
        return self.stop - self.start - self.samples if self.has_prompt_logprobs else 0


@dataclass(frozen=True, slots=True)
class Step:
    """What one step computes: a token of each of the `running` rows [D], oldest first, then chunks of prompts."""

    running: Index
    chunks: list[Chunk]

    def prompts(self) -> list[Req]:
        """The requests whose prompt it completes."""
        return [c.req for c in self.chunks if c.samples]

    def prompt_logprobs(self) -> list[tuple[Req, int]]:
        """The requests of whose prompts it finds out log-probabilities, and how many, in slot order."""
        return [(c.req, c.num_prompt_logprobs) for c in self.chunks if c.has_prompt_logprobs]

    def sampled_rows(self) -> Index:
        """The rows that get a token, in slot order."""
        if not self.chunks:
            return self.running
        return np.concatenate([self.running, np.array([r.row for r in self.prompts()], np.intp)])

    def make_plan(self, number: int, rows: Rows) -> BatchPlan:
        """The step as host integers, with everything that the device must learn before."""
        n = len(self.running)
        slots = np.empty(n + len(self.chunks), SLOT)
        decodes, start = slots[:n], rows.cached_len[self.running]
        decodes["row"] = self.running
        decodes["start"] = start
        decodes["stop"] = start + 1
        decodes["flags"] = rows.flags[self.running]
        for i, c in enumerate(self.chunks, n):
            flags = Flag.SAMPLES * c.samples | Flag.PROMPT_LOGPROBS * c.has_prompt_logprobs | sampling_flags(c.req)
            slots[i] = c.req.row, c.start, c.stop, flags
        tokens = ids = NO_INTS
        if self.chunks:
            tokens = np.concatenate([c.req.ids[c.start : c.stop] for c in self.chunks])
            chunks = [c for c in self.chunks if c.has_prompt_logprobs]
            ids = np.concatenate([NO_INTS, *(c.req.ids[c.start + 1 : c.stop + 1] for c in chunks)])
        return BatchPlan(number, slots, tokens, *rows.writes.take(), self._masks(rows), ids)

    def _masks(self, rows: Rows) -> Ints:
        """What the constrained rows may sample; nothing yet if that depends on a token in flight."""
        if not rows.num_constrained or rows.depend_on_tokens_in_flight(self.running):
            return NO_MASKS
        return rows.masks(self.sampled_rows())


@dataclass(frozen=True, slots=True)
class Launched:
    """A step in flight. Holding it keeps its buffers alive until it is collected."""

    plan: BatchPlan
    sampled: Index  # the rows that get a token, in slot order
    prompts: list[Req]  # those of which this is the first token since they were admitted
    prompt_logprobs: list[tuple[Req, int]]  # of whose prompts it finds out log-probabilities, and how many
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


def penalty_record(req: Req, row: int, eos_token_ids: frozenset[int]) -> Ints:
    """What the engine must know to apply the penalties of a row: a PENALTY_HEAD and its lists, as int32."""
    p = req.sampling_params
    ends = [] if p.min_tokens == 0 else [*p.stop_token_ids, *(() if p.ignore_eos else sorted(eos_token_ids))]
    biases = dict.fromkeys(ends, 0.0)
    for token, bias in p.logit_bias:
        biases[token] = biases.get(token, 0.0) + bias
    bias_ids = np.array([~token if token in ends else token for token in biases], np.int32)
    bias_bits = np.array(list(biases.values()), np.float32).view(np.int32)
    prompt, generated = req.ids[: req.prompt_len], req.ids[req.prompt_len :]
    head = np.zeros(1, PENALTY_HEAD)
    head["words"] = words(PENALTY_HEAD) + 2 * len(biases) + len(req.ids)
    head["row"] = row
    head["presence"] = p.presence_penalty
    head["frequency"] = p.frequency_penalty
    head["repetition"] = p.repetition_penalty
    head["first_end"] = req.prompt_len + p.min_tokens
    head["num_biases"] = len(biases)
    head["num_prompt"] = len(prompt)
    head["num_generated"] = len(generated)
    return np.concatenate([head.view(np.int32), bias_ids, bias_bits, prompt, generated])


def decode_flags(req: Req) -> int:
    """The flags of a decode slot of `req` in a plan."""
    return Flag.SAMPLES | Flag.FROM_DEVICE | sampling_flags(req)


def sampling_flags(req: Req) -> int:
    """How the logits of `req` are treated before a token is chosen."""
    p = req.sampling_params
    flags = Flag.PENALIZED * p.has_penalties | Flag.FILTERED * p.is_filtered
    return flags | Flag.LOGPROBS * (p.logprobs is not None) | Flag.MASKED * (p.grammar is not None)
