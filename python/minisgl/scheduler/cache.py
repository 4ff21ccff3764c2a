"""The host's bookkeeping of KV pages: who owns each, and how pages move between requests and the prefix cache."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Final

import numpy as np

from minisgl.core.layout import FULL, NO_MOVES
from minisgl.core.message import PrefixesMsg
from minisgl.core.rounding import ceil_div
from minisgl.kvcache import create_prefix_cache
from minisgl.kvcache.base import MatchResult
from minisgl.kvcache.prefixes import salt_digest
from minisgl.kvcache.snapshots import IdPool, Reason, Snapshots
from minisgl.kvcache.tiers import worthwhile_tiers
from minisgl.scheduler.bounded import BoundedState

if TYPE_CHECKING:
    from minisgl.core.layout import Records
    from minisgl.core.plan import Ints
    from minisgl.kvcache.arena import Arena
    from minisgl.kvcache.base import CacheHandle
    from minisgl.scheduler.budget import LoadBudget
    from minisgl.scheduler.plan import StepEngine
    from minisgl.scheduler.req import Req
    from minisgl.scheduler.rows import Rows
    from minisgl.settings.options import SchedulerConfig

WRITE_BACK_S: Final = 0.05  # how long a new request may wait for pages that are copied to a tier in idle time


class CacheManager:
    """Every page is free, in the prefix cache, privately owned by one request, or fenced.

    A request's `pages` start with those covered by its `cache_handle`. These belong to the prefix cache, and the
    request holds a lock on them; the others are private. Fenced pages have no owner, but a batch in flight may still
    read them: they become free when that step is collected.
    """

    def __init__(
        self, config: SchedulerConfig, engine: StepEngine, arena: Arena, pools: list[IdPool], rows: Rows
    ) -> None:
        self.arena = arena
        self.pages = arena.pools[FULL]
        self.num_pages = arena.blocks.ids(FULL)
        self.page_size = engine.page_size
        self.rows = rows
        costs = engine.step_costs()
        tiers = worthwhile_tiers(engine.tiers, engine.page_size, costs, is_fresh=config.record is not None)
        snapshots = Snapshots(pools) if pools else None
        self.prefix = create_prefix_cache(config.cache_type, engine.page_size, tiers, snapshots)
        self._location_costs = [0.0, *(tier.cost for tier in tiers)]
        self._pages_ahead = math.ceil(2 * config.max_prefill_length / engine.page_size)  # that two steps may evict
        self._copy_seconds = max((tier.spec.page_seconds for tier in tiers), default=0.0) or 1e-6  # of a page
        self.on_free: Callable[[list[int]], None] | None = None  # called with pages that become free; tests poison them
        self._page_seconds = np.array([tier.spec.page_seconds for tier in tiers])
        page_units = arena.blocks.units // arena.blocks.pages[FULL]
        self._unit_seconds = np.array([spec.page_seconds for spec in engine.tiers]) / page_units  # by a tier's number
        self._fenced: deque[tuple[int, list[int]]] = deque()
        self.bounded = None if snapshots is None else BoundedState(snapshots, rows, self.make_room)

    def pages_for(self, num_tokens: int) -> int:
        return ceil_div(num_tokens, self.page_size)

    @property
    def free_size(self) -> int:
        """The number of pages that `allocate` can provide without evicting anything."""
        return max(0, self.arena.spare(FULL))

    @property
    def evictable_size(self) -> int:
        """The number of pages that cached prefixes and snapshots leave if they are evicted, when no step needs them."""
        blocks = 0 if self.bounded is None else sum(pool.evictable_blocks for pool in self.bounded.pools)
        return self.prefix.evictable_size + blocks * self.pages.per_block

    @property
    def available(self) -> int:
        """The number of pages that `allocate` can provide now; with snapshots, at most."""
        return self.free_size + self.evictable_size

    def allocate(self, count: int) -> list[int] | None:
        """Return `count` pages, evicting cached prefixes as needed; None, and evict nothing, if there are too few."""
        needs = {FULL: count}
        if not self.arena.fits(needs) and (count > self.available or not self.make_room(needs)):
            return None
        return self.pages.allocate(count)

    def make_room(
        self, needs: Mapping[int, int], reason: Reason = Reason.SHARED, handle: CacheHandle | None = None
    ) -> bool:
        """Evict until `needs` (pages by group) can be allocated; return false if that is not possible yet.

        The pages are for a row that goes on from `handle`, or for a snapshot with `reason`. Snapshots are evicted in
        their own order.
        """
        but = None if handle is None else handle.node
        while not self.arena.fits(needs):
            if self.prefix.snapshots is not None:
                node = self.prefix.snapshots.oldest(self.rows.last_collected, reason, but)
                if node is None:
                    return False
                evicted = self.prefix.drop_snapshot(node)
            else:
                evicted = self.prefix.evict(needs[FULL] - self.free_size)
                if not len(evicted):
                    return False
            self._release_evicted(evicted)
        return True

    def match(self, req: Req, max_pages: int | None = None) -> MatchResult:
        """Return the longest cached prefix, of at most `max_pages` pages, that leaves a token of a request to compute.

        With `max_pages`, it may end without a snapshot. A prompt whose log-probabilities are asked for is computed as a
        whole: the cache has only K/V.
        """
        limit = len(req.ids) - 1 if req.prompt_logprobs is None else 0
        if max_pages is not None:
            limit = min(limit, max_pages * self.page_size)
        salt = salt_digest(req.sampling_params.salt)
        return self.prefix.match_prefix(req.ids[:limit], salt, anywhere=max_pages is not None)

    def attach(self, req: Req) -> list[int]:
        """Lock the part of a waiting request's longest cached prefix that is on the device, and return its pages.

        `Req.is_loading` then says whether the prefix continues in a tier. With bounded state, `Req.target` is the whole
        prefix, so that its snapshot and all pages up to it stay where they are.
        """
        handle, pages = self.match(req)
        req.is_loading = bool((pages < 0).any()) or not self._has_snapshot(handle)
        if req.is_loading:
            if self.bounded is not None:
                req.target = handle
                self.prefix.lock_handle(handle)
                self.bounded.snapshots.awaited[handle.node] += 1
            handle, pages = self.match(req, int((pages >= 0).sum()))
        self.prefix.lock_handle(handle)
        req.cache_handle = handle
        shared: list[int] = pages.tolist()
        return shared

    def _has_snapshot(self, handle: CacheHandle) -> bool:
        """Return whether all that a text needs besides pages to go on from a prefix is on the device."""
        if self.bounded is None or not handle.num_pages:
            return True
        snapshot = self.bounded.snapshots.of.get(handle.node)
        return snapshot is not None and not len(snapshot.loads)

    def row_needs(self, req: Req) -> dict[int, int]:
        """Return the ids to reserve for the row of a request that is attached, by group; and for its snapshot."""
        if self.bounded is None:
            return {}
        found, target = self.bounded.snapshots, req.target
        is_fetched = target is not None and target.node not in found.of
        loaded = found.needs(target.num_pages * self.page_size) if is_fetched else {}
        return {group: count + loaded.get(group, 0) for group, count in self.bounded.row_needs.items()}

    def open(self, req: Req, waiting: Iterable[Req]) -> None:
        """Give a request that has just got its row its bounded state, or begin to load that."""
        if self.bounded is None:
            return
        self.bounded.open(req, waiting)
        if req.target is None:
            self.bounded.restore(req)
        else:
            self.prefix.fetch(req.target)

    def forget_match(self, req: Req) -> bool:
        """Drop the snapshot from which a waiting request would go on, and return whether there was one."""
        if self.bounded is None or not (handle := self.match(req).handle).num_pages:
            return False
        self._release_evicted(self.prefix.drop_snapshot(handle.node, everywhere=True))
        return True

    def load(self, req: Req, budget: LoadBudget) -> None:
        """Load more of the cached prefix of `req`, which has computed nothing yet, into its own pages."""
        handle, pages = self.match(req, None if req.target is None else req.target.num_pages)
        absent = ~pages[pages < 0]
        granted = budget.grant(self._page_seconds[absent])
        req.is_loading = granted < len(absent)
        if req.is_loading:
            handle, pages = self.match(req, len(pages) - len(absent) + granted)
        own = np.array(req.pages[: handle.num_pages], np.int32)
        self._adopt(req, handle, self.prefix.load(handle, own[pages < 0]))
        self.rows.cached_len[req.row] = handle.num_pages * self.page_size
        if self.bounded is not None and req.target is not None and not req.is_loading:
            loads = self.bounded.snapshots.of[req.target.node].loads
            if len(loads):
                self.prefix.load_snapshot(req.target, budget.grant(self._unit_seconds[loads["tier"]]))
            req.is_loading = not self._has_snapshot(req.target)
            if not req.is_loading:
                self._drop_target(req)
                self.bounded.restore(req)
        if not req.is_loading:
            self.rows.set_pages(req, 0, req.pages)

    def _drop_target(self, req: Req) -> None:
        """Stop awaiting what is loaded for `req`; drop a snapshot of which only a part is there."""
        if self.bounded is None or (target := req.target) is None:
            return
        req.target, found = None, self.bounded.snapshots
        found.awaited[target.node] -= 1
        if not found.awaited[target.node]:
            del found.awaited[target.node]
            if target.node in found.of and not self._has_snapshot(target):
                found.remove(target.node)
        self._unlock(target)

    def pop_moves(self, seconds: float, *, is_idle: bool) -> Records:
        """Return the copies between tiers that a step of `seconds` makes, as many as end with it."""
        if not self.prefix.tiers:
            return NO_MOVES
        # In idle time, room is not made for later pages.
        max_stores = 0 if is_idle else math.ceil(min(self._pages_ahead, seconds / self._copy_seconds))
        return self.prefix.pop_moves(self._pages_ahead - self.free_size, max_stores)

    def write_back(self, *, lasting: bool) -> bool:
        """Queue copies of cached pages to tiers (`lasting`: to those that outlive the process); return whether any."""
        pages = max(1, int(WRITE_BACK_S / self._copy_seconds))
        return bool(self.prefix.tiers and self.prefix.write_back(pages, lasting=lasting))

    def changes(self) -> PrefixesMsg | None:
        """Return what has changed in the prefix cache since the last call, if a router has asked."""
        if not (changes := self.prefix.pop_changes()):
            return None
        hashes, locations = np.array([*changes], np.uint64), np.array([*changes.values()], np.int8)
        return PrefixesMsg(
            page_size=self.page_size, costs=self._location_costs, hashes=hashes.tobytes(), locations=locations.tobytes()
        )

    def drop_damaged(self, req: Req) -> bool:
        """Drop the pages that were loaded for `req`, whose logits are not finite; return false if there are none."""
        if req.cache_handle is None:
            return False
        with_snapshot = self.bounded is not None and self.bounded.is_unconfirmed(req)
        return self.prefix.drop_damaged(req.cache_handle, with_snapshot=with_snapshot)

    def detach(self, req: Req) -> None:
        """Undo `attach`."""
        self._drop_target(req)
        self._unlock(req.cache_handle)
        req.cache_handle = None

    def _unlock(self, handle: CacheHandle) -> None:
        self.prefix.lock_handle(handle, unlock=True)
        if self.bounded is not None:
            self._release_evicted(self.prefix.prune(handle.node))

    def share_prefix(self, req: Req, *, is_leaving: bool = False) -> None:
        """Insert the request's full pages whose K/V has led to finite logits into the prefix cache.

        With bounded state, insert them up to each snapshot.
        """
        finite = self.rows.finite_len(req)
        if not finite or self.prefix.is_damaged(req.cache_handle):
            return
        self.prefix.mark_intact(req.cache_handle)
        if self.bounded is None:
            self._insert(req, finite // self.page_size)
            return
        self.bounded.mark_intact(req)
        for length, snapshot in self.bounded.pop_captures(req, finite, is_leaving=is_leaving):
            handle = self._insert(req, length // self.page_size)
            is_whole = handle.num_pages * self.page_size == length
            self.bounded.snapshots.add(handle.node if is_whole else None, snapshot)

    def _insert(self, req: Req, count: int) -> CacheHandle:
        """Insert `count` pages into the prefix cache, unless the request shares them already; return their handle.

        If another request has inserted the same prefix before, the row is remapped to the cached pages and the
        request's copies are fenced: the newest batch that holds the row may still read them.
        """
        handle: CacheHandle = req.cache_handle
        if count > handle.num_pages:
            ids = self.rows.text(req)[: count * self.page_size]
            own = np.array(req.pages[:count], np.int32)
            handle, canonical = self.prefix.insert_prefix(ids, own, salt_digest(req.sampling_params.salt))
            if handle.num_pages > req.cache_handle.num_pages:
                self._adopt(req, handle, canonical)
        return handle

    def _adopt(self, req: Req, handle: CacheHandle, pages: Ints) -> None:
        """Lock a longer prefix, let `req` use its `pages`, and free the request's own copies."""
        own, has_begun = np.array(req.pages[: len(pages)], np.int32), self._has_begun(req)
        differing = np.flatnonzero(pages != own)
        for i in differing.tolist():
            self.rows.set_pages(req, i, [int(pages[i])])
        self.prefix.lock_handle(handle)
        self._unlock(req.cache_handle)
        req.cache_handle = handle
        duplicates: list[int] = own[differing].tolist()
        if not self.rows.is_in_flight(req):
            self._release_pages(duplicates, are_used=has_begun)
        elif duplicates:
            self._fenced.append((int(self.rows.last_step[req.row]), duplicates))

    def continuation(self, req: Req, count: int) -> Ints:
        """Return up to `count` tokens that followed the text of `req` in a cached text with the same salt."""
        handle = req.cache_handle
        cached = handle.num_pages * self.page_size
        ids = np.concatenate([req.ids[cached:], self.rows.sampled(req)[max(0, cached - len(req.ids)) :]])
        return self.prefix.continuation(handle, ids, count, salt_digest(req.sampling_params.salt))

    def release(self, req: Req) -> None:
        """Take back the pages of a request that no batch in flight holds."""
        self._release_pages(req.pages[req.cache_handle.num_pages :], are_used=self._has_begun(req))
        if self.bounded is not None:
            self.bounded.close(req)
        self.detach(req)
        req.pages = []

    def lower_fences(self) -> None:
        """Free the fenced pages that no step in flight can read any more."""
        # In the order in which they were fenced, so a page of a busier row may hold up the next ones for a step.
        while self._fenced and self._fenced[0][0] <= self.rows.last_collected:
            self._release_pages(self._fenced.popleft()[1])

    def flush(self) -> None:
        """Evict every cached prefix that no request holds."""
        self._release_evicted(self.prefix.reset())

    def _release_evicted(self, pages: Ints) -> None:
        # At the end of the free list: pages that need no copy to a tier are allocated before these.
        self.pages.release(pages.tolist(), last=True)
        if not self.prefix.tiers:
            self._notify_free(pages.tolist())

    def _release_pages(self, pages: list[int], *, are_used: bool = True) -> None:
        """Free `pages` that a step has used; some may still have to be copied to a tier."""
        self.pages.release(pages)
        if are_used:
            self._notify_free(pages)

    def _notify_free(self, pages: list[int]) -> None:
        if self.on_free is not None and pages:
            self.on_free(pages)

    def _has_begun(self, req: Req) -> bool:
        """Return whether a step has computed a token of `req`, or is planned to."""
        return bool(self.rows.cached_len[req.row] > req.cache_handle.num_pages * self.page_size)

    def fenced_pages(self) -> list[int]:
        """Return the fenced pages (for the invariant checks)."""
        return [p for _, pages in self._fenced for p in pages]
