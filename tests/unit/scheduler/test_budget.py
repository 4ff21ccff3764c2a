"""Prompts computed beside running streams keep the streams at their pace."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from statistics import mean

import numpy as np
import pytest

from minisgl.core.errors import ConfigError
from minisgl.core.layout import SEQUENCE
from minisgl.core.message import ids_from_bytes
from minisgl.core.plan import TILE_TOKENS, BatchPlan, FinishReason, StepCosts
from minisgl.scheduler.budget import FLOOR_TOKENS, LARGE_TILE_TOKENS, QUEUE_S, Pace, StepBudget
from minisgl.settings.options import SchedulerConfig
from support.fake_engine import FakeEngine, step_seconds
from support.traces import Harness

COSTS = StepCosts(base=8e-3, per_token=22e-6)


def random_costs(rng: random.Random) -> StepCosts:
    per_pair = rng.choice((0.0, 1e-9, 1e-7))
    return StepCosts(rng.choice((1e-3, 8e-3, 5e-2)), rng.choice((2e-6, 22e-6)), rng.choice((0.0, 1e-7)), per_pair)


@pytest.mark.parametrize("seed", range(20))
def test_chunks_beyond_the_floor_never_exceed_the_target(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(200):
        costs, target = random_costs(rng), rng.choice((5.0, 30.0, 100.0))
        pace = Pace(SchedulerConfig(itl_target_ms=target, max_prefill_length=8192), costs)
        running, context = rng.randrange(1, 300), rng.randrange(200_000)
        budget = pace.budget(running, context)
        seconds, granted = costs.decode_seconds(running, context), 0
        while not budget.is_spent:
            start, wanted = rng.choice((0, 0, 17, 5000, 100_000)), rng.choice((1, 30, 700, 9000))
            count = budget.grant(start, wanted)
            if granted and not count:  # it fits into the next step
                break
            assert 0 <= count <= wanted
            seconds += costs.chunk_seconds(start, count)
            granted += count
            assert granted >= min(FLOOR_TOKENS, wanted)
        assert granted <= FLOOR_TOKENS or seconds <= target / 1e3 + 1e-9
        assert granted <= 8192 - running
        # The target is used up: an endless prompt takes all but a partial tile.
        count = pace.budget(running, context).grant(0, 1 << 20)
        if FLOOR_TOKENS < count < 8192 - running:
            tile = LARGE_TILE_TOKENS if running + count >= 3 * LARGE_TILE_TOKENS else TILE_TOKENS
            more = count + tile + 1
            assert costs.decode_seconds(running, context) + costs.chunk_seconds(0, more) > target / 1e3
            assert (running + count) % TILE_TOKENS == 0


def test_a_backlog_lengthens_steps_unless_the_user_sets_a_target() -> None:
    pace = Pace(SchedulerConfig(max_prefill_length=8192), COSTS)
    most = pace.max_backlog
    paced, between, rushed = (pace.budget(16, 9000, backlog).grant(0, 8192) for backlog in (0, most // 2, most))
    assert COSTS.decode_seconds(16, 9000) + COSTS.chunk_seconds(0, paced) <= 0.030
    assert 0.030 < COSTS.decode_seconds(16, 9000) + COSTS.chunk_seconds(0, rushed) <= QUEUE_S
    assert most // 2 - LARGE_TILE_TOKENS < between <= most // 2
    assert (16 + between) % LARGE_TILE_TOKENS == (16 + rushed) % LARGE_TILE_TOKENS == 0
    assert paced < between < rushed <= most
    assert pace.budget(16, 9000, 100).grant(0, 8192) == paced
    own = Pace(SchedulerConfig(itl_target_ms=30.0, max_prefill_length=8192), COSTS)
    assert own.budget(16, 9000, most).grant(0, 8192) == paced


def test_without_running_requests_a_step_stays_short() -> None:
    pace = Pace(SchedulerConfig(itl_target_ms=10.0, max_prefill_length=5000), COSTS)
    assert 0.07 < COSTS.decode_seconds(0, 0) + COSTS.chunk_seconds(0, pace.budget(0, 0).grant(0, 9999)) < QUEUE_S
    slow = Pace(SchedulerConfig(max_prefill_length=5000), StepCosts(base=0.2, per_token=1e-3))
    assert slow.budget(0, 0).grant(0, 9999) == TILE_TOKENS
    assert pace.budget(10, 100).grant(0, 9999) < 100
    off = Pace(SchedulerConfig(itl_target_ms=0, max_prefill_length=5000), COSTS)
    assert off.budget(0, 0).grant(0, 9999) == 5000
    assert off.budget(10, 100).grant(0, 9999) == 4990
    unmeasured = Pace(SchedulerConfig(max_prefill_length=5000), None)
    assert unmeasured.budget(10, 100).grant(0, 9999) == 4990


def test_the_default_target_doubles_a_slow_decode_step() -> None:
    pace = Pace(SchedulerConfig(), StepCosts(base=0.1, per_token=1e-4))
    count = pace.budget(1, 0).grant(0, 9999)
    assert 0 <= (0.1 + 1e-4) / 1e-4 - count < TILE_TOKENS  # as long as decoding alone


@pytest.mark.parametrize(
    ("options", "costs"),
    [
        ({"itl_target_ms": -1.0}, COSTS),
        ({"itl_target_ms": float("nan")}, COSTS),
        ({"itl_target_ms": 30.0}, None),
        ({"max_prefill_length": 0}, None),
    ],
)
def test_invalid_settings_are_refused(options: dict[str, object], costs: StepCosts | None) -> None:
    with pytest.raises(ConfigError):
        Pace(SchedulerConfig(**options), costs)  # type: ignore[arg-type]


def test_chunk_costs_add_up_over_its_tokens() -> None:
    costs = StepCosts(1e-3, 2e-6, 3e-8, 5e-9)
    sequences = np.array([(0, 99, 100, 3), (1, 40, 41, 3), (2, 1000, 1300, 1)], SEQUENCE)
    want = costs.decode_seconds(2, 139) + costs.chunk_seconds(1000, 300)
    assert step_seconds(costs, BatchPlan(1, sequences)) == pytest.approx(want)


def run_burst(target: float) -> tuple[float, float]:
    """Add 64 prompts of 1,024 tokens to 16 streams; return the streams' largest gap and the mean TTFT in seconds."""
    engine = FakeEngine(rows=80, num_pages=6000, page_size=16, max_model_len=2048, vocab=5003, costs=COSTS)
    h = Harness(engine, 1, itl_target_ms=target, max_prefill_length=8192)
    streams = [h.add([1 + i, 2, 3], 400, ignore_eos=True) for i in range(16)]
    times: dict[int, list[float]] = defaultdict(list)

    def step() -> None:
        h.scheduler.step()
        for msg in h.io.replies:
            for uid in np.frombuffer(msg.uids, "<i8").tolist():
                times[uid].append(engine.seconds)
            assert len(ids_from_bytes(msg.tokens)) <= 80
        h.drain_replies()

    while len(times) < 16:
        step()
    rng = random.Random(0)
    burst = [h.add([rng.randrange(5003) for _ in range(1024)], 2, ignore_eos=True) for _ in range(64)]
    came = engine.seconds
    while not all(uid in h.endings for uid in burst):
        step()
    assert {h.endings[uid] for uid in burst} == {FinishReason.LENGTH}
    gaps = [b - a for uid in streams for a, b in itertools.pairwise(times[uid])]
    firsts = [times[uid][0] - came for uid in burst]
    assert firsts == sorted(firsts), "equally long prompts are computed in order of arrival"
    for uid in streams:
        h.abort(uid)
    h.finish_all()
    h.check_outputs()
    return max(gaps), mean(firsts)


def test_a_burst_of_prompts_keeps_running_streams_at_their_pace() -> None:
    gap_without, first_without = run_burst(0.0)
    gap, first = run_burst(30.0)
    assert gap_without > 0.150
    assert gap <= 0.030 + 1e-9
    assert first < 1.5 * first_without  # most of a step is still spent on prompts


def test_a_prompt_that_fits_into_the_next_step_is_not_cut_unless_a_queue_waits() -> None:
    pace = Pace(SchedulerConfig(max_prefill_length=8192), COSTS)
    whole = pace.budget(16, 9000).grant(0, 8192)
    budget = pace.budget(16, 9000)
    assert (budget.grant(0, 500), budget.grant(0, whole)) == (500, 0)
    budget = pace.budget(16, 9000)
    assert budget.grant(0, 500) == 500 and budget.grant(0, 2 * whole) > 0, "it takes several steps in any case"
    budget = pace.budget(16, 9000, pace.max_backlog)
    rest = [budget.grant(0, 600) for _ in range(9)]
    assert 0 < [count for count in rest if count][-1] < 600 and sum(rest) > 2 * whole


def test_a_budget_decreases_as_tokens_are_taken() -> None:
    budget = StepBudget(100)
    assert (budget.grant(0, 60), budget.grant(0, 60), budget.is_spent) == (60, 40, True)
