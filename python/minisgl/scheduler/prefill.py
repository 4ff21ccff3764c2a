"""Waiting requests: the order in which they are admitted, the pages kept free, and the chunks of their prompts."""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter, deque
from typing import TYPE_CHECKING, Final

import numpy as np

from minisgl.core.layout import FULL
from minisgl.scheduler.plan import Chunk
from minisgl.scheduler.req import Rank, Req, Status

if TYPE_CHECKING:
    from collections.abc import Iterator

    from minisgl.scheduler.adapters import Adapters
    from minisgl.scheduler.budget import LoadBudget, StepBudget
    from minisgl.scheduler.cache import CacheManager
    from minisgl.scheduler.rows import Index, Rows

# Ranking by cached prefix costs a tree walk per request; beyond this many requests it costs more than it gains.
LPM_MAX_WAITING = 128
NEIGHBOURS = 16  # waiting requests whose prompts may be found to begin like one that is admitted
# For each of its tokens, a prompt lets this many tokens of later prompts overtake it. A larger number lowers the mean
# time to first token in a queue, but weakens the bound on a request's wait.
OVERTAKING: Final = 16
# A request of a less urgent class waits this many times as long as among equals, at most. A larger number protects the
# urgent ones better, which lose one in so many admitted tokens to the others.
AGING: Final = 32
OVERDUE: Final = (-1, 0)  # the rank of a request that has waited so long
# After this many steps at the head of the queue, a request preempts a running one that has MUCH_LONGER times as many
# tokens to go. The preempted one's pages stay in the prefix cache, so it loses at most a page of work.
PATIENCE_STEPS: Final = 8
MUCH_LONGER: Final = 4
# One in this many rows is kept for other clients: only a request's first prompt or choice may take it.
KEPT_ROWS: Final = 8


class GrowthEstimate:
    """The fraction of the tokens still to be generated that is reserved when a new request is admitted.

    Reserving all of them wastes most of the pool, since few requests reach their limit; with none, requests preempt
    each other. So the fraction decays while pages suffice, and jumps after a preemption. No clock is involved.
    """

    START = 0.5
    FLOOR = 0.1
    DECAY = 0.999
    JUMP = 0.25

    def __init__(self) -> None:
        self.fraction = self.START

    def relax(self) -> None:
        self.fraction = max(self.FLOOR, self.fraction * self.DECAY)

    def tighten(self) -> None:
        self.fraction = min(1.0, self.fraction + self.JUMP)

    def tokens(self, *reqs: Req) -> int:
        """Return the tokens to reserve for requests that have not begun to decode."""
        return sum(int((r.max_len - len(r.ids)) * self.fraction) + 1 for r in reqs)

    def tokens_of_rows(self, rows: Rows, running: Index) -> int:
        """Return the tokens to reserve for the requests that decode in the rows `running`."""
        remaining = rows.max_len[running] - rows.cached_len[running] - 1
        return int((remaining * self.fraction).astype(np.int64).sum()) + len(running)


class PrefillManager:
    """Admits waiting requests and plans chunks of their prompts within a token budget.

    Requests are in the order of one `key`, the shortest prompt first. It also runs between the chunks of a longer one
    that is `chunked` (admitted, with a part of the prompt still to be planned). Each request has a deadline in admitted
    prompt tokens: those that waited when it arrived, plus OVERTAKING times its own. After its deadline a request is
    due, and goes before all that are not. So a prompt of n tokens waits for at most twice the tokens that waited before
    it, plus 2 x OVERTAKING x n.

    While a due request lacks pages, much shorter ones pass it, for OVERTAKING times its own tokens more. For these, no
    pages are reserved for the growth of running requests, which would be preempted first.

    Prompts and choices of one client's request count as one: each waits as if the earlier ones were a part of it
    (`Req.queue_tokens`), and leaves some rows free.

    With the policy `fcfs`, all of this is off: every request is due from its arrival, and none passes another one.

    All of this holds among requests of one rank (class and priority); lower ranks go first. While a request waits, its
    `patience` decreases by each token that is admitted; without any, it goes before all ranks, and is not preempted for
    others.
    """

    def __init__(self, cache: CacheManager, rows: Rows, adapters: Adapters, policy: str) -> None:
        self.cache = cache
        self.rows = rows
        self.adapters = adapters
        self.policy = policy
        self.is_fcfs = policy == "fcfs"
        self.growth = GrowthEstimate()
        self.waiting: list[Req] = []  # in order, unless requests have come or gone
        self._is_sorted = True
        self.chunked: list[Req] = []
        self._waiting_tokens = Counter[Rank]()  # uncached, of the prompts in the queue
        # The first of the queue that lacked a row or pages in the last plan, and the first that lacked an adapter slot.
        self.blocked: list[Req] = []
        self.least_urgent = OVERDUE  # of all ranks so far
        self._admitted = 0  # tokens since the start, with those of requests that left the queue otherwise
        self.patience = PATIENCE_STEPS
        self._head: tuple[Req | None, int] = None, 0  # the first of the waiting requests, and since which step

    def rank(self, req: Req) -> Rank:
        """Return the rank of a request now: its own, or OVERDUE."""
        left = req.overdue_at - self._admitted if req.status is Status.WAITING else req.patience
        return req.rank if left > 0 else OVERDUE

    def key(self, req: Req) -> tuple[Rank, bool, int, int]:
        """Return the key that orders requests."""
        rank, is_due = self.rank(req), req.deadline <= self._admitted
        if rank == OVERDUE:
            return rank, False, req.overdue_at, req.order
        return rank, not is_due, req.deadline if is_due else req.queue_tokens, req.order

    def add(self, req: Req) -> None:
        """Queue a new request."""
        req.new_tokens = len(req.ids) - self._cached_len(req)
        before = sum(tokens for rank, tokens in self._waiting_tokens.items() if rank <= req.rank)
        req.patience = 1 + AGING * (self._waiting_tokens.total() + OVERTAKING * req.queue_tokens)
        self.least_urgent = max(self.least_urgent, req.rank)
        self._insert(req, before + req.new_tokens)

    def requeue(self, req: Req) -> None:
        """Queue a preempted request again, with a new deadline."""
        self._admitted -= req.new_tokens  # which count once
        self._insert(req, req.new_tokens)

    def _insert(self, req: Req, tokens_before: int) -> None:
        if not self.is_fcfs:
            req.deadline = max(req.deadline, self._admitted + tokens_before + OVERTAKING * req.queue_tokens)
        req.overdue_at = self._admitted + req.patience
        self.waiting.append(req)
        self._is_sorted = False
        self._waiting_tokens[req.rank] += req.new_tokens

    def remove(self, req: Req) -> None:
        if req.status is Status.WAITING:
            self.waiting.remove(req)
            self._is_sorted = False  # others may be due now
            self._waiting_tokens[req.rank] -= req.new_tokens
            if not self._waiting_tokens[req.rank]:
                del self._waiting_tokens[req.rank]
            req.patience = max(0, req.overdue_at - self._admitted)
            self._admitted += req.new_tokens
        elif req in self.chunked:
            self.chunked.remove(req)

    def in_order(self) -> list[Req]:
        """Return a list of the waiting requests in order."""
        if not self._is_sorted:
            self.waiting.sort(key=self.key)
            self._is_sorted = True
        return self.waiting.copy()

    @property
    def has_work(self) -> bool:
        return bool(self.chunked or self.waiting)

    def backlog(self, enough: int) -> int:
        """Return the prompt tokens not planned yet, without those of the longest prompt; counted up to `enough`."""
        total = longest = 0
        for req in itertools.chain(self.chunked, self.waiting):
            if total - longest >= enough:
                break
            # A waiting request counts in full: what it will find in the prefix cache is not known.
            left = len(req.ids) - (0 if req.table_idx is None else int(self.rows.cached_len[req.row]))
            total += left
            longest = max(longest, left)
        return min(total - longest, enough)

    def is_full(self, queue_tokens: int, limit: int, rank: Rank = (0, 0)) -> bool:
        """Whether a new prompt with `queue_tokens` would wait for more than `limit` tokens that it does not pass."""
        if self._waiting_tokens.total() <= limit:
            return False
        new = rank, True, queue_tokens
        return sum(r.new_tokens for r in self.waiting if self.key(r)[:3] <= new) > limit

    def starved(self, step: int) -> Req | None:
        """Return the head of the queue if it has been the head for `patience` steps. Call this once a step.

        None with `fcfs`, where no running request arrived after the head.
        """
        # Others than the first of a request may wait for a row while some are free.
        head = next((req for req in self.in_order() if not req.child_index), None)
        if head is not self._head[0]:
            self._head = head, step
        return None if self.is_fcfs or step - self._head[1] < self.patience else head

    def plan(self, budget: StepBudget, running: Index | None, loads: LoadBudget, step: int) -> list[Chunk]:
        """Return chunks of prompts within the budget, one prompt after the other.

        A prompt whose cached prefix continues in a tier is loaded first; `loads` limits the pages of a step.

        Pages are kept free for the growth of the rows `running`, which go on decoding; None admits no request. While
        the next request does not fit, only much shorter ones are admitted, but prompts already begun go on.
        """
        chunks: list[Chunk] = []
        begun = deque(sorted(self.chunked, key=self.key))
        by_prefix = self.policy == "lpm" and len(self.waiting) <= LPM_MAX_WAITING
        waiting: Iterator[Req] = iter(())
        reserved, longest, is_blocked = self.growth.tokens(*self.chunked), 0, False
        self.blocked = []
        if running is not None and self.rows.available and not budget.is_spent:
            reserved += self.growth.tokens_of_rows(self.rows, running)
            if not self.is_fcfs:  # which preempts the newest, and not the longest
                longest = int((self.rows.max_len[running] - self.rows.confirmed_len[running]).max(initial=0))
            waiting = filter(self._has_row, self._by_prefix() if by_prefix else self.in_order())
            waiting = self._with_adapter(waiting, step)
        elif running is not None and not self.rows.available:
            self.blocked = self.in_order()[:1]
        candidate = next(waiting, None)
        while not budget.is_spent and (begun or candidate is not None):
            order = self.rank if by_prefix else self.key
            if candidate is None or (begun and order(begun[0]) <= order(candidate)):
                req = begun.popleft()
            elif self._admit(candidate, reserved if MUCH_LONGER * candidate.max_len > longest else 0):
                req, candidate = candidate, next(waiting, None)
                reserved += self.growth.tokens(req)
            else:  # the second that does not fit ends the search, since each costs a walk through the prefix cache
                if not is_blocked:
                    self.blocked.append(candidate)
                waiting = iter(()) if is_blocked or self.is_fcfs else self._passing(candidate, waiting)
                is_blocked, candidate = True, next(waiting, None)
                continue
            if req.is_loading:
                self.cache.load(req, loads)
                self._note_hit(req)
            if self.is_fcfs if req.is_loading else not self._chunk(req, budget, chunks):
                break
        return chunks

    def _passing(self, blocked: Req, waiting: Iterator[Req]) -> Iterator[Req]:
        """Return those of `waiting` that may pass `blocked`, which lacks pages: much shorter ones, up to a bound."""
        if self._is_overdue(blocked):
            return iter(())
        rank = self.rank(blocked)
        return (req for req in waiting if MUCH_LONGER * req.max_len <= blocked.max_len and self.rank(req) <= rank)

    def _is_overdue(self, req: Req) -> bool:
        """Return whether no other request may pass one that is due and cannot be admitted yet."""
        is_late = self._admitted >= req.deadline + OVERTAKING * req.queue_tokens
        return self.is_fcfs or is_late or self.rank(req) == OVERDUE

    def _with_adapter(self, waiting: Iterator[Req], step: int) -> Iterator[Req]:
        """Yield those of `waiting` whose adapter is ready; none after one that is overdue and has no slot."""
        is_blocked = False
        for req in waiting:
            if self.adapters.is_ready(req, step):
                yield req
                continue
            if not is_blocked and not self.adapters.has_slot(req):
                is_blocked = True
                self.blocked.append(req)
            if self._is_overdue(req):
                return

    def _has_row(self, req: Req) -> bool:
        leaves_rows = req.child_index and not self.is_fcfs and self.rank(req) != OVERDUE
        return self.rows.available > (self.rows.num_rows // KEPT_ROWS if leaves_rows else 0)

    def _by_prefix(self) -> list[Req]:
        hits = {r.uid: self._cached_len(r) for r in self.waiting}
        return sorted(self.in_order(), key=lambda r: (self.rank(r), -hits[r.uid]))

    def _cached_len(self, req: Req) -> int:
        """Return how many tokens of a waiting request have their K/V in the prefix cache."""
        return self.cache.match(req).handle.num_pages * self.cache.page_size

    def _admit(self, req: Req, reserved: int) -> bool:
        """Give `req` a row and the pages of its whole prompt, unless fewer than `reserved` tokens would stay free."""
        cache = self.cache
        shared = cache.attach(req)
        need = cache.pages_for(len(req.ids)) - len(shared)
        # Alone, a request needs no margin: `Admission` has checked that the pool can hold it to its end.
        margin = cache.pages_for(reserved + self.growth.tokens(req)) if reserved else 0
        needs = {FULL: need} | cache.row_needs(req)
        if need + margin > cache.available or not cache.make_room(needs, handle=req.cache_handle):
            cache.detach(req)
            # Alone, a request fits, though not always beside its snapshot.
            return self.rows.available == self.rows.num_rows and cache.forget_match(req) and self._admit(req, reserved)
        own = cache.pages.allocate(need)
        self.adapters.hold(req)
        self.rows.allocate(req, len(shared) * cache.page_size)
        req.pages = shared + own
        cache.open(req, (other for other in self.waiting[:NEIGHBOURS] if other is not req))
        if not req.is_loading:  # else the next step would wait until pages are free that it does not use yet
            self.rows.set_pages(req, 0, req.pages)
        if req.prompt_logprobs is not None:
            req.prompt_logprobs = []  # those computed before a preemption are computed again
        self._note_hit(req)
        self.remove(req)
        req.status = Status.RUNNING
        self.chunked.append(req)
        return True

    def _note_hit(self, req: Req) -> None:
        if len(req.ids) == req.prompt_len:  # a preempted request would find its own prompt
            req.prefix_hit = int(self.rows.cached_len[req.row])

    def _chunk(self, req: Req, budget: StepBudget, chunks: list[Chunk]) -> bool:
        """Add the chunk of `req` that the budget allows; return whether the prompt is then complete."""
        start, bounded = int(self.rows.cached_len[req.row]), self.cache.bounded
        limit = math.inf if bounded is None else bounded.chunk_limit(req, start)
        stop = start + budget.grant(start, len(req.ids) - start, limit)
        is_complete = stop == len(req.ids)
        if is_complete:
            self.chunked.remove(req)
        if stop > start:
            req.note_chunk(time.monotonic())
            chunks.append(Chunk(req, start, stop, samples=is_complete))
            if bounded is not None:
                bounded.add_chunk(req, start, stop)
        return is_complete
