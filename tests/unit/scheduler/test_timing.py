"""The next step is planned as late as the device allows, and at once if prompts wait or the timing is unknown."""

from __future__ import annotations

import math
import time

import pytest

from minisgl.core.message import BackendMsg, ExitMsg, UserMsg, ids_to_bytes
from minisgl.core.params import SamplingParams
from minisgl.core.plan import StepCosts
from minisgl.scheduler.budget import LATE_S, PLAN_MARGIN_S, RECENT_STEPS, StepClock
from support.fake_engine import FakeEngine, FakeOutput
from support.traces import Harness

STEP_S = 0.05


def clock(*seconds: float, predicted: float = 0.01) -> tuple[StepClock, float]:
    """Return a clock after decode steps of these durations, and the time at which the last one ended."""
    c, now = StepClock(), 100.0
    c.launch(now, predicted, has_prompts=False)
    for s in seconds:
        c.launch(now, predicted, has_prompts=False)
        now += s
        c.collect(now - s / 2, now)
    return c, now


def test_the_shortest_recent_step_predicts_the_next() -> None:
    c, now = clock(0.001, 0.020, 0.010, 0.030, *[0.011] * (RECENT_STEPS - 2))
    assert c.slack(now) == pytest.approx(0.010 - PLAN_MARGIN_S)
    assert c.slack(now + 0.004) == pytest.approx(0.006 - PLAN_MARGIN_S)
    assert c.slack(now + 0.010) == 0.0
    c.launch(now, 0.01, has_prompts=False)
    assert c.slack(now) == 0.0, "the next step is planned already"


def test_each_kind_of_step_has_a_prediction_of_its_own_and_short_steps_leave_no_slack() -> None:
    c, now = clock(0.008)
    c.launch(now, 0.04, has_prompts=True)
    c.collect(now + 0.004, now + 0.008)
    assert c.slack(now + 0.008) == 0.0, "no step with prompts was seen"
    c.launch(now + 0.008, 0.02, has_prompts=True)
    c.collect(now + 0.054, now + 0.058)
    assert c.slack(now + 0.058) == pytest.approx(1.25 * 0.02 - PLAN_MARGIN_S)
    c, now = clock(PLAN_MARGIN_S)
    assert c.slack(now) == 0.0
    assert StepClock().slack(5.0) == 0.0
    assert clock(0.01, predicted=math.inf)[0].slack(100.0) == 0.0, "costs were not measured"


def test_a_late_collect_forgets_the_prediction_until_the_next_wait() -> None:
    c, now = clock(0.010, 0.010)
    c.launch(now, 0.01, has_prompts=False)
    now += 0.015
    c.collect(now - LATE_S / 2, now)
    assert c.slack(now) == 0.0
    c.launch(now, 0.01, has_prompts=False)
    c.collect(now + 0.002, now + 0.009)
    assert c.slack(now + 0.009) == pytest.approx(0.009 - PLAN_MARGIN_S)


def test_a_scheduler_listens_while_the_device_computes_unless_a_queue_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = StepCosts(STEP_S, STEP_S / 4)
    engine = FakeEngine(rows=4, num_pages=200, page_size=4, max_model_len=400, vocab=5003, costs=costs)
    h = Harness(engine, 1, max_prefill_length=8)
    wait = FakeOutput.wait

    def slow(output: FakeOutput) -> object:
        time.sleep(STEP_S)
        return wait(output)

    monkeypatch.setattr(FakeOutput, "wait", slow)
    listened: list[tuple[float, bool]] = []

    def receive(timeout: float) -> list[BackendMsg]:
        scheduler = h.scheduler
        listened.append((timeout, scheduler.pace.is_queue(scheduler.prefill.backlog(scheduler.pace.max_backlog))))
        turn = len(listened)
        prompts = {1: [4], 12: [30, 60]}.get(turn, [])
        params = SamplingParams(max_tokens=300, ignore_eos=True)
        messages = [UserMsg(uid=n, input_ids=ids_to_bytes([n] * n), sampling_params=params) for n in prompts]
        return [ExitMsg()] if turn == 30 else messages

    monkeypatch.setattr(h.io, "receive", receive)
    h.scheduler.run_forever()
    before, after = listened[1:12], listened[12:]
    assert sum(0 < timeout <= STEP_S * 20 for timeout, _ in before) >= 6
    assert {timeout for timeout, is_queue in after if is_queue} == {0.0}
    assert max(timeout for timeout, is_queue in after if not is_queue) > 0
