"""Short requests beside many long ones: what the queue refuses, and who makes room."""

from __future__ import annotations

import random

import pytest

from minisgl.core.plan import FinishReason, StepCosts
from minisgl.scheduler.prefill import KEPT_ROWS, OVERTAKING, PATIENCE_STEPS
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


CPU = StepCosts(base=9e-4, per_token=1.3e-4, per_context=3e-7, per_pair=5e-8)  # the built-in model on one core


@pytest.mark.parametrize(
    ("prompt", "output", "clients", "rows", "pages"),
    [(1500, 8, 4, 64, 4000), (300, 600, 40, 64, 4000), (100, 400, 60, 96, 500), (30, 400, 40, 16, 4000)],
    ids=["prompts", "streams", "few pages", "few rows"],
)
def test_a_short_request_starts_soon_beside_long_ones_on_a_cpu(
    prompt: int, output: int, clients: int, rows: int, pages: int
) -> None:
    """Its first token takes two steps, or where it must wait for a row a few more, not the time of the long ones."""
    engine = FakeEngine(rows=rows, num_pages=pages, page_size=16, max_model_len=2000, vocab=5003, late=0, costs=CPU)
    engine.is_async = False
    h = Harness(engine, 0, max_prefill_length=8192)
    rng = random.Random(0)

    def add(length: int, tokens: int) -> int:
        return h.add([rng.randrange(5003) for _ in range(length)], tokens, ignore_eos=True)

    longs = [add(prompt, output) for _ in range(clients)]
    waits: list[float] = []
    steps: list[float] = []
    while len(waits) < 40:
        came, short = engine.seconds, add(5, 12)
        while short not in h.endings:
            before = engine.seconds
            h.step()
            steps.append(engine.seconds - before)
            if len(h.outputs[short]) == 1:
                waits.append(engine.seconds - came)
            longs = [add(prompt, output) if uid in h.endings else uid for uid in longs]
        for _ in range(20):
            h.step()
    num_steps = PATIENCE_STEPS + 4 if rows < clients else 2
    assert max(waits) <= num_steps * max(steps)
    assert max(steps) < 0.035, "twice the time of decoding alone"
    for uid in longs:
        h.abort(uid)
    h.finish_all()


@pytest.mark.parametrize("depth", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_many_prompts_of_one_request_leave_rows_and_the_turn_to_others(depth: int) -> None:
    """The first token of another request takes as many steps as alone, though its prompt is longer than each."""
    h = Harness(FakeEngine(rows=32, vocab=5003, max_model_len=1000, num_pages=4000), depth)
    many = [h.add([i], 40, child_index=i, ignore_eos=True) for i in range(500)]
    for _ in range(8):
        h.step()
    assert sum(bool(h.outputs[uid]) for uid in many) == 32 - 32 // KEPT_ROWS
    other = h.add([9] * 50, 4, ignore_eos=True)
    steps = 0
    while not h.outputs[other]:
        h.step()
        steps += 1
    assert steps <= 2 + depth
    h.finish_all()
    h.check_outputs()
    assert set(h.endings.values()) == {FinishReason.LENGTH}
    assert h.scheduler.stats.preemptions == 0


def test_a_request_that_lacks_pages_lets_much_shorter_ones_pass_for_a_bounded_time() -> None:
    h = Harness(FakeEngine(rows=16, num_pages=100, max_model_len=400, vocab=5003), 0)  # 400 tokens
    running = h.add([1] * 100, 250, ignore_eos=True)
    h.step()
    h.add([2] * 200, 100, ignore_eos=True)
    bound = 100 + 2 * OVERTAKING * 200  # the request is due after half of it
    passed, short = 0, None
    while short is None or short in h.endings:
        assert passed <= bound + 300
        short = h.add([3 + passed // 40, *[4] * 39], 1, ignore_eos=True)
        h.step()
        passed += 40
    assert running not in h.endings
    assert bound <= passed
    h.finish_all()
    h.check_outputs()
