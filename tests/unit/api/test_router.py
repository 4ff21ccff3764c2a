"""The router knows what each cache has, assigns requests by that and by load, and moves those of a lost replica."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minisgl.api.router import ANSWER_TOKENS, MAX_DEATHS, SILENT_S, Router
from minisgl.core.message import (
    PrefixesMsg,
    StatsMsg,
    TellPrefixesMsg,
    TierView,
    UserMsg,
    UserReply,
    ids_from_bytes,
    ids_to_bytes,
)
from minisgl.core.params import SamplingParams
from minisgl.core.plan import FinishReason, StepCosts
from minisgl.kvcache.prefixes import prefix_hashes, salt_digest
from minisgl.kvcache.tiers import TierSpec
from support.fake_engine import FakeEngine
from support.traces import Harness

PAGE = 4
UIDS = itertools.count(1)


def message(ids: Sequence[int], **params: Any) -> UserMsg:
    return UserMsg(uid=next(UIDS), input_ids=ids_to_bytes(ids), sampling_params=SamplingParams(**params))


def router_of(count: int) -> Router:
    router = Router()
    for index in range(count):
        router.open(index, index, now=0.0)
    return router


def cache(router: Router, incarnation: int, ids: Sequence[int], location: int = 0, start: int = 0) -> None:
    """Tell that `incarnation` has the pages of `ids` from `start` on in `location`; loading costs 10 % of computing."""
    hashes = prefix_hashes(np.array(ids, np.int32), PAGE, b"")[start:]
    msg = PrefixesMsg(
        page_size=PAGE,
        costs=[0.0, 0.1],
        hashes=hashes.tobytes(),
        locations=np.full(len(hashes), location, np.int8).tobytes(),
        incarnation=incarnation,
    )
    router.note_prefixes(msg)


def end(router: Router, msg: UserMsg, tokens: int = 1) -> None:
    router.note_reply(UserReply(uid=msg.uid, completion_tokens=tokens, finish_reason=FinishReason.STOP))


@pytest.mark.parametrize("cache_type", ["radix", "naive", "host", "host and disk"])
@pytest.mark.parametrize("seed", [0, 1, 5, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3, 4))])
def test_known_prefixes_are_those_of_the_tree(seed: int, cache_type: str, tmp_path: Path) -> None:
    """In random traffic on a small pool, at every step and for every prompt, with and without a salt, with tiers."""
    rng = random.Random(seed)
    page_size = rng.choice((1, 2, 4))
    tiers = [TierSpec("host", 48 // page_size, 0.2)] if "host" in cache_type else []
    tiers += [TierSpec("disk", 160 // page_size, 0.5, True, str(tmp_path))] if "disk" in cache_type else []
    sizes: dict[str, Any] = {"num_pages": 80 // page_size, "page_size": page_size, "tiers": tiers}
    engine = FakeEngine(rows=3, max_model_len=64, vocab=5, costs=StepCosts(0.1, 1.0), **sizes)
    h = Harness(engine, 0, cache_type="naive" if cache_type == "naive" else "radix")
    router = router_of(1)
    h.io.send_prefixes = router.note_prefixes  # type: ignore[method-assign]
    h.io.inbox.append(TellPrefixesMsg())
    h.step()
    prefixes = [[rng.randrange(1, 5) for _ in range(40)] for _ in range(3)]
    hits = loads = 0
    for turn in range(150):
        prompt = rng.choice(prefixes)[: rng.randrange(1, 41)] + [rng.randrange(1, 5) for _ in range(rng.randrange(4))]
        salt = rng.choice(("", "", "a"))
        h.add(prompt, rng.choice((1, 9)), ignore_eos=True, cache_salt=salt)
        for _ in range(rng.randrange(4)):
            h.step()
        if rng.random() < 0.02:
            h.scheduler.cache.flush()
            h.step()
        if turn % 50 == 49:  # another router
            router.remove(0, has_died=False)
            router.open(0, 0, 0.0)
            h.io.inbox.append(TellPrefixesMsg())
            h.step()
        if turn == 100 and "disk" in cache_type:  # another process, which finds what the disk has
            while h.scheduler.is_busy:
                h.step()
            while engine.moves:
                engine.move(engine.moves[0])
            kept = engine.slots[-1]
            engine = FakeEngine(rows=3, max_model_len=64, vocab=5, costs=StepCosts(0.1, 1.0), **sizes)
            engine.slots[-1] = kept
            h._start(engine)
            h.io.send_prefixes = router.note_prefixes  # type: ignore[method-assign]
            router.remove(0, has_died=False)
            router.open(0, 0, 0.0)
            h.io.inbox.append(TellPrefixesMsg())
            h.step()
            assert router.replicas[0].prefixes
        replica, prefix = router.replicas[0], h.scheduler.cache.prefix
        assert sum(location == 0 for location in replica.prefixes.values()) == len(prefix.owned_pages())
        for salt in ("", "a"):
            asked, before = message(prompt, cache_salt=salt), router.cached
            router.route(asked, 0.0)
            end(router, asked)
            ids = np.array(prompt[:-1], np.int32)
            match = prefix.match_prefix(ids, salt_digest(salt))
            assert router.cached - before == match.handle.num_pages * page_size
            absent = ~match.pages[match.pages < 0]
            cost = sum(tiers[i].page_seconds / page_size for i in absent)
            hashes = prefix_hashes(ids, page_size, salt_digest(salt)).tolist()
            assert replica.find(hashes) == (match.handle.num_pages, pytest.approx(cost))
            hits, loads = hits + match.handle.num_pages, loads + len(absent)
    assert (hits > 100) == (cache_type != "naive")
    assert (loads > 20) == ("host" in cache_type)


def test_requests_go_where_their_prefix_is_cached() -> None:
    router = router_of(3)
    prompt = list(range(40))
    cache(router, 2, prompt[:32])
    cache(router, 1, prompt[:16])
    assert router.route(message(prompt, max_tokens=1), 0.0) == 2
    assert router.replicas[2].queued == 40 - 32
    assert router.route(message(prompt[:20], max_tokens=1), 0.0) == 1  # 2 has it too, and a request
    salted = message(prompt, cache_salt="a", max_tokens=1)
    assert router.route(salted, 0.0) == 0
    cache(router, 2, prompt[:32], location=-1, start=4)
    assert router.route(message(prompt, max_tokens=1), 0.0) == 1


def test_a_prefix_in_a_tier_counts_by_the_time_to_load_it() -> None:
    router = router_of(3)
    prompt = list(range(4000))
    cache(router, 1, prompt, location=1)
    assert router.route(message(prompt, max_tokens=1), 0.0) == 1
    assert router.replicas[1].queued == PAGE + round(0.1 * (4000 - PAGE))  # the last token is computed
    cache(router, 2, prompt[:3800])
    assert router.route(message(prompt, max_tokens=1), 0.0) == 2  # 200 to compute instead of 400 to load
    cache(router, 2, prompt[:3800], location=-1)
    assert router.route(message(prompt, max_tokens=1), 0.0) == 1
    cache(router, 0, prompt[:400])
    cache(router, 0, prompt[:3000], location=1, start=100)
    hashes = prefix_hashes(np.array(prompt, np.int32), PAGE, b"").tolist()
    assert router.replicas[0].find(hashes) == (750, pytest.approx(65))


def test_load_outweighs_a_cached_prefix() -> None:
    """Each request beside costs as much as the answer has tokens, so in the end the prefix is computed elsewhere."""
    router = router_of(2)
    prompt = list(range(1000, 1800))
    cache(router, 0, prompt)
    routed = [router.route(message(prompt, max_tokens=100), 0.0) for _ in range(12)]
    assert routed[:8] == [0] * 8
    assert 1 in routed


def test_equal_prompts_are_spread_evenly() -> None:
    router = router_of(4)
    routed = [router.route(message([1, 2, 3]), 0.0) for _ in range(40)]
    assert [routed.count(incarnation) for incarnation in range(4)] == [10] * 4


def test_the_length_of_answers_is_learned() -> None:
    router = router_of(1)
    for _ in range(300):
        msg = message([1])
        router.route(msg, 0.0)
        end(router, msg, tokens=7)
    assert abs(router._answer_tokens - 7) < 0.05 * ANSWER_TOKENS


def test_silent_and_draining_replicas_get_requests_only_if_there_are_no_others() -> None:
    router = router_of(3)
    now = SILENT_S + 1
    router.note_stats(StatsMsg(incarnation=2), now)
    assert [router.route(message([1]), now) for _ in range(3)] == [2, 2, 2]
    router.replicas[2].accepts_requests = False
    assert router.route(message([1]), now) in (0, 1)
    router.remove(0, has_died=True)
    router.remove(1, has_died=True)
    assert router.route(message([1]), now) == 2
    router.remove(2, has_died=False)
    assert router.route(message([1]), now) is None


def test_requests_of_a_lost_replica_go_on_with_their_tokens() -> None:
    router = router_of(2)
    begun, waiting, aborted, ended = (message([1, 2, 3], seed=i) for i in range(4))
    for msg in (begun, waiting, aborted, ended):
        router.replicas[1].accepts_requests = False
        assert router.route(msg, 0.0) == 0
    router.replicas[1].accepts_requests = True
    for token in (7, 8):
        router.note_reply(UserReply(uid=begun.uid, output_ids=ids_to_bytes([token]), completion_tokens=token - 6))
    assert router.abort(aborted.uid) == [0]
    router.remove(0, has_died=True)
    router.note_reply(UserReply(uid=begun.uid, output_ids=ids_to_bytes([9]), completion_tokens=3))  # was on its way
    end(router, ended)
    moved, ends = router.move(0, 0.0)
    assert {(incarnation, m.uid) for incarnation, m in moved} == {(1, begun.uid), (1, waiting.uid)}
    outputs = {m.uid: ids_from_bytes(m.output_ids or b"").tolist() for _, m in moved}
    assert outputs == {begun.uid: [7, 8, 9], waiting.uid: []}
    assert [(e.uid, e.reason) for e in ends] == [(aborted.uid, FinishReason.ABORT)]
    assert router.abort(begun.uid) == [1]
    assert router.abort(ended.uid) == [1]  # its answer has ended, by a stop string perhaps: whoever has it stops


def test_a_request_ends_that_may_be_what_kills_replicas() -> None:
    router = router_of(MAX_DEATHS + 1)
    msg = message([1])
    incarnation = router.route(msg, 0.0)
    for _ in range(MAX_DEATHS - 1):
        assert incarnation is not None
        router.remove(incarnation, has_died=True)
        ((incarnation, _),), _ = router.move(incarnation, 0.0)
    assert incarnation is not None
    router.remove(incarnation, has_died=True)
    moved, (ended,) = router.move(incarnation, 0.0)
    assert not moved
    assert ended.failure is not None and ended.failure.status == 503
    assert len(router.replicas) == 1  # which it does not reach


def test_counters_outlive_a_replica() -> None:
    router = router_of(2)
    tier = TierView(name="disk", pages_total=90, pages_held=7, stored=30, loaded=20, lost=1)
    for incarnation in (0, 1):
        counts = StatsMsg(
            incarnation=incarnation, generation_tokens=10, running=3, pages_total=100, page_size=16, tiers=[tier]
        )
        router.note_stats(counts, 0.0)
    router.remove(0, has_died=True)
    router.open(2, 0, now=1.0)
    router.note_stats(StatsMsg(incarnation=2, generation_tokens=1, running=1, pages_total=100, page_size=16), 1.0)
    router.note_stats(StatsMsg(incarnation=0, generation_tokens=99), 1.0)  # too late
    stats = router.stats
    assert (stats.generation_tokens, stats.running, stats.pages_total, stats.page_size) == (21, 4, 200, 16)
    assert stats.tiers == [TierView(name="disk", pages_total=90, pages_held=7, stored=60, loaded=40, lost=2)]
