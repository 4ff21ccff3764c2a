"""The rows of the page table: who holds them, and what the steady state of decoding needs to know, as arrays."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from minisgl.core import BatchPlan
from minisgl.layout import NO_MASKS
from minisgl.scheduler.plan import decode_flags
from minisgl.scheduler.writes import RowWrites

if TYPE_CHECKING:
    import numpy.typing as npt

    from minisgl.core import Ints
    from minisgl.scheduler.req import Req

    Index = npt.NDArray[np.intp]


class Rows:
    """State of the requests that hold a row, indexed by row, so that a decode step is a handful of array operations.

    requests       Req | None
    uid            int64
    cached_len     int32, tokens whose K/V is in the cache once everything planned so far has run
    confirmed_len  int32, tokens known to the host; the rest of what is planned is still in flight
    max_len        int32, tokens at which the request ends
    limit          int32, `cached_len` up to which decoding can be planned without asking: there is a page for the next
                   token, and it is not the last one
    flags          int32, flags of the row's decode slots in a plan
    last_step      int64, newest step that holds the row; it is in flight while that is above `retired`
    is_constrained bool, a grammar says which tokens it may sample
    is_wanted      bool, its tokens are reported: false once the request has ended
    tokens         int32 [rows, max tokens], sampled tokens at their position in the sequence; those before
                   len(Req.ids) are there and not here

    Invariants: a free row has no request and is in no step in flight; for the others len(Req.ids) <= confirmed_len <=
    max(len(Req.ids), cached_len + 1) and 0 <= cached_len < max_len. While decoding, cached_len + 1 is the number of
    tokens counting those being sampled.
    """

    def __init__(self, num_rows: int, max_tokens: int, page_size: int, vocab: int, eos_ids: frozenset[int]) -> None:
        self.num_rows = num_rows
        self.page_size = page_size
        self.eos_ids = eos_ids
        self.retired = 0  # newest step known to be executed; all before it are, too
        self.writes = RowWrites(eos_ids)
        self.requests: list[Req | None] = [None] * num_rows
        self.uid = np.zeros(num_rows, "<i8")
        self.cached_len = np.zeros(num_rows, np.int32)
        self.confirmed_len = np.zeros(num_rows, np.int32)
        self.max_len = np.zeros(num_rows, np.int32)
        self.limit = np.zeros(num_rows, np.int32)
        self.flags = np.zeros(num_rows, np.int32)
        self.last_step = np.zeros(num_rows, np.int64)
        self.is_wanted = np.zeros(num_rows, np.bool_)
        self.is_constrained = np.zeros(num_rows, np.bool_)
        self.num_constrained = 0  # rows held by such requests
        # Memory that is never written costs nothing: of a row only what is generated is.
        self.tokens = np.empty((num_rows, max_tokens), np.int32)
        # Tokens that end some request, or once did: only where one of these is sampled does anybody look closer.
        self._may_end = np.zeros(max(vocab, *(i + 1 for i in eos_ids), 1), np.bool_)
        self._may_end[list(eos_ids)] = True
        self._free = deque(range(num_rows))

    # -- rows come and go

    @property
    def available(self) -> int:
        return len(self._free)

    def allocate(self, req: Req, cached_len: int) -> None:
        """Give `req` a row, whose pages hold its first `cached_len` tokens; the row must be there (`available`)."""
        row = req.table_idx = self._free.popleft()
        self.requests[row] = req
        self.uid[row] = req.uid
        self.cached_len[row], self.confirmed_len[row], self.max_len[row] = cached_len, len(req.ids), req.max_len
        self.limit[row] = 0
        self.flags[row] = decode_flags(req)
        self.is_wanted[row] = True
        self.is_constrained[row] = req.matcher is not None
        self.num_constrained += req.matcher is not None
        self._may_end[list(req.sampling_params.stop_token_ids)] = True
        self.writes.fill(req)

    def free(self, req: Req) -> None:
        self.requests[req.row] = None
        self.num_constrained -= req.matcher is not None
        self._free.append(req.row)
        req.table_idx = None

    def mute(self, req: Req) -> None:
        """`req` has ended: no token of it is wanted any more."""
        if req.table_idx is not None:
            self.is_wanted[req.table_idx] = False

    def set_pages(self, req: Req, start: int, pages: list[int]) -> None:
        """The pages of `req` from index `start` on are `pages`; it had at least `start` before and keeps any beyond."""
        req.pages[start : start + len(pages)] = pages
        self.writes.pages(req.row, start, pages)
        self.limit[req.row] = min(len(req.pages) * self.page_size, req.max_len - 1)

    # -- one request

    def is_in_flight(self, req: Req) -> bool:
        """Whether a launched batch that is not collected yet holds the row of `req`."""
        return req.table_idx is not None and bool(self.last_step[req.table_idx] > self.retired)

    def sampled(self, req: Req) -> Ints:
        """The tokens that were sampled since `req` got its row: a view, int32."""
        return self.tokens[req.row, len(req.ids) : self.confirmed_len[req.row]]

    def finite_len(self, req: Req) -> int:
        """Tokens whose K/V is in the pages of `req` and has led to finite logits.

        A finite result for the last position vouches for all before it; the newest token itself has no K/V yet.
        """
        confirmed = int(self.confirmed_len[req.row])
        return confirmed - 1 if confirmed > len(req.ids) else 0

    # -- many at once

    def holders(self, rows: Index) -> list[Req]:
        """The requests that hold `rows`."""
        return [req for row in rows.tolist() if (req := self.requests[row]) is not None]

    def depend_on_tokens_in_flight(self, rows: Index) -> bool:
        """Whether a grammar constrains one of the decoding `rows` whose newest token is not confirmed yet."""
        return bool((self.is_constrained[rows] & (self.confirmed_len[rows] <= self.cached_len[rows])).any())

    def masks(self, rows: Index) -> Ints:
        """What the constrained ones of `rows` may sample next [M, W], by the tokens that are confirmed."""
        constrained = self.holders(rows[self.is_constrained[rows]])
        return np.stack([req.matcher.mask for req in constrained]) if constrained else NO_MASKS

    def advance(self, plan: BatchPlan) -> None:
        """The plan is made: count its tokens as planned."""
        rows = plan.slots["row"].astype(np.intp)
        self.cached_len[rows] = plan.slots["stop"]
        self.last_step[rows] = plan.step

    def confirm(self, rows: Index, tokens: Ints) -> Index:
        """Append a sampled token to each of `rows`; returns the indices of those that it may have ended."""
        at = self.confirmed_len[rows]
        self.tokens[rows, at] = tokens
        at += 1
        self.confirmed_len[rows] = at
        return np.flatnonzero(self._may_end.take(tokens) | (at == self.max_len[rows]))

    def free_rows(self) -> list[int]:
        """The free rows (for the invariant checks)."""
        return list(self._free)
