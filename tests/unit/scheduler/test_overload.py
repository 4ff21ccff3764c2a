"""Short requests beside many long ones: what the queue refuses, and who makes room."""

from __future__ import annotations

import pytest

from minisgl.core import FinishReason
from minisgl.scheduler.prefill import PATIENCE_STEPS
from support.fake_engine import FakeEngine
from support.traces import Harness


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("pages", [400, 80])
def test_a_short_request_takes_the_place_of_a_long_one(depth: int, pages: int) -> None:
    """Rows are few in one case, pages in the other; no output changes."""
    h = Harness(FakeEngine(rows=3 if pages == 400 else 8, num_pages=pages, max_model_len=1000, vocab=5003), depth)
    prompts = [[1 + i] * 20 for i in range(6)]
    for prompt in prompts:
        h.add(prompt, 300, ignore_eos=True)
    for _ in range(20):
        h.step()
    short = h.add([9, 9, 9], 4, ignore_eos=True)
    steps = 0
    while short not in h.endings:
        h.step()
        steps += 1
    assert steps < PATIENCE_STEPS + 20
    assert len(h.endings) == 1, "it has passed all the others"
    h.finish_all()
    h.check_outputs()
    assert set(h.endings.values()) == {FinishReason.LENGTH}


def test_requests_of_equal_length_do_not_preempt_each_other() -> None:
    h = Harness(FakeEngine(rows=2, vocab=5003, max_model_len=1000, num_pages=400), 1)
    for i in range(6):
        h.add([1 + i] * 20, 100, ignore_eos=True)
    h.finish_all()
    assert h.scheduler.stats.preemptions == 0


def test_long_prompts_are_refused_where_short_ones_still_pass() -> None:
    engine = FakeEngine(rows=1, vocab=5003, max_model_len=1000, num_pages=400)
    h = Harness(engine, 0, max_queued_tokens=500)
    running = h.add([1], 300, ignore_eos=True)
    h.step()
    longs = [h.add([2 + i] * 200, 2, ignore_eos=True) for i in range(5)]
    short = h.add([9] * 4, 2, ignore_eos=True)
    h.step()
    assert {uid: h.endings.get(uid) for uid in longs} == dict.fromkeys(longs[:3]) | dict.fromkeys(
        longs[3:], FinishReason.ERROR
    )
    assert h.errors[longs[3]] == "more than 500 prompt tokens are waiting before this request; try again later"
    assert short not in h.endings
    h.abort(running)
    h.finish_all()
    h.check_outputs()
    assert h.endings[short] is FinishReason.LENGTH
