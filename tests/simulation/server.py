"""The whole server in one process: the package's own parts, with simulated clock, channels, processes and engine.

The package's parts are `Supervisor` with `FrontendManager`, `Worker` and `Scheduler` with `ZmqIO`. The engine is
`support/fake_engine.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from minisgl.api import dispatch as dispatch_module
from minisgl.api import frontend as frontend_module
from minisgl.api.frontend import FrontendManager
from minisgl.api.metrics import Metrics
from minisgl.core.message import BackendMsg, FrontendMsg, TokenizerMsg
from minisgl.core.params import Limits
from minisgl.launch.supervisor import Supervisor
from minisgl.process.processes import Child
from minisgl.process.queues import Codec
from minisgl.scheduler import io as io_module
from minisgl.scheduler.grammars import Grammars
from minisgl.scheduler.io import ZmqIO
from minisgl.scheduler.scheduler import Scheduler
from minisgl.scheduler.stats import HEARTBEAT_S
from minisgl.settings.options import ServerArgs
from minisgl.tokenizer.server import REPORT_S, Worker
from minisgl.tokenizer.text import _byte_of_char
from minisgl.tokenizer.tokenize import TokenizeManager
from simulation.world import AsyncPull, Process, Pull, Push, World
from support.fake_engine import FakeEngine
from support.fake_grammar import FakeCompiler, LateExecutor

EOS = 0
CLASSES = "interactive", "batch", "idle"
LETTERS = "abcdefghijklmnopqrstuvwxyz .,!?-ABCDEFGHIJKLMNO"
HALVES = bytes.fromhex("c3a9bce282ace4bda0f09f98")  # some of them together make a character
BYTES = [b"", *(c.encode() for c in LETTERS), *(bytes([b]) for b in HALVES)]  # of each token; EOS is not shown
VOCAB = len(BYTES)
TURN_S = 0.002  # the longest turn of a tokenizer
STEP_S = 0.03  # the longest step of the scheduler
SCHEDULER, DETOKENIZER = "minisgl-TP0-scheduler", "minisgl-detokenizer-0"
READY_S = 1.0  # at most, from the start of a replica until it is ready


@cache
def tokenizer() -> TokenizeManager:
    """A byte-level tokenizer with one token for each letter, and tokens that are a part of a character."""
    char_of = {bytes([byte]): char for char, byte in _byte_of_char().items()}
    made = Tokenizer(models.BPE({"<eos>": EOS} | {char_of[BYTES[i]]: i for i in range(1, VOCAB)}, []))
    made.add_special_tokens([AddedToken("<eos>", special=True)])
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    with tempfile.TemporaryDirectory() as folder:
        made.save(str(Path(folder) / "tokenizer.json"))
        return TokenizeManager(Path(folder), Limits(max_model_len=64, vocab_size=VOCAB))


class PatientGrammars(Grammars):
    def wait(self, seconds: float) -> None:
        """Return at once: nothing is compiled while a simulated process waits."""


class FakeUvicorn:
    """Stands for uvicorn's server, without connections: serves until it is told to stop, and a second longer."""

    def __init__(self) -> None:
        self._stop = asyncio.Event()
        self.requests: set[asyncio.Task[None]] = set()

    @property
    def should_exit(self) -> bool:
        return self._stop.is_set()

    @should_exit.setter
    def should_exit(self, value: bool) -> None:
        self._stop.set()

    async def startup(self, sockets: Any) -> None:
        pass

    async def main_loop(self) -> None:
        await self._stop.wait()

    async def shutdown(self, sockets: Any) -> None:
        if self.requests:
            _, late = await asyncio.wait(self.requests, timeout=1.0)
            for request in late:
                request.cancel()


class Children:
    """Stands for `Processes`: what the supervisor asks about the simulated processes."""

    def __init__(self, processes: dict[str, Process], ended: list[Process]) -> None:
        self._processes = processes
        self._ended = ended

    @property
    def sentinels(self) -> dict[str, int]:
        return {name: process.sentinel for name, process in self._processes.items()}

    @property
    def pids(self) -> dict[str, int]:
        return self.sentinels

    def silence(self) -> dict[str, float]:
        return {name: process.silence for name, process in self._processes.items()}

    def describe_end(self, name: str) -> str:
        return f"{name} ended"

    def give_up(self, name: str) -> None:
        self._processes[name].kill()

    def start(self, *children: Child) -> None:
        for child in children:
            child.target()

    def is_ready(self, names: list[str]) -> bool:
        return all(self._processes[name].is_ready for name in names)

    def end(self, names: list[str], seconds: float) -> None:
        for name in names:
            self._processes[name].kill()
            self._ended.append(self._processes.pop(name))


class SimulatedServer:
    """One server from start to end; `serve` runs it. Made, used and dropped within `simulated`."""

    def __init__(self, world: World, args: ServerArgs, make_engine: Callable[[], FakeEngine], depth: int) -> None:
        self.world = world
        self.args = args
        self.make_engine = make_engine
        self.depth = depth
        self.compiling = LateExecutor()
        self.processes: dict[str, Process] = {}
        self.ended: list[Process] = []  # of incarnations that are over
        self.workers: dict[str, Worker] = {}
        self.schedulers: dict[str, Scheduler] = {}  # of the replicas' newest incarnations, by the name of the process
        self.checks_steps = True
        engine = make_engine()
        for index in range(args.dp):
            self._add_replica(index, index)
        addrs = {DETOKENIZER: args.zmq_detokenizer_addr}
        if args.num_tokenizer:
            addrs |= {f"minisgl-tokenizer-{i}": addr for i, addr in enumerate(args.zmq_tokenizer_addrs)}
        for name, addr in addrs.items():
            manager = copy.copy(tokenizer())
            manager.limits, manager._last = engine.limits, None
            manager._max_chars = engine.limits.max_model_len * len("<eos>")
            self.workers[name] = Worker(manager)
            self._add(name, partial(self._run_worker, name, addr))
        with self._sockets(None):
            self.frontend = FrontendManager(args, engine.limits, Metrics("simulated", classes=CLASSES))
        dispatcher = self.frontend.dispatcher
        dispatcher._add = self._sockets(None)(dispatcher._add)  # type: ignore[method-assign]
        app: Any = SimpleNamespace(state=SimpleNamespace(frontend=self.frontend))
        children: Any = Children(self.processes, self.ended)
        self.http = Supervisor(app, children, args, self._replica_children, None)
        self.uvicorn = FakeUvicorn()
        self.http._uvicorn = self.uvicorn  # type: ignore[assignment]

    def _add(self, name: str, main: Callable[[], Any]) -> Process:
        self.processes[name] = process = Process(self.world, name, main)
        process.sentinel = len(self.processes) + len(self.ended)
        process.on_end = lambda: self.world.loop.readers.get(process.sentinel, lambda: None)()
        return process

    def _add_replica(self, index: int, incarnation: int) -> str:
        """A scheduler in a process that is not started; return its name."""
        args = replace(self.args, incarnation=incarnation)
        name = SCHEDULER if args.dp == 1 else f"minisgl-DP{index}-TP0-scheduler"
        self._add(name, partial(self._run_scheduler, name, args))
        engine = self.make_engine()
        grammars = PatientGrammars(FakeCompiler(engine.vocab), self.compiling)
        with self._sockets(name):
            io = ZmqIO(args.zmq_scheduler_addr, args.zmq_detokenizer_addr, args.zmq_frontend_addr, incarnation)
        scheduler = Scheduler(args.scheduler, engine, io, grammars, clock=self.world.loop.time)
        self.schedulers[name] = scheduler
        scheduler.depth = self.depth
        engine.watch(scheduler.cache)
        if not self.checks_steps:
            scheduler._check = None
        return name

    def _replica_children(self, index: int, incarnation: int) -> list[Child]:
        def start() -> None:
            self._add_replica(index, incarnation)
            self.processes[name].is_ready = False
            self.processes[name].start()

        name = f"minisgl-DP{index}-TP0-scheduler"
        return [Child(name, start, (), {})]

    @contextlib.contextmanager
    def _sockets(self, name: str | None) -> Iterator[None]:
        """Give whatever opens a socket of process `name` (None: the API's) a simulated one instead."""
        world, process = self.world, None if name is None else self.processes[name]
        with (
            patch.object(io_module, "ZmqPullQueue", partial(Pull, world)),
            patch.object(io_module, "ZmqPushQueue", partial(Push, world, process)),
            patch.object(frontend_module, "ZmqAsyncPullQueue", partial(AsyncPull, world)),
            patch.object(frontend_module, "ZmqPushQueue", partial(Push, world, process)),
            patch.object(dispatch_module, "ZmqAsyncPullQueue", partial(AsyncPull, world)),
            patch.object(dispatch_module, "ZmqPushQueue", partial(Push, world, process)),
        ):
            yield

    async def serve(self) -> None:
        """Start the processes, serve until the server ends by itself or by a signal, and end the processes."""
        for process in self.processes.values():
            process.start()
        socket: Any = None
        await self.http.serve(socket, lambda: None)
        await self.frontend.close()
        await asyncio.sleep(2.0)
        for process in self.processes.values():
            process.kill()
        await asyncio.sleep(0)

    async def _run_scheduler(self, name: str, args: ServerArgs) -> None:
        process, rng, scheduler = self.processes[name], self.world.rng, self.schedulers[name]
        if not process.is_ready:
            await asyncio.sleep(rng.random() * READY_S)
            process.is_ready = True
        inbox = self.world.inbox(args.zmq_scheduler_addr)
        while not scheduler.is_exiting:
            if scheduler.is_busy:
                await asyncio.sleep(rng.random() * STEP_S)
            else:
                await inbox.wait(HEARTBEAT_S)
            await process.point()
            scheduler.step()
            if rng.random() < 0.5:
                self.compiling.work()
        scheduler.run_forever()  # answers what is left

    async def _run_worker(self, name: str, addr: str) -> None:
        process, rng, worker = self.processes[name], self.world.rng, self.workers[name]
        inbox: Pull = Pull(self.world, addr, Codec(TokenizerMsg))
        backend = Push(self.world, process, self.args.zmq_backend_addr, Codec(BackendMsg))
        frontend = Push(self.world, process, self.args.zmq_frontend_addr, Codec(FrontendMsg))
        messages: list[Any] = [None]
        while True:
            await inbox.inbox.wait(REPORT_S if messages else None)  # after an idle turn, others would be the same
            await process.point()
            to_backend, to_frontend = worker.handle(messages := inbox.get())
            await asyncio.sleep(rng.random() * TURN_S)
            await process.point()
            if to_backend:
                backend.put(to_backend)
            if to_frontend:
                frontend.put(to_frontend)


@contextlib.contextmanager
def simulated_time(now: Callable[[], float]) -> Iterator[None]:
    """Let everybody in this process read a simulated clock."""
    with patch.object(time, "monotonic", now), patch.object(time, "perf_counter", now):
        yield


@cache
def server_args(dp: int = 1) -> ServerArgs:
    """The arguments that histories vary; to check all of them takes a while."""
    return ServerArgs(run_dir="/simulated", dp=dp)


def vary(args: ServerArgs, **values: Any) -> ServerArgs:
    """`args` with other values for options of the server and of its scheduler."""
    scheduler = {k: values.pop(k) for k in list(values) if hasattr(args.scheduler, k)}
    return replace(args, scheduler=replace(args.scheduler, **scheduler), **values)
