"""The other API processes of the same server: what they say of themselves, and how they are told something."""

from __future__ import annotations

import os
from collections.abc import Sequence

from minisgl.message import Codec, FrontendMsg, WorkerMsg
from minisgl.process.queues import ZmqAsyncPushQueue


class Peers:
    """API process `own` among those that listen at `addrs`; most servers have one, and then nothing is ever sent."""

    def __init__(self, addrs: Sequence[str], own: int) -> None:
        codec: Codec[FrontendMsg] = Codec(FrontendMsg)
        self._own = own
        self._queues: list[ZmqAsyncPushQueue[FrontendMsg]] = [
            ZmqAsyncPushQueue(addr, codec) for i, addr in enumerate(addrs) if i != own
        ]
        self._reports: dict[int, WorkerMsg] = {}
        self._reported: WorkerMsg | None = None

    @property
    def reports(self) -> list[WorkerMsg]:
        """The last word of each that has spoken."""
        return list(self._reports.values())

    def note(self, msg: WorkerMsg) -> None:
        self._reports[msg.worker] = msg

    async def report(self, entries: int, tally: list[float]) -> None:
        """Tell the others how we are, if that has changed."""
        if not self._queues:
            return
        msg = WorkerMsg(self._own, os.getpid(), entries, tally)
        if msg != self._reported:
            self._reported = msg
            await self.tell(msg)

    async def tell(self, msg: FrontendMsg) -> None:
        """Send `msg` to each of the others."""
        for queue in self._queues:
            await queue.put([msg])

    def close(self) -> None:
        for queue in self._queues:
            queue.close()
