"""What a scheduler consists of, for those that look at it: the checks, and views for people."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from minisgl.scheduler.cache import CacheManager
    from minisgl.scheduler.decode import DecodeManager
    from minisgl.scheduler.drafts import Drafts
    from minisgl.scheduler.grammars import Grammars
    from minisgl.scheduler.plan import Launched
    from minisgl.scheduler.prefill import PrefillManager
    from minisgl.scheduler.req import Req
    from minisgl.scheduler.rows import Rows


class SchedulerParts(Protocol):
    """The parts of a `Scheduler` that are looked at."""

    cache: CacheManager
    rows: Rows
    prefill: PrefillManager
    decode: DecodeManager
    grammars: Grammars
    drafts: Drafts | None
    live: dict[int, Req]
    leaving: dict[int, Req]
    launched: deque[Launched]
    step_number: int
    shows_texts: bool

    @property
    def num_queued(self) -> int: ...
