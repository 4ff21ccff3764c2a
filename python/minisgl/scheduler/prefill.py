"""Waiting requests: in which order they enter, when there is room, and how their prompts are cut into chunks."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from minisgl.core import Req, SeqSlot, Status

if TYPE_CHECKING:
    from minisgl.scheduler.cache import CacheManager
    from minisgl.scheduler.table import TableManager

# Ranking by cached prefix costs a tree walk a request; beyond this many it would cost more than it gains.
LPM_MAX_WAITING = 128


class GrowthEstimate:
    """Which share of the tokens that running requests may still produce is kept free when a new one is admitted.

    Full reservation wastes most of the pool (few requests reach their limit), none makes requests evict each other. So
    the share falls while all goes well and jumps when a request had to be retracted. Deterministic by construction.
    """

    START, FLOOR, DECAY, JUMP = 0.5, 0.1, 0.999, 0.25

    def __init__(self) -> None:
        self.share = self.START

    def relax(self) -> None:
        self.share = max(self.FLOOR, self.share * self.DECAY)

    def tighten(self) -> None:
        self.share = min(1.0, self.share + self.JUMP)

    def tokens(self, req: Req) -> int:
        return int(req.remain_len * self.share) + 1


class PrefillManager:
    """Admits waiting requests and plans chunks of their prompts within a token budget.

    `waiting` is sorted by arrival; a retracted request returns to its old place. `chunked` holds the admitted requests
    whose prompt is not planned completely; they go first.
    """

    def __init__(self, cache: CacheManager, table: TableManager, policy: str) -> None:
        self.cache = cache
        self.table = table
        self.policy = policy
        self.growth = GrowthEstimate()
        self.waiting: list[Req] = []
        self.chunked: list[Req] = []

    def add(self, req: Req) -> None:
        bisect.insort(self.waiting, req, key=lambda r: r.order)

    def remove(self, req: Req) -> None:
        for queue in (self.waiting, self.chunked):
            if req in queue:
                queue.remove(req)

    def plan(self, budget: int, running: Iterable[Req] | None, on_admit: Callable[[Req], None]) -> list[SeqSlot]:
        """Slots for at most `budget` prompt tokens.

        `running` are the requests that will go on decoding, for whose growth room is kept; None admits nobody.
        """
        slots: list[SeqSlot] = []
        for req in list(self.chunked):
            if budget <= 0:
                return slots
            slots.append(self._chunk(req, budget))
            budget -= slots[-1].stop - slots[-1].start
        if running is None or budget <= 0 or not self.waiting or not self.table.available:
            return slots
        reserved = sum(self.growth.tokens(r) for r in running) + sum(self.growth.tokens(s.req) for s in slots)
        for req in self._in_order():
            if budget <= 0 or not self.table.available or not self._admit(req, reserved):
                break
            reserved += self.growth.tokens(req)
            on_admit(req)
            slots.append(self._chunk(req, budget))
            budget -= slots[-1].stop - slots[-1].start
        return slots

    def _in_order(self) -> list[Req]:
        if self.policy == "lpm" and len(self.waiting) <= LPM_MAX_WAITING:
            prefix = self.cache.prefix
            hits = {
                r.uid: prefix.match_prefix(r.host_ids[: r.confirmed_len - 1]).handle.num_pages for r in self.waiting
            }
            return sorted(self.waiting, key=lambda r: (-hits[r.uid], r.order))
        return list(self.waiting)

    def _admit(self, req: Req, reserved: int) -> bool:
        """Give `req` a row and the pages of its whole prompt, if the pool can bear it. `reserved` counts tokens."""
        cache = self.cache
        cache.attach(req)
        need = cache.pages_for(req.device_len) - len(req.pages)
        # With nobody else to wait for, what fits now is enough: the request was checked at the door.
        margin = cache.pages_for(reserved + self.growth.tokens(req)) if reserved else 0
        if need + margin > cache.available or (pages := cache.allocate(need)) is None:
            cache.detach(req)
            return False
        req.pages += pages
        req.cached_len = req.cache_handle.num_pages * cache.page_size
        req.status = Status.RUNNING
        self.table.allocate(req)
        assert req.table_idx is not None
        self.table.write_pages(req.table_idx, 0, req.pages)
        self.waiting.remove(req)
        self.chunked.append(req)
        return True

    def _chunk(self, req: Req, budget: int) -> SeqSlot:
        start, stop = req.cached_len, req.cached_len + min(req.extend_len, budget)
        samples = stop == req.device_len
        if samples:
            self.chunked.remove(req)
        assert req.table_idx is not None
        return SeqSlot(req, req.table_idx, start, stop, samples=samples, from_device=False)
