"""Steady decoding looks at no single request, and the invariant checks find corrupted state."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import numpy as np
import pytest

from minisgl.core.errors import InvariantError
from minisgl.core.plan import FinishReason
from minisgl.scheduler.check import check_invariants
from minisgl.scheduler.req import Status
from minisgl.scheduler.scheduler import Scheduler
from support.fake_engine import FakeEngine, expected_output
from support.traces import Harness


def decoding(requests: int, depth: int = 1, page_size: int = 32) -> Harness:
    """Return a scheduler with decoding requests, none at a page boundary or at its end for ten steps."""
    engine = FakeEngine(rows=requests, num_pages=4 * requests, page_size=page_size, max_model_len=128, vocab=5003)
    h = Harness(engine, depth)
    for i in range(requests):
        h.add([1 + i % 7, 2, 3, i], 60, ignore_eos=i % 2 == 0)
    while len(h.scheduler.decode.running) < requests or not h.outputs[requests - 1]:
        h.step()
    return h


def calls_of_a_step(h: Harness) -> int:
    """Count the calls made by the scheduler package in one step, built-in functions included.

    The least of a few steps counts: a step on a busy machine may listen once more.
    """
    return min(_calls_of_this_step(h) for _ in range(5))


def _calls_of_this_step(h: Harness) -> int:
    count = 0

    def profile(frame: FrameType, event: str, arg: object) -> None:
        nonlocal count
        if event in ("call", "c_call") and "minisgl/scheduler/" in frame.f_code.co_filename:
            count += 1

    h.scheduler._check = None
    sys.setprofile(profile)
    try:
        h.scheduler.step()
    finally:
        sys.setprofile(None)
    check_invariants(h.scheduler)
    return count


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_steady_step_does_not_look_at_single_requests(depth: int) -> None:
    few, many = decoding(3, depth), decoding(200, depth)
    assert calls_of_a_step(few) == calls_of_a_step(many)
    for h in (few, many):
        h.drain_replies()
        h.finish_all()
        h.check_outputs()


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_failures_aborts_endings_and_page_faults_in_one_step(depth: int) -> None:
    """In one step some requests get NaN logits, some are aborted, some end and all others need a page."""
    engine = FakeEngine(rows=40, num_pages=200, page_size=4, max_model_len=64, vocab=5003)
    h = Harness(engine, depth)
    prompts = [[1 + i, 2, 3] for i in range(40)]
    for i, prompt in enumerate(prompts):
        h.add(prompt, 13 if i % 5 == 0 else 30, ignore_eos=True, stop_token_ids=(9, 5002 - i))
    while len(h.outputs[0]) != 12 - depth:
        h.step()
    broken = {h.table_row(uid) for uid in range(1, 40, 5)}
    engine.nan_rows = {row for row in broken if row is not None}
    for uid in range(2, 40, 5):
        h.abort(uid)
    h.step()
    h.step()
    engine.nan_rows = set()
    h.finish_all()
    h.check_outputs()
    want = [FinishReason.LENGTH, FinishReason.ERROR, FinishReason.ABORT, FinishReason.LENGTH, FinishReason.LENGTH] * 8
    assert [h.endings[uid] for uid in range(40)] == want
    for uid in range(1, 40, 5):
        assert h.outputs[uid] == expected_output(prompts[uid], 30, 5003, ignore_eos=True)[: len(h.outputs[uid])]


def test_a_stop_token_of_one_request_is_text_of_another() -> None:
    engine = FakeEngine(rows=2, num_pages=40, page_size=4, vocab=5003)
    h = Harness(engine, 1)
    whole = expected_output([5, 6], 12, 5003, ignore_eos=True)
    ended = h.add([5, 6], 12, ignore_eos=True, stop_token_ids=(whole[4],))
    other = h.add([5, 6], 12, ignore_eos=True)
    h.finish_all()
    assert (h.outputs[ended], h.endings[ended]) == (whole[:5], FinishReason.STOP)
    assert (h.outputs[other], h.endings[other]) == (whole, FinishReason.LENGTH)


def spoil_row(name: str, value: int) -> Callable[[Scheduler], None]:
    def spoil(s: Scheduler) -> None:
        getattr(s.rows, name)[s.decode.running[1].row] = value

    return spoil


def swap_order(s: Scheduler) -> None:
    s.decode.running.reverse()


def stale_index(s: Scheduler) -> None:
    s.decode._index = s.decode.index[::-1].copy()


def lose_request(s: Scheduler) -> None:
    s.rows.requests[s.decode.running[0].row] = None


def lose_page(s: Scheduler) -> None:
    s.decode.running[0].pages.pop()


def forget_leaving(s: Scheduler) -> None:
    s.decode.running[0].status = Status.PREEMPTED


@pytest.mark.parametrize(
    "spoil",
    [
        *(spoil_row(name, 90) for name in ("uid", "cached_len", "confirmed_len", "max_len", "limit", "last_step")),
        *(spoil_row(name, 0) for name in ("cached_len", "confirmed_len", "limit", "last_step", "is_live", "flags")),
        *(swap_order, stale_index, lose_request, lose_page, forget_leaving),
    ],
)
def test_invariant_checks_find_corrupted_state(spoil: Callable[[Scheduler], None]) -> None:
    h = decoding(4)
    check_invariants(h.scheduler)
    spoil(h.scheduler)
    with pytest.raises(InvariantError):
        check_invariants(h.scheduler)


def test_a_preempted_request_keeps_its_sampled_tokens() -> None:
    """A preempted request waits with prompt and output so far, however often it is preempted."""
    engine = FakeEngine(rows=8, num_pages=18, page_size=4, max_model_len=64, vocab=5003)
    h = Harness(engine, 1)
    for i in range(12):
        h.add([1 + i, 2, 3], 40, ignore_eos=True)
    preempted: dict[int, int] = {}
    for _ in range(2000):
        h.step()
        for req in h.scheduler.prefill.waiting:
            assert req.ids.dtype == np.int32
            prompt = h.requests[req.uid][0]
            assert req.ids.tolist() == prompt + h.outputs[req.uid]
            preempted[req.uid] = max(preempted.get(req.uid, 0), len(req.ids) - len(prompt))
        if not h.scheduler.is_busy:
            break
    assert sum(n > 0 for n in preempted.values()) > 2
    h.finish_all()
    h.check_outputs()


def test_the_step_benchmark_runs() -> None:
    """Its stub engine must have everything that the scheduler needs of an engine."""
    script = Path(__file__).parents[3] / "benchmark" / "scheduler" / "bench.py"
    argv = [sys.executable, str(script), "--rows", "8", "--steps", "64"]
    printed = subprocess.run(argv, check=True, capture_output=True, text=True).stdout
    assert "steady: 56 steps" in printed and "paging: 8 steps" in printed
