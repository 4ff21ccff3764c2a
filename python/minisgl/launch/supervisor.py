"""Serves HTTP in the main process, and watches, restarts, adds and ends the processes of the server.

Each process is a member of one of two groups. If a process ends that all requests need, the server ends, with an error
to every open stream. If a replica of `--dp` ends, other replicas take over its requests and it is restarted.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import uvicorn
import uvloop
from starlette.applications import Starlette

from minisgl.api.dispatch import Dispatcher
from minisgl.api.frontend import FrontendManager
from minisgl.core.errors import MinisglError, StartupError
from minisgl.device.machine import choose_device, gpu_memory
from minisgl.launch.http_protocol import IDLE_S, BoundedHttpProtocol, Connections, connection_limit
from minisgl.process.processes import EXIT_S, Child, Processes
from minisgl.settings.options import ServerArgs

WATCH_S: Final = 1.0
SILENT_S: Final = 4.0  # without a heartbeat, until /health reports a process: a busy machine may delay it
LAST_WORDS_S: Final = 1.0  # for error events to reach clients before connections are closed
RETRY_S: Final = 5.0  # between attempts to start a replica
POLL_S: Final = 0.05

logger = logging.getLogger(__name__)

MakeChildren = Callable[[int, int], list[Child]]  # (index, incarnation) -> the processes to start


@dataclass
class _Replica:
    """One incarnation of a replica: its number, its processes by rank, and the futures that end it."""

    incarnation: int
    names: list[str]
    died: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    leaving: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    is_removed: bool = False  # no other incarnation follows


class Supervisor:
    """Runs the HTTP server until a signal or the end of a process. `exit_code` is 1 if a process ended unexpectedly.

    All of this runs on the event loop, in the thread that starts processes.
    """

    def __init__(
        self, app: Starlette, processes: Processes, args: ServerArgs, make: MakeChildren, tls: ssl.SSLContext | None
    ) -> None:
        """`make` returns the processes of another incarnation of a replica."""
        self.exit_code = 0
        self.replicas: dict[int, _Replica] = {}  # by index; empty without `--dp`
        self._args = args
        self._app = app
        self._processes = processes
        self._make = make
        self._incarnations = itertools.count(args.dp)
        self._changing = asyncio.Lock()  # held by one signal at a time
        self._tasks: set[asyncio.Task[None]] = set()
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
            timeout_keep_alive=int(IDLE_S),
        )
        config.load()
        config.ssl = tls
        self._uvicorn = uvicorn.Server(config)
        self._uvicorn.lifespan = config.lifespan_class(config)

    @property
    def _frontend(self) -> FrontendManager:
        frontend: FrontendManager = self._app.state.frontend  # made by the application's lifespan
        return frontend

    @property
    def _dispatcher(self) -> Dispatcher:
        return self._frontend.dispatcher

    def run(self, sock: socket.socket, on_ready: Callable[[], None]) -> None:
        """Serve in this thread until stopped. Calls `on_ready` once requests are accepted."""
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self.serve(sock, on_ready))

    async def serve(self, sock: socket.socket, on_ready: Callable[[], None]) -> None:
        """Serve until stopped."""
        loop = self._loop = asyncio.get_running_loop()
        await self._uvicorn.startup([sock])
        handlers: dict[signal.Signals, Callable[[], None]] = {signal.SIGINT: self.stop, signal.SIGTERM: self.stop}
        if self._args.dp > 1:
            for index in range(self._args.dp):
                prefix = f"minisgl-DP{index}-"
                self.replicas[index] = _Replica(index, [n for n in self._processes.pids if n.startswith(prefix)])
                self._run(self._keep(index))
            changes = {signal.SIGUSR2: self._renew, signal.SIGTTIN: self._add, signal.SIGTTOU: self._remove}
            handlers |= {number: partial(self._change, change) for number, change in changes.items()}
        for name in self._processes.sentinels:
            self._watch_end(name)
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                loop.add_signal_handler(number, handler)
        on_ready()
        self._run(self._watch_heartbeats())
        await self._uvicorn.main_loop()
        await self._uvicorn.shutdown([sock])
        for task in self._tasks:
            task.cancel()

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- the processes

    def _replica_of(self, name: str) -> _Replica | None:
        return next((replica for replica in self.replicas.values() if name in replica.names), None)

    def _watch_end(self, name: str) -> None:
        """Call `_ended` when the process `name` ends."""
        sentinel = self._processes.sentinels[name]
        asyncio.get_running_loop().add_reader(sentinel, self._ended, name, sentinel)

    def _ended(self, name: str, sentinel: int) -> None:
        asyncio.get_running_loop().remove_reader(sentinel)
        if self._uvicorn.should_exit:
            return
        cause = self._processes.describe_end(name)
        if (replica := self._replica_of(name)) is not None:
            if not replica.died.done():
                logger.error("%s; other replicas take over its requests", cause)
                replica.died.set_result(None)
            return
        self.exit_code = 1
        logger.error("%s; the server stops", cause)
        self._end(self._fail(f"the server failed: {cause}"))

    async def _watch_heartbeats(self) -> None:
        """Report a silent process in `stalled`; kill one that stays silent or in one step for the hang timeout."""
        while True:
            await asyncio.sleep(WATCH_S)
            silence = self._processes.silence()
            watched = {name: seconds for name, seconds in silence.items() if self._replica_of(name) is None}
            name, seconds = max(watched.items(), key=lambda item: item[1])
            self._frontend.stalled = f"no heartbeat from {name} for {seconds:.0f} s" if seconds > SILENT_S else ""
            schedulers = {i: r.names[0] for i, r in self.replicas.items() if r.names} or {0: next(iter(silence))}
            for index, since_step in self._dispatcher.silence.items():
                watched[schedulers[index]] = max(since_step, silence[schedulers[index]])
            name, seconds = max(watched.items(), key=lambda item: item[1])
            if seconds > self._args.heartbeat_timeout and not self._uvicorn.should_exit:
                logger.error("%s hangs for %.0f s (--heartbeat-timeout); it is killed", name, seconds)
                await asyncio.to_thread(self._processes.give_up, name)
                if self._replica_of(name) is None:
                    return

    # -- replicas

    async def _keep(self, index: int) -> None:
        """Restart replica number `index` whenever it has died or is renewed, until it is removed."""
        while True:
            replica = self.replicas[index]
            drain_timeout = self._args.drain_timeout
            has_died = await self._dispatcher.serve(replica.incarnation, replica.died, replica.leaving, drain_timeout)
            await self._end_replica(replica, 0.0 if has_died else EXIT_S)
            if replica.is_removed:
                break
            while not await self._start(index):
                await asyncio.sleep(RETRY_S)
        del self.replicas[index]
        logger.info("replica %d has ended", index)

    async def _end_replica(self, replica: _Replica, seconds: float) -> None:
        sentinels = self._processes.sentinels
        for name in sentinels.keys() & replica.names:
            asyncio.get_running_loop().remove_reader(sentinels[name])  # its end is no news
        await asyncio.to_thread(self._processes.end, replica.names, seconds)

    async def _start(self, index: int) -> bool:
        """Start another incarnation of replica number `index`. Return whether it is ready, and then gets requests."""
        self._dispatcher.starting.add(index)
        incarnation, began = next(self._incarnations), time.monotonic()
        replica = self.replicas[index] = _Replica(incarnation, [])
        try:
            children = self._make(index, incarnation)
            replica.names = [child.name for child in children]
            self._processes.start(*children)
            while not self._processes.is_ready(replica.names):
                if time.monotonic() - began > self._args.ready_timeout:
                    raise StartupError(f"not ready after {self._args.ready_timeout:g} s (--ready-timeout)")
                await asyncio.sleep(POLL_S)
        except (MinisglError, OSError) as e:
            logger.error("replica %d could not start: %s; the next attempt is in %g s", index, e, RETRY_S)
            await self._end_replica(replica, 0.0)
            return False
        self._dispatcher.open(incarnation, index)
        for name in replica.names:
            self._watch_end(name)
        logger.info("replica %d is ready after %.1f s", index, time.monotonic() - began)
        return True

    def _change(self, change: Callable[[], Coroutine[Any, Any, None]]) -> None:
        async def run() -> None:
            async with self._changing:
                await change()

        self._run(run())

    async def _renew(self) -> None:
        """Restart all replicas, one after the other."""
        for index in list(self.replicas):
            await self._retire(index, is_removed=False)

    async def _add(self) -> None:
        """Start one more replica."""
        index, engine = max(self.replicas) + 1, self._args.scheduler.engine
        if choose_device(engine.device) == "cuda" and len(gpu_memory()) < (index + 1) * engine.tp:
            logger.error("another replica does not fit: this host has %d GPUs", len(gpu_memory()))
            return
        while not await self._start(index):
            await asyncio.sleep(RETRY_S)
        self._run(self._keep(index))

    async def _remove(self) -> None:
        """End the last replica."""
        await self._retire(max(self.replicas), is_removed=True)

    async def _retire(self, index: int, is_removed: bool) -> None:
        """End replica number `index` after its requests, and move those that outlast the drain timeout.

        Return when it has ended, and another incarnation is ready unless it `is_removed`. The only replica stays.
        """
        while len(self.replicas) > 1 and not self._dispatcher.has_others(index):
            await asyncio.sleep(POLL_S)  # another one is being started
        replica = self.replicas[index]
        if len(self.replicas) == 1 or replica.died.done() or index in self._dispatcher.starting:
            logger.error("replica %d is not ended: it is the only one, or has just died", index)
            return
        replica.is_removed = is_removed
        replica.leaving.set_result(None)
        while self.replicas.get(index) is replica or index in self._dispatcher.starting:
            await asyncio.sleep(POLL_S)

    # -- the end

    def stop(self) -> None:
        """Stop the server: finish open requests first; on a second call, end them at once."""
        if self._stopping is None and (n := self._frontend.entries):
            logger.info("finishing %d requests; repeat the signal to stop now", n)
        self._end(self._drain(0.0 if self._stopping else self._args.drain_timeout))

    def stop_from_other_thread(self) -> None:
        """Call `stop` from any thread. Does nothing if the server has ended."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.stop)

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
