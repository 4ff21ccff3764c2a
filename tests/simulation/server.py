"""The whole server in one process: the package's own parts, with simulated clock, channels, processes and engine.

The package's parts are `HttpServer` with `FrontendManager`, `Worker` and `Scheduler` with `ZmqIO`. The engine is
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

from minisgl.api import frontend as frontend_module
from minisgl.api.frontend import FrontendManager
from minisgl.api.metrics import Metrics
from minisgl.launch.http_server import HttpServer
from minisgl.message import BackendMsg, ExitMsg, FrontendMsg, TokenizerMsg
from minisgl.params import Limits
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
from simulation.world import AsyncPull, AsyncPush, Process, Pull, Push, World
from support.fake_engine import FakeEngine
from support.fake_grammar import FakeCompiler, LateExecutor

EOS = 0
LETTERS = "abcdefghijklmnopqrstuvwxyz .,!?-ABCDEFGHIJKLMNO"
HALVES = bytes.fromhex("c3a9bce282ace4bda0f09f98")  # some of them together make a character
BYTES = [b"", *(c.encode() for c in LETTERS), *(bytes([b]) for b in HALVES)]  # of each token; EOS is not shown
VOCAB = len(BYTES)
TURN_S = 0.002  # the longest turn of a tokenizer
STEP_S = 0.03  # the longest step of the scheduler
SCHEDULER, DETOKENIZER = "minisgl-TP0-scheduler", "minisgl-detokenizer-0"


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

    started = True

    def __init__(self) -> None:
        self._stop = asyncio.Event()
        self.requests: set[asyncio.Task[None]] = set()

    @property
    def should_exit(self) -> bool:
        return self._stop.is_set()

    @should_exit.setter
    def should_exit(self, value: bool) -> None:
        self._stop.set()

    async def serve(self, sockets: Any) -> None:
        await self._stop.wait()
        if self.requests:
            _, late = await asyncio.wait(self.requests, timeout=1.0)
            for request in late:
                request.cancel()


class Children:
    """Stands for `Processes`: what `HttpServer` asks about the simulated processes."""

    def __init__(self, processes: dict[str, Process]) -> None:
        self._processes = processes
        self.sentinels = {name: i for i, name in enumerate(processes)}
        self.pids = self.sentinels

    def silence(self) -> dict[str, float]:
        return {name: process.silence for name, process in self._processes.items()}

    def describe_end(self, name: str) -> str:
        return f"{name} ended"

    def give_up(self, name: str) -> None:
        self._processes[name].kill()


class SimulatedServer:
    """One server from start to end; `serve` runs it. Made, used and dropped within `simulated`."""

    def __init__(self, world: World, args: ServerArgs, engine: FakeEngine, depth: int) -> None:
        self.world = world
        self.args = args
        self.engine = engine
        self.compiling = LateExecutor()
        self.processes: dict[str, Process] = {}
        self.workers: dict[str, Worker] = {}
        self._add(SCHEDULER, self._run_scheduler)
        addrs = {DETOKENIZER: args.zmq_detokenizer_addr}
        if args.num_tokenizer:
            addrs |= {f"minisgl-tokenizer-{i}": addr for i, addr in enumerate(args.zmq_tokenizer_addrs)}
        for name, addr in addrs.items():
            manager = copy.copy(tokenizer())
            manager.limits, manager._last = engine.limits, None
            manager._max_chars = engine.limits.max_model_len * len("<eos>")
            self.workers[name] = Worker(manager)
            self._add(name, partial(self._run_worker, name, addr))
        grammars = PatientGrammars(FakeCompiler(engine.vocab), self.compiling)
        with self._sockets(SCHEDULER):
            io = ZmqIO(args.zmq_backend_addr, args.zmq_detokenizer_addr, args.zmq_frontend_addr)
        self.scheduler = Scheduler(args.scheduler, engine, io, grammars)
        self.scheduler.depth = depth
        self.scheduler.cache.on_free = engine.poison
        with self._sockets(None):
            self.frontend = FrontendManager(args, engine.limits, Metrics("simulated"))
        app: Any = SimpleNamespace(state=SimpleNamespace(frontend=self.frontend))
        children: Any = Children(self.processes)
        self.http = HttpServer(app, children, args.drain_timeout, args.heartbeat_timeout)
        self.uvicorn = FakeUvicorn()
        self.http._uvicorn = self.uvicorn  # type: ignore[assignment]

    def _add(self, name: str, main: Callable[[], Any]) -> None:
        self.processes[name] = process = Process(self.world, name, main)
        sentinel = len(self.processes) - 1
        process.on_end = lambda: self.world.loop.readers.get(sentinel, lambda: None)()

    @contextlib.contextmanager
    def _sockets(self, name: str | None) -> Iterator[None]:
        """Give whatever opens a socket of process `name` (None: the API's) a simulated one instead."""
        world, process = self.world, None if name is None else self.processes[name]
        with (
            patch.object(io_module, "ZmqPullQueue", partial(Pull, world)),
            patch.object(io_module, "ZmqPushQueue", partial(Push, world, process)),
            patch.object(frontend_module, "ZmqAsyncPullQueue", partial(AsyncPull, world)),
            patch.object(frontend_module, "ZmqAsyncPushQueue", partial(AsyncPush, world, process)),
        ):
            yield

    async def serve(self) -> None:
        """Start the processes, serve until the server ends by itself or by a signal, and end the processes."""
        for process in self.processes.values():
            process.start()
        socket: Any = None
        await self.http._serve(socket, lambda: None)
        await self.frontend.close()
        Push(self.world, None, self.args.zmq_backend_addr, Codec(BackendMsg)).put([ExitMsg()])
        await asyncio.sleep(2.0)
        for process in self.processes.values():
            process.kill()
        await asyncio.sleep(0)

    async def _run_scheduler(self) -> None:
        process, rng, scheduler = self.processes[SCHEDULER], self.world.rng, self.scheduler
        inbox = self.world.inbox(self.args.zmq_backend_addr)
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
    real = time.monotonic
    time.monotonic = now
    try:
        yield
    finally:
        time.monotonic = real


@cache
def server_args() -> ServerArgs:
    """The arguments that histories vary; to check all of them takes a while."""
    return ServerArgs(run_dir="/simulated")


def vary(args: ServerArgs, **values: Any) -> ServerArgs:
    """`args` with other values for options of the server and of its scheduler."""
    scheduler = {k: values.pop(k) for k in list(values) if hasattr(args.scheduler, k)}
    return replace(args, scheduler=replace(args.scheduler, **scheduler), **values)
