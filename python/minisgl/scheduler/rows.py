"""The rows of the page table: their requests, and the state that steady decoding needs, as arrays."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from minisgl.core.layout import Flag
from minisgl.core.plan import BatchPlan
from minisgl.grammar.thinking import NEVER
from minisgl.scheduler.writes import RowWrites, decode_flags

if TYPE_CHECKING:
    import numpy.typing as npt

    from minisgl.core.plan import Ints
    from minisgl.scheduler.req import Req

    Index = npt.NDArray[np.intp]


class Rows:
    """State of the requests that hold a row, indexed by row, so that a decode step is a handful of array operations.

    requests       Req | None
    uid            int64
    cached_len     int32, tokens with K/V in the cache once everything planned so far has run
    confirmed_len  int32, tokens known to the host; the other planned ones are still in flight
    max_len        int32, tokens at which the request ends
    limit          int32, `cached_len` up to which decoding needs no look at the request: there is a page for the next
                   token, and it is not the last one
    flags          int32, flags of the row's decoding sequences in plans
    free_len       int32, tokens of the text that certainly need no mask, while MASKED may come and go
    last_step      int64, newest step that holds the row; the row is in flight while that is above `last_collected`
    is_live        bool, tokens are reported: false once the request has ended
    tokens         int32 [rows, max tokens], sampled tokens at their position in the sequence; positions below
                   len(Req.ids) are in `Req.ids` only

    Invariants: a free row has no request and is in no step in flight; for the others len(Req.ids) <= confirmed_len <=
    max(len(Req.ids), cached_len + 1) and 0 <= cached_len < max_len. While decoding, cached_len + 1 is the number of
    tokens counting those being sampled.
    """

    def __init__(self, num_rows: int, max_tokens: int, page_size: int, vocab: int, eos_ids: frozenset[int]) -> None:
        self.num_rows = num_rows
        self.page_size = page_size
        self.eos_ids = eos_ids
        self.last_collected = 0  # the newest collected step
        self.writes = RowWrites(eos_ids)
        self.requests: list[Req | None] = [None] * num_rows
        self.uid = np.zeros(num_rows, "<i8")
        self.cached_len = np.zeros(num_rows, np.int32)
        self.confirmed_len = np.zeros(num_rows, np.int32)
        self.max_len = np.zeros(num_rows, np.int32)
        self.limit = np.zeros(num_rows, np.int32)
        self.flags = np.zeros(num_rows, np.int32)
        self.free_len = np.zeros(num_rows, np.int32)
        self.last_step = np.zeros(num_rows, np.int64)
        self.is_live = np.zeros(num_rows, np.bool_)
        # Memory that is never written costs nothing: only generated tokens are.
        self.tokens = np.empty((num_rows, max_tokens), np.int32)
        # Tokens that end some request, or once did: a request is only looked at when it samples one of these.
        self._may_end = np.zeros(max(vocab, *(i + 1 for i in eos_ids), 1), np.bool_)
        self._may_end[list(eos_ids)] = True
        self._free = deque(range(num_rows))

    # -- rows come and go

    @property
    def available(self) -> int:
        return len(self._free)

    def allocate(self, req: Req, cached_len: int) -> None:
        """Give `req` a row; its pages hold the first `cached_len` tokens. There must be a row (`available`)."""
        row = req.table_idx = self._free.popleft()
        self.requests[row] = req
        self.uid[row] = req.uid
        self.cached_len[row] = cached_len
        self.confirmed_len[row] = len(req.ids)
        self.max_len[row] = req.max_len
        self.limit[row] = 0
        req.is_masked = req.matcher is not None  # at first: the tokens of its prompt have not been looked at
        self.free_len[row] = 0 if req.is_masked and req.sampling_params.grammar is None else NEVER
        self.flags[row] = decode_flags(req)
        self.is_live[row] = True
        self._may_end[list(req.sampling_params.stop_token_ids)] = True
        self.writes.fill(req)

    def toggle_masks(self, rows: list[int]) -> None:
        """Begin or cease to mask what the requests in `rows` sample in the steps to come."""
        self.flags[rows] ^= Flag.MASKED
        for req in self.holders(np.array(rows, np.intp)):
            req.is_masked = not req.is_masked

    def free(self, req: Req) -> None:
        self.requests[req.row] = None
        self._free.append(req.row)
        req.table_idx = None

    def end(self, req: Req) -> None:
        """Record that `req` has ended, or begins again: tokens in flight are not reported."""
        if req.table_idx is not None:
            self.is_live[req.table_idx] = False

    def set_pages(self, req: Req, start: int, pages: list[int]) -> None:
        """Set the pages of `req` from index `start` on, at most its number of pages; pages after them stay."""
        req.pages[start : start + len(pages)] = pages
        self.writes.pages(req.row, start, pages)
        self.limit[req.row] = min(len(req.pages) * self.page_size, req.max_len - 1)

    # -- one request

    def is_in_flight(self, req: Req) -> bool:
        """Return whether a launched batch that is not collected yet holds the row of `req`."""
        return req.table_idx is not None and bool(self.last_step[req.table_idx] > self.last_collected)

    def is_reported(self, req: Req) -> bool:
        """Return whether `req` holds a row whose tokens are reported."""
        return req.table_idx is not None and bool(self.is_live[req.table_idx])

    def sampled(self, req: Req) -> Ints:
        """Return the tokens sampled since `req` got its row: a view, int32."""
        return self.tokens[req.row, len(req.ids) : self.confirmed_len[req.row]]

    def text(self, req: Req, start: int = 0) -> Ints:
        """Return the confirmed tokens of `req` from `start` on, prompt and output, int32."""
        return np.concatenate([req.ids[start:], self.sampled(req)[max(0, start - len(req.ids)) :]])

    def finite_len(self, req: Req) -> int:
        """Return how many tokens of `req` have K/V in its pages that has led to finite logits.

        Finite logits of the last position show that the K/V of all positions before it is intact. The newest token has
        no K/V yet.
        """
        confirmed = int(self.confirmed_len[req.row])
        return confirmed - 1 if confirmed > len(req.ids) else 0

    # -- many at once

    def holders(self, rows: Index) -> list[Req]:
        """Return the requests that hold `rows`."""
        return [req for row in rows.tolist() if (req := self.requests[row]) is not None]

    def advance(self, plan: BatchPlan) -> None:
        """Count the tokens of `plan` as planned."""
        rows = plan.sequences["row"].astype(np.intp)
        self.cached_len[rows] = plan.sequences["stop"]
        self.last_step[rows] = self.last_step[plan.restores["row"]] = plan.step

    def confirm(self, rows: Index, tokens: Ints) -> Index:
        """Append a sampled token to each of `rows`; return the indices of the rows that may have ended."""
        length = self.confirmed_len[rows]
        self.tokens[rows, length] = tokens
        length += 1
        self.confirmed_len[rows] = length
        # Clipped, since the hashed tokens of a record are no ids; what is flagged in vain is only looked at.
        return np.flatnonzero(self._may_end.take(tokens, mode="clip") | (length == self.max_len[rows]))

    def free_rows(self) -> list[int]:
        """Return the free rows (for the invariant checks)."""
        return list(self._free)
