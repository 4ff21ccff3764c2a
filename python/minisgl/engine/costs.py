"""Times a few steps at the start, so that the scheduler can predict what a step costs on this device.

On a GPU this takes a fraction of a second. A CPU may need a second for 64 tokens, so there the sizes follow from the
time of a first chunk. Other processes delay a CPU's steps, so there the shortest CPU time of the thread counts. Several
ranks must run the same steps, and their steps on a CPU are slow: there each is only repeated once.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from minisgl.core.layout import FULL, MAX_DRAFT_TOKENS, NO_INTS, NO_PAGE_WRITES, PROPOSAL, Flag
from minisgl.core.plan import DRAFT_CONTEXT, BatchPlan, Points, StepCosts
from minisgl.engine.config import EngineSpec
from minisgl.engine.trial import SequenceFields, spread_plan, unknown_histories
from minisgl.kvcache.arena import Blocks
from minisgl.settings.options import MAX_DRAFTS

DECODES = Flag.SAMPLES | Flag.FROM_DEVICE
REPEATS, CPU_REPEATS = 3, 8  # more on a CPU, where other work delays most of them and the shortest counts
FIRST_CHUNK = 16  # tokens, on a CPU
CHUNK_S = 0.02  # the longest time of its largest chunk
SLOW_S = 0.2  # a first step that takes longer is not repeated
PIPELINED = 3  # consecutive steps, as under load: each is launched while its predecessor runs
SMALL_CHUNK = 256
LARGE_CHUNK = 2048
CHUNK_CONTEXT = 8192
DECODE_ROWS, DECODE_CONTEXT = 64, 2048
FEW_ROWS = 4  # on a CPU, where the first use of a page allocates memory
DRAFT_ROWS, CPU_DRAFT_ROWS = (1, 8, 64, 256), (1, 8, 32)
SLACK = (REPEATS + 1) * PIPELINED * (1 + MAX_DRAFTS)  # positions that rows with drafts advance while they are timed

Run = Callable[[BatchPlan], Callable[[], object]]
"""Launches a plan and returns a function that waits for its result."""


def measure_costs(run: Run, spec: EngineSpec, blocks: Blocks, is_async: bool) -> StepCosts:
    """Fit `StepCosts` to a few timed steps. The steps overwrite pages of each group, so none may be in use yet."""
    longest = min(spec.max_seq_len, blocks.ids(FULL) * spec.page_size) - 1
    pipelined = PIPELINED if is_async else 1
    adapts = not is_async and spec.info.size == 1
    repeats = REPEATS if is_async else CPU_REPEATS if adapts else 1
    clock = time.thread_time if adapts else time.perf_counter

    def seconds(sequences: list[SequenceFields]) -> float:
        return timed(spread_plan(sequences, spec.page_size, blocks))

    def timed(plan: BatchPlan) -> float:
        times: list[float] = []
        # The first step may be the first to touch its memory. It counts only if it is too slow for that to matter.
        while len(times) <= repeats and (not adapts or sum(times) < (CHUNK_S if times[1:] else SLOW_S)):
            count = pipelined if times else 1
            started = clock()
            waits = [run(plan) for _ in range(count)]
            for wait in waits:
                wait()
            times.append((clock() - started) / count)
            # On a CPU each step must begin with the same lengths, since the plan bounds them.
            plan = replace(plan, page_writes=NO_PAGE_WRITES, histories=NO_INTS if is_async else plan.histories)
        return (statistics.median if is_async else min)(times[1:] or times)

    def chunk(start: int, count: int) -> float:
        return seconds([(0, start, start + count, Flag.SAMPLES)])

    def decode(context: int, rows: int) -> float:
        return seconds([(row, context, context + 1, DECODES) for row in range(rows)])

    def draft(rows: int, width: int, *, are_proposed: bool = False) -> float:
        """Time a step in which each row has `width` tokens, all but one drafts, which are likely to be rejected."""
        # Where steps are not repeated from the same lengths, the plan bounds those of the last one.
        start = DRAFT_CONTEXT + SLACK * is_async
        plan = spread_plan([(row, 0, start + width, DECODES) for row in range(rows)], spec.page_size, blocks)
        plan.sequences["start"] = start
        plan.sequences["flags"] |= Flag.DRAFTS
        proposals = np.zeros(rows * are_proposed, PROPOSAL)
        proposals["row"], proposals["first"] = np.arange(len(proposals)), DRAFT_CONTEXT + 1
        return timed(replace(plan, histories=unknown_histories(rows, DRAFT_CONTEXT + 1), proposals=proposals))

    large = LARGE_CHUNK if is_async else 4 * FIRST_CHUNK
    if adapts:
        first = min(FIRST_CHUNK, longest, spec.max_step_tokens)
        large = min(LARGE_CHUNK, max(2 * first, int(first * CHUNK_S / chunk(0, first))))
    rows = DECODE_ROWS if is_async else FEW_ROWS
    large = min(large, longest, spec.max_step_tokens)
    small = min(SMALL_CHUNK, large // 2)
    rows = min(rows, spec.max_running_requests)
    few, many = chunk(0, small), chunk(0, large)
    # The large chunk's time includes the keys that its tokens attend to, so the cost per pair comes first.
    context = min(CHUNK_CONTEXT if is_async else 4 * large, longest - large)
    per_pair = max(0.0, (chunk(context, large) - many) / (large * context)) if context > 0 else 0.0
    pairs = (large * large - small * small) / 2
    # At least half of the large chunk's time per token: a base that is measured too high must not make tokens free.
    per_token = max(many / large / 2, (many - few - per_pair * pairs) / (large - small))
    base = max(0.0, few - per_token * small)
    # GEMMs of medium size are slower than the line through both ends predicts: raise the line to an upper bound.
    middle = (small + large) // 2
    base += max(0.0, chunk(0, middle) - base - per_token * middle - per_pair * middle * middle / 2)
    context = min(DECODE_CONTEXT if is_async else 4 * large, longest)
    per_context = max(0.0, (decode(context, rows) - decode(context // 16, rows)) / (rows * (context - context // 16)))
    costs = StepCosts(base, per_token, per_context, per_pair)
    has_model = spec.draft is not None
    if spec.drafter is None or longest < DRAFT_CONTEXT + spec.max_queries + SLACK:
        return costs
    timed_rows = sorted({min(n, spec.max_running_requests) for n in (DRAFT_ROWS if is_async else CPU_DRAFT_ROWS)})
    widths = (1, 2, spec.max_queries) if is_async else (2, spec.max_queries)

    def curves(*, are_proposed: bool) -> tuple[Points, ...]:
        sizes = {n: [w for w in widths if n * w <= MAX_DRAFT_TOKENS] for n in timed_rows}
        return tuple(tuple((n * w, draft(n, w, are_proposed=are_proposed)) for w in sizes[n]) for n in timed_rows)

    drafted, proposed = curves(are_proposed=False), curves(are_proposed=True) if has_model else ()
    # Plain steps come last: on a CPU, the first ones to use the pages of all rows are slower by up to a quarter.
    plain = tuple((n, decode(DRAFT_CONTEXT, n)) for n in timed_rows)
    return replace(costs, plain=plain, drafted=drafted, proposed=proposed)
