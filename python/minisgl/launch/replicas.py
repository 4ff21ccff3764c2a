"""The replicas of a running server (`--dp`): their devices, their restart after a death, and changes by signals."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from minisgl.api.dispatch import Dispatcher
from minisgl.device.machine import choose_device, gpu_memory, usable_cores
from minisgl.errors import ConfigError, MinisglError, StartupError
from minisgl.process.processes import EXIT_S, Child, Processes
from minisgl.settings.options import MEMORY_RATIOS, ServerArgs

RETRY_S: Final = 5.0  # between attempts to start a replica
POLL_S: Final = 0.05

logger = logging.getLogger(__name__)

MakeChildren = Callable[[int, int], list[Child]]  # (index, life) -> the processes to start


def divided(args: ServerArgs, index: int = 0) -> ServerArgs:
    """Return `args` for replica `index` of `--dp`: with its part of the tiers and, on a CPU, of cores and memory.

    Raises `ConfigError` for options that replicas do not support.
    """
    engine = args.scheduler.engine
    if args.dp == 1:
        return args
    if engine.nnodes > 1:
        raise ConfigError("--dp works on one host only: start a server on each host instead of giving --nnodes")
    if args.scheduler.record is not None:
        raise ConfigError("--record works with one replica only: start without --dp")
    engine = replace(engine, host_kv=engine.host_kv // args.dp)
    if engine.disk_tier is not None:
        folder, size = engine.disk_tier
        engine = replace(engine, disk_kv=f"{folder}/replica-{index}:{size // args.dp}")
    if choose_device(engine.device) != "cuda":
        threads = engine.threads or max(1, usable_cores() // (args.dp * engine.tp))
        ratio = (engine.memory_ratio or MEMORY_RATIOS["cpu"]) / args.dp
        engine = replace(engine, threads=threads, memory_ratio=ratio)
    return replace(args, scheduler=replace(args.scheduler, engine=engine))


def visible_gpus(args: ServerArgs, index: int) -> dict[str, str]:
    """Return environment variables that make only the replica's own GPUs visible to it."""
    engine = args.scheduler.engine
    if choose_device(engine.device) != "cuda":
        return {}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(len(gpu_memory()))))).split(",")
    return {"CUDA_VISIBLE_DEVICES": ",".join(visible[index * engine.tp : (index + 1) * engine.tp])}


@dataclass
class _Life:
    """One life of a replica: its number, and the names of its processes by rank. `is_over`: its end is no surprise."""

    number: int
    names: list[str]
    is_over: bool = False


class Replicas:
    """Restarts replicas that have died; adds, removes and renews replicas on signals. No request is lost.

    When a life ends, the dispatcher moves its requests to other replicas. All of this runs on the event loop, in the
    thread that starts processes.
    """

    def __init__(self, args: ServerArgs, processes: Processes, make: MakeChildren) -> None:
        self._args = args
        self._processes = processes
        self._make = make
        self._numbers = itertools.count(args.dp)
        self._lives = {
            index: _Life(index, [name for name in processes.pids if name.startswith(f"minisgl-DP{index}-")])
            for index in range(args.dp)
        }
        self._tasks: set[asyncio.Task[None]] = set()
        self._changing = asyncio.Lock()  # held by one signal at a time

    def attach(self, dispatcher: Dispatcher, watch: Callable[[str], None], unwatch: Callable[[str], None]) -> None:
        """Set the dispatcher to inform of new and ended lives.

        After `watch(name)`, the caller calls `ended` when that process ends; after `unwatch(name)` no longer.
        """
        self._dispatcher = dispatcher
        self._watch = watch
        self._unwatch = unwatch

    @property
    def schedulers(self) -> dict[int, str]:
        """The name of the scheduler process of each replica, by index."""
        return {index: life.names[0] for index, life in self._lives.items() if life.names}

    @property
    def addrs(self) -> list[str]:
        """The addresses at which the schedulers receive messages."""
        return [replace(self._args, life=life.number).zmq_scheduler_addr for life in self._lives.values()]

    def owns(self, name: str) -> bool:
        """Return whether the process `name` belongs to a replica."""
        return any(name in life.names for life in self._lives.values())

    # -- death

    def ended(self, name: str) -> None:
        """Restart the replica whose process `name` has ended, unless that was expected."""
        for index, life in self._lives.items():
            if name in life.names and not life.is_over:
                life.is_over = True
                logger.error("%s; other replicas take over its requests", self._processes.describe_end(name))
                self._run(partial(self._replace, index, life))

    async def _replace(self, index: int, life: _Life) -> None:
        await self._dispatcher.remove(life.number, has_died=True)
        await self._end(life, 0.0)
        await self._start(index)

    async def _end(self, life: _Life, seconds: float) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self._processes.end, life.names, seconds)
        for name in life.names:
            self._unwatch(name)  # or the end of this process would be attributed to the next one with this name
        self._processes.forget(life.names)

    async def _start(self, index: int) -> None:
        """Start a new life of replica number `index`; try again until it succeeds."""
        self._dispatcher.starting.add(index)
        while True:
            life = self._lives[index] = _Life(next(self._numbers), [])
            start = time.monotonic()
            try:
                for child in self._make(index, life.number):
                    life.names.append(child.name)
                    self._processes.start(child)
                while not self._processes.is_ready(life.names):
                    if time.monotonic() - start > self._args.ready_timeout:
                        raise StartupError(f"not ready after {self._args.ready_timeout:g} s (--ready-timeout)")
                    await asyncio.sleep(POLL_S)
                break
            except (MinisglError, OSError) as e:
                logger.error("replica %d could not start: %s; the next attempt is in %g s", index, e, RETRY_S)
                life.is_over = True
                await self._end(life, 0.0)
                await asyncio.sleep(RETRY_S)
        await self._dispatcher.open(life.number, index)
        for name in life.names:
            self._watch(name)
        logger.info("replica %d is ready after %.1f s", index, time.monotonic() - start)

    # -- signals

    @property
    def handlers(self) -> dict[signal.Signals, Callable[[], None]]:
        """The handler of each signal."""
        changes = {signal.SIGUSR2: self._renew, signal.SIGTTIN: self._add, signal.SIGTTOU: self._remove}
        return {number: partial(self._run, change) for number, change in changes.items()}

    def _run(self, change: Callable[[], Coroutine[Any, Any, None]]) -> None:
        task = asyncio.get_running_loop().create_task(change())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _renew(self) -> None:
        """Restart all replicas, one after the other."""
        async with self._changing:
            for index in list(self._lives):
                if await self._retire(index):
                    await self._start(index)

    async def _add(self) -> None:
        """Start one more replica."""
        async with self._changing:
            index, engine = max(self._lives) + 1, self._args.scheduler.engine
            if choose_device(engine.device) == "cuda" and len(gpu_memory()) < (index + 1) * engine.tp:
                logger.error("another replica does not fit: this host has %d GPUs", len(gpu_memory()))
                return
            await self._start(index)

    async def _remove(self) -> None:
        """End the last replica."""
        async with self._changing:
            index = max(self._lives)
            if await self._retire(index):
                del self._lives[index]

    async def _retire(self, index: int) -> bool:
        """End replica number `index`: wait for its requests, and move those that outlast the drain timeout.

        Return false if it is the only replica or has died.
        """
        life = self._lives[index]
        while len(self._lives) > 1 and not self._dispatcher.has_others(index):
            await asyncio.sleep(POLL_S)  # another one is being started
        if len(self._lives) == 1 or life.is_over:
            logger.error("replica %d is not ended: it is the only one, or has just died", index)
            return False
        logger.info("replica %d takes no new requests", index)
        if not await self._dispatcher.drain(life.number, self._args.drain_timeout):
            return False  # it has died meanwhile, and is being restarted
        life.is_over = True
        await self._dispatcher.remove(life.number, has_died=False)
        await self._end(life, EXIT_S)
        logger.info("replica %d has ended", index)
        return True
