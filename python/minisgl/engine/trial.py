"""Synthetic plans: to measure memory and time, to compile kernels, to capture graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from minisgl.core.layout import HISTORY_HEAD, NO_MASKS, PAGE_WRITE, SEQUENCE, SLOT_ID, STATE, STATE_LEN, Flag, words
from minisgl.core.plan import BatchPlan
from minisgl.core.rounding import ceil_div

if TYPE_CHECKING:
    from minisgl.core.plan import Ints
    from minisgl.engine.config import EngineSpec
    from minisgl.kvcache.arena import Blocks

SequenceFields = tuple[int, int, int, int]
"""(row, start, stop, flags)"""


def trial_plan(
    sequences: Sequence[SequenceFields],
    tokens: Ints | None = None,
    page_writes: Sequence[tuple[int, int, int, int]] = (),
    masks: Ints = NO_MASKS,
) -> BatchPlan:
    """Make a step of `sequences`; `page_writes` as PAGE_WRITE. Without `tokens`, all tokens are 0."""
    records = np.array(sequences, SEQUENCE)
    if tokens is None:
        is_chunk = (records["flags"] & Flag.FROM_DEVICE) == 0
        tokens = np.zeros(int((records["stop"] - records["start"])[is_chunk].sum()), np.int32)
    return BatchPlan(0, records, tokens, np.array([*page_writes], PAGE_WRITE), masks=masks)


def largest_prefill(spec: EngineSpec) -> BatchPlan:
    """Make a step of as many prompt tokens as a step may have, in as few sequences as possible."""
    sequences, remaining = [], spec.max_step_tokens
    for row in range(spec.max_running_requests):
        if remaining:
            sequences.append((row, 0, min(remaining, spec.max_seq_len - 1), Flag.SAMPLES))
            remaining -= sequences[-1][2]
    return trial_plan(sequences)


def decode_plan(rows: int, vocab_size: int, flags: int) -> BatchPlan:
    """Make a decode step of `rows` rows at their first token, sampled with `flags`; masks allow all tokens."""
    masks = np.full((rows, ceil_div(vocab_size, 32)), -1, np.int32) if flags & Flag.MASKED else NO_MASKS
    flags |= Flag.SAMPLES | Flag.FROM_DEVICE
    return trial_plan([(row, 0, 1, flags) for row in range(rows)], masks=masks)


def draft_plan(rows: int, max_queries: int) -> BatchPlan:
    """Make the first decode step of `rows` rows with prompts of one token, with all drafts."""
    flags = Flag.SAMPLES | Flag.FROM_DEVICE | Flag.DRAFTS
    plan = trial_plan([(row, 1, 1 + max_queries, flags) for row in range(rows)])
    return replace(plan, histories=unknown_histories(rows, 2))


def unknown_histories(rows: int, length: int) -> Ints:
    """Make the history records of the first `rows` rows, with `length` unknown tokens each."""
    heads = np.zeros(rows, HISTORY_HEAD)
    heads["words"], heads["row"], heads["length"] = words(HISTORY_HEAD), np.arange(rows), length
    return heads.view(np.int32)


def spread_plan(sequences: Sequence[SequenceFields], page_size: int, blocks: Blocks) -> BatchPlan:
    """Make a step of `sequences` whose rows are spread over the pages of each group."""
    pages = [(row, index) for row, _, stop, _ in sequences for index in range(ceil_div(stop, page_size))]
    full_and_window, states = blocks.spread()[:STATE], blocks.spread()[STATE:]
    writes = [(g, *page, ids[i % len(ids)]) for g, ids in enumerate(full_and_window) for i, page in enumerate(pages)]
    for ids in states:
        for i, (row, start, stop, flags) in enumerate(sequences):
            length = start if flags & Flag.FROM_DEVICE else stop
            writes += [(STATE, row, SLOT_ID, ids[i % len(ids)]), (STATE, row, STATE_LEN, length)]
    return trial_plan(sequences, page_writes=writes)
