"""When the server ends: on a signal, or when one of its processes does. All API processes end together."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Final

from minisgl.launch.http_server import Service
from minisgl.message import StopMsg
from minisgl.process.processes import Processes

logger = logging.getLogger(__name__)

LEAVE_S: Final = 4.0  # for the other API processes to go, beyond the time that their requests get


class Supervisor:
    """The main process's part: it serves like the other API processes, and watches over all of them."""

    def __init__(self, service: Service, drain_timeout: float, engine: Processes, workers: Processes) -> None:
        """`engine` are the processes without which nothing works, `workers` the other API processes."""
        self.exit_code = 0
        self._service = service
        self._drain_timeout = drain_timeout
        self._groups: Sequence[Processes] = (engine, workers)
        self._workers = set(workers.sentinels)
        self._workers_gone = asyncio.Event()
        self._stopping: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run(self, sock: socket.socket, on_ready: Callable[[], None]) -> None:
        """Serve until stopped."""
        loop = self._loop = asyncio.get_running_loop()

        def watch() -> None:
            if threading.current_thread() is threading.main_thread():
                for number in (signal.SIGINT, signal.SIGTERM):
                    loop.add_signal_handler(number, self.stop)
            for group in self._groups:
                for name, sentinel in group.sentinels.items():
                    loop.add_reader(sentinel, self._child_ended, group, name, sentinel)
            on_ready()

        await self._service.run(sock, watch)

    def stop(self) -> None:
        """The first call drains; the second one ends at once."""
        if self._stopping is None and (n := self._service.frontend.all_entries):
            logger.info("finishing %d requests; repeat the signal to stop now", n)
        self._stop(StopMsg(0.0 if self._stopping else self._drain_timeout))

    def stop_from_other_thread(self) -> None:
        """`stop` for whoever does not run in the server's own thread; harmless when it has ended."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.stop)

    def _stop(self, msg: StopMsg) -> None:
        if self._stopping is not None:
            self._stopping.cancel()
        self._stopping = asyncio.create_task(self._end(msg))

    async def _end(self, msg: StopMsg) -> None:
        """End all API processes; this one is the last, because the engine must not leave before their requests."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(msg.drain_s + LEAVE_S):
                await self._service.frontend.peers.tell(msg)
                await self._service.drain(msg)
                if self._workers:
                    await self._workers_gone.wait()
        self._service.exit()

    def _child_ended(self, group: Processes, name: str, sentinel: int) -> None:
        asyncio.get_running_loop().remove_reader(sentinel)
        if name in self._workers:
            self._workers.remove(name)
            if not self._workers:
                self._workers_gone.set()
            if self._stopping is not None:
                return  # as it was told
        if self._service.is_exiting:
            return
        self.exit_code = 1
        cause = group.describe_end(name)
        logger.error("%s; the server stops", cause)
        self._stop(StopMsg(0.0, f"the server failed: {cause}"))
