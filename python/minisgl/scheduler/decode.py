"""Running requests: one token each per step, and what happens when there is no page for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from minisgl.core import Req, SeqSlot

if TYPE_CHECKING:
    from minisgl.scheduler.cache import CacheManager
    from minisgl.scheduler.table import TableManager


class DecodeManager:
    """The requests whose prompt is planned completely. They go first in every step, oldest first."""

    def __init__(self, cache: CacheManager, table: TableManager) -> None:
        self.cache = cache
        self.table = table
        self.running: dict[int, Req] = {}

    def add(self, req: Req) -> None:
        self.running[req.uid] = req

    def remove(self, req: Req) -> None:
        self.running.pop(req.uid, None)

    def plan(self, make_room: Callable[[Req], bool]) -> list[SeqSlot]:
        """A slot for each running request that may go on.

        A request at a page boundary needs one more page. When the pool is dry, `make_room(req)` retracts a newer
        request and says whether to try again; if not, the request sits this step out.
        """
        slots = []
        # Oldest first, so that whoever is retracted (the newest) has not been planned yet.
        for req in sorted(self.running.values(), key=lambda r: r.order):
            if not req.can_decode:
                continue  # retracted a moment ago, or its last token is in flight
            if req.cached_len == len(req.pages) * self.cache.page_size and not self._grow(req, make_room):
                continue
            assert req.table_idx is not None, f"running without a row: {req}"
            slots.append(SeqSlot(req, req.table_idx, req.cached_len, req.device_len, samples=True, from_device=True))
        return slots

    def _grow(self, req: Req, make_room: Callable[[Req], bool]) -> bool:
        while (page := self.cache.allocate(1)) is None:
            if not make_room(req):
                return False
        assert req.table_idx is not None
        self.table.write_pages(req.table_idx, len(req.pages), page)
        req.pages += page
        return True
