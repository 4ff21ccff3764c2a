"""Slots and seeds as host integers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from minisgl.core import BatchPlan, SeqSlot

if TYPE_CHECKING:
    from minisgl.core import Ints, Req


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


def make_plan(step: int, slots: list[SeqSlot], page_writes: Ints, row_writes: Ints, adjusts: Ints) -> BatchPlan:
    """The slots as host integers."""
    flags = [
        BatchPlan.SAMPLES * s.samples
        + BatchPlan.FROM_DEVICE * s.from_device
        + BatchPlan.ADJUSTED * s.req.sampling_params.is_adjusted
        + BatchPlan.FILTERED * s.req.sampling_params.is_filtered
        for s in slots
    ]
    table = np.array([(s.row, s.start, s.stop, f) for s, f in zip(slots, flags, strict=True)], np.int32)
    tokens = [s.req.host_ids[s.start : s.stop] for s in slots if not s.from_device]
    return BatchPlan(
        step, table, np.concatenate(tokens) if tokens else np.empty(0, np.int32), page_writes, row_writes, adjusts
    )


def adjust_record(req: Req, row: int, eos_token_ids: frozenset[int]) -> Ints:
    """What the engine must know to adjust the logits of a row, int32:

    length of the record, row, presence, frequency and repetition penalty (float bits), first position at which the
    request may end, the lengths of the five lists that follow: biased ids, their biases (float bits), ids that end a
    request, prompt ids, ids generated so far.
    """
    p = req.sampling_params
    ends = [] if p.min_tokens == 0 else [*p.stop_token_ids, *(() if p.ignore_eos else sorted(eos_token_ids))]
    bias_ids = np.array([token for token, _ in p.logit_bias], np.int32)
    biases = np.array([bias for _, bias in p.logit_bias], np.float32).view(np.int32)
    ids = req.host_ids
    lists = [bias_ids, biases, np.array(ends, np.int32), ids[: req.prompt_len], ids[req.prompt_len :]]
    penalties = np.array([p.presence_penalty, p.frequency_penalty, p.repetition_penalty], np.float32).view(np.int32)
    head = [row, *penalties.tolist(), req.prompt_len + p.min_tokens, *(len(x) for x in lists)]
    record = np.concatenate([np.array([0, *head], np.int32), *lists])
    record[0] = len(record)
    return record
