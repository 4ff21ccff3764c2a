"""What the next plan must tell the device about its rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from minisgl.layout import NO_INTS, NO_PAGE_WRITES, NO_ROW_STATES, PAGE_WRITE, ROW_STATE
from minisgl.scheduler.plan import penalty_record

if TYPE_CHECKING:
    from minisgl.layout import Ints, Records
    from minisgl.scheduler.req import Req


class RowWrites:
    """Collects page-table entries, sampling states and penalty records between two plans.

    The host keeps each request's pages in `Req.pages`; the device keeps them in its page table. The two agree once the
    writes taken by `take` have been applied, in plan order.
    """

    def __init__(self, eos_token_ids: frozenset[int]) -> None:
        self._eos_token_ids = eos_token_ids
        # Keyed by row << 32 | index, so that one plan never writes an entry twice: the device applies a plan's writes
        # in any order.
        self._pages: dict[int, int] = {}
        self._states: dict[int, tuple[int, float, int, float, float, int]] = {}
        self._penalties: dict[int, Ints] = {}

    def fill(self, req: Req) -> None:
        """Write the sampling state of `req`, which has just got its row."""
        p, row = req.sampling_params, req.row
        self._states[row] = (row, p.temperature, p.top_k, p.top_p, p.min_p, req.noise_key)
        self._penalties.pop(row, None)
        if p.has_penalties:
            self._penalties[row] = penalty_record(req, row, self._eos_token_ids)

    def pages(self, row: int, start: int, pages: list[int]) -> None:
        """Write `pages` to the row's entries from index `start` on."""
        for entry, page in enumerate(pages, row << 32 | start):
            self._pages[entry] = page

    def take(self) -> tuple[Records, Records, Ints]:
        """The page writes, row states and penalty records since the last call, as in `BatchPlan`."""
        if not self._pages and not self._states:
            return NO_PAGE_WRITES, NO_ROW_STATES, NO_INTS
        entries = np.fromiter(self._pages, np.int64, len(self._pages))
        pages = np.empty(len(entries), PAGE_WRITE)
        pages["row"] = entries >> 32
        pages["index"] = entries & 0xFFFFFFFF
        pages["page"] = np.fromiter(self._pages.values(), np.int32, len(entries))
        states = np.array(list(self._states.values()), ROW_STATE)
        penalties = np.concatenate([NO_INTS, *self._penalties.values()])
        self._pages, self._states, self._penalties = {}, {}, {}
        return pages, states, penalties
