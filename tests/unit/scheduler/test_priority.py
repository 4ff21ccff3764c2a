"""Requests of several ranks: who goes first, who makes room, and how long the least urgent wait."""

from __future__ import annotations

import random

import msgspec
import pytest

from minisgl.core.params import Adapter
from minisgl.core.plan import FinishReason
from minisgl.scheduler.prefill import AGING, OVERTAKING
from minisgl.scheduler.req import Req, Status
from support.fake_engine import FakeEngine
from support.traces import Harness


def harness(depth: int = 1, **options: object) -> Harness:
    memory = {"rows": 8, "num_pages": 400, "max_model_len": 1000} | options
    policy = {"max_prefill_length": memory.pop("chunk", 8), "schedule_policy": memory.pop("policy", "shortest")}
    return Harness(FakeEngine(vocab=5003, **memory), depth, mixed_batches=False, **policy)  # type: ignore[arg-type]


def begun(h: Harness) -> list[int]:
    """The requests in the order of their first tokens."""
    first: dict[int, None] = {}
    while h.scheduler.is_busy or h.io.inbox:
        h.step()
        first |= dict.fromkeys(uid for uid, output in h.outputs.items() if output)
    return list(first)


@pytest.mark.parametrize("policy", ["shortest", "fcfs", "lpm"])
def test_a_lower_priority_goes_first(policy: str) -> None:
    h = harness(policy=policy)
    for priority, length in ((1, 9), (0, 30), (0, 20), (-1, 40), (1, 8)):
        h.add([len(h.requests) + 1] * length, 1, priority=priority, ignore_eos=True)
    of_one_rank = [1, 2] if policy == "fcfs" else [2, 1]
    assert begun(h) == [3, *of_one_rank, *([0, 4] if policy == "fcfs" else [4, 0])]
    h.check_outputs()


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize(("rows", "pages"), [(3, 400), (8, 60)], ids=["few rows", "few pages"])
def test_the_least_urgent_make_room(depth: int, rows: int, pages: int) -> None:
    """The newest of the lowest rank first, at once, and no more than needed; no output changes."""
    h = harness(depth, rows=rows, num_pages=pages, chunk=100)
    ranks = [0, 2, 1, 2, 2, 1]
    for i, priority in enumerate(ranks):
        h.add([1 + i] * 40, 30, priority=priority, ignore_eos=True)
    for _ in range(6):
        h.step()
    running = [uid for uid in h.requests if h.table_row(uid) is not None]
    assert 0 in running and len(running) < len(ranks)
    patience = {uid: h.scheduler.live[uid].patience for uid in running}
    urgent = h.add([9] * 40, 4, priority=-1, ignore_eos=True)
    steps = 0
    while not h.outputs[urgent]:
        h.step()
        steps += 1
    left = [uid for uid in running if h.table_row(uid) is None]
    assert steps <= 3 + 2 * depth and left == [max(running, key=lambda uid: (ranks[uid], uid))]
    victim, prefill = h.scheduler.live[left[0]], h.scheduler.prefill
    left_over = victim.overdue_at - prefill._admitted
    assert left_over <= patience[victim.uid] - 40, "all waits together are bounded"
    h.finish_all()
    h.check_outputs()
    assert {*h.endings.values()} == {FinishReason.LENGTH}


@pytest.mark.parametrize("depth", [0, 1])
def test_the_least_urgent_give_up_the_slot_of_an_adapter(depth: int) -> None:
    """All those of one slot, and no other; none passes an overdue request that lacks one."""
    h = harness(depth, adapter_slots=2, chunk=100)
    for name, priority in (("a", 2), ("a", 1), ("b", 2), ("b", 0), ("", 3)):
        adapter = Adapter(name, f"/{name}", "key") if name else None
        h.add([1 + len(h.requests)] * 9, 60, priority=priority, adapter=adapter, ignore_eos=True)
    for _ in range(8):
        h.step()
    assert all(h.outputs.values())
    _, urgent = (h.add([9] * 9, 60, priority=p, adapter=Adapter("c", "/c", "key")) for p in (1, 0))
    for _ in range(6 + 2 * depth):
        h.step()
    assert h.outputs[urgent] and [uid for uid in range(5) if h.table_row(uid) is None] == [0, 1]
    late = h.add([9] * 9, 4, priority=3, adapter=Adapter("d", "/d", "key"))
    while h.scheduler.live.get(late) is None or h.scheduler.live[late].status is not Status.WAITING:
        h.step()  # until the adapter is read
    h.scheduler.live[late].overdue_at = 0
    h.scheduler.prefill._is_sorted = False
    other = h.add([8] * 9, 4, priority=-5)
    for _ in range(6):
        h.step()
    assert not h.outputs[other] and not h.outputs[late]
    h.finish_all()
    h.check_outputs()


def test_less_urgent_classes_do_not_fill_the_queue() -> None:
    h = harness(rows=1)
    h.scheduler.admission.max_queued = 2
    for level in (1, 1, 1, 1, 0, 0, 0):
        h.add([1 + len(h.requests)] * 9, 20, ignore_eos=True)
        h.io.inbox[-1] = msgspec.structs.replace(h.io.inbox[-1], level=level)
        h.step()
    h.finish_all()
    refused = [uid for uid, error in h.errors.items() if "waiting already" in error]
    assert refused == [3, 6]
    h.check_outputs()


def test_equal_ranks_make_no_room() -> None:
    h = harness(rows=2)
    for i in range(6):
        h.add([1 + i] * 20, 30, priority=3, ignore_eos=True)
    h.finish_all()
    assert not h.scheduler.stats.preemptions


@pytest.mark.parametrize(("seed", "count"), [(0, 900), (1, 900), pytest.param(2, 10_000, marks=pytest.mark.slow)])
def test_nobody_waits_longer_than_the_bound(seed: int, count: int) -> None:
    """The urgent two of three classes come as fast as prompts are computed; the third gets about one token in AGING."""
    rng = random.Random(seed)
    h = harness(depth=seed % 3, rows=16, chunk=16, policy=("shortest", "fcfs", "lpm")[seed % 3])
    prefill = h.scheduler.prefill
    arrivals: dict[int, tuple[int, int, int]] = {}  # rank, tokens admitted before, the bound
    waits: dict[int, list[int]] = {0: [], 1: [], 2: []}
    tokens = [0, 0, 0]
    admit = prefill._admit

    def noted(req: Req, reserved: int) -> bool:
        rank, came, bound = arrivals[req.uid]
        waited = prefill._admitted - came
        is_admitted = admit(req, reserved)
        if is_admitted:
            assert waited <= bound
            waits[rank].append(waited)
            tokens[rank] += req.new_tokens
        return is_admitted

    prefill._admit = noted  # type: ignore[method-assign]
    while len(h.requests) < count:
        while sum(prefill._waiting_tokens[0, rank] for rank in (0, 1)) < 20:
            add_one(h, rng.choice((0, 0, 1)), rng.choice((1, 2, 4)), arrivals)
        if rng.random() < 0.1:
            add_one(h, 2, rng.choice((1, 2, 4)), arrivals)
        h.step()
    assert len(waits[2]) > count / 1000, "the third class never waited so long"
    assert tokens[2] <= 2 * sum(tokens) / AGING, "the others lose more than their share"
    assert max(waits[0]) < min(waits[2])
    h.finish_all(1_000_000)
    h.check_outputs()


def add_one(h: Harness, rank: int, length: int, arrivals: dict[int, tuple[int, int, int]]) -> None:
    """Add a request, and note its rank, the tokens that were admitted before it, and the most that may be."""
    prefill, uid = h.scheduler.prefill, len(h.requests)
    waiting = prefill._waiting_tokens.total()
    h.add([uid % 5000 + 1, uid // 5000 + 1, *[7] * length], 1, priority=rank, ignore_eos=True)
    h.scheduler.handle(h.io.inbox.pop())
    arrivals[uid] = rank, prefill._admitted, AGING * (2 * waiting + 2 * OVERTAKING * (length + 2))
