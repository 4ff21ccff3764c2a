"""When the server ends: on a signal, or when one of its processes does."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from minisgl.launch.http_server import Service
from minisgl.process.processes import Processes

logger = logging.getLogger(__name__)


class Supervisor:
    """Runs the HTTP server and watches the child processes."""

    def __init__(self, service: Service, drain_timeout: float, children: Processes) -> None:
        self.exit_code = 0
        self._service = service
        self._drain_timeout = drain_timeout
        self._children = children
        self._stopping: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run(self, sock: socket.socket, on_ready: Callable[[], None]) -> None:
        """Serve until stopped."""
        loop = self._loop = asyncio.get_running_loop()

        def watch() -> None:
            if threading.current_thread() is threading.main_thread():
                for number in (signal.SIGINT, signal.SIGTERM):
                    loop.add_signal_handler(number, self.stop)
            for name, sentinel in self._children.sentinels.items():
                loop.add_reader(sentinel, self._child_ended, name, sentinel)
            on_ready()

        await self._service.run(sock, watch)

    def stop(self) -> None:
        """The first call drains the open requests; the second one ends them at once."""
        if self._stopping is None and (n := self._service.frontend.entries):
            logger.info("finishing %d requests; repeat the signal to stop now", n)
        self._end(self._drain(0.0 if self._stopping else self._drain_timeout))

    def stop_from_other_thread(self) -> None:
        """`stop`, callable from any thread; does nothing when the server has ended."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.stop)

    def _end(self, ending: Coroutine[Any, Any, None]) -> None:
        """Run `ending` instead of the one that is under way, if any."""
        if self._stopping is not None:
            self._stopping.cancel()
        self._stopping = asyncio.create_task(ending)

    async def _drain(self, timeout: float) -> None:
        await self._service.drain(timeout)
        self._service.exit()

    async def _fail(self, cause: str) -> None:
        await self._service.fail(cause)
        self._service.exit()

    def _child_ended(self, name: str, sentinel: int) -> None:
        asyncio.get_running_loop().remove_reader(sentinel)
        if self._service.is_exiting:
            return
        self.exit_code = 1
        cause = self._children.describe_end(name)
        logger.error("%s; the server stops", cause)
        self._end(self._fail(f"the server failed: {cause}"))
