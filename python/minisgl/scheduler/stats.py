"""Counters of the scheduler, its heartbeat, and a snapshot for the engine view."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from minisgl.core.layout import FULL
from minisgl.core.message import EngineView, NodeView, RequestView, StatsMsg, StepView, TierView, ids_to_bytes

if TYPE_CHECKING:
    from minisgl.kvcache.tree import Node
    from minisgl.scheduler.cache import CacheManager
    from minisgl.scheduler.parts import SchedulerParts
    from minisgl.scheduler.plan import Launched
    from minisgl.scheduler.req import Req

HEARTBEAT_S: Final = 0.5
MAX_VIEW_REQUESTS: Final = 48
VIEW_STEPS: Final = 120
HEAD_TOKENS: Final = 32  # shown of a tree node's tokens; there may be thousands


class Stats:
    """Totals since the start, named as in `StatsMsg`; plain integers that the scheduler adds to."""

    def __init__(self) -> None:
        self.prompt_tokens = 0  # accepted
        self.looked_up_tokens = 0  # prompt tokens of the requests that have begun
        self.cached_tokens = 0  # of these, found in the prefix cache
        self.computed_prompt_tokens = 0  # prompt tokens that went through the model; preemption repeats some
        self.generation_tokens = 0
        self.drafted_tokens = 0
        self.accepted_tokens = 0  # drafts
        self.preemptions = 0
        self.dropped = 0  # messages
        # The last ones: number, seconds, rows, prompt tokens, drafts and accepted ones.
        self._steps: deque[tuple[int, float, int, int, int, int]] = deque(maxlen=VIEW_STEPS)
        self._last_beat = 0.0

    def note_step(self, step: Launched, seconds: float, drafted: int, accepted: int) -> None:
        """Remember a collected step for the engine view."""
        rows, prompt_tokens = len(step.sampled) - len(step.prompts), len(step.plan.tokens)
        self._steps.append((step.plan.step, seconds, rows, prompt_tokens, drafted, accepted))

    def last_steps(self) -> list[StepView]:
        """Return the remembered steps, oldest first."""
        return [StepView(number, round(1e3 * seconds, 3), *counts) for number, seconds, *counts in self._steps]

    def heartbeat(self, scheduler: SchedulerParts, now: float) -> StatsMsg | None:
        """Return a snapshot if the last one is HEARTBEAT_S old, else None. `now` is a monotonic clock in seconds."""
        if now - self._last_beat < HEARTBEAT_S:
            return None
        self._last_beat = now
        return self.snapshot(scheduler)

    def snapshot(self, scheduler: SchedulerParts) -> StatsMsg:
        """Return the totals, and the queues and pages of now."""
        cache = scheduler.cache
        free, evictable = cache.free_size, cache.evictable_size
        totals = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        return StatsMsg(
            step=scheduler.step_number,
            running=len(scheduler.decode.running) + len(scheduler.prefill.chunked),
            waiting=scheduler.num_queued,
            pages_total=cache.num_pages,
            pages_free=free,
            pages_evictable=evictable,
            pages_held=cache.num_pages - free - evictable,
            page_size=cache.page_size,
            tiers=_tiers(cache),
            **totals,
        )


def _tiers(cache: CacheManager) -> list[TierView]:
    blocks = cache.arena.blocks
    units = blocks.units // blocks.pages[FULL]
    return [
        TierView(
            name=tier.spec.name,
            pages_total=tier.spec.num_slots // units,
            pages_held=(tier.spec.num_slots - tier.free_size) // units,
            stored=tier.stored_pages // units,
            loaded=tier.loaded_pages // units,
            lost=tier.lost_pages // units,
        )
        for tier in cache.prefix.tiers
    ]


def engine_view(scheduler: SchedulerParts, uid: int, stats: Stats) -> EngineView:
    """Answer the `ViewMsg` of `uid`: a snapshot of bounded size, made in about a millisecond."""
    cache = scheduler.cache
    tree, root_hidden = cache.prefix.outline()
    index = {outlined.node: i for i, outlined in enumerate(tree)}
    locations = ["device", *(tier.spec.name for tier in cache.prefix.tiers)]
    nodes = [
        NodeView(
            parent=parent,
            tokens=len(node.key),
            pages=node.length,
            ref_count=node.ref_count,
            idle_steps=scheduler.step_number - node.timestamp,
            hidden=hidden,
            place=next(name for name, ids in zip(locations, node.locations, strict=True) if len(ids)),
            head=ids_to_bytes(node.key[:HEAD_TOKENS]) if scheduler.shows_texts and not node.is_salted else b"",
        )
        for node, parent, hidden in tree
    ]
    in_prefill, decoding = scheduler.prefill.chunked, scheduler.decode.running
    batch = [(req, True) for req in in_prefill] + [(req, False) for req in decoding]
    free = cache.free_size + len(cache.fenced_pages())
    locked, cached = cache.prefix.protected_size, cache.evictable_size
    return EngineView(
        uid=uid,
        step=scheduler.step_number,
        page_size=cache.page_size,
        pages_total=cache.num_pages,
        pages_free=free,
        pages_private=cache.num_pages - free - locked - cached,
        pages_locked=locked,
        pages_cached=cached,
        running=len(batch),
        waiting=len(scheduler.prefill.waiting),
        requests=[_request(scheduler, req, is_prefill, index) for req, is_prefill in batch[:MAX_VIEW_REQUESTS]],
        nodes=nodes,
        nodes_total=cache.prefix.num_nodes,
        nodes_hidden=root_hidden,
        steps=stats.last_steps(),
        tiers=_tiers(cache),
    )


def _request(scheduler: SchedulerParts, req: Req, is_prefill: bool, index: dict[Node, int]) -> RequestView:
    rows, drafts = scheduler.rows, scheduler.drafts
    return RequestView(
        uid=req.uid,
        is_prefill=is_prefill,
        prompt_tokens=req.prompt_len,
        prefix_tokens=req.prefix_hit,
        computed_tokens=int(rows.cached_len[req.row]),
        output_tokens=max(0, int(rows.confirmed_len[req.row]) - req.prompt_len),
        accepted_tokens=0 if drafts is None or is_prefill else int(drafts.accepted[req.row]),
        pages=len(req.pages),
        node=index.get(req.cache_handle.node, -1),
    )
