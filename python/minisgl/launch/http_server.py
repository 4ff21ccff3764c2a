"""The HTTP server of the main process: uvicorn, which stops on a signal or when a child process ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from typing import Any, Final

import uvicorn
import uvloop
from starlette.applications import Starlette

from minisgl.api.frontend import FrontendManager
from minisgl.errors import StartupError
from minisgl.launch.http_protocol import BoundedHttpProtocol, Connections, connection_limit
from minisgl.launch.replicas import Replicas
from minisgl.process.processes import Processes
from minisgl.settings.options import ServerArgs

WATCH_S: Final = 1.0
SILENT_S: Final = 4.0  # without a sign of life, until /health reports a process: a busy machine may delay it
LAST_WORDS_S: Final = 1.0  # for error events to reach clients before connections are closed

logger = logging.getLogger(__name__)


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Install no signal handlers: `HttpServer` has its own, which drain requests first."""
        yield


class HttpServer:
    """Serves `app` and watches the child processes. `exit_code` is 1 if a child has ended unexpectedly."""

    def __init__(
        self,
        app: Starlette,
        children: Processes,
        args: ServerArgs,
        tls: ssl.SSLContext | None = None,
        replicas: Replicas | None = None,
    ) -> None:
        """With `replicas`, the server outlives the death of a replica."""
        self.exit_code = 0
        self._args = args
        self._app = app
        self._children = children
        self._replicas = replicas
        self._stopping: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        config = uvicorn.Config(
            app,
            http=partial(BoundedHttpProtocol, Connections(connection_limit())),  # type: ignore[arg-type]
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=1,
            timeout_keep_alive=30,
        )
        config.load()
        config.ssl = tls
        self._uvicorn = _Uvicorn(config)

    def run(self, sock: socket.socket, on_ready: Callable[[], None]) -> None:
        """Serve in this thread until stopped. Calls `on_ready` once requests are accepted."""
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._serve(sock, on_ready))

    async def _serve(self, sock: socket.socket, on_ready: Callable[[], None]) -> None:
        loop = self._loop = asyncio.get_running_loop()
        serving = asyncio.create_task(self._uvicorn.serve(sockets=[sock]))
        while not self._uvicorn.started:
            if serving.done():
                raise StartupError(f"the HTTP server could not start: {serving.exception()}")
            await asyncio.sleep(0.005)
        handlers = {signal.SIGINT: self.stop, signal.SIGTERM: self.stop}
        for name in self._children.sentinels:
            self._watch_end(name)
        if self._replicas is not None:
            self._replicas.attach(self._frontend.dispatcher, self._watch_end, self._unwatch_end)
            handlers |= self._replicas.handlers
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                loop.add_signal_handler(number, handler)
        on_ready()
        watching = asyncio.create_task(self._watch())
        await serving
        watching.cancel()

    async def _watch(self) -> None:
        """Report a silent process in `stalled`; kill one that stays silent or in one step for the hang timeout."""
        while True:
            await asyncio.sleep(WATCH_S)
            replicas, silence = self._replicas, self._children.silence()
            watched = silence if replicas is None else {n: s for n, s in silence.items() if not replicas.owns(n)}
            name, seconds = max(watched.items(), key=lambda item: item[1])
            self._frontend.stalled = f"no sign of life from {name} for {seconds:.0f} s" if seconds > SILENT_S else ""
            schedulers = {0: next(iter(silence))} if replicas is None else replicas.schedulers
            for index, since_step in self._frontend.dispatcher.silence.items():
                watched[schedulers[index]] = max(since_step, silence[schedulers[index]])
            name, seconds = max(watched.items(), key=lambda item: item[1])
            if seconds > self._args.heartbeat_timeout and not self._uvicorn.should_exit:
                logger.error("%s hangs for %.0f s (--heartbeat-timeout); it is killed", name, seconds)
                await asyncio.get_running_loop().run_in_executor(None, self._children.give_up, name)
                if replicas is None or not replicas.owns(name):
                    return

    @property
    def _frontend(self) -> FrontendManager:
        frontend: FrontendManager = self._app.state.frontend  # made by the application's lifespan
        return frontend

    def stop(self) -> None:
        """Stop the server: finish open requests first; on a second call, end them at once."""
        if self._stopping is None and (n := self._frontend.entries):
            logger.info("finishing %d requests; repeat the signal to stop now", n)
        self._end(self._drain(0.0 if self._stopping else self._args.drain_timeout))

    def stop_from_other_thread(self) -> None:
        """Call `stop` from any thread. Does nothing if the server has ended."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.stop)

    def _watch_end(self, name: str) -> None:
        """Call `_child_ended` when the process `name` ends."""
        sentinel = self._children.sentinels[name]
        asyncio.get_running_loop().add_reader(sentinel, self._child_ended, name, sentinel)

    def _unwatch_end(self, name: str) -> None:
        asyncio.get_running_loop().remove_reader(self._children.sentinels[name])

    def _child_ended(self, name: str, sentinel: int) -> None:
        asyncio.get_running_loop().remove_reader(sentinel)
        if self._uvicorn.should_exit:
            return
        if self._replicas is not None and self._replicas.owns(name):
            self._replicas.ended(name)
            return
        self.exit_code = 1
        cause = self._children.describe_end(name)
        logger.error("%s; the server stops", cause)
        self._end(self._fail(f"the server failed: {cause}"))

    def _end(self, ending: Coroutine[Any, Any, None]) -> None:
        """Run `ending`; cancel the one in progress, if any."""
        if self._stopping is not None:
            self._stopping.cancel()
        self._stopping = asyncio.create_task(ending)

    async def _drain(self, timeout: float) -> None:
        """Refuse new requests, wait up to `timeout` seconds for open ones, and end the rest with an error."""
        await self._frontend.drain(timeout)
        if not await self._frontend.wait_idle(LAST_WORDS_S):
            logger.warning("%d requests are still open", self._frontend.entries)
        self._uvicorn.should_exit = True

    async def _fail(self, cause: str) -> None:
        """End every open request with the error `cause`, then stop."""
        self._frontend.fail(cause)
        await asyncio.sleep(LAST_WORDS_S)  # for the error events, and for /health to show the cause to a probe
        self._uvicorn.should_exit = True
