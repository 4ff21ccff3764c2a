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
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from minisgl.core.errors import ConfigError, MinisglError, RankError, StartupError
from minisgl.process.log import configure_logging

logger = logging.getLogger(__name__)

EXIT_S: Final = 2.0  # for a child to exit after an ExitMsg
KILL_S: Final = 1.0  # for a child to exit after its pipe was closed
HEARTBEAT_S: Final = 1.0  # between two heartbeats of a child
DUMP_S: Final = 0.5  # for a child to write its stacks before it is killed
PR_SET_PDEATHSIG: Final = 1  # prctl(2)
PR_SET_NAME: Final = 15
DIR_PREFIX: Final = "minisgl-run-"
MAKING_S: Final = 60.0  # much longer than making a folder and locking it takes
MAX_BASE: Final = 60  # characters; the path of a unix socket may have about 107 bytes

Facts = dict[str, str | int | float]
Ready = Callable[[Facts], None]


@dataclass(frozen=True)
class Child:
    """A child process to start: it runs `target(*args, ready)` under `name`, with `env` added to its environment.

    The target calls `ready(facts)` once it can work. With `leaves_when_told`, the child exits after an ExitMsg. Other
    children exit when their pipe is closed.
    """

    name: str
    target: Callable[..., None]
    args: tuple[Any, ...]
    env: dict[str, str]
    leaves_when_told: bool = False


@dataclass
class _Running:
    """A child that has been started, and what it has sent through its pipe: facts or an error, and heartbeats."""

    process: SpawnProcess
    pipe: Connection
    leaves_when_told: bool
    heard: float
    facts: Facts | None = None  # None until it is ready
    error: MinisglError | None = None
    is_given_up: bool = False

    def receive(self) -> None:
        """Read the messages that have arrived."""
        with contextlib.suppress(EOFError, OSError):
            while self.pipe.poll():
                message: Facts | MinisglError | None = self.pipe.recv()
                self.heard = time.monotonic()
                if isinstance(message, MinisglError):
                    self.error = message
                elif message is not None:
                    self.facts = message


class Processes:
    """The child processes. `start` starts some, `wait_ready` waits for all, `end` ends some, and `stop` ends all."""

    def __init__(self) -> None:
        self._running: dict[str, _Running] = {}

    @property
    def pids(self) -> dict[str, int]:
        return {name: pid for name, child in self._running.copy().items() if (pid := child.process.pid) is not None}

    @property
    def sentinels(self) -> dict[str, int]:
        """By name, a file descriptor that becomes readable when the child ends."""
        return {name: child.process.sentinel for name, child in self._running.copy().items()}

    def start(self, *children: Child) -> None:
        """Start `children`, in the main thread: a child dies with the thread that has started it."""
        context = multiprocessing.get_context("spawn")
        for child in children:
            pipe, its_end = context.Pipe()
            work = ForkingPickler.dumps((child.target, child.args))
            arguments = (child.name, os.getpid(), its_end, child.env, bytes(work))
            process = context.Process(target=_child_main, args=arguments, name=child.name, daemon=True)
            with held_interrupt(), _blocked_interrupt(), _hidden_main():  # no partial start
                process.start()
            self._running[child.name] = _Running(process, pipe, child.leaves_when_told, time.monotonic())
            its_end.close()

    def is_ready(self, names: Iterable[str], seconds: float = 0.0) -> bool:
        """Return whether these children are ready, after waiting up to `seconds` for news of them if they are not.

        Raises `ConfigError` or `StartupError` with the cause if one of them cannot start or has ended.
        """
        children = {name: self._running[name] for name in names}
        if any(child.facts is None for child in children.values()):
            wait([news for child in children.values() for news in (child.pipe, child.process.sentinel)], seconds)
        # A child that failed has usually reported the cause before its end, so reports go first.
        ended = [name for name, child in children.items() if not child.process.is_alive()]
        for child in children.values():
            child.receive()
            if child.error is not None:
                raise child.error
        if ended:
            raise StartupError(f"{self.describe_end(ended[0])} before the start was complete")
        return all(child.facts is not None for child in children.values())

    def wait_ready(self, seconds: float) -> Facts:
        """Wait until all children are ready; return the facts of all of them. Raises what `is_ready` does."""
        deadline = time.monotonic() + seconds
        while not self.is_ready(self._running, max(0.0, deadline - time.monotonic())):
            if time.monotonic() > deadline:
                late = ", ".join(name for name, child in self._running.items() if child.facts is None)
                raise StartupError(f"{late} not ready after {seconds:g} s (--ready-timeout)")
        return {key: fact for child in self._running.values() for key, fact in (child.facts or {}).items()}

    def check(self) -> None:
        """Raise what `is_ready` does if a child cannot start or has ended."""
        self.is_ready(self._running)

    def silence(self) -> dict[str, float]:
        """Return the seconds since each child's last heartbeat. Busy children send heartbeats, stopped ones do not."""
        children = self._running.copy()  # as another thread may end some
        for child in children.values():
            child.receive()
        return {name: time.monotonic() - child.heard for name, child in children.items()}

    def give_up(self, name: str) -> None:
        """Kill a child that hangs, after its threads' stacks are in the log."""
        child = self._running.get(name)
        if child is not None and child.process.pid is not None and child.process.is_alive():
            child.is_given_up = True
            os.kill(child.process.pid, signal.SIGUSR1)
            os.kill(child.process.pid, signal.SIGCONT)  # a stopped process would write nothing
            time.sleep(DUMP_S)
            child.process.kill()

    def wait_end(self) -> str:
        """Wait until some child ends; return its name."""
        names = {sentinel: name for name, sentinel in self.sentinels.items()}
        return next(names[s] for s in wait(list(names)) if isinstance(s, int))

    def exit_code(self, name: str) -> int | None:
        """Return the exit code of a child; None while it runs."""
        return self._running[name].process.exitcode

    def describe_end(self, name: str) -> str:
        """Return a sentence that says how the child ended."""
        child = self._running[name]
        child.process.join(timeout=0.2)
        code = child.process.exitcode
        if child.is_given_up:
            return f"{name} hung and was killed"
        if code is not None and code < 0:
            names = {number.value: number.name for number in signal.Signals}  # without most of the real-time ones
            return f"{name} was killed by signal {-code} ({names.get(-code, 'real-time')})"
        return f"{name} ended with exit code {code}"

    def end(self, names: Sequence[str], seconds: float) -> None:
        """End these children, from any thread: wait `seconds`, then close their pipes, then send SIGKILL."""
        children = {name: self._running[name] for name in names if name in self._running}
        _join(children.values(), seconds)
        for child in children.values():
            child.pipe.close()
        _join(children.values(), KILL_S)
        for name, child in children.items():
            if child.process.is_alive():
                logger.warning("%s does not end; killing it", name)
                child.process.kill()
                child.process.join()
            del self._running[name]

    def stop(self) -> None:
        """End all children. Those that leave when told have been sent an ExitMsg, unless the start has failed."""
        is_complete = all(child.facts is not None for child in self._running.values())
        self.end([name for name, child in self._running.items() if child.leaves_when_told], EXIT_S * is_complete)
        self.end(list(self._running), 0.0)


def _join(children: Iterable[_Running], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while alive := [child.process.sentinel for child in children if child.process.is_alive()]:
        if (remaining := deadline - time.monotonic()) <= 0:
            break
        wait(alive, remaining)


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


def _child_main(name: str, parent_pid: int, pipe: Connection, env: dict[str, str], work: bytes) -> None:
    """The entry point of a child: run `target(*args, ready)` until it returns or the parent is gone.

    `work` is unpickled here, after the environment is set: libraries with thread pools read it when they are imported.
    """
    os.environ.update(env)
    # The parent decides when a child ends: a Ctrl-C or SIGTERM to the whole group must not cut its streams.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        libc.prctl(PR_SET_NAME, name.encode()[:15])
    if os.getppid() != parent_pid:
        os._exit(1)  # the parent died before the lines above
    configure_logging(name)
    threading.Thread(target=_send_heartbeats, args=(pipe,), name="heartbeat", daemon=True).start()

    try:
        target, args = ForkingPickler.loads(work)
        target(*args, pipe.send)
    except BaseException as e:
        error: MinisglError = StartupError(f"{name} could not start: {type(e).__name__}: {e}")
        if isinstance(e, ConfigError):
            error = ConfigError(str(e))
        elif isinstance(e, RankError):
            logger.error("%s ends: %s", name, e)
        else:
            logger.exception("%s ends", name)
        with contextlib.suppress(OSError):  # the parent is gone
            pipe.send(error)
        sys.exit(1)


def _send_heartbeats(pipe: Connection) -> None:
    """Send heartbeats until the parent closes the pipe or dies; then end this process.

    The main thread sends, too. The system keeps short messages whole.
    """
    with contextlib.suppress(EOFError, OSError):
        while not pipe.poll(HEARTBEAT_S):
            pipe.send(None)
    os._exit(0)


# -- the private folder


@contextlib.contextmanager
def run_dir() -> Iterator[Path]:
    """Make a folder (mode 0700, unique name) for one server's ipc sockets, and remove it at the end.

    Its lock shows that the server is running, and ends with the process, however that dies. So the next server can
    remove the folder of a crashed one. (Process ids are reused and differ between containers.)
    """
    base = _run_dir_base()
    _remove_stale_dirs(base)
    path = Path(tempfile.mkdtemp(prefix=DIR_PREFIX, dir=base))
    try:
        with _opened(path) as folder:
            fcntl.flock(folder, fcntl.LOCK_EX)
            yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    """Yield a file descriptor of a folder, which must not be a link."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield folder
    finally:
        os.close(folder)


def _run_dir_base() -> Path:
    for candidate in (os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir()):
        if candidate and len(os.fsencode(candidate)) <= MAX_BASE and os.access(candidate, os.W_OK | os.X_OK):
            return Path(candidate)
    return Path("/tmp")


def _remove_stale_dirs(base: Path) -> None:
    """Remove the folders of this user's servers that have ended without removing them."""
    for path in base.glob(DIR_PREFIX + "*"):
        # Others are in use, another user's, links, or removed meanwhile.
        with contextlib.suppress(OSError), _opened(path) as folder:
            status = os.fstat(folder)
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_new = not os.listdir(folder) and time.time() - status.st_mtime < MAKING_S  # it is about to be locked
            if status.st_uid == os.getuid() and not is_new:
                shutil.rmtree(path, ignore_errors=True)
