"""Windows and recurrent states: where prompts go on from, what is captured, and that mistakes change the text."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from minisgl.core.errors import ConfigError, InvariantError
from minisgl.core.layout import STATE, WINDOW
from minisgl.core.plan import BatchPlan, FinishReason
from minisgl.kvcache import snapshots
from minisgl.kvcache.arena import Arena, Blocks
from minisgl.kvcache.snapshots import Bounded, IdPool, Reason, Snapshot, Snapshots
from minisgl.kvcache.tiers import TierSpec
from minisgl.scheduler import bounded
from minisgl.scheduler.bounded import BoundedState
from minisgl.scheduler.req import Req
from minisgl.settings.options import MAX_DRAFTS
from support.fake_engine import FakeEngine
from support.traces import Harness, run_random_trace

PAGE = 4
KINDS = {"window": [Bounded(WINDOW, 10)], "state": [Bounded(STATE)], "both": [Bounded(WINDOW, 10), Bounded(STATE)]}


@pytest.fixture(params=KINDS)
def kinds(request: pytest.FixtureRequest) -> list[Bounded]:
    return KINDS[request.param]


def harness(
    bounded: list[Bounded], depth: int = 1, num_pages: int = 100, room: int = 200, **options: object
) -> Harness:
    memory = {"num_pages": num_pages, "bounded": bounded, "room": [room] * len(bounded)}
    engine = FakeEngine(page_size=PAGE, max_model_len=200, vocab=5003, **memory)
    return Harness(engine, depth, max_prefill_length=16, **options)


def hit_of(h: Harness, prompt: list[int], max_tokens: int = 3, **params: object) -> int:
    """Run a request; return how many tokens of its prompt were cached."""
    before = h.scheduler.stats.cached_tokens
    h.add(prompt, max_tokens, ignore_eos=True, **params)
    h.finish_all()
    h.check_outputs()
    return h.scheduler.stats.cached_tokens - before


def test_prompts_go_on_where_a_snapshot_is(kinds: list[Bounded]) -> None:
    h, text = harness(kinds), list(range(1, 120))
    assert hit_of(h, text[:50]) == 0
    assert hit_of(h, text[:50]) == 48, "not from the prompt's last page boundary"
    assert hit_of(h, [*text[:30], 700, 701, 702, 703]) == 0, "a prompt hit where no snapshot was taken"
    assert hit_of(h, [*text[:30], 800, 801]) == 28, "the second to part there has captured"
    assert hit_of(h, [*text[:50], *text[60:70]]) == 48
    assert hit_of(h, text[:50], cache_salt="salt") == 0
    h.scheduler.cache.flush()
    assert hit_of(h, text[:50]) == 0
    assert hit_of(h, [*text[:30], 9, 9, 9, 9], system_tokens=26) == 0
    assert hit_of(h, [*text[:27], 8, 8]) == 24, "the second with a system prompt finds the first's"


def test_a_prompt_is_captured_where_it_parts_from_one_that_waits(kinds: list[Bounded]) -> None:
    """So the prompts of a burst find it in the first of them, and not only in the second."""
    h, common = harness(kinds, 0), list(range(1, 42))
    for i in range(3):
        h.add([*common, *[90 + i] * 7], 2, ignore_eos=True)
    h.finish_all()
    assert h.scheduler.stats.cached_tokens == 2 * 40
    h.check_outputs()


def test_spare_snapshots_let_the_second_of_two_prompts_begin_late(
    kinds: list[Bounded], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only they are dropped for another spare one, and one that was used counts as shared."""
    monkeypatch.setattr(bounded, "EVERY", 16)
    h, text = harness(kinds), list(range(1, 75))
    assert hit_of(h, [*text[:60], 7, 7]) == 0
    assert hit_of(h, [*text[:58], 8, 8]) == 48, "the last of every 16 tokens before they part"
    found = h.scheduler.cache.prefix.snapshots
    assert found is not None
    assert [snapshot.reason for snapshot in found.of.values()].count(Reason.SPARE) == 2
    while (node := found.oldest(1 << 30, Reason.SPARE)) is not None:
        found.remove(node)
    assert [s.reason for s in found.of.values()].count(Reason.SPARE) == 0 < len(found.of)


def test_a_long_prompt_has_a_limited_number_of_spare_snapshots(
    kinds: list[Bounded], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is a node that all later look-ups of the text walk through."""
    monkeypatch.setattr(bounded, "EVERY", 4)
    monkeypatch.setattr(bounded, "MAX_SPARE", 5)
    h = harness(kinds)
    hit_of(h, list(range(160)))
    found = h.scheduler.cache.prefix.snapshots
    assert found is not None
    assert [s.reason for s in found.of.values()].count(Reason.SPARE) == 4, "one of five is the prompt's end"


def test_a_request_that_fits_only_without_its_snapshot_begins_without() -> None:
    """In memory for one row and the longest text, whose snapshot of one part keeps a block."""
    h = harness([Bounded(WINDOW, 10)], num_pages=17, room=10)
    capacity = h.scheduler.cache.arena.max_pages * PAGE
    text = list(range(1, capacity + 1))
    hit_of(h, text[:20])
    assert hit_of(h, text) in (0, 16)
    assert h.endings == {0: FinishReason.LENGTH, 1: FinishReason.LENGTH}


def test_an_answer_is_handed_over(kinds: list[Bounded]) -> None:
    h, prompt = harness(kinds), list(range(1, 40))
    hit_of(h, prompt, 30)
    has_state = len(kinds) > 1 or kinds[0].group == STATE
    assert hit_of(h, [*prompt, *h.outputs[0], 7, 8]) == (64 if has_state else 68), "a state is as of the last fold"


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_preempted_request_goes_on_from_its_last_snapshot(depth: int, kinds: list[Bounded]) -> None:
    h = harness(kinds, depth)
    uid = h.add(list(range(1, 60)), 60, ignore_eos=True)
    while len(h.outputs[uid]) < 40:
        h.step()
    computed = h.scheduler.stats.computed_prompt_tokens
    assert not h.scheduler._preempt_for(h.scheduler.live[uid]), "the only request is not preempted"
    h.add([5] * 20, 20, ignore_eos=True)
    h.step()
    h.scheduler._leave(h.scheduler.live[uid], h.scheduler.live[uid].status.PREEMPTED)
    h.finish_all()
    h.check_outputs()
    assert h.scheduler.stats.computed_prompt_tokens - computed < 20 + 60


def test_rows_wait_for_ids_and_snapshots_give_way(kinds: list[Bounded]) -> None:
    """With memory for one row and a half, and many rows."""
    h = harness(kinds, num_pages=28, room=12)
    for i in range(12):
        h.add([i % 5, *range(40 + i)], 20, ignore_eos=True)
    h.finish_all()
    h.check_outputs()
    assert {*h.endings.values()} == {FinishReason.LENGTH}


def test_a_plan_with_pages_of_one_lifetime_has_no_copies_and_no_groups() -> None:
    h, _ = run_random_trace(3, 1)
    for packed in h.engine.plans:
        if len(packed) > 100:
            plan = BatchPlan.unpack(np.frombuffer(packed, np.int32))
            assert not len(plan.restores) and not len(plan.captures) and not plan.page_writes["group"].any()


def test_the_most_ids_of_a_row_allow_for_drafts() -> None:
    assert snapshots.STEP_TOKENS == 1 + MAX_DRAFTS
    for page, window in [(1, 1), (16, 1000), (16, 1024), (64, 1024), (4, 10)]:
        pool = IdPool(Arena(Blocks(5000, (1, 1))), Bounded(WINDOW, window), page, 0)
        most = max(len(pool.span(n, n + 3 * snapshots.STEP_TOKENS)) for n in range(window, window + 3 * page))
        assert most == pool.per_row


def test_tiers_are_refused(kinds: list[Bounded]) -> None:
    engine = FakeEngine(tiers=[TierSpec("host", 40, 1e-6)], bounded=kinds, room=[20] * len(kinds))
    with pytest.raises(ConfigError, match="do not keep the windows"):
        Harness(engine, 1)


def test_without_a_prefix_cache_nothing_is_kept(kinds: list[Bounded]) -> None:
    h = harness(kinds, cache_type="naive")
    assert hit_of(h, list(range(50))) == hit_of(h, list(range(50))) == 0
    assert len(h.scheduler.cache.arena.free) == h.engine.blocks.count


# -- mistakes are noticed


def drop_any(self: Snapshots, collected: int, reason: Reason, but: object = None) -> object:
    return next(iter(self.of), None)


def free_early(self: IdPool, computed: int, stop: int) -> range:
    span = original_span(self, computed, stop)
    return range(span.start + (stop == 0 < span.start), stop and span.stop)


def copy_less(self: IdPool, computed: int, stop: int) -> range:
    span = original_span(self, computed, stop)
    return range(span.start + (computed == stop and len(span) > 1), span.stop)


def place_shifted(self: BoundedState, req: Req, finite: int, *, is_leaving: bool) -> list[tuple[int, Snapshot]]:
    page = self._rows.page_size
    captures = original_pop(self, req, finite, is_leaving=is_leaving)
    return [(max(page, length - page), snapshot) for length, snapshot in captures]


def forget_restores(self: BoundedState, req: Req, waiting: Iterable[Req]) -> None:
    original_open(self, req, waiting)
    self._rows.writes.restores.clear()
    self._rows.writes.bounded.clear()


def forget_sharers(self: IdPool, ids: dict[int, int]) -> tuple[dict[int, int], list[tuple[int, int]]]:
    return (ids.copy(), []) if self.is_shared else original_repeat(self, ids)


def share_states(self: IdPool, ids: dict[int, int]) -> tuple[dict[int, int], list[tuple[int, int]]]:
    self.others.update(ids.values())
    return ids.copy(), []


original_span, original_pop, original_open = IdPool.span, BoundedState.pop_captures, BoundedState.open
original_repeat = IdPool._repeat
MISTAKES = {
    "a snapshot is dropped that a step in flight restores": (Snapshots, "oldest", drop_any),
    "window pages are freed that a step in flight reads": (IdPool, "span", free_early),
    "a snapshot lacks the first page of its window": (IdPool, "span", copy_less),
    "a snapshot is taken for one of a shorter text": (BoundedState, "pop_captures", place_shifted),
    "a row begins without its snapshot": (BoundedState, "open", forget_restores),
    "window pages are freed that others share": (IdPool, "_repeat", forget_sharers),
    "a state is shared": (IdPool, "_repeat", share_states),
}


@pytest.mark.parametrize(
    ("name", "bounded"),
    [
        (name, kind)
        for name in MISTAKES
        for kind in ("window", "state")
        if {"window": "state", "state": "window"}[kind] not in name
    ],
)
def test_mistakes_are_noticed(name: str, bounded: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, wrong = MISTAKES[name]
    monkeypatch.setattr(owner, attribute, wrong)
    assert any(fails(seed, bounded) for seed in range(60))


def fails(seed: int, bounded: str) -> bool:
    try:
        run_random_trace(seed, 1 + seed % 2, bounded=bounded)
    except (AssertionError, InvariantError, KeyError):
        return True
    return False
