"""A limit on how long one write may take, cheap enough to stand around every token."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Final

CHECKS: Final = 4  # during the time allowed: how late the limit may be noticed


class WriteWatch:
    """`async with WriteWatch(seconds) as watch`, with `watch.begin()` before each write and `watch.end()` behind it.

    Raises `TimeoutError` out of the block when a write takes longer. A timer that looks now and then takes the place of
    one for each write, which would cost more than making the event.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._since: float | None = None
        self._limit = asyncio.timeout(None)
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        self._since = self._loop.time()

    def end(self) -> None:
        self._since = None

    def _look(self) -> None:
        now = self._loop.time()
        if self._since is not None and now - self._since >= self._seconds:
            self._limit.reschedule(now)
        else:
            self._timer = self._loop.call_later(self._seconds / CHECKS, self._look)

    async def __aenter__(self) -> WriteWatch:
        await self._limit.__aenter__()
        self._look()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        await self._limit.__aexit__(kind, error, trace)
