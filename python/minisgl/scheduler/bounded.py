"""Allocates and frees the window pages and slots of rows, and plans captures and restores (`kvcache/snapshots.py`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from minisgl.core.layout import FOLD_TOKENS, SLOT_ID, STATE, STATE_LEN, Flag
from minisgl.core.plan import TILE_TOKENS
from minisgl.core.rounding import ceil_div
from minisgl.kvcache.snapshots import IN_FLIGHT, Reason, Snapshot
from minisgl.kvcache.tree import common_prefix_len

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from minisgl.core.plan import BatchPlan, Ints
    from minisgl.kvcache.snapshots import IdPool, Snapshots
    from minisgl.scheduler.req import Req
    from minisgl.scheduler.rows import Rows


EVERY: Final = 512  # the least number of tokens between spare snapshots of a prompt
MAX_SPARE: Final = 32  # of a prompt: each is a node of the tree, through which every later look-up walks
MAX_MESSAGES: Final = 8  # of a prompt, after which it is captured


class BoundedState:
    """Bounded state by row.

    A row has window pages from its window before `computed_len` on. No step in flight reads what is before, so what is
    freed can be used at once.

    A row's slot has its state as of `state_len` tokens. It moves on, by folds, to those that collected steps have
    computed: no draft among them can be rejected.

    computed_len  int32 [rows], the tokens computed by collected steps
    state_len     int32 [rows], the tokens of the state in a row's slot, once the planned chunks and folds are done
    """

    def __init__(
        self, snapshots: Snapshots, rows: Rows, make_room: Callable[[Mapping[int, int], Reason], bool]
    ) -> None:
        """`make_room` is `CacheManager.make_room`."""
        self.snapshots, self.pools = snapshots, snapshots.pools
        self.computed_len = np.zeros(rows.num_rows, np.int32)
        self.state_len = np.zeros(rows.num_rows, np.int32)
        self._slots = next((pool for pool in self.pools if pool.group == STATE), None)
        self._restored: dict[int, Snapshot] = {}  # row -> the one that it has gone on from
        self._rows = rows
        self._make_room = make_room

    @property
    def row_needs(self) -> dict[int, int]:
        """Return the number of ids to reserve for one more row, by group."""
        return {pool.group: pool.per_row for pool in self.pools}

    def _capture(self, req: Req, length: int, reason: Reason, *, is_leaving: bool = False) -> None:
        """Plan a capture of `length` tokens of a request, if there is memory. One that `is_leaving` gives its slot."""
        taken = [pool for pool in self.pools if is_leaving and not pool.is_shared]
        copied = [pool for pool in self.pools if pool not in taken]
        if not self._make_room({pool.group: pool.snapshot_needs(req.row, length) for pool in copied}, reason):
            return
        snapshot = Snapshot(reason)
        req.captures.append((length, snapshot))
        for pool in taken:
            pool.hand_over(req.row, snapshot)
        for pool in copied:
            copies = pool.capture(req.row, length, snapshot)
            self._rows.writes.captures += [(*copy, req.row, length) for copy in copies]

    def restore(self, req: Req) -> None:
        """Restore the snapshot of a request's cached prefix to its row."""
        row, length = req.row, int(self._rows.cached_len[req.row])
        self.computed_len[row] = self.state_len[row] = length
        if not length:
            return
        snapshot = self._restored[row] = self.snapshots.use(req.cache_handle.node)
        for pool in self.pools:
            if copies := pool.restore(row, snapshot):
                self._rows.writes.restores[row] = [(*copy, row, length) for copy in copies]
            self._write(pool, row, pool.rows[row])

    def is_unconfirmed(self, req: Req) -> bool:
        """Return whether a request has gone on from a snapshot that was loaded and may be damaged."""
        return req.row in self._restored and self._restored[req.row].is_loaded

    def mark_intact(self, req: Req) -> None:
        """Record that a finite result was computed from what was restored for `req`."""
        if req.row in self._restored:
            self._restored[req.row].is_loaded = False

    def open(self, req: Req, waiting: Iterable[Req]) -> None:
        """Reserve ids for the new row of a request, and plan its captures.

        One capture is where the prompt diverges from the most similar one of `waiting`.
        """
        handle, page_size = req.target or req.cache_handle, self._rows.page_size
        for pool in self.pools:
            pool.rows[req.row] = {}
        # Prompts may arrive one by one: the second captures where it diverges from the first, and the third finds that.
        divergence = max((common_prefix_len(req.ids, other.ids) for other in waiting), default=0)
        shared = req.system_tokens, handle.branch * page_size, divergence
        every = max(EVERY, ceil_div(len(req.ids), MAX_SPARE))
        wanted = dict.fromkeys((*range(every, len(req.ids), every), *self._ends(req)), Reason.SPARE)
        wanted |= {len(req.ids) - 1: Reason.END} | dict.fromkeys(shared, Reason.SHARED)
        req.capture_at = dict(sorted((end // page_size * page_size, reason) for end, reason in wanted.items()))

    def _ends(self, req: Req) -> list[int]:
        """Return the ends of the first messages of a prompt, if its template ends them with EOS."""
        ends = np.flatnonzero(np.isin(req.ids, [*self._rows.eos_ids])) + 1
        return [int(end) for end in ends[:MAX_MESSAGES]]

    def extend(self, req: Req, stop: int | None = None) -> None:
        """Allocate the ids that a row lacks for the first `stop` tokens of its text, or for all of its pages."""
        stop = len(req.pages) * self._rows.page_size if stop is None else stop
        for pool in self.pools:
            span = pool.span(int(self.computed_len[req.row]), stop)
            self._write(pool, req.row, pool.extend(pool.rows[req.row], span))

    def _write(self, pool: IdPool, row: int, ids: dict[int, int]) -> None:
        self._rows.writes.bounded |= {(pool.group, row, index): i for index, i in ids.items()}

    def chunk_limit(self, req: Req, start: int) -> int:
        """Return the number of tokens from `start` on for which ids are available.

        It is 0 instead of a small number while other prompts are in flight, since more ids will be free soon.
        """
        limit = min(pool.limit(req.row, int(self.computed_len[req.row])) for pool in self.pools) - start
        return limit if limit >= TILE_TOKENS or not any(pool.excess for pool in self.pools) else 0

    def add_chunk(self, req: Req, start: int, stop: int) -> None:
        """Allocate the ids for a chunk of a prompt, and plan its captures, as far as there is memory."""
        self.extend(req, min(stop + IN_FLIGHT, req.max_len - 1))
        self._move_state(req.row, stop)
        for length, reason in req.capture_at.items():
            if start < length <= stop:
                self._capture(req, length, reason)

    def collect(self, plan: BatchPlan) -> None:
        """Count the tokens of a collected step, and free the window pages that no later step reads."""
        rows, is_chunk = plan.sequences["row"], (plan.sequences["flags"] & Flag.FROM_DEVICE) == 0
        before = self.computed_len[rows]
        computed = np.where(is_chunk, plan.sequences["stop"], self._rows.confirmed_len[rows] - 1)
        self.computed_len[rows] = np.maximum(before, computed)
        self._fold(rows)
        for pool in self.pools:
            for row in rows[computed // pool.page_size > before // pool.page_size].tolist():
                ids, first = pool.rows.get(row, {}), pool.span(int(self.computed_len[row]), 0).start
                pool.release([ids.pop(index) for index in list(ids) if index < first])

    def _fold(self, rows: Ints) -> None:
        """Plan folds of rows that have FOLD_TOKENS computed tokens."""
        if self._slots is None:
            return
        stops = self.computed_len[rows] // FOLD_TOKENS * FOLD_TOKENS
        due, folds = stops > self.state_len[rows], self._rows.writes.folds
        for row, stop in zip(rows[due].tolist(), stops[due].tolist(), strict=True):
            if slot := self._slots.rows.get(row):  # else the row has left
                start, _ = folds.get(slot[SLOT_ID], (int(self.state_len[row]), 0))
                folds[slot[SLOT_ID]] = start, stop
                self._move_state(row, stop)

    def _move_state(self, row: int, stop: int) -> None:
        """Note that the state of a row is as of `stop` tokens, from the next plan on."""
        self.state_len[row] = stop
        if self._slots is not None:
            self._rows.writes.bounded[STATE, row, STATE_LEN] = stop

    def pop_captures(self, req: Req, finite: int, *, is_leaving: bool) -> list[tuple[int, Snapshot]]:
        """Return (tokens, snapshot) of each capture of a request whose first `finite` tokens have finite logits.

        A leaving request hands over what it has as of its last page boundary, or as of the last fold.
        """
        page_size, row = self._rows.page_size, req.row
        length = finite // page_size * page_size if self._slots is None else int(self.state_len[row])
        newest = req.captures[-1][0] if req.captures else req.cache_handle.num_pages * page_size
        has_all = all(pool.rows[row].keys() >= {*pool.span(length, length)} for pool in self.pools)
        if is_leaving and newest < length <= finite and not length % page_size and has_all:
            self._capture(req, length, Reason.END, is_leaving=True)
        captures, req.captures = req.captures, []
        return captures

    def close(self, req: Req) -> None:
        """Free the ids of a row, and its captures that were not inserted."""
        for pool in self.pools:
            pool.release([*pool.rows.pop(req.row).values()])
        for _, snapshot in req.captures:
            self.snapshots.free(snapshot)
        req.captures = []
        self._restored.pop(req.row, None)
        self._rows.writes.restores.pop(req.row, None)
