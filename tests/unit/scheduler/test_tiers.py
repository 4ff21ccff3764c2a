"""Prefixes below the device are found again, whatever else happens, and are not believed where they are damaged."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from minisgl.core.layout import LOAD, MOVE, STATE, WINDOW
from minisgl.core.plan import BatchPlan, FinishReason, StepCosts
from minisgl.kvcache import tree
from minisgl.kvcache.snapshots import Bounded
from minisgl.kvcache.tiers import TierSpec
from minisgl.scheduler import budget
from minisgl.scheduler.budget import LoadBudget, Pace
from minisgl.scheduler.stats import engine_view
from support.fake_engine import FakeEngine, expected_output
from support.traces import Harness, run_random_trace

HOST, DISK = TierSpec("host", 40, 1e-6), TierSpec("disk", 60, 1e-6, lasts=True)
CHOICES = {"host": [HOST], "disk": [DISK], "both": [HOST, DISK]}


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Edges are evicted page by page, and a step loads a page at most."""
    monkeypatch.setattr(tree, "PART", 1)
    monkeypatch.setattr(Pace, "load_budget", lambda *_: LoadBudget(0.0, 0.0))


@pytest.mark.parametrize("damage", [0.0, 0.2])
@pytest.mark.parametrize("depth", [0, pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize(
    ("parts", "names"),
    [
        ("large", "host"),
        pytest.param("large", "disk", marks=pytest.mark.slow),
        pytest.param("large", "both", marks=pytest.mark.slow),
        pytest.param("small", "host", marks=pytest.mark.slow),
        pytest.param("small", "disk", marks=pytest.mark.slow),
        ("small", "both"),
    ],
)
def test_random_traces_with_tiers(
    parts: str, names: str, depth: int, damage: float, request: pytest.FixtureRequest
) -> None:
    if parts == "small":
        request.getfixturevalue("small_parts")
    stored = loaded = lost = 0
    for seed in range(4):
        number = 1000 * depth + seed + 500 * (damage > 0)
        h, _ = run_random_trace(number, depth, "auto" if seed == 3 else "off", CHOICES[names], damage)
        assert {*h.errors.values()} <= {"", "no grammar"}
        tiers = h.scheduler.cache.prefix.tiers
        stored += sum(tier.stored_pages for tier in tiers)
        loaded += sum(tier.loaded_pages for tier in tiers)
        lost += sum(tier.lost_pages for tier in tiers)
        assert h.engine.num_moves == [sum(t.stored_pages for t in tiers), sum(t.loaded_pages for t in tiers)]
    assert stored > 50 and loaded > 2
    assert (lost > 0) == (damage > 0)


@pytest.mark.parametrize(("damage", "depth"), [(0.0, 1), (0.2, 0), (0.2, 2)])
def test_random_traces_with_snapshots_in_tiers(damage: float, depth: int, small_parts: None) -> None:
    """Windows and recurrent states, in slots that hold a part of a page of the group with the largest."""
    tiers = [replace(HOST, num_slots=160), replace(DISK, num_slots=240)]
    stored = loaded = lost = saved = 0
    for kinds in ("window", "state", "window state"):
        speculate = "auto" if kinds == "window state" else "off"
        h, _ = run_random_trace(10, depth, speculate, tiers, damage, bounded=kinds)
        h.step()  # what was evicted at the end
        assert {*h.errors.values()} <= {"", "no grammar"}
        found = h.scheduler.cache.prefix.tiers
        counts = [sum(getattr(tier, f"{name}_pages") for tier in found) for name in ("stored", "loaded", "lost")]
        assert h.engine.num_moves == counts[:2]
        stored, loaded, lost = (a + b for a, b in zip((stored, loaded, lost), counts, strict=True))
        saved += len(h.scheduler.cache.prefix._keeper.saved[1])  # type: ignore[attr-defined]
    assert stored > 500 and loaded > 200 and saved > 3
    assert (lost > 0) == (damage > 0)


def small_pool(tiers: list[TierSpec], depth: int = 0, **options: object) -> Harness:
    """A scheduler whose pool holds one long request."""
    costs = StepCosts(1e-3, 1e-4)
    return Harness(FakeEngine(rows=2, num_pages=16, vocab=5003, costs=costs, tiers=tiers), depth, **options)


def ask(h: Harness, start: int, length: int = 40, max_tokens: int = 8) -> int:
    """Compute a prompt; return how many of its tokens were cached."""
    before = h.scheduler.stats.cached_tokens
    h.add(range(start, start + length), max_tokens, ignore_eos=True)
    h.finish_all()
    h.check_outputs()
    return h.scheduler.stats.cached_tokens - before


@pytest.mark.parametrize("depth", [0, 1])
def test_an_evicted_prefix_is_loaded_and_not_computed(depth: int) -> None:
    h = small_pool([HOST], depth)
    assert [ask(h, 100), ask(h, 200), ask(h, 100), ask(h, 200)] == [0, 0, 36, 36]
    h.scheduler.cache.flush()
    assert ask(h, 100) == 0, "a flushed prefix was found"


def plans(h: Harness) -> list[BatchPlan]:
    return [BatchPlan.unpack(np.frombuffer(data, np.int32)) for data in h.engine.plans]


def loading(monkeypatch: pytest.MonkeyPatch, depth: int, page_seconds: float) -> tuple[Harness, int]:
    """A request decodes, and one with a prefix of 15 pages in the tier has come; return its uid."""
    monkeypatch.setattr(tree, "PART", 2)
    tier, costs = TierSpec("host", 60, page_seconds), StepCosts(1e-3, 1e-4)
    h = Harness(FakeEngine(rows=3, num_pages=30, vocab=5003, costs=costs, tiers=[tier], max_model_len=100), depth)
    for start in (100, 200, 300):
        ask(h, start, 62)
    h.engine.plans.clear()
    h.add(range(900, 910), 30, ignore_eos=True)
    while not h.outputs[3]:
        h.step()
    return h, h.add(range(100, 162), ignore_eos=True)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("end", ["completes", "aborts", "is aborted beside another"])
def test_a_long_prefix_is_loaded_beside_a_stream(depth: int, end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In parts that take no longer than a step of 1.1 ms, each of which has a token of the stream."""
    h, uid = loading(monkeypatch, depth, 3.5e-4)
    if end == "is aborted beside another":
        h.add(range(100, 162), ignore_eos=True)
    if end != "completes":
        while not h.engine.num_moves[1]:
            h.step()
        h.abort(uid)
    h.finish_all()
    h.check_outputs()
    counts = [int((plan.moves["kind"] == LOAD).sum()) for plan in plans(h)]
    assert all(len(plan.sequences) for plan, count in zip(plans(h), counts, strict=True) if count)
    assert max(counts) == 3
    # Pages that the request does not use yet are not written to its row: the step would wait for their stores.
    assert all({*plan.page_writes["row"].tolist()} <= {*plan.sequences["row"].tolist()} for plan in plans(h))
    assert sum(counts) == 3 if end == "aborts" else sum(counts) > 10
    if end != "aborts":
        assert h.scheduler.stats.cached_tokens == 60
    assert h.endings[uid] is (FinishReason.LENGTH if end == "completes" else FinishReason.ABORT)


def test_a_request_alone_is_loaded_in_large_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """For others who may come, a part takes no longer than a step with prompts does then."""
    monkeypatch.setattr(budget, "QUEUE_S", 7e-3)
    h = small_pool([TierSpec("host", 40, 1e-3 * 0.3999)], 1)
    assert [ask(h, 100, 48), ask(h, 200, 48)] == [0, 0]
    h.engine.plans.clear()
    monkeypatch.setattr(budget, "QUEUE_S", 2e-3)
    assert ask(h, 100, 48) == 44
    counts = [int((plan.moves["kind"] == LOAD).sum()) for plan in plans(h)]
    assert [count for count in counts if count] == [5, 5, 1]
    assert [len(plan.sequences) for plan in plans(h)][:3] == [0, 0, 1]


def test_a_preempted_request_comes_back_from_the_host() -> None:
    """Two requests that fit only one at a time: what the second has computed is loaded, not computed again."""
    h = small_pool([HOST])
    h.scheduler.prefill.growth.fraction = h.scheduler.prefill.growth.FLOOR = 0.0  # type: ignore[misc]
    for start in (100, 200):
        h.add(range(start, start + 20), 40, ignore_eos=True)
    h.finish_all()
    h.check_outputs()
    stats, tier = h.scheduler.stats, h.scheduler.cache.prefix.tiers[0]
    assert stats.preemptions > 0 and tier.loaded_pages > 0
    assert stats.computed_prompt_tokens <= 40 + 4 * stats.preemptions, "more than the last pages was computed again"


def test_the_oldest_leave_a_full_tier() -> None:
    h = small_pool([TierSpec("host", 24, 1e-6)])
    for start in (100, 200, 300, 400):
        ask(h, start)
    assert [ask(h, 300), ask(h, 100)] == [36, 0]


def test_damage_of_a_shared_prefix_costs_no_request() -> None:
    """Several requests load one prefix; all of them are computed, and their own tails are found later."""
    h = small_pool([HOST], 1, max_prefill_length=8)
    ask(h, 100, 20)
    ask(h, 500, 60, 2)
    h.engine.damaged = {(0, slot) for slot in h.engine.slots[0]}
    for tail in (1, 2):
        h.add([*range(100, 120), tail, tail, tail], 6, ignore_eos=True)
    h.finish_all()
    h.check_outputs()
    assert h.scheduler.cache.prefix.tiers[0].lost_pages > 0
    assert ask(h, 100, 20) == 16


def test_a_tier_that_is_slower_than_computing_is_not_used() -> None:
    h = small_pool([TierSpec("disk", 60, 1e-3)])  # 1 ms a page, 0.1 ms a token
    assert h.scheduler.cache.prefix.tiers == []
    assert [ask(h, 100), ask(h, 200), ask(h, 100)] == [0, 0, 0]


@pytest.mark.parametrize("lasts", [True, False])
def test_idle_time_is_used_once(lasts: bool) -> None:
    """What is cached is written while nothing else is to do; then the tier is left alone, even if it is too small."""
    h = small_pool([TierSpec("small", 9, 1e-6, lasts=lasts)])
    ask(h, 100, 20)
    ask(h, 200, 20)
    for _ in range(50):
        h.step()
    stored = h.engine.num_moves[0]
    assert 5 <= stored <= 20
    for _ in range(50):
        h.step()
    assert h.engine.num_moves[0] == stored


def test_the_view_tells_where_pages_are() -> None:
    h = small_pool([HOST])
    for start in (100, 200, 100):
        ask(h, start)
    view = engine_view(h.scheduler, 1, h.scheduler.stats)
    assert {node.place for node in view.nodes} == {"device", "host"}
    (tier,) = view.tiers
    assert h.scheduler.stats.snapshot(h.scheduler).tiers == [tier]
    assert [tier.name, tier.pages_total, tier.lost] == ["host", 40, 0]
    assert tier.stored >= tier.pages_held > 0 and tier.loaded == 9


def test_moves_travel_in_a_packed_plan() -> None:
    h = small_pool([HOST])
    for start in (100, 200, 100):
        ask(h, start)
    moves = np.concatenate([plan.moves for plan in plans(h)])
    assert moves.dtype == MOVE and len(moves) == sum(h.engine.num_moves)
    stored, loaded = ({*moves["name"][(moves["kind"] == LOAD) == i].tolist()} for i in (0, 1))
    assert loaded and loaded < stored


KINDS = {"window": [Bounded(WINDOW, 10)], "state": [Bounded(STATE)], "both": [Bounded(WINDOW, 10), Bounded(STATE)]}


@pytest.fixture(params=KINDS)
def bounded(request: pytest.FixtureRequest) -> Harness:
    """A scheduler of a model with bounded state, whose memory holds one long request and hardly a snapshot."""
    kinds = KINDS[request.param]
    memory = {"num_pages": 15, "bounded": kinds, "room": [18 if kind.window else 2 for kind in kinds]}
    per_block = (1, 1, 1) if request.param == "window" else (3, 1, 1)
    costs, tiers = StepCosts(1e-3, 1e-4), [TierSpec("host", 300, 1e-6)]
    return Harness(FakeEngine(rows=2, vocab=5003, costs=costs, tiers=tiers, per_block=per_block, **memory), 1)


def ask_on(h: Harness, start: int) -> tuple[int, int]:
    """Go on after the answer to `ask`; return how many tokens were cached, and how many may be.

    An answer is handed over with its window; a recurrent state is as of the end of the prompt, since no fold is due.
    With both, the window has moved on from there, and the snapshot of the prompt remains.
    """
    prompt = [*range(start, start + 40)]
    prompt += expected_output(prompt, 8, h.engine.vocab, ignore_eos=True)
    before = h.scheduler.stats.cached_tokens
    h.add([*prompt, 7], 2, ignore_eos=True)
    h.finish_all()
    h.check_outputs()
    return h.scheduler.stats.cached_tokens - before, (36 if h.engine.window else 40) if h.engine.has_state else 44


def test_a_prefix_is_found_in_a_tier_with_its_snapshot(bounded: Harness) -> None:
    h = bounded
    assert [ask(h, 100), ask(h, 200)] == [0, 0]
    for start in (100, 200):
        found, cached = ask_on(h, start)
        assert found == cached
    assert h.scheduler.stats.snapshot(h.scheduler).tiers[0].loaded >= 18
    h.scheduler.cache.flush()
    assert ask_on(h, 100)[0] == 0, "a flushed prefix was found"


def test_a_snapshot_that_costs_more_than_the_text_is_not_loaded(bounded: Harness) -> None:
    h = bounded
    ask(h, 100), ask(h, 200)
    (tier,) = h.scheduler.cache.prefix.tiers
    tier.cost = 0.99
    assert ask_on(h, 100)[0] == 0, "9 pages and a snapshot take longer than 9 pages"
    assert tier.loaded_pages == 0


def test_a_snapshot_is_loaded_in_parts_and_may_be_aborted(bounded: Harness, small_parts: None) -> None:
    """A unit in each step; a second request waits for the same snapshot, and does not take a part of it for all."""
    h = bounded
    ask(h, 100), ask(h, 200)
    prompt = [*h.requests[0][0], *h.outputs[0]]
    first, second = (h.add([*prompt, i], 2, ignore_eos=True) for i in range(2))
    for _ in range(10):
        h.step()
    assert h.engine.num_moves[1] > 5 and not h.outputs[first]
    h.abort(first)
    h.finish_all()
    h.check_outputs()
    assert h.endings[second] is FinishReason.LENGTH and h.engine.num_moves[1] > 9
    assert not h.scheduler.cache.prefix.snapshots.awaited  # type: ignore[union-attr]


def test_a_damaged_snapshot_is_computed_again(bounded: Harness) -> None:
    h = bounded
    ask(h, 100), ask(h, 200)
    keeper = h.scheduler.cache.prefix._keeper  # type: ignore[attr-defined]
    h.engine.damaged = {(0, slot) for saved in keeper.saved[1].values() for slot in saved.slots.tolist()}
    assert h.engine.damaged
    ask_on(h, 100)
    assert keeper.tiers[0].lost_pages > 0
    h.engine.damaged.clear()
    ask(h, 300)
    found, cached = ask_on(h, 100)
    assert found >= cached, "what was computed again was not kept"


def test_a_conversation_keeps_one_snapshot_in_a_tier(bounded: Harness) -> None:
    """That of its newest turn: the ones before are passed."""
    h, text = bounded, list(range(100, 112))
    for turn in range(3):
        uid = h.add(text, 4, ignore_eos=True)
        h.finish_all()
        text += [*h.outputs[uid], *range(1000 + 10 * turn, 1008 + 10 * turn)]
        ask(h, 500 + 100 * turn)
    keeper = h.scheduler.cache.prefix._keeper  # type: ignore[attr-defined]
    texts = [keeper._tree.path(node)[0].key[0] for node in keeper.saved[1]]
    assert texts.count(100) == 1
