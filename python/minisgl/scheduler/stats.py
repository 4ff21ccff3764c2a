"""Counters of one scheduler, and the heartbeat made of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minisgl.message import StatsMsg

if TYPE_CHECKING:
    from minisgl.scheduler.scheduler import Scheduler

HEARTBEAT_S = 0.5


class Stats:
    """Totals since the start; plain integers that the scheduler adds to."""

    def __init__(self) -> None:
        self.prompt_tokens = 0  # accepted
        self.cached_tokens = 0  # of those, found in the prefix cache
        self.computed_prompt_tokens = 0  # prompt tokens that went through the model (retraction computes some again)
        self.generation_tokens = 0
        self.preemptions = 0
        self._last_beat = 0.0

    def heartbeat(self, scheduler: Scheduler, now: float) -> StatsMsg | None:
        """A snapshot if the last one is HEARTBEAT_S old, else None. `now` is a monotonic clock in seconds."""
        if now - self._last_beat < HEARTBEAT_S:
            return None
        self._last_beat = now
        cache = scheduler.cache
        free, evictable = cache.free_size, cache.prefix.evictable_size
        return StatsMsg(
            step=scheduler.step_number,
            running=len(scheduler.decode.running) + len(scheduler.prefill.chunked),
            waiting=scheduler.num_queued,
            pages_total=cache.num_pages,
            pages_free=free,
            pages_evictable=evictable,
            pages_held=cache.num_pages - free - evictable,
            page_size=cache.page_size,
            prompt_tokens=self.prompt_tokens,
            computed_prompt_tokens=self.computed_prompt_tokens,
            cached_tokens=self.cached_tokens,
            generation_tokens=self.generation_tokens,
            preemptions=self.preemptions,
        )
