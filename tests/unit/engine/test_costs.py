"""The costs of a step are recovered from timed steps, in a time that a start can afford."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from minisgl import LLM
from minisgl.core.plan import DRAFT_CONTEXT, BatchPlan, StepCosts
from minisgl.device.device import CpuDevice, Device
from minisgl.engine import costs as measured
from minisgl.engine.costs import SLACK, measure_costs
from minisgl.engine.engine import Engine
from minisgl.engine.resolve import resolve
from minisgl.kvcache.arena import Blocks
from minisgl.settings.options import EngineConfig
from support.fake_engine import step_seconds
from support.late_device import LateDevice
from support.tiny_model import write_tiny_model

SPEC = SimpleNamespace(
    max_seq_len=40_960,
    page_size=16,
    max_step_tokens=8192,
    max_running_requests=256,
    info=SimpleNamespace(size=1),
    drafter=None,
    draft=None,
)
CASES = {
    "10M on a laptop": (StepCosts(2e-3, 2e-4, 1e-6, 2e-7), 1.5),
    "8B on a laptop": (StepCosts(0.4, 2e-2, 1e-5, 1e-6), 8.0),
    "8B on a GPU": (StepCosts(4e-3, 2.2e-5, 2e-9, 1e-9), 2.0),
}


def _tell_time(monkeypatch: pytest.MonkeyPatch, clock: SimpleNamespace, busy: float = 1.0) -> None:
    """Let `clock` tell the CPU time of a thread on a machine where all takes `busy` times as long."""
    times = SimpleNamespace(perf_counter=lambda: busy * clock.now, thread_time=lambda: clock.now)
    monkeypatch.setattr(measured, "time", times)


@pytest.mark.parametrize("case", CASES)
def test_costs_are_recovered(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    true, most = CASES[case]
    clock = SimpleNamespace(now=0.0)
    _tell_time(monkeypatch, clock)

    def run(plan: BatchPlan) -> Callable[[], object]:
        clock.now += step_seconds(true, plan)
        return lambda: None

    found = measure_costs(run, SPEC, Blocks(10_000), is_async="GPU" in case)  # type: ignore[arg-type]
    assert found.per_token == pytest.approx(true.per_token, rel=0.3)
    assert found.per_context == pytest.approx(true.per_context, rel=0.05, abs=1e-12)
    assert found.per_pair == pytest.approx(true.per_pair, rel=0.3)
    assert found.base == pytest.approx(true.base, rel=0.5)
    assert clock.now < most, "a start would take too long"


def test_the_first_touch_of_memory_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    true, clock, touched = CASES["10M on a laptop"][0], SimpleNamespace(now=0.0), set[int]()
    _tell_time(monkeypatch, clock)

    def run(plan: BatchPlan) -> Callable[[], object]:
        pages = set(map(int, plan.page_writes["page"]))
        clock.now += step_seconds(true, plan) + 1e-3 * len(pages - touched)
        touched.update(pages)
        return lambda: None

    found = measure_costs(run, SPEC, Blocks(10_000), is_async=False)  # type: ignore[arg-type]
    assert found.per_context == pytest.approx(true.per_context, rel=0.05)
    assert found.per_pair == pytest.approx(true.per_pair, rel=0.3)


def test_other_work_on_a_cpu_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    true, clock = CASES["10M on a laptop"][0], SimpleNamespace(now=0.0)
    _tell_time(monkeypatch, clock, busy=5.0)

    def run(plan: BatchPlan) -> Callable[[], object]:
        clock.now += step_seconds(true, plan)
        return lambda: None

    found = measure_costs(run, SPEC, Blocks(10_000), is_async=False)  # type: ignore[arg-type]
    assert found.per_token == pytest.approx(true.per_token, rel=0.3)


def test_a_cpu_has_costs() -> None:
    with LLM(threads=1, num_pages=300) as llm:
        costs = llm.scheduler.engine.step_costs()
    assert costs is not None and 1e-6 < costs.per_token < 0.05 and costs.base < 5


RUNNERS: dict[str, Device | None] = {"C++": None, "op by op": CpuDevice(1), "op by op and late": LateDevice(1)}


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("speculate", ["off", "ngram", "draft"])
def test_steps_of_each_runner_are_timed(runner: str, speculate: str, tmp_path: Path) -> None:
    """Other tests of these engines have fixed costs."""
    device = RUNNERS[runner]
    folder = str(write_tiny_model(tmp_path, 512))
    config = EngineConfig(
        model=folder,
        dummy_weight=True,
        speculate=f"draft:{folder}" if speculate == "draft" else speculate,
        attention_backend="auto" if device is None else "cpu",
        num_pages=300,
        max_running_requests=8,
    )
    engine = Engine(resolve(config, "cpu"), device or CpuDevice(1))
    costs = engine.step_costs()
    assert costs is not None and costs.per_token > 0
    assert [rows for rows, _ in costs.plain] == ([] if speculate == "off" else [1, 8])
    assert len(costs.drafted) == len(costs.plain) and bool(costs.proposed) == (speculate == "draft")


def test_ranks_take_the_same_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """However different their speed is: each step has collectives."""
    monkeypatch.setattr(SPEC, "info", SimpleNamespace(size=2))
    plans: list[list[bytes]] = [[], []]
    for per_token, seen in zip((1e-5, 1e-2), plans, strict=True):
        clock = SimpleNamespace(now=0.0)
        _tell_time(monkeypatch, clock)

        def run(plan: BatchPlan, per_token: float = per_token, seen: list[bytes] = seen, c: Any = clock) -> Any:
            c.now += step_seconds(StepCosts(1e-3, per_token), plan)
            seen.append(plan.sequences.tobytes())
            return lambda: None

        measure_costs(run, SPEC, Blocks(10_000), is_async=False)  # type: ignore[arg-type]
    assert plans[0] == plans[1]


def test_steps_with_drafts_are_timed_where_the_device_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device on which steps with drafts cost 1 ms more, and their tokens a tenth of those of prompts."""
    true, clock, lengths = StepCosts(4e-3, 2.2e-5), SimpleNamespace(now=0.0), dict[int, int]()
    _tell_time(monkeypatch, clock)

    def run(plan: BatchPlan) -> Callable[[], object]:
        for _, row, first, length in plan.histories.reshape(-1, 4).tolist():
            assert first == 0
            lengths[row] = length
        seconds = step_seconds(true, plan)
        if plan.has_drafts:
            for row, start, stop, _ in plan.sequences.tolist():
                assert start == lengths[row] - 1 + SLACK and stop - start in (1, 2, 5)
            seconds = 1e-3 + true.base + 0.1 * true.per_token * int(plan.widths.sum())
        clock.now += seconds
        return lambda: None

    spec = SimpleNamespace(**vars(SPEC) | {"drafter": "ngram", "max_queries": 5})
    found = measure_costs(run, spec, Blocks(10_000), is_async=True)  # type: ignore[arg-type]
    assert [rows for rows, _ in found.plain] == [1, 8, 64, 256]
    assert [[tokens for tokens, _ in curve] for curve in found.drafted] == [
        [rows, 2 * rows, 5 * rows] for rows in (1, 8, 64, 256)
    ]
    for tokens, seconds in [point for curve in found.drafted for point in curve]:
        assert seconds == pytest.approx(true.base + 1e-3 + 0.1 * true.per_token * tokens)
    for rows in (1, 64):
        drafts = np.array([0, 1, rows, 4 * rows])
        plain, *others = found.draft_seconds(rows, drafts)
        assert plain == pytest.approx(true.base + true.per_token * rows, rel=0.01)
        least = np.maximum(plain, true.base + 1e-3 + 0.1 * true.per_token * (rows + drafts[1:]))
        assert others == pytest.approx(least, rel=0.01)


def test_context_counts_beyond_that_of_the_timed_steps() -> None:
    costs = StepCosts(1e-3, 0.0, per_context=1e-6)
    assert costs.draft_context_seconds(2, 300) == pytest.approx(300e-6)
    timed = replace(costs, plain=((1, 1e-3),), drafted=(((5, 1.5e-3),),))
    assert timed.draft_context_seconds(2, 300) == pytest.approx((300 - 2 * DRAFT_CONTEXT) * 1e-6)
    assert timed.draft_context_seconds(2, 100) == 0
