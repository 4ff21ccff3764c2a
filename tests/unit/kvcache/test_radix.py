"""T20: the radix tree and the page accounting against a plain model."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.kvcache import create_prefix_cache, tree
from minisgl.kvcache.base import CacheHandle
from minisgl.kvcache.radix import RadixCache
from minisgl.kvcache.tiers import Tier, TierSpec


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def cached_prefixes(cache: RadixCache) -> set[tuple[int, ...]]:
    """Every page-aligned prefix that the tree holds, read off its nodes."""
    found = set()

    def visit(node: object, above: tuple[int, ...]) -> None:
        for child in node.children.values():  # type: ignore[attr-defined]
            key = above + tuple(child.key.tolist())
            size = cache.tree.page_size
            found.update(key[:n] for n in range(len(above) + size, len(key) + 1, size))
            visit(child, key)

    visit(cache.tree.root, ())
    return found


@pytest.mark.parametrize("part", [1, tree.PART])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_ten_thousand_random_operations(page_size: int, part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages partition into free, tree and held; every match is the longest."""
    monkeypatch.setattr(tree, "PART", part)
    rng = random.Random(page_size)
    cache = RadixCache(page_size)
    num_pages = 200
    free = list(range(num_pages))
    content: dict[int, tuple[int, ...]] = {}  # page -> the whole prefix that it ends
    locked: list[CacheHandle] = []
    vocab = 3
    for step in range(10_000):
        cache.tick(step)
        tokens = ids(*(rng.randrange(vocab) for _ in range(rng.randrange(0, 12 * page_size) if page_size < 16 else 0)))
        if page_size >= 16:  # few distinct pages, or nothing would ever match
            tokens = np.repeat(ids(*(rng.randrange(vocab) for _ in range(rng.randrange(12)))), page_size)
        op = rng.random()
        count = len(tokens) // page_size
        if op < 0.45:
            match = cache.match_prefix(tokens)
            want = 0
            known = {content[p] for p in content}
            while want < count and tuple(tokens[: (want + 1) * page_size].tolist()) in known:
                want += 1
            assert match.handle.num_pages == want == len(match.pages)
            for i, page in enumerate(match.pages.tolist()):
                assert content[page] == tuple(tokens[: (i + 1) * page_size].tolist())
            if rng.random() < 0.3:
                cache.lock_handle(match.handle)
                locked.append(match.handle)
        elif op < 0.8:
            if count > len(free):
                continue
            pages = [free.pop() for _ in range(count)]
            result = cache.insert_prefix(tokens, np.array(pages, np.int32))
            assert result.handle.num_pages == count
            for i, (mine, kept) in enumerate(zip(pages, result.pages.tolist(), strict=True)):
                prefix = tuple(tokens[: (i + 1) * page_size].tolist())
                if mine == kept:
                    content[mine] = prefix
                else:
                    assert content[kept] == prefix
                    free.append(mine)
        elif op < 0.9 and locked:
            cache.lock_handle(locked.pop(rng.randrange(len(locked))), unlock=True)
        else:
            want = rng.randrange(30)
            before = cache.evictable_size
            gone = cache.evict(want).tolist()
            assert min(want, before) <= len(gone) <= (min(want, before) if part == 1 else before)
            for page in gone:
                del content[page]
                free.append(page)
        if step % 50 == 0:
            cache.check_integrity()
        assert sorted(cache.owned_pages()) == sorted(content)
        assert sum(cache.size_info) + len(free) == num_pages
    assert cached_prefixes(cache) == set(content.values())
    for handle in locked:
        cache.lock_handle(handle, unlock=True)
    assert cache.protected_size == 0
    cache.reset()
    assert cache.owned_pages() == []


@given(st.lists(st.lists(st.integers(0, 2), max_size=24), max_size=12), st.sampled_from([1, 2, 4]))
@settings(max_examples=150)
def test_tree_equals_a_set_of_prefixes(sequences: list[list[int]], page_size: int) -> None:
    cache = RadixCache(page_size)
    known: set[tuple[int, ...]] = set()
    next_page = 0
    for s in sequences:
        count = len(s) // page_size
        cache.insert_prefix(ids(*s), np.arange(next_page, next_page + count, dtype=np.int32))
        next_page += count
        known |= {tuple(s[: n * page_size]) for n in range(1, count + 1)}
    assert cached_prefixes(cache) == known
    cache.check_integrity()


@pytest.mark.parametrize("page_size", [1, 2])
def test_prefixes_with_different_salts_are_separate(page_size: int) -> None:
    rng = random.Random(page_size)
    salts = [b"", b"a", b"a" * 4, (1).to_bytes(4, "little")]  # the last two are as long as a token, or are one
    shared, alone = RadixCache(page_size), {salt: RadixCache(page_size) for salt in salts}
    for step in range(600):
        salt = rng.choice(salts)
        tokens = ids(*(rng.randrange(3) for _ in range(rng.randrange(10 * page_size))))
        pages = np.arange(100 * step, 100 * step + len(tokens) // page_size, dtype=np.int32)
        shared.tick(step)
        alone[salt].tick(step)
        assert shared.match_prefix(tokens, salt).pages.tolist() == alone[salt].match_prefix(tokens).pages.tolist()
        if rng.random() < 0.4:
            mine = shared.insert_prefix(tokens, pages, salt).pages.tolist()
            assert mine == alone[salt].insert_prefix(tokens, pages).pages.tolist()
        shared.check_integrity()
    assert shared.evictable_size == sum(cache.evictable_size for cache in alone.values()) > 0
    shared.reset()
    assert shared.owned_pages() == [] and shared.num_nodes == 0


def test_locked_prefix_survives_a_split_and_eviction_takes_the_oldest() -> None:
    cache = RadixCache(2)
    cache.tick(1)
    cache.insert_prefix(ids(1, 1, 2, 2, 3, 3), ids(10, 11, 12))
    held = cache.match_prefix(ids(1, 1, 2, 2, 3, 3)).handle
    cache.lock_handle(held)
    cache.tick(2)
    assert cache.insert_prefix(ids(1, 1, 4, 4), ids(20, 21)).pages.tolist() == [10, 21]
    cache.tick(3)
    cache.insert_prefix(ids(5, 5), ids(30))
    cache.tick(4)
    cache.match_prefix(ids(1, 1, 4, 4))  # used again: now the newest
    assert cache.evict(1).tolist() == [30]
    assert cache.evict(10).tolist() == [21]
    assert cache.size_info == (0, 3)
    cache.lock_handle(held, unlock=True)
    assert sorted(cache.evict(1).tolist()) == [11, 12]
    assert cache.evict(1).tolist() == [10]


def test_naive_cache_keeps_nothing() -> None:
    cache = create_prefix_cache("naive", 4)
    assert cache.insert_prefix(ids(1, 2, 3, 4), ids(0)).handle.num_pages == 0
    assert cache.match_prefix(ids(1, 2, 3, 4)).handle.num_pages == 0
    assert len(cache.evict(5)) == 0
    assert cache.size_info == (0, 0)


def test_computed_pages_are_not_given_up_for_loaded_ones() -> None:
    cache = RadixCache(2, [Tier(TierSpec("host", 8, 0.0), 0, 2)])
    tokens = ids(1, 1, 2, 2, 3, 3)
    cache.insert_prefix(tokens, ids(10, 11, 12))
    assert cache.evict(3).tolist() == [10, 11, 12]
    handle, pages = cache.match_prefix(tokens[:4])
    cache.lock_handle(handle)
    assert (pages < 0).all()
    assert cache.load(handle, ids(20, 21)).tolist() == [20, 21]
    own = cache.insert_prefix(tokens, ids(30, 31, 32))
    assert own.handle.num_pages == 0, "the loaded pages are not known to be intact"
    cache.mark_intact(handle)
    assert cache.insert_prefix(tokens, ids(30, 31, 32)).pages.tolist() == [20, 21, 32]
    moves = cache.pop_moves()
    assert moves[["unit", "slot", "kind"]].tolist() == [(10, 0, 0), (11, 1, 0), (12, 2, 0), (20, 0, 1), (21, 1, 1)]
    assert cache.match_prefix(tokens, b"salt").handle.num_pages == 0
    cache.check_integrity()


def test_a_lost_prefix_is_not_found_and_leaves_when_unlocked() -> None:
    cache = RadixCache(2, [Tier(TierSpec("host", 8, 0.0), 0, 2)])
    tokens = ids(1, 1, 2, 2)
    cache.insert_prefix(tokens, ids(10, 11))
    cache.evict(2)
    cache.track_changes()
    assert list(cache.pop_changes().values()) == [1, 1]
    handle = cache.match_prefix(tokens).handle
    cache.lock_handle(handle)
    cache.load(handle, ids(20, 21))
    assert cache.drop_damaged(handle) and cache.drop_damaged(handle) and cache.is_damaged(handle)
    assert list(cache.pop_changes().values()) == [-1, -1]
    cache.check_integrity()
    assert cache.tiers[0].free_size == 8 and cache.tiers[0].lost_pages == 2
    assert cache.match_prefix(tokens).handle.num_pages == 0
    cache.tick(1)
    assert cache.insert_prefix(tokens, ids(30, 31)).pages.tolist() == [30, 31]
    assert list(cache.pop_changes().values()) == [0, 0]
    cache.lock_handle(handle, unlock=True)
    assert cache.evict(2).tolist() == [20, 21] and cache.pop_changes() == {}, "the router lost the computed prefix"
    assert cache.evict(2).tolist() == [30, 31] and list(cache.pop_changes().values()) == [1, 1]
    cache.check_integrity()


def test_a_text_goes_on_as_another_with_its_salt() -> None:
    cache = RadixCache(4)

    def insert(first_page: int, salt: bytes, *tokens: int) -> None:
        cache.tick(first_page)
        cache.insert_prefix(ids(*tokens), np.arange(first_page, first_page + len(tokens) // 4, dtype=np.int32), salt)

    def following(prefix: tuple[int, ...], *after: int, salt: bytes = b"") -> list[int]:
        handle = cache.match_prefix(ids(*prefix), salt).handle
        return cache.continuation(handle, ids(*prefix[4 * handle.num_pages :], *after), 5, salt).tolist()

    insert(0, b"", 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12)
    assert following((1, 2, 3, 4)) == [5, 6, 7, 8, 9]
    assert following((1, 2, 3, 4), 5, 6) == [7, 8, 9, 10, 11]
    assert following((1, 2, 3, 4), 5, 6, 7, 8, 9, 10) == [11, 12]
    assert following((1, 2, 3, 4), 5, 7) == following((1, 2, 3, 4), 5, 6, 7, 9) == []
    insert(10, b"", 1, 2, 3, 4, 5, 6, 20, 21)
    assert following((1, 2, 3, 4), 5, 6) == [20, 21], "not that of the text used last"
    assert following((1,), 2) == [3, 4, 5, 6, 20], "within the first page"
    assert following((1, 2, 3, 4), salt=b"a") == following((1,), 2, salt=b"a") == []
    insert(20, b"a", 1, 2, 3, 4, 30, 31, 32, 33)
    assert following((1, 2, 3, 4), salt=b"a") == following((1,), 2, 3, 4, salt=b"a") == [30, 31, 32, 33]
    assert following((1,), 2) == [3, 4, 5, 6, 20], "what another salt hides"
