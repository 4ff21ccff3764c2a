"""The next step is planned as late as the device allows, and at once if prompts wait or the timing is unknown."""

from __future__ import annotations

import time

import pytest

from minisgl.message import BackendMsg, ExitMsg, UserMsg, ids_to_bytes
from minisgl.params import SamplingParams
from minisgl.scheduler.budget import LATE_S, PLAN_MARGIN_S, RECENT_STEPS, StepClock
from support.fake_engine import FakeEngine, FakeOutput
from support.traces import Harness

STEP_S = 0.05


def clock(*seconds: float) -> tuple[StepClock, float]:
    """Return a clock after decode steps of these durations, and the time at which the last one ended."""
    c, now = StepClock(), 100.0
    c.launch(now, is_idle=True)
    c.launch(now - 7, is_idle=False)
    for s in seconds:
        now += s
        c.collect(now - s / 2, now, is_decode=True)
    return c, now


def test_the_shortest_recent_step_predicts_the_next() -> None:
    c, now = clock(0.001, 0.020, 0.010, 0.030, *[0.011] * (RECENT_STEPS - 2))
    assert c.slack(now) == pytest.approx(0.010 - PLAN_MARGIN_S)
    assert c.slack(now + 0.004) == pytest.approx(0.006 - PLAN_MARGIN_S)
    assert c.slack(now + 0.010) == 0.0


def test_steps_with_prompts_are_ignored_and_short_steps_leave_no_slack() -> None:
    c, now = clock(0.010)
    c.collect(now + 0.1, now + 0.2, is_decode=False)
    assert c.slack(now + 0.2) == pytest.approx(0.010 - PLAN_MARGIN_S), "the running step began when the last one ended"
    c, now = clock(PLAN_MARGIN_S)
    assert c.slack(now) == 0.0
    assert StepClock().slack(5.0) == 0.0


def test_a_late_collect_forgets_the_prediction_until_the_next_wait() -> None:
    c, now = clock(0.010, 0.010)
    now += 0.015
    c.collect(now - LATE_S / 2, now, is_decode=True)
    assert c.slack(now) == 0.0
    c.collect(now + 0.002, now + 0.009, is_decode=True)
    assert c.slack(now + 0.009) == pytest.approx(0.009 - PLAN_MARGIN_S)


def test_a_scheduler_listens_while_the_device_computes_unless_prompts_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine(rows=4, num_pages=200, page_size=4, max_model_len=400, vocab=5003)
    h = Harness(engine, 1, max_prefill_length=8)
    wait = FakeOutput.wait

    def slow(output: FakeOutput) -> object:
        time.sleep(STEP_S)
        return wait(output)

    monkeypatch.setattr(FakeOutput, "wait", slow)
    listened: list[tuple[float, bool]] = []

    def receive(timeout: float) -> list[BackendMsg]:
        listened.append((timeout, h.scheduler.prefill.has_work))
        turn = len(listened)
        if turn in (1, 12):
            prompt = ids_to_bytes([turn] * (4 if turn == 1 else 60))
            return [
                UserMsg(uid=turn, input_ids=prompt, sampling_params=SamplingParams(max_tokens=300, ignore_eos=True))
            ]
        return [ExitMsg()] if turn == 30 else []

    monkeypatch.setattr(h.io, "receive", receive)
    h.scheduler.run_forever()
    before, after = listened[1:12], listened[12:]
    assert sum(0 < timeout <= STEP_S * 20 for timeout, _ in before) >= 6
    assert [timeout for timeout, has_prompts in after if has_prompts] == [0.0] * 8, "60 tokens in chunks of 7"
    assert max(timeout for timeout, has_prompts in after if not has_prompts) > 0
