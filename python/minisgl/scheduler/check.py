"""Checks of the bookkeeping: all of it after every step in the invariant mode (`MINISGL_CHECK=1`), a part when idle."""

from __future__ import annotations

from collections import Counter
from itertools import chain, pairwise
from typing import TYPE_CHECKING

import numpy as np

from minisgl.core.errors import InvariantError
from minisgl.core.layout import STATE, Flag
from minisgl.scheduler.req import Status
from minisgl.scheduler.writes import decode_flags

if TYPE_CHECKING:
    from minisgl.scheduler.drafts import Drafts
    from minisgl.scheduler.parts import SchedulerParts
    from minisgl.scheduler.req import Req


def check_invariants(scheduler: SchedulerParts) -> None:
    """Raise `InvariantError` with the request or page that contradicts the rules of the scheduler package."""
    _check_pages(scheduler)
    _check_bounded(scheduler)
    _check_rows(scheduler)
    _check_requests(scheduler)
    scheduler.cache.prefix.check_integrity()


def check_idle(scheduler: SchedulerParts) -> None:
    """Check cheaply, whenever the scheduler is idle, that all rows and pages have been given back."""
    cache, rows = scheduler.cache, scheduler.rows
    used, cached = cache.pages.num_used, cache.prefix.size_info
    if used != cached.evictable_size or cached.protected_size or rows.available != rows.num_rows:
        raise InvariantError(f"idle, but {used} pages are used, {cached}, and of {rows.num_rows} rows {rows.available}")
    if scheduler.leaving:
        raise InvariantError(f"idle, but requests {list(scheduler.leaving)} are still leaving")
    if cache.bounded is not None and any(pool.rows for pool in cache.bounded.pools):
        raise InvariantError("idle, but rows have window pages or slots")


def _check_pages(scheduler: SchedulerParts) -> None:
    """Each page of a block is free, fenced, cached or private to one request: exactly one of these."""
    cache = scheduler.cache
    cache.arena.check()
    owner: dict[int, str] = {}

    def claim(pages: list[int], name: str) -> None:
        for page in pages:
            if page in owner:
                raise InvariantError(f"page {page} belongs to {owner[page]} and to {name}")
            owner[page] = name

    claim([*cache.pages.free], "the free list")
    claim(cache.fenced_pages(), "the fence")
    claim(cache.prefix.owned_pages(), "the prefix cache")
    for req in scheduler.live.values():
        if req.cache_handle is not None:
            shared = req.cache_handle.num_pages
            claim(req.pages[shared:], f"request {req.uid}")
            for page in req.pages[:shared]:
                if owner.get(page) != "the prefix cache":
                    raise InvariantError(f"request {req.uid} shares page {page}, which {owner.get(page)} owns")
    if len(owner) != cache.pages.num_used + len(cache.pages.free):
        raise InvariantError(f"{cache.pages.num_used} pages are in use, but {len(owner)} have an owner or are free")


def _check_bounded(scheduler: SchedulerParts) -> None:
    """Ids of window pages and slots are free or held, and shared as counted; rows and snapshots have all they need."""
    rows, bounded = scheduler.rows, scheduler.cache.bounded
    held = [req for req in scheduler.live.values() if req.table_idx is not None]
    awaited = Counter(req.target.node for req in scheduler.live.values() if req.target is not None)
    if awaited != (Counter() if bounded is None else bounded.snapshots.awaited):
        raise InvariantError(f"requests await {awaited}")
    for pool in () if bounded is None else bounded.pools:
        assert bounded is not None
        cached = {i for snapshot in bounded.snapshots.of.values() for i in pool.snapshots[snapshot].values()}
        owners = {*bounded.snapshots.of.values(), *(snapshot for req in held for _, snapshot in req.captures)}
        if pool.rows.keys() != {req.row for req in held} or pool.snapshots.keys() != owners:
            raise InvariantError(f"ids of group {pool.group} belong to rows or snapshots that are gone")
        kept = Counter(chain(*(ids.values() for ids in pool.snapshots.values())))
        holders = kept + Counter(chain(*(ids.values() for ids in pool.rows.values())))
        if holders.keys() & pool.free.keys() or len(holders) != pool.num_used or pool.excess > pool.reserve:
            raise InvariantError(f"ids of group {pool.group} are lost, free and held, or held in excess")
        others = {i: count - 1 for i, count in holders.items() if count > 1}
        if kept != pool.kept or others != pool.others or (others and not pool.is_shared):
            raise InvariantError(f"ids of group {pool.group} are shared otherwise than counted: {others}")
        for node, snapshot in bounded.snapshots.of.items():
            length = node.depth * rows.page_size
            if [*pool.snapshots[snapshot]] != [*pool.span(length, length)]:
                raise InvariantError(f"the snapshot at depth {node.depth} lacks the ids of its text")
        for req in held:
            own = pool.rows[req.row]
            needed = pool.span(int(bounded.computed_len[req.row]), int(rows.cached_len[req.row]))
            needed = range(0) if req.is_loading else needed
            if not {*needed} <= own.keys() or min(own, default=needed.start) < needed.start:
                raise InvariantError(f"{req} needs {needed} of group {pool.group} and has {own}")
            if any(own[i] in others for i in own if i * pool.page_size >= rows.cached_len[req.row]):
                raise InvariantError(f"{req} will write ids of group {pool.group} that others share: {own}")
        for plan in (step.plan for step in scheduler.launched):
            copies, starts = (
                np.concatenate([plan.restores, plan.captures]),
                dict(plan.sequences[["row", "start"]].tolist()),
            )
            if pool.group == STATE and not {*plan.restores["source"].tolist()} <= cached - {*copies["target"].tolist()}:
                raise InvariantError(f"step {plan.step} restores ids that it writes, or of no snapshot: {copies}")
            if any(starts.get(row, length) != length for *_, row, length in plan.restores.tolist()):
                raise InvariantError(f"step {plan.step} restores {plan.restores}, and computes {plan.sequences}")


def _check_rows(scheduler: SchedulerParts) -> None:
    """Each row is free or held by one request, and the arrays agree with that request."""
    rows = scheduler.rows
    held = {r.table_idx: r for r in scheduler.live.values() if r.table_idx is not None}
    if sorted([*rows.free_rows(), *held]) != list(range(rows.num_rows)):
        raise InvariantError(f"rows are lost or held twice: {sorted(rows.free_rows())} are free, {held}")
    newest = dict.fromkeys(range(rows.num_rows), 0)  # the newest step in flight that holds the row
    for step in scheduler.launched:
        if step.plan.step <= rows.last_collected:
            raise InvariantError(f"step {step.plan.step} is in flight, but {rows.last_collected} was collected last")
        held_by = [*step.plan.sequences["row"].tolist(), *step.plan.restores["row"].tolist()]
        newest.update(dict.fromkeys(held_by, step.plan.step))
    for row, req in enumerate(rows.requests):
        if req is not held.get(row):
            raise InvariantError(f"row {row} is held by {held.get(row)}, the arrays say by {req}")
        if int(rows.last_step[row]) != newest[row] and (newest[row] or rows.last_step[row] > rows.last_collected):
            raise InvariantError(f"row {row} is in flight up to step {newest[row]}, not {rows.last_step[row]}: {req}")
        if req is not None:
            _check_row(scheduler, req)
    matchers = sum(r.matcher is not None for r in scheduler.live.values() if r.status is not Status.FINISHED)
    if scheduler.grammars.num_matchers != matchers:
        raise InvariantError(f"{scheduler.grammars.num_matchers} matchers are counted, not {matchers}")
    running = scheduler.decode.running
    if scheduler.decode.index.tolist() != [r.table_idx for r in running]:
        raise InvariantError(f"decoding rows {scheduler.decode.index} are not those of {running}")
    if any(a.order >= b.order for a, b in pairwise(running)):
        raise InvariantError(f"running requests are not in order of arrival: {running}")


def _check_row(scheduler: SchedulerParts, req: Req) -> None:
    rows, row = scheduler.rows, req.row
    cached = int(rows.cached_len[row])
    confirmed = int(rows.confirmed_len[row])
    limit = int(rows.limit[row])
    where = f"{req} with {cached} tokens cached, {confirmed} confirmed, limit {limit}"
    capacity = len(req.pages) * rows.page_size
    stored = int(rows.uid[row]), int(rows.max_len[row]), int(rows.flags[row])
    if stored != (req.uid, req.max_len, decode_flags(req)):
        raise InvariantError(f"the arrays say uid, max_len, flags = {stored}: {where}")
    may_be_dead = req.status in (Status.FINISHED, Status.PREEMPTED)  # the latter where a loaded page was damaged
    is_dead = not rows.is_live[row]
    has_limit = limit == min(capacity, req.max_len - 1) or req.is_loading
    if not has_limit or (req.status is Status.FINISHED) > is_dead or is_dead > may_be_dead:
        raise InvariantError(f"`limit` or `is_live` ({rows.is_live[row]}) contradicts the request: {where}")
    if not 0 <= cached <= min(capacity, req.max_len - 1):
        raise InvariantError(f"the row has more tokens than its pages hold, or than the request allows: {where}")
    planned = cached + 1 if cached >= len(req.ids) else len(req.ids)
    if scheduler.drafts is not None:
        _check_drafts(scheduler, req, scheduler.drafts)
    if not len(req.ids) <= confirmed <= planned <= req.max_len or not 0 <= rows.finite_len(req) <= cached:
        raise InvariantError(f"the lengths of the request are out of order: {where}")
    is_live = req.status in (Status.RUNNING, Status.PREEMPTED)
    if is_live and not rows.is_in_flight(req) and confirmed != planned:
        raise InvariantError(f"nothing is in flight, but not all planned tokens are confirmed: {where}")
    is_decoding = req.status is Status.RUNNING and cached >= len(req.ids)
    if is_decoding != (req in scheduler.decode.running):
        raise InvariantError(f"the prompt is planned, but the request does not decode, or the reverse: {where}")


def _check_drafts(scheduler: SchedulerParts, req: Req, drafts: Drafts) -> None:
    """Drafts in flight are counted, and a row with such drafts goes on with DRAFTS."""
    sequences = [
        sequence for step in scheduler.launched for sequence in step.plan.sequences if sequence["row"] == req.row
    ]
    in_flight = sum(
        int(sequence["stop"] - sequence["start"]) - 1 for sequence in sequences if sequence["flags"] & Flag.DRAFTS
    )
    if in_flight != drafts.in_flight[req.row] or (in_flight and not sequences[-1]["flags"] & Flag.DRAFTS):
        raise InvariantError(f"{in_flight} drafts are in flight, not {drafts.in_flight[req.row]}: {req}")


def _check_requests(scheduler: SchedulerParts) -> None:
    running = {r.uid for r in (*scheduler.decode.running, *scheduler.prefill.chunked)}
    queued = {r.uid for r in scheduler.prefill.waiting}
    leaving = set()
    for uid, req in scheduler.live.items():
        if uid != req.uid or not 0 < req.prompt_len <= len(req.ids) < req.max_len:
            raise InvariantError(f"the lengths of the request are out of order: {req}")
        if (req.table_idx is None) != (req.cache_handle is None):
            raise InvariantError(f"the request has a row without pages, or pages without a row: {req}")
        if (req.status is Status.RUNNING) != (uid in running) or (req.status is Status.WAITING) != (uid in queued):
            raise InvariantError(f"the request is in the wrong queue: {req}")
        if (req.status in (Status.WAITING, Status.COMPILING)) != (req.table_idx is None):
            raise InvariantError(f"the request waits with a row, or runs without one: {req}")
        if req.status in (Status.FINISHED, Status.PREEMPTED):
            leaving.add(uid)
            if not scheduler.rows.is_in_flight(req):
                raise InvariantError(f"the request has left and is not in flight, but was not released: {req}")
    if leaving != scheduler.leaving.keys() or not running | queued | leaving <= scheduler.live.keys():
        raise InvariantError(f"requests {leaving} are leaving, but {list(scheduler.leaving)} are listed")
