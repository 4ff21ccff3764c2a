"""Waiting requests: in which order they enter, when there is room, and how their prompts are cut into chunks."""

from __future__ import annotations

import bisect
import itertools
import time
from collections import deque
from typing import TYPE_CHECKING, Final

import numpy as np

from minisgl.scheduler.plan import Chunk
from minisgl.scheduler.req import Req, Status

if TYPE_CHECKING:
    from collections.abc import Iterator

    from minisgl.scheduler.budget import StepBudget
    from minisgl.scheduler.cache import CacheManager
    from minisgl.scheduler.rows import Index, Rows

# Ranking by cached prefix costs a tree walk a request; beyond this many it would cost more than it gains.
LPM_MAX_WAITING = 128
# How many tokens of prompts that came later may pass a prompt, for each of its own. With more, the mean time to the
# first token in a rush falls further (docs/performance.md), but the bound protects less.
OVERTAKING: Final = 16


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

    def tokens(self, *reqs: Req) -> int:
        """For requests of which nothing but the prompt is planned."""
        return sum(int((r.max_len - len(r.ids)) * self.share) + 1 for r in reqs)

    def tokens_of_rows(self, rows: Rows, running: Index) -> int:
        """For the requests that decode in the rows `running`."""
        remaining = rows.max_len[running] - rows.cached_len[running] - 1
        return int((remaining * self.share).astype(np.int64).sum()) + len(running)


class PrefillManager:
    """Admits waiting requests and plans chunks of their prompts within a token budget.

    `waiting` and `chunked`, the admitted requests whose prompt is not planned completely, are sorted by `Req.turn`:
    the uncached prompt tokens that had arrived with the request, and OVERTAKING times its own. So a short prompt passes
    a long one, even between its chunks, but one of n tokens is passed by less than OVERTAKING x n that came later.
    """

    def __init__(self, cache: CacheManager, rows: Rows, policy: str) -> None:
        self.cache = cache
        self.rows = rows
        self.policy = policy
        self.growth = GrowthEstimate()
        self.waiting: list[Req] = []
        self.chunked: list[Req] = []
        self._arrived = 0  # uncached prompt tokens since the start

    def add(self, req: Req) -> None:
        """Queue a new request."""
        uncached = len(req.ids) - self._cached_len(req)
        self._arrived += uncached
        req.turn = self._arrived + OVERTAKING * uncached
        self.put_back(req)

    def put_back(self, req: Req) -> None:
        """Queue a request again, in its old place."""
        bisect.insort(self.waiting, req, key=_place)

    def remove(self, req: Req) -> None:
        if req.status is Status.WAITING:
            del self.waiting[bisect.bisect_left(self.waiting, _place(req), key=_place)]
        elif req in self.chunked:
            self.chunked.remove(req)

    @property
    def has_work(self) -> bool:
        return bool(self.chunked or self.waiting)

    def backlog(self, enough: int) -> int:
        """Tokens of the prompts that are not planned yet, those of the longest left out; counted up to `enough`."""
        total = longest = 0
        for req in itertools.chain(self.chunked, self.waiting):
            if total - longest >= enough:
                break
            left = self._tokens_left(req)
            total, longest = total + left, max(longest, left)
        return min(total - longest, enough)

    def _tokens_left(self, req: Req) -> int:
        """Tokens of its prompt that are not planned yet; what a waiting one will find in the cache is not known."""
        return len(req.ids) - (0 if req.table_idx is None else int(self.rows.cached_len[req.row]))

    def plan(self, budget: StepBudget, running: Index | None) -> list[Chunk]:
        """Chunks of prompts within the budget, one prompt after the other.

        `running` are the rows that will go on decoding, for whose growth room is kept; None admits nobody. While there
        is no room for the next in turn nobody else is admitted, but prompts that were begun go on.
        """
        chunks: list[Chunk] = []
        begun = deque(self.chunked)
        waiting: Iterator[Req] = iter(())
        reserved = self.growth.tokens(*self.chunked)
        by_prefix = self.policy == "lpm" and len(self.waiting) <= LPM_MAX_WAITING
        if running is not None and self.rows.available and not budget.is_spent:
            reserved += self.growth.tokens_of_rows(self.rows, running)
            waiting = iter(self._by_prefix() if by_prefix else list(self.waiting))
        newcomer = next(waiting, None)
        while not budget.is_spent and (begun or newcomer is not None):
            if newcomer is None or (begun and (by_prefix or _place(begun[0]) < _place(newcomer))):
                req = begun.popleft()
            elif self.rows.available and self._admit(newcomer, reserved):
                req, newcomer = newcomer, next(waiting, None)
                reserved += self.growth.tokens(req)
            else:
                newcomer = None
                continue
            if not self._chunk(req, budget, chunks):
                break
        return chunks

    def _by_prefix(self) -> list[Req]:
        hits = {r.uid: self._cached_len(r) for r in self.waiting}
        return sorted(self.waiting, key=lambda r: (-hits[r.uid], _place(r)))

    def _cached_len(self, req: Req) -> int:
        """Tokens of a waiting request whose K/V is in the prefix cache."""
        return self.cache.match(req).handle.num_pages * self.cache.page_size

    def _admit(self, req: Req, reserved: int) -> bool:
        """Give `req` a row and the pages of its whole prompt, if the pool can bear it. `reserved` counts tokens."""
        cache = self.cache
        shared = cache.attach(req)
        need = cache.pages_for(len(req.ids)) - len(shared)
        # With nobody else to wait for, what fits now is enough: the request was checked at the door.
        margin = cache.pages_for(reserved + self.growth.tokens(req)) if reserved else 0
        if need + margin > cache.available or (own := cache.allocate(need)) is None:
            cache.detach(req)
            return False
        cached_len = len(shared) * cache.page_size
        self.rows.allocate(req, cached_len)
        self.rows.set_pages(req, 0, shared + own)
        if req.prompt_logprobs is not None:
            req.prompt_logprobs = []  # what an earlier admission has found out is found out again
        if len(req.ids) == req.prompt_len:  # not one that was retracted: it would find its own prompt
            req.prefix_hit = cached_len
        self.remove(req)
        req.status = Status.RUNNING
        bisect.insort(self.chunked, req, key=_place)
        return True

    def _chunk(self, req: Req, budget: StepBudget, chunks: list[Chunk]) -> bool:
        """Add what the budget has for the prompt of `req`; whether that completes it."""
        start = int(self.rows.cached_len[req.row])
        stop = start + budget.take(start, len(req.ids) - start)
        is_complete = stop == len(req.ids)
        if is_complete:
            self.chunked.remove(req)
        if stop > start:
            req.note_chunk(time.monotonic())
            chunks.append(Chunk(req, start, stop, samples=is_complete))
        return is_complete


def _place(req: Req) -> tuple[int, int]:
    return req.turn, req.order
