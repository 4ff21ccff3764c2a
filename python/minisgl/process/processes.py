"""Starts, watches and ends the child processes of one server."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, Final

import msgspec

from minisgl.errors import ConfigError, StartupError
from minisgl.process.child import Report, child_main

logger = logging.getLogger(__name__)

EXIT_S: Final = 2.0  # for a child that was asked to leave
KILL_S: Final = 1.0  # for one that lost its death pipe

Facts = dict[str, str | int | float]


@dataclass(frozen=True)
class Child:
    """A child process: `target(*args, ready)` under `name`, with `env` added to its environment."""

    name: str
    target: Callable[..., None]
    args: tuple[Any, ...]
    env: dict[str, str]
    leaves_when_told: bool = False  # by an ExitMsg; the others just end with their death pipe


class Processes:
    """The running children. `start` returns when all are ready; `stop` leaves no survivor."""

    def __init__(self, children: list[Child]) -> None:
        self._children = children
        self._running: dict[str, SpawnProcess] = {}
        self._reports: dict[str, Connection] = {}
        self._death_pipes: list[Connection] = []
        self._waiting: dict[str, Connection] = {}  # for the reports of these
        self._facts: Facts = {}
        self._is_ready = False

    @property
    def pids(self) -> dict[str, int]:
        return {name: p.pid for name, p in self._running.items() if p.pid is not None}

    @property
    def sentinels(self) -> dict[str, int]:
        """Name -> a file descriptor that becomes readable when the child ends."""
        return {name: p.sentinel for name, p in self._running.items()}

    def describe_end(self, name: str) -> str:
        """How the child ended, for people."""
        process = self._running[name]
        process.join(timeout=0.2)
        code = process.exitcode
        if code is not None and code < 0:
            return f"{name} was killed by signal {-code} ({signal.Signals(-code).name})"
        return f"{name} ended with exit code {code}"

    def start(self, timeout: float) -> Facts:
        """`spawn`, then `wait_ready`."""
        self.spawn()
        return self.wait_ready(timeout)

    def spawn(self) -> None:
        """Start all. Call it in the main thread: children live as long as the thread that makes them."""
        context = multiprocessing.get_context("spawn")
        for child in self._children:
            death_end, death = context.Pipe(duplex=False)
            report, report_end = context.Pipe(duplex=False)
            arguments = (child.name, os.getpid(), death_end, report_end, child.target, child.args)
            process = context.Process(target=child_main, args=arguments, name=child.name, daemon=True)
            self._death_pipes.append(death)
            self._reports[child.name] = report
            with _environment(child.env), _held_interrupt():
                process.start()
            self._running[child.name] = process
            death_end.close()
            report_end.close()
        self._waiting = dict(self._reports)

    def wait_ready(self, timeout: float) -> Facts:
        """Wait until each has reported ready; returns their facts together.

        Raises `ConfigError` or `StartupError` with the cause of the first child that cannot start; the others are left
        to `stop`.
        """
        deadline = time.monotonic() + timeout
        while self._waiting:
            if not self._hear(max(0.0, deadline - time.monotonic())):
                raise StartupError(f"{', '.join(self._waiting)} not ready after {timeout:g} s (--ready-timeout)")
        self._is_ready = True
        return self._facts

    def check(self) -> None:
        """Raises as `wait_ready` does when a child has failed, but does not wait."""
        while self._hear(0.0):
            pass

    def wait_end(self) -> str:
        """Wait until some child ends; returns its name."""
        names = {sentinel: name for name, sentinel in self.sentinels.items()}
        return next(names[s] for s in wait(list(names)) if isinstance(s, int))

    def exit_code(self, name: str) -> int | None:
        """None while the child runs."""
        return self._running[name].exitcode

    def _hear(self, timeout: float) -> bool:
        """Take in reports that come within `timeout` seconds; whether there were any."""
        names = {id(c): n for n, c in self._waiting.items()}
        done = wait([*self._waiting.values(), *self.sentinels.values()], timeout)
        # A child that failed has usually said why before it ended, so reports go first.
        for connection in done:
            if isinstance(connection, Connection):
                name = names[id(connection)]
                self._facts |= self._read_report(name, connection)
                del self._waiting[name]
        for name, sentinel in self.sentinels.items():
            if sentinel in done and name not in self._waiting:
                raise StartupError(f"{self.describe_end(name)} while the server was starting")
        return bool(done)

    def _read_report(self, name: str, connection: Connection) -> Facts:
        try:
            report = msgspec.msgpack.decode(connection.recv_bytes(), type=Report)
        except (EOFError, OSError):
            raise StartupError(f"{self.describe_end(name)} while it was starting") from None
        if report.is_config_error:
            raise ConfigError(report.error)
        if report.error:
            raise StartupError(f"{name} could not start: {report.error}")
        return report.facts

    def stop(self) -> None:
        """End every child: time for those that were told to leave, then the death pipes, then SIGKILL."""
        if self._is_ready:
            self._join([c.name for c in self._children if c.leaves_when_told], EXIT_S)
        for pipe in self._death_pipes:
            pipe.close()
        self._join(list(self._running), KILL_S)
        for name, process in self._running.items():
            if process.is_alive():
                logger.warning("%s does not end; killing it", name)
                process.kill()
                process.join()
        for report in self._reports.values():
            report.close()

    def _join(self, names: list[str], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while alive := [self._running[n].sentinel for n in names if self._running[n].is_alive()]:
            if (left := deadline - time.monotonic()) <= 0:
                break
            wait(alive, left)


@contextmanager
def _environment(extra: dict[str, str]) -> Iterator[None]:
    """Set variables for the next child; thread pools read them when their library loads, before our code."""
    old = {name: os.environ.get(name) for name in extra}
    os.environ.update(extra)
    try:
        yield
    finally:
        for name, value in old.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _held_interrupt() -> Iterator[None]:
    """Hold a Ctrl-C back until a child is started: half a start cannot be undone, and the child, which inherits what is
    blocked, would print a traceback while its interpreter starts.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []
    resource_tracker.ensure_running()  # whose own start would unblock it
    old = signal.signal(signal.SIGINT, lambda number, _: held.append(number))  # other threads do not block it
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, old)
    if held:
        signal.raise_signal(signal.SIGINT)
