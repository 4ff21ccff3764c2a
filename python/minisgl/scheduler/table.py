"""Rows of the device's page table, and the writes to it that the next plan must carry."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from minisgl.core import BatchPlan
from minisgl.scheduler.plan import adjust_record

if TYPE_CHECKING:
    from minisgl.core import Ints, Req


class TableManager:
    """Hands out rows and collects what the device must learn about them.

    The host keeps each request's pages in `Req.pages`; the device keeps them in its page table. The two agree once the
    writes taken by `take_writes` have been applied, in plan order.
    """

    def __init__(self, num_rows: int, eos_token_ids: frozenset[int] = frozenset()) -> None:
        self.num_rows = num_rows
        self._eos_token_ids = eos_token_ids
        self._free = deque(range(num_rows))
        # Keyed by place, so that one plan never writes a place twice (the device applies a plan's writes in any order).
        self._page_writes: dict[tuple[int, int], int] = {}
        self._row_writes: dict[int, tuple[int, int, int, int, int, int]] = {}
        self._adjusts: dict[int, Ints] = {}

    @property
    def available(self) -> int:
        return len(self._free)

    def allocate(self, req: Req) -> None:
        """Give `req` a row and record its sampling state; the row must be there (`available`)."""
        row = req.table_idx = self._free.popleft()
        p = req.sampling_params
        temperature, top_p, min_p = np.array([p.temperature, p.top_p, p.min_p], np.float32).view(np.int32).tolist()
        low, high = np.array([req.noise_key], np.int64).view(np.int32).tolist()
        self._row_writes[row] = (temperature, p.top_k, top_p, min_p, low, high)
        self._adjusts.pop(row, None)
        if p.is_adjusted:
            self._adjusts[row] = adjust_record(req, row, self._eos_token_ids)

    def free(self, row: int) -> None:
        self._free.append(row)

    def write_pages(self, row: int, start: int, pages: list[int]) -> None:
        """The row's entries from index `start` on are `pages`."""
        for i, page in enumerate(pages, start):
            self._page_writes[row, i] = page

    def take_writes(self) -> tuple[Ints, Ints, Ints]:
        """The page writes [P, 3], row writes [R, 7] and adjust records [A] since the last call."""
        pages = np.array([(*place, page) for place, page in self._page_writes.items()], np.int32).reshape(-1, 3)
        rows = np.array([(row, *state) for row, state in self._row_writes.items()], np.int32).reshape(
            -1, BatchPlan.ROW_WIDTH
        )
        adjusts = np.concatenate([np.empty(0, np.int32), *self._adjusts.values()])
        self._page_writes, self._row_writes, self._adjusts = {}, {}, {}
        return pages, rows, adjusts

    def free_rows(self) -> list[int]:
        """The free rows (for the invariant checks)."""
        return list(self._free)
