"""The engine view: its counts add up, its size is bounded, and the most used nodes come first."""

from __future__ import annotations

import time

import numpy as np
import pytest

from minisgl.core.message import EngineView, FrontendMsg, ids_from_bytes
from minisgl.kvcache import outline as outlines
from minisgl.kvcache.radix import RadixCache
from minisgl.process.queues import Codec
from minisgl.scheduler.stats import MAX_VIEW_REQUESTS, engine_view
from support.fake_engine import FakeEngine
from support.traces import Harness

SHARED = list(range(1, 13))  # three pages


def checked(h: Harness) -> EngineView:
    """Return a view after checking that its counts add up."""
    view = engine_view(h.scheduler, 7, h.scheduler.stats)
    assert view.uid == 7
    parts = (view.pages_free, view.pages_private, view.pages_locked, view.pages_cached)
    assert min(parts) >= 0 and sum(parts) == view.pages_total
    assert all(-1 <= node.parent < i for i, node in enumerate(view.nodes))
    for i, node in enumerate(view.nodes):
        children = [n for n in view.nodes if n.parent == i]
        assert node.ref_count >= max((c.ref_count for c in children), default=0)
        assert node.hidden == 0 and len(ids_from_bytes(node.head)) == min(32, node.tokens)
    if view.nodes_total == len(view.nodes):
        assert sum(n.pages for n in view.nodes) == view.pages_locked + view.pages_cached
        assert sum(n.pages for n in view.nodes if n.ref_count) == view.pages_locked
    return view


@pytest.mark.parametrize("depth", [0, 1])
def test_the_view_shows_a_shared_prefix_in_tree_and_requests(depth: int) -> None:
    h = Harness(FakeEngine(rows=8, num_pages=64, vocab=5003), depth, max_prefill_length=16, view_texts=True)
    h.add([*SHARED, 20, 21, 22, 23], max_tokens=30)
    seen = [checked(h)]
    for _ in range(4):
        h.step()
        seen.append(checked(h))
    assert seen[0].waiting == 0 and seen[1].running == 1
    h.add([*SHARED, 30, 31, 32, 33], max_tokens=30)
    for _ in range(6):
        h.step()
        seen.append(checked(h))
    view = seen[-1]
    first, second = view.requests
    assert (first.prompt_tokens, first.prefix_tokens, second.prefix_tokens) == (16, 0, 12)
    assert not first.is_prefill and first.output_tokens > second.output_tokens > 0
    root = next(n for n in view.nodes if n.parent == -1)
    assert (root.ref_count, root.pages, ids_from_bytes(root.head).tolist()) == (2, 3, SHARED)
    assert {view.nodes[r.node].ref_count for r in view.requests} == {1}
    assert {view.nodes[r.node].parent for r in view.requests} == {view.nodes.index(root)}
    while h.scheduler.is_busy or h.io.inbox:
        h.step()
        checked(h)
    view = checked(h)
    assert view.requests == [] and view.pages_locked == view.pages_private == 0 and view.pages_cached > 0


def test_the_view_limits_requests_and_works_without_a_tree() -> None:
    h = Harness(FakeEngine(rows=80, num_pages=400, vocab=5003), 1, cache_type="naive", view_texts=True)
    for start in range(70):
        h.add(range(start + 1, start + 9), max_tokens=8)
    for _ in range(4):
        h.step()
    view = checked(h)
    assert (view.nodes, view.nodes_total) == ([], 0)
    assert view.running > MAX_VIEW_REQUESTS == len(view.requests)


def full_tree(nodes: int, fan_out: int) -> RadixCache:
    """Return a tree of `nodes` nodes with `fan_out` children each, in pages of one token."""
    cache = RadixCache(1)
    keys = [np.empty(0, np.int32)]
    at = 0
    while len(keys) <= nodes:
        if at % fan_out == 0:
            parent = keys[at // fan_out]
        cache.tick(at)
        at += 1
        key = np.append(parent, np.int32(at))
        cache.insert_prefix(key, np.full(len(key), at, np.int32))
        keys.append(key)
    return cache


@pytest.mark.parametrize("fan_out", [2, 40, 10_000])
def test_the_view_truncates_large_trees(fan_out: int) -> None:
    cache = full_tree(10_000, fan_out)
    assert cache.num_nodes == 10_000
    h = Harness(FakeEngine(num_pages=20_000, page_size=1), 0, view_texts=True)
    h.scheduler.cache.prefix = cache
    locked = next(iter(cache.tree.root.children.values()))
    handle = cache.match_prefix(locked.key).handle
    cache.lock_handle(handle)
    times = []
    for _ in range(5):
        started = time.process_time()
        view = engine_view(h.scheduler, 1, h.scheduler.stats)
        Codec(FrontendMsg).encode([view])
        times.append(time.process_time() - started)
    assert len(view.nodes) == (outlines.MAX_NODES if fan_out < 10_000 else outlines.MAX_CHILDREN)
    assert view.nodes_total == 10_000
    hidden = view.nodes_hidden + sum(n.hidden for n in view.nodes)
    assert hidden > 0
    if fan_out <= outlines.MAX_LOOKS:
        assert view.nodes[0].ref_count == 1  # used nodes come first
    assert min(times) < 0.005, times  # 0.6 ms on the machine of docs/notebook/cpu-step.md
    print(f"{fan_out}: {1e3 * min(times):.2f} ms")


@pytest.mark.parametrize(
    ("options", "salt", "is_shown"),
    [({"view_texts": True}, "", True), ({"view_texts": True}, "s", False), ({}, "", False)],
)
def test_the_view_shows_texts_only_if_told_to_and_of_salted_prompts_never(
    options: dict[str, bool], salt: str, is_shown: bool
) -> None:
    h = Harness(FakeEngine(rows=8, num_pages=64, vocab=5003), 0, **options)
    for last in (20, 30):  # the second prompt splits the edge of the first
        h.add([*SHARED, last, 21, 22, 23], max_tokens=2, cache_salt=salt)
        while h.scheduler.is_busy or h.io.inbox:
            h.step()
    nodes = engine_view(h.scheduler, 1, h.scheduler.stats).nodes
    assert len(nodes) == 3
    assert all(bool(node.head) == is_shown for node in nodes)
