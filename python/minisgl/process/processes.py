"""The child processes of one server: their run directory, their start, and their end."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import fcntl
import logging
import multiprocessing
import os
import shutil
import signal
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from minisgl.errors import ConfigError, MinisglError, RankError, StartupError
from minisgl.process.log import configure_logging

logger = logging.getLogger(__name__)

EXIT_S: Final = 2.0  # for a child to exit after an ExitMsg
KILL_S: Final = 1.0  # for a child to exit after its death pipe was closed
PULSE_S: Final = 1.0  # between two signs of life of a child
DUMP_S: Final = 0.5  # for a child to write its stacks before it is killed
PR_SET_PDEATHSIG: Final = 1  # prctl(2)
PR_SET_NAME: Final = 15
DIR_PREFIX: Final = "minisgl-"
MAKING_S: Final = 60.0  # much longer than making a folder and its lock takes
MAX_BASE: Final = 60  # characters; the path of a unix socket may have about 107 bytes

Facts = dict[str, str | int | float]
Ready = Callable[[Facts], None]


@dataclass(frozen=True)
class Child:
    """A child process to start: it runs `target(*args, ready)` under `name`, with `env` added to its environment.

    The target calls `ready(facts)` once it can work. With `leaves_when_told`, the child exits after an ExitMsg. Other
    children exit when their death pipe is closed.
    """

    name: str
    target: Callable[..., None]
    args: tuple[Any, ...]
    env: dict[str, str]
    leaves_when_told: bool = False


class Processes:
    """The running children. `spawn` and `wait_ready` start them; `stop` ends all of them.

    Later, `start` and `is_ready` start more children; `end` and `forget` end single ones.
    """

    def __init__(self, children: list[Child]) -> None:
        self._first = children
        self._leaving: set[str] = set()  # children that exit after an ExitMsg
        self._running: dict[str, SpawnProcess] = {}
        self._reports: dict[str, Connection] = {}  # from children that have not reported yet
        self._death_pipes: dict[str, Connection] = {}
        self._given_up: set[str] = set()
        self._pulses: dict[str, tuple[Connection, float]] = {}  # with the time of the last one
        self._facts: Facts = {}

    @property
    def pids(self) -> dict[str, int]:
        return {name: p.pid for name, p in self._running.items() if p.pid is not None}

    @property
    def sentinels(self) -> dict[str, int]:
        """By name, a file descriptor that becomes readable when the child ends."""
        return {name: p.sentinel for name, p in self._running.items()}

    def spawn(self) -> None:
        """Start all children. Called in the main thread, because a child dies with the thread that started it."""
        for child in self._first:
            self.start(child)

    def start(self, child: Child) -> None:
        """Start one child, in the main thread."""
        context = multiprocessing.get_context("spawn")
        death_end, death = context.Pipe(duplex=False)
        report, report_end = context.Pipe(duplex=False)
        pulse, pulse_end = context.Pipe(duplex=False)
        arguments = (child.name, os.getpid(), death_end, report_end, pulse_end, child.target, child.args)
        process = context.Process(target=_child_main, args=arguments, name=child.name, daemon=True)
        self._death_pipes[child.name] = death
        self._reports[child.name] = report
        self._pulses[child.name] = pulse, time.monotonic()
        with _environment(child.env), held_interrupt(), _blocked_interrupt(), _hidden_main():  # no partial start
            process.start()
        self._running[child.name] = process
        if child.leaves_when_told:
            self._leaving.add(child.name)
        death_end.close()
        report_end.close()
        pulse_end.close()

    def is_ready(self, names: Iterable[str]) -> bool:
        """Return whether these children are ready. Raises like `wait_ready` if one of them has failed."""
        for name in self._reports.keys() & names:
            if self._reports[name].poll():  # also at the end of the child
                self._take_report(name)
        return self._reports.keys().isdisjoint(names)

    def end(self, names: list[str], seconds: float) -> None:
        """End these children, from any thread. They get `seconds` to exit by themselves."""
        self._join(names, seconds)
        for name in names:
            self._running[name].kill()
            self._running[name].join()

    def forget(self, names: Iterable[str]) -> None:
        """Remove these children, which have ended."""
        for name in names:
            del self._running[name]
            self._given_up.discard(name)
            self._death_pipes.pop(name).close()
            self._pulses.pop(name)[0].close()
            if (report := self._reports.pop(name, None)) is not None:
                report.close()

    def silence(self) -> dict[str, float]:
        """Return the seconds since each child's last sign of life. Busy children give signs, stopped ones do not."""
        now = time.monotonic()
        for name, (pulse, _) in self._pulses.items():
            with contextlib.suppress(EOFError, OSError):
                while pulse.poll():
                    pulse.recv_bytes()
                    self._pulses[name] = pulse, now
        return {name: now - seen for name, (_, seen) in self._pulses.items()}

    def give_up(self, name: str) -> None:
        """Kill a child that hangs, after its threads' stacks are in the log."""
        if (pid := self.pids.get(name)) is not None and self.exit_code(name) is None:
            process = self._running[name]
            self._given_up.add(name)
            os.kill(pid, signal.SIGUSR1)
            os.kill(pid, signal.SIGCONT)  # a stopped process would write nothing
            time.sleep(DUMP_S)
            process.kill()

    def wait_ready(self, timeout: float) -> Facts:
        """Wait until all children are ready; return the facts of all of them.

        Raises `ConfigError` or `StartupError` with the cause of the first child that cannot start. `stop` ends the
        others.
        """
        deadline = time.monotonic() + timeout
        while self._reports:
            if not self._read_reports(max(0.0, deadline - time.monotonic())):
                raise StartupError(f"{', '.join(self._reports)} not ready after {timeout:g} s (--ready-timeout)")
        return self._facts

    def check(self) -> None:
        """Raise like `wait_ready` if a child has failed, without waiting."""
        while self._read_reports(0.0):
            pass

    def _read_reports(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds for reports and ends of children. Return whether there were any."""
        names = {report: name for name, report in self._reports.items()}
        done = wait([*names, *self.sentinels.values()], timeout)
        # A child that failed has usually reported the cause before its end, so reports go first.
        for report, name in names.items():
            if report in done:
                self._take_report(name)
        for name, sentinel in self.sentinels.items():
            if sentinel in done and name not in self._reports:
                raise StartupError(f"{self.describe_end(name)} while the server was starting")
        return bool(done)

    def _take_report(self, name: str) -> None:
        try:
            report: Facts | MinisglError = self._reports[name].recv()
        except (EOFError, OSError):
            raise StartupError(f"{self.describe_end(name)} while it was starting") from None
        if isinstance(report, MinisglError):
            raise report
        self._facts |= report
        self._reports.pop(name).close()

    def wait_end(self) -> str:
        """Wait until some child ends; return its name."""
        names = {sentinel: name for name, sentinel in self.sentinels.items()}
        return next(names[s] for s in wait(list(names)) if isinstance(s, int))

    def exit_code(self, name: str) -> int | None:
        """Return the exit code of a child; None while it runs."""
        return self._running[name].exitcode

    def describe_end(self, name: str) -> str:
        """Return a sentence that says how the child ended."""
        process = self._running[name]
        process.join(timeout=0.2)
        code = process.exitcode
        if name in self._given_up:
            return f"{name} hung and was killed"
        if code is not None and code < 0:
            names = {number.value: number.name for number in signal.Signals}  # without most of the real-time ones
            return f"{name} was killed by signal {-code} ({names.get(-code, 'real-time')})"
        return f"{name} ended with exit code {code}"

    def stop(self) -> None:
        """End all children: wait for those with an ExitMsg, then close the death pipes, then send SIGKILL."""
        if not self._reports:
            self._join([name for name in self._leaving if name in self._running], EXIT_S)
        for pipe in self._death_pipes.values():
            pipe.close()
        self._join(list(self._running), KILL_S)
        for name, process in self._running.items():
            if process.is_alive():
                logger.warning("%s does not end; killing it", name)
                process.kill()
                process.join()
        for connection in (*self._reports.values(), *(pulse for pulse, _ in self._pulses.values())):
            connection.close()

    def _join(self, names: list[str], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while alive := [self._running[n].sentinel for n in names if self._running[n].is_alive()]:
            if (remaining := deadline - time.monotonic()) <= 0:
                break
            wait(alive, remaining)


@contextlib.contextmanager
def _environment(extra: dict[str, str]) -> Iterator[None]:
    """Set variables for the next child: libraries with thread pools read them before our code runs."""
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


@contextlib.contextmanager
def _hidden_main() -> Iterator[None]:
    """Keep the next child from importing the user's script, which it does not need.

    So a script needs no `if __name__ == "__main__":`, and may come from standard input.
    """
    script = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = script


@contextlib.contextmanager
def signal_handler(number: signal.Signals, handler: Callable[..., Any]) -> Iterator[None]:
    """Call `handler` for a signal within the block. Only for the main thread."""
    old = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, old)


@contextlib.contextmanager
def held_interrupt() -> Iterator[None]:
    """Delay a Ctrl-C to the end of the block, in the main thread."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is None:
        yield
        return
    held: list[int] = []
    with signal_handler(signal.SIGINT, lambda number, _: held.append(number)):
        yield
    if held:
        signal.raise_signal(signal.SIGINT)


@contextlib.contextmanager
def _blocked_interrupt() -> Iterator[None]:
    """Have children that are started inherit a blocked SIGINT: else they print a traceback while Python starts."""
    resource_tracker.ensure_running()  # starting the tracker later would unblock the signal
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


# -- inside the child


def _child_main(
    name: str,
    parent_pid: int,
    death: Connection,
    report: Connection,
    pulse: Connection,
    target: Callable[..., None],
    args: tuple[Any, ...],
) -> None:
    """The entry point of a child: run `target(*args, ready)` until it returns or the parent is gone."""
    # The parent decides when a child ends: a Ctrl-C or SIGTERM to the whole group must not cut its streams.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    _end_with_parent(name, parent_pid, death)
    configure_logging(name)
    threading.Thread(target=_show_life, args=(pulse,), name="pulse", daemon=True).start()

    try:
        target(*args, report.send)
    except BaseException as e:
        error: MinisglError = StartupError(f"{name} could not start: {type(e).__name__}: {e}")
        if isinstance(e, ConfigError):
            error = ConfigError(str(e))
        elif isinstance(e, RankError):
            logger.error("%s ends: %s", name, e)
        else:
            logger.exception("%s ends", name)
        # After the start the parent has closed its end; the exit code says enough.
        with contextlib.suppress(OSError):
            report.send(error)
        sys.exit(1)


def _end_with_parent(name: str, parent_pid: int, death: Connection) -> None:
    """End this child with its parent: by the kernel on Linux, elsewhere when the death pipe closes."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        libc.prctl(PR_SET_NAME, name.encode()[:15])
    if os.getppid() != parent_pid:
        os._exit(1)  # the parent died before the line above

    def watch() -> None:
        with contextlib.suppress(EOFError, OSError):
            death.recv_bytes()
        os._exit(0)

    threading.Thread(target=watch, name="death-pipe", daemon=True).start()


def _show_life(pulse: Connection) -> None:
    with contextlib.suppress(OSError):
        while True:
            pulse.send_bytes(b"")
            time.sleep(PULSE_S)


# -- the private folder


@contextlib.contextmanager
def run_dir() -> Iterator[Path]:
    """Make a folder (mode 0700, unique name) for one server's ipc sockets, and remove it at the end.

    A locked file inside shows that the server is running. The lock ends with the process, however it dies, so the next
    server can remove the folder of a crashed one. (Process ids are reused and differ between containers.)
    """
    base = _run_dir_base()
    _remove_stale_dirs(base)
    path = Path(tempfile.mkdtemp(prefix=DIR_PREFIX, dir=base))
    try:
        # Lock first, then rename: no other server ever sees an unlocked "lock".
        with open(path / "lock.new", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            os.rename(path / "lock.new", path / "lock")
            yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _run_dir_base() -> Path:
    for candidate in (os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir()):
        if candidate and len(os.fsencode(candidate)) <= MAX_BASE and os.access(candidate, os.W_OK | os.X_OK):
            return Path(candidate)
    return Path("/tmp")


def _remove_stale_dirs(base: Path) -> None:
    """Remove the folders of this user's servers that have ended without removing them."""
    for folder in base.glob(DIR_PREFIX + "*"):
        try:
            status = folder.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
                continue
            if not (folder / "lock").exists():  # just being made, or its server was killed before it had the lock
                if time.time() - status.st_mtime > MAKING_S:
                    (folder / "lock.new").unlink(missing_ok=True)
                    folder.rmdir()
                continue
            lock = os.open(folder / "lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:  # removed meanwhile, another user's, or not empty
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            pass  # the server is running
        finally:
            os.close(lock)
