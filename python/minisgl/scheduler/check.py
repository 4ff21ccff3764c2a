"""Does the bookkeeping add up? Fully after every step in the invariant mode (`MINISGL_CHECK=1`), cheaply when idle."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minisgl.core import Status
from minisgl.utils.errors import InvariantError

if TYPE_CHECKING:
    from minisgl.scheduler.scheduler import Scheduler


def check_invariants(scheduler: Scheduler) -> None:
    """Raises `InvariantError` naming the request or page that contradicts the rules of the scheduler package."""
    _check_pages(scheduler)
    _check_rows(scheduler)
    _check_requests(scheduler)
    scheduler.cache.prefix.check_integrity()


def check_idle(scheduler: Scheduler) -> None:
    """The cheap check that always runs when there is nothing to do: whatever was lent is back."""
    cache, table = scheduler.cache, scheduler.table
    if cache.available != cache.num_pages or cache.prefix.protected_size or table.available != table.num_rows:
        raise InvariantError(
            f"idle, but of {cache.num_pages} pages only {cache.available} are available, {cache.prefix.size_info}, "
            f"and of {table.num_rows} rows {table.available}"
        )
    if scheduler.leaving:
        raise InvariantError(f"idle, but {scheduler.leaving} requests are still leaving")


def _check_pages(scheduler: Scheduler) -> None:
    """Each page is free, fenced, cached or private to one request: exactly one of these."""
    cache = scheduler.cache
    free, fenced = cache.unowned_pages()
    owner: dict[int, str] = {}

    def claim(pages: list[int], name: str) -> None:
        for page in pages:
            if page in owner:
                raise InvariantError(f"page {page} belongs to {owner[page]} and to {name}")
            owner[page] = name

    claim(free, "the free list")
    claim(fenced, "the fence")
    claim(cache.prefix.owned_pages(), "the prefix cache")
    for req in scheduler.live.values():
        if req.cache_handle is not None:
            shared = req.cache_handle.num_pages
            claim(req.pages[shared:], f"request {req.uid}")
            for page in req.pages[:shared]:
                if owner.get(page) != "the prefix cache":
                    raise InvariantError(f"request {req.uid} shares page {page}, which {owner.get(page)} owns")
    if len(owner) != cache.num_pages:
        lost = sorted(set(range(cache.num_pages)) - owner.keys())
        raise InvariantError(f"pages {lost[:8]} belong to nobody")


def _check_rows(scheduler: Scheduler) -> None:
    rows = scheduler.table.free_rows() + [r.table_idx for r in scheduler.live.values() if r.table_idx is not None]
    if sorted(rows) != list(range(scheduler.table.num_rows)):
        raise InvariantError(f"rows are lost or held twice: {sorted(rows)}")


def _check_requests(scheduler: Scheduler) -> None:
    in_flight: dict[int, int] = {}
    for step in scheduler.launched:
        for slot in step.slots:
            in_flight[slot.req.uid] = in_flight.get(slot.req.uid, 0) + 1
    leaving = 0
    places = {r.uid for r in (*scheduler.decode.running.values(), *scheduler.prefill.chunked)}
    queued = {r.uid for r in scheduler.prefill.waiting}
    page_size = scheduler.cache.page_size
    for req in scheduler.live.values():
        if req.in_flight != in_flight.get(req.uid, 0):
            raise InvariantError(f"{req} is in {in_flight.get(req.uid, 0)} batches in flight")
        if not 0 <= req.sound_len <= req.cached_len <= req.device_len <= req.max_device_len:
            raise InvariantError(f"lengths out of order: {req}")
        if req.confirmed_len > req.device_len or req.cached_len > len(req.pages) * page_size:
            raise InvariantError(f"more tokens than planned or than there are pages for: {req}")
        if (req.table_idx is None) != (req.cache_handle is None):
            raise InvariantError(f"row without pages or pages without row: {req}")
        if (req.status is Status.RUNNING) != (req.uid in places) or (req.status is Status.WAITING) != (
            req.uid in queued
        ):
            raise InvariantError(f"in the wrong queue: {req}")
        if req.status is Status.WAITING and req.table_idx is not None:
            raise InvariantError(f"waiting with a row: {req}")
        leaving += req.status in (Status.FINISHED, Status.RETRACTING)
    if leaving != scheduler.leaving:
        raise InvariantError(f"{leaving} requests are leaving, {scheduler.leaving} were counted")
