"""What the next plan must tell the device about its rows."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import numpy as np

from minisgl.core import BatchPlan
from minisgl.scheduler.plan import adjust_record

if TYPE_CHECKING:
    from minisgl.core import Ints
    from minisgl.scheduler.req import Req

_VALUES, _BITS = struct.Struct("=3fq"), struct.Struct("=5i")  # the same bytes as numbers and as int32
NO_WRITES = (np.empty((0, 3), np.int32), np.empty((0, BatchPlan.ROW_WIDTH), np.int32), np.empty(0, np.int32))


class RowWrites:
    """Collects page-table entries, sampling states and adjust records between two plans.

    The host keeps each request's pages in `Req.pages`; the device keeps them in its page table. The two agree once the
    writes taken by `take` have been applied, in plan order.
    """

    def __init__(self, eos_token_ids: frozenset[int]) -> None:
        self._eos_token_ids = eos_token_ids
        # Keyed by place, so that one plan never writes a place twice (the device applies a plan's writes in any order):
        # row << 32 | index.
        self._pages: dict[int, int] = {}
        self._rows: dict[int, tuple[int, ...]] = {}
        self._adjusts: dict[int, Ints] = {}

    def fill(self, req: Req) -> None:
        """`req` has got a row: its sampling state."""
        p, row = req.sampling_params, req.row
        temperature, top_p, min_p, *key = _BITS.unpack(_VALUES.pack(p.temperature, p.top_p, p.min_p, req.noise_key))
        self._rows[row] = (row, temperature, p.top_k, top_p, min_p, *key)
        self._adjusts.pop(row, None)
        if p.is_adjusted:
            self._adjusts[row] = adjust_record(req, row, self._eos_token_ids)

    def pages(self, row: int, start: int, pages: list[int]) -> None:
        """The row's entries from index `start` on are `pages`."""
        for place, page in enumerate(pages, row << 32 | start):
            self._pages[place] = page

    def take(self) -> tuple[Ints, Ints, Ints]:
        """The page writes [P, 3], row writes [R, 7] and adjust records [A] since the last call."""
        if not self._pages and not self._rows:
            return NO_WRITES
        places = np.fromiter(self._pages, np.int64, len(self._pages))
        pages = np.empty((len(places), 3), np.int32)
        pages[:, 0], pages[:, 1] = places >> 32, places & 0xFFFFFFFF
        pages[:, 2] = np.fromiter(self._pages.values(), np.int32, len(places))
        rows = np.array(list(self._rows.values()), np.int32).reshape(-1, BatchPlan.ROW_WIDTH)
        adjusts = np.concatenate([np.empty(0, np.int32), *self._adjusts.values()])
        self._pages, self._rows, self._adjusts = {}, {}, {}
        return pages, rows, adjusts
