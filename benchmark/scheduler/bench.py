"""Host work of the scheduler per step, by phase, in microseconds: `python benchmark/scheduler/bench.py`.

The engine is a stub that answers at once, so what is left is the scheduler: plan, launch (without the engine's own
part), collect (without waiting) and the message to the detokenizer. 256 requests decode at overlap depth 1. A `steady`
step is one in which no request begins, ends or needs a page; `paging` steps need pages for some of the requests.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np

from minisgl.core.message import UserMsg, ids_to_bytes
from minisgl.core.params import Limits, SamplingParams
from minisgl.core.plan import BatchPlan, StepResult
from minisgl.kvcache.arena import Blocks
from minisgl.scheduler.io import OfflineIO
from minisgl.scheduler.scheduler import Scheduler
from minisgl.settings.options import EngineConfig, SchedulerConfig

PHASES = ("plan", "launch", "collect", "send")


class Clock:
    """Seconds spent in wrapped functions since the last `pop`; the time of inner ones does not count in outer ones."""

    def __init__(self) -> None:
        self._spent: dict[str, float] = defaultdict(float)
        self._inner = [0.0]

    def wrap(self, owner: Any, name: str, phase: str) -> None:
        function: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                total = time.perf_counter() - start
                self._spent[phase] += total - self._inner.pop()
                self._inner[-1] += total

        setattr(owner, name, timed)

    def pop(self) -> dict[str, float]:
        spent, self._spent = self._spent, defaultdict(float)
        return spent


class InstantOutput:
    awaits_masks = False

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def wait(self) -> StepResult:
        return self._result


class InstantEngine:
    """Answers at once; every token is 7."""

    is_async = True
    adapter_slots = 0
    tiers = ()
    bounded = ()
    eos_token_ids = frozenset({1, 2})
    limits = Limits(max_model_len=16_384, vocab_size=150_000)

    def __init__(self, rows: int, page_size: int, num_pages: int, drafts: int, acceptance: float) -> None:
        self.max_running_requests, self.page_size, self.blocks = rows, page_size, Blocks(num_pages)
        self._drafts, self._acceptance, self._noise = drafts, acceptance, np.random.default_rng(0)

    def step_costs(self) -> None:
        return None

    def describe(self) -> dict[str, str | int | float]:
        return {}

    def read_adapter(self, source: str) -> None:
        pass

    def launch(self, plan: BatchPlan) -> InstantOutput:
        count = int(plan.widths.sum())
        tokens, finite = np.full(count, 7, np.int32), np.ones(count, np.int32)
        if not plan.has_drafts:
            return InstantOutput(StepResult(tokens, finite))
        first = np.cumsum(plan.widths) - plan.widths
        right = self._noise.random(count) < self._acceptance  # what the draft before says
        right[first] = True
        wrong = np.cumsum(~right)
        confirmed = (wrong == np.repeat(wrong[first], plan.widths)).astype(np.int32)
        ready = np.full(count, self._drafts, np.int32)
        return InstantOutput(StepResult(tokens, finite, confirmed=confirmed, ready=ready))


def measure(
    rows: int, page_size: int, steps: int, drafts: int, acceptance: float
) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    """Seconds by phase of `steps` steps: those without and those with page-table writes."""
    engine = InstantEngine(rows, page_size, rows * 128, drafts, acceptance)
    io = OfflineIO()
    given = EngineConfig(speculate="ngram" if drafts else "off", num_draft_tokens=max(1, drafts))
    config = SchedulerConfig(engine=given, max_prefill_length=2**20)  # all start in the same step
    scheduler = Scheduler(config, engine, io)
    assert scheduler.depth == 1
    rng = np.random.default_rng(0)
    for uid in range(rows):
        # Half of the page's offsets occur, so every other step needs pages, for eight requests of 256 at once.
        prompt = rng.integers(10, 1000, size=64 + 2 * uid % page_size, dtype=np.int32)
        params = SamplingParams(max_tokens=64 * 64, ignore_eos=uid % 2 == 0)
        io.inbox.append(UserMsg(uid=uid, input_ids=ids_to_bytes(prompt), sampling_params=params))
    clock = Clock()
    for name in ("plan", "launch", "collect"):
        clock.wrap(scheduler, name, name)
    clock.wrap(scheduler.replies, "send", "send")
    clock.wrap(engine, "launch", "engine")
    while len(scheduler.decode.running) < rows:
        scheduler.step()
    steady, paging = [], []
    gc.collect()
    gc.freeze()
    for _ in range(steps):
        io.replies.clear()
        clock.pop()
        start = time.perf_counter()
        scheduler.step()
        total = time.perf_counter() - start
        spent = clock.pop()
        spent["step"] = total - spent["engine"]
        plan = scheduler.launched[-1].plan
        assert len(plan.sequences) == rows
        (paging if len(plan.page_writes) else steady).append(spent)
    return steady, paging


def main() -> None:
    os.environ["MINISGL_CHECK"] = "0"
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=900)
    parser.add_argument("--drafts", type=int, default=0, help="of each row in each step")
    parser.add_argument("--acceptance", type=float, default=0.8, help="the share of drafts that is right")
    args = parser.parse_args()
    steady, paging = measure(args.rows, args.page_size, args.steps, args.drafts, args.acceptance)
    print(f"{args.rows} requests, page size {args.page_size}, median (90th percentile) in us")
    for name, spent in (("steady", steady), ("paging", paging)):
        if not spent:
            continue
        cells = []
        for phase in (*PHASES, "step"):
            values = [s[phase] * 1e6 for s in spent]
            cells.append(f"{phase} {np.median(values):.1f} ({np.percentile(values, 90):.1f})")
        counted = np.median([sum(s[p] for p in PHASES) * 1e6 for s in spent])
        print(f"{name}: {len(spent)} steps; {'; '.join(cells)}; sum of the phases {counted:.1f}")


if __name__ == "__main__":
    main()
