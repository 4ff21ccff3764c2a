"""The order of prompts: shorter ones pass longer ones, by a bounded number of tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from minisgl.core.plan import FinishReason, StepCosts
from minisgl.scheduler.budget import TARGET_S
from minisgl.scheduler.prefill import OVERTAKING
from minisgl.scheduler.req import Status
from support.fake_engine import FakeEngine
from support.traces import Harness

STEP = 8  # tokens of prompts a step


class Recorded(Harness):
    """Records the planned chunks of prompts as (uid, start, stop)."""

    def __init__(
        self,
        *,
        rows: int = 64,
        num_pages: int = 500,
        depth: int = 1,
        costs: StepCosts | None = None,
        **options: object,
    ) -> None:
        engine = FakeEngine(rows=rows, num_pages=num_pages, page_size=4, max_model_len=900, vocab=5003, costs=costs)
        super().__init__(engine, depth, **{"max_prefill_length": STEP, "mixed_batches": False} | options)
        self.chunks: list[tuple[int, int, int]] = []
        plan = self.scheduler.prefill.plan

        def recorded(*args, **kwargs):
            chunks = plan(*args, **kwargs)
            self.chunks += [(c.req.uid, c.start, c.stop) for c in chunks]
            return chunks

        self.scheduler.prefill.plan = recorded  # type: ignore[method-assign]

    def prompt(self, length: int, max_tokens: int = 1) -> int:
        """Add a request whose prompt shares no prefix with others."""
        uid = len(self.requests)
        return self.add([uid % 5000 + 1, uid // 5000 + 1, *range(3, length + 1)], max_tokens, ignore_eos=True)

    def completed(self, lengths: Sequence[int]) -> list[int]:
        """Return the requests whose prompts are planned completely, in that order."""
        return [uid for uid, _, stop in self.chunks if stop == lengths[uid]]


def test_shorter_prompts_go_first_and_equal_ones_in_order_of_arrival() -> None:
    h = Recorded()
    lengths = [30, 9, 50, 9, 20, 30]
    for n in lengths:
        h.prompt(n)
    h.finish_all()
    assert h.completed(lengths) == [1, 3, 4, 0, 5, 2]
    h.check_outputs()


@pytest.mark.parametrize("seed", [*range(8), 392, 434])  # in the last two, a step in flight holds a preempted one
def test_fcfs_admits_and_computes_in_order_of_arrival(seed: int) -> None:
    rng = random.Random(seed)
    options = {"schedule_policy": "fcfs", "max_prefill_length": rng.choice((8, 60)), "mixed_batches": seed % 2 == 0}
    h = Recorded(depth=seed % 3, rows=rng.choice((3, 16)), num_pages=rng.choice((40, 300)), **options)
    h.scheduler.prefill.patience = 1
    h.scheduler.prefill.growth.fraction = 0.0  # hopes too much, so requests are preempted
    lengths, planned = [], 0
    for _ in range(80):
        for child_index in range(rng.choice((0, 0, 1, 3))):
            lengths.append(rng.choice((3, 9, 40, 90)))
            ids = [len(lengths), *range(2, lengths[-1] + 1)]
            h.add(ids, rng.choice((1, 20, 60)), child_index, ignore_eos=True)
        h.step()
        newest = max((uid for uid, *_ in h.chunks[planned:]), default=-1)
        waiting = [r.uid for r in h.scheduler.live.values() if r.status in (Status.WAITING, Status.PREEMPTED)]
        assert newest < min(waiting, default=len(lengths)), "passed a request that waits"
        planned = len(h.chunks)
    h.finish_all()
    assert list(dict.fromkeys(uid for uid, *_ in h.chunks)) == list(range(len(lengths)))
    assert h.scheduler.stats.preemptions or seed in (1, 3, 6, 7)
    h.check_outputs()


@pytest.mark.parametrize("length", [12, 40])
def test_short_prompts_delay_a_long_one_up_to_the_bound(length: int) -> None:
    h = Recorded()
    long = h.prompt(length)
    for _ in range(2 * OVERTAKING * length // STEP):  # as much as the steps can compute, and longer than the bound
        h.prompt(STEP)
        h.step()
    h.finish_all()
    before = h.chunks[: next(i for i, (uid, _, stop) in enumerate(h.chunks) if uid == long and stop == length)]
    passed = sum(stop - start for uid, start, stop in before if uid != long)
    assert OVERTAKING * length - 3 * STEP <= passed <= (OVERTAKING + 1) * length + 3 * STEP
    h.check_outputs()


@pytest.mark.parametrize("seed", range(4))
def test_a_prompt_waits_for_a_bounded_number_of_tokens(seed: int) -> None:
    rng = random.Random(seed)
    h = Recorded(depth=seed % 3, max_prefill_length=rng.choice((5, 30)))
    lengths, bounds = [], []
    for _ in range(60):
        for _ in range(rng.choice((0, 0, 1, 4))):
            lengths.append(rng.choice((3, 5, 12, 60, 200)))
            unfinished = sum(lengths[:-1]) - sum(stop - start for _, start, stop in h.chunks)
            bounds.append(2 * (unfinished + OVERTAKING * lengths[-1]))
            h.prompt(lengths[-1], rng.choice((1, 5)))
        h.step()
    h.finish_all()
    done = {uid: i for i, (uid, _, stop) in enumerate(h.chunks) if stop == lengths[uid]}
    passes = [sum(b - a for u, a, b in h.chunks[: done[uid]] if u > uid) for uid in range(len(lengths))]
    assert any(passes)
    assert all(tokens <= bound for tokens, bound in zip(passes, bounds, strict=True))
    h.check_outputs()


def test_a_short_prompt_passes_a_burst_of_long_ones_that_arrived_before_it() -> None:
    h = Recorded()
    for _ in range(40):
        h.prompt(10 * STEP)
    for _ in range(25):
        h.step()
    short = h.prompt(4)
    h.step()
    assert h.chunks[-1][0] == short or h.chunks[-2][0] == short
    h.finish_all()
    h.check_outputs()


def test_prompts_that_leave_the_queue_do_not_postpone_the_others() -> None:
    h = Recorded(rows=2)
    running = [h.prompt(4, 400) for _ in range(2)]
    h.step()
    long = h.prompt(40)
    for _ in range(100):  # which would keep the long one from its turn if they counted as still to come
        h.abort(h.prompt(30))
    for uid in running:
        h.abort(uid)
    h.step()
    for _ in range(4 * 40 // STEP):  # far fewer than the OVERTAKING * 40 tokens that may pass it
        h.prompt(STEP)
        h.step()
    assert long in h.endings
    h.finish_all()


def test_a_short_prompt_passes_between_the_chunks_of_a_long_one() -> None:
    h = Recorded()
    long = h.prompt(60)
    h.step()
    h.step()
    short = h.prompt(6)
    h.finish_all()
    assert [uid for uid, _, _ in h.chunks[:4]] == [long, long, short, long]
    h.check_outputs()


def test_cached_tokens_do_not_count_as_prompt_length() -> None:
    h = Recorded(max_prefill_length=200)
    h.add(range(1, 101), 1, ignore_eos=True)
    h.finish_all()
    fresh, again = h.prompt(40), h.add(range(1, 110), 1, ignore_eos=True)
    h.chunks.clear()
    h.finish_all()
    assert h.chunks == [(again, 100, 109), (fresh, 0, 40)]


@pytest.mark.parametrize("depth", [0, 1])
def test_short_requests_are_not_preempted_for_long_ones(depth: int) -> None:
    h = Recorded(depth=depth, num_pages=150, max_prefill_length=200, mixed_batches=True)  # 600 tokens
    h.scheduler.prefill.growth.fraction = 0.1  # hopes too much
    for _ in range(4):
        h.prompt(10, 500)
    h.step()
    short = set()
    while h.scheduler.live:
        if h.scheduler.step_number % 30 == 0 and len(short) < 10:
            short.add(h.prompt(5, 60))
        h.step()
        preempted = {r.uid for r in h.scheduler.prefill.waiting if len(r.ids) > r.prompt_len}
        assert not preempted & short
    assert h.scheduler.stats.preemptions and short <= h.endings.keys()
    h.check_outputs()


def test_a_preempted_request_returns_to_its_old_position() -> None:
    h = Recorded(rows=3, max_prefill_length=200)
    running = [h.prompt(n, 200) for n in (20, 20, 20)]
    while len(h.scheduler.decode.running) < 3:
        h.step()
    later = [h.prompt(20, 200), h.prompt(9, 200)]
    for _ in range(30):  # the running ones' sequences grow
        h.step()
    h.scheduler._preempt_for(h.scheduler.live[running[0]])
    while h.scheduler.leaving:
        h.scheduler.collect(h.scheduler.launched.popleft())
    preempted = running[2]
    waiting = h.scheduler.prefill.in_order()
    assert [r.uid for r in waiting] == [later[1], preempted, later[0]]
    assert len(waiting[1].ids) > 40, "which is by now longer than all others"
    h.finish_all()
    h.check_outputs()


def test_without_pages_no_request_is_admitted_but_begun_prompts_go_on() -> None:
    h = Recorded(num_pages=50)  # 200 tokens
    begun = h.prompt(150)
    h.step()
    blocked, small = h.prompt(100), h.prompt(120)
    lengths = [150, 100, 120]
    h.finish_all()
    assert h.completed(lengths) == [begun, blocked, small]
    assert {h.endings[uid] for uid in (begun, blocked, small)} == {FinishReason.LENGTH}
    h.check_outputs()


def test_a_step_filled_by_one_prompt_gives_no_leftover_to_the_next() -> None:
    costs = StepCosts(base=1e-3, per_token=1e-5, per_pair=1e-6)  # late tokens cost many times what the first do
    h = Recorded(costs=costs, max_prefill_length=500, itl_target_ms=4.0, mixed_batches=True)
    h.scheduler.pace.floor = 1
    stream = h.prompt(3, 60)
    while not h.outputs[stream]:
        h.step()
    h.chunks.clear()
    long = h.prompt(200)
    longer = h.prompt(220)
    h.finish_all()
    uids = [uid for uid, _, _ in h.chunks]
    assert uids == sorted(uids) and {long, longer} == set(uids)
    assert uids.count(long) > 4
    h.check_outputs()


def test_lpm_admits_the_longest_cached_prefix_after_begun_prompts() -> None:
    h = Recorded(schedule_policy="lpm")
    h.add(range(1, 101), 1, ignore_eos=True)
    h.finish_all()
    h.chunks.clear()
    begun = h.prompt(30)
    h.step()
    short, again = h.prompt(6), h.add(range(1, 130), 1, ignore_eos=True)
    h.finish_all()
    order = list(dict.fromkeys(uid for uid, _, _ in h.chunks))
    assert order == [begun, again, short]


def test_the_backlog_excludes_the_longest_prompt() -> None:
    h = Recorded()
    assert h.scheduler.prefill.backlog(1000) == 0
    h.prompt(100)
    h.step()
    assert h.scheduler.prefill.backlog(1000) == 0, "one prompt makes no queue, however long"
    for n in (40, 300, 20):
        h.prompt(n)
    h.step()
    left = 100 + 40 + 20 - 2 * STEP
    assert h.scheduler.prefill.backlog(1000) == left
    assert h.scheduler.prefill.backlog(left - 1) == left - 1
    h.finish_all()


def test_a_lone_long_prompt_slows_no_stream_and_lets_short_prompts_pass() -> None:
    costs = StepCosts(base=8e-3, per_token=22e-6)
    engine = FakeEngine(rows=80, num_pages=1000, page_size=16, max_model_len=12_000, vocab=5003, costs=costs)
    h = Harness(engine, 1, max_prefill_length=8192)
    stream = h.add([1, 2, 3], 200, ignore_eos=True)
    while not h.outputs[stream]:
        h.step()
    long = h.add([i % 5000 for i in range(10_000)], 2, ignore_eos=True)
    h.step()
    came, first, steps = engine.seconds, None, []
    short = h.add([7] * 300, 2, ignore_eos=True)
    while not h.outputs[long]:
        before = engine.seconds
        h.step()
        steps.append(engine.seconds - before)
        if first is None and h.outputs[short]:
            first = engine.seconds - came
    assert len(steps) > 8
    assert max(steps) <= TARGET_S + 1e-9
    assert first is not None and first < 4 * TARGET_S
    h.finish_all()
    h.check_outputs()
