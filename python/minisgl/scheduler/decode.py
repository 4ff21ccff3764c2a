"""Running requests: one token each per step, and preemption when pages run out."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from minisgl.scheduler.req import Req, Status

if TYPE_CHECKING:
    from minisgl.scheduler.cache import CacheManager
    from minisgl.scheduler.rows import Index, Rows


class DecodeManager:
    """The requests whose prompt is completely planned, oldest first. Every step serves them before any prompt."""

    def __init__(self, cache: CacheManager, rows: Rows) -> None:
        self.cache = cache
        self.rows = rows
        self.running: list[Req] = []
        self._index: Index | None = None  # the rows of `running`; None after a change

    def add(self, req: Req) -> None:
        bisect.insort(self.running, req, key=lambda r: r.order)
        self._index = None

    def remove(self, req: Req) -> None:
        if req in self.running:
            self.running.remove(req)
            self._index = None

    @property
    def index(self) -> Index:
        """The rows of the running requests, oldest first."""
        if self._index is None:
            self._index = np.array([r.row for r in self.running], np.intp)
        return self._index

    def plan(self, preempt_for: Callable[[Req], bool]) -> tuple[Index, bool]:
        """Return the rows that decode a token in the next step, and whether pages were too few.

        A request at a page boundary needs one more page. When the pool is dry, `preempt_for(req)` preempts the newest
        request and says whether to try again; if not, the request skips this step.
        """
        rows, bounded = self.rows, self.cache.bounded
        index = self.index
        is_ready = rows.cached_len[index] < rows.limit[index]
        if is_ready.all():
            return index, False
        is_short = False
        # The others that are not ready wait for their last token, which is in flight.
        needs_page = ~is_ready & (rows.limit[index] < rows.max_len[index] - 1)
        for req in [self.running[i] for i in np.flatnonzero(needs_page).tolist()]:
            if req.status is Status.RUNNING:  # not preempted for an older request in this loop
                while (page := self.cache.allocate(1)) is None:
                    is_short = True
                    if not preempt_for(req):
                        break
                else:
                    rows.set_pages(req, len(req.pages), page)
                    if bounded is not None:
                        bounded.extend(req)
        index = self.index
        return index[rows.cached_len[index] < rows.limit[index]], is_short
