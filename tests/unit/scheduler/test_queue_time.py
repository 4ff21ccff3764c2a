"""Requests that wait for too long are refused, and only those."""

from __future__ import annotations

import pytest

from support.fake_engine import FakeEngine
from support.traces import Harness


class Clock:
    """A clock that is moved by hand."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("depth", [0, 1])
def test_requests_that_wait_too_long_are_refused(depth: int) -> None:
    h = Harness(FakeEngine(rows=2, vocab=101), depth, max_queue_time=5.0)
    h.scheduler._clock = clock = Clock()
    running = [h.add([1, 2, i], max_tokens=30) for i in range(2)]
    h.step()
    late = [h.add([1, 3, i], max_tokens=2) for i in range(3)]
    for _ in range(3):
        h.step()
    clock.now += 3.0
    newer = h.add([1, 4], max_tokens=2)
    h.step()
    assert not h.endings
    clock.now += 2.5
    h.step()
    assert set(h.endings) == set(late)
    assert all("has waited for 5 s (--max-queue-time)" in h.errors[uid] for uid in late)
    h.finish_all()
    assert h.endings.keys() == {*running, *late, newer}
    assert not any(h.errors[uid] for uid in (*running, newer))


def test_preempted_requests_are_not_refused() -> None:
    h = Harness(FakeEngine(rows=8, num_pages=14, vocab=101), 1, max_queue_time=5.0)
    h.scheduler._clock = clock = Clock()
    for i in range(6):
        h.add([i, 2, 3, 4], max_tokens=20, ignore_eos=True)
    h.step()
    while not h.scheduler.stats.preemptions:
        h.step()
    waiting = [req for req in h.scheduler.prefill.waiting if len(req.ids) > req.prompt_len]
    clock.now += 100.0
    h.finish_all()
    for req in waiting:
        assert not h.errors[req.uid]
