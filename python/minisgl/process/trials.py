"""Jobs that may crash, loop, or take all memory: each runs in a process of its own, within limits, which can be killed.

A server process prepares what all jobs need, and forks for each job, which arrives on a socket of its own. A pool of
`concurrent.futures` would not do: the death of one worker fails the jobs of all others, and the scheduler, which is a
daemon, may have no such children.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

logger = logging.getLogger(__name__)

TRIES: Final = 3
BEGUN: Final = b"\n"  # what each fork sends first: without it, the server has failed and not the job


@dataclass(frozen=True)
class TrialLimits:
    """The limits of one job. `memory` and `stack` are bytes, `memory` besides what the server has."""

    cpu_s: int
    wall_s: int
    memory: int
    stack: int

    def apply(self) -> None:
        """Limit this process, and lower its priority."""
        os.nice(5)
        signal.alarm(self.wall_s)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limits = {
            resource.RLIMIT_CPU: self.cpu_s,
            resource.RLIMIT_AS: pages * resource.getpagesize() + self.memory,
            resource.RLIMIT_STACK: self.stack,
            resource.RLIMIT_CORE: 0,
        }
        for kind, limit in limits.items():
            hard = resource.getrlimit(kind)[1]
            resource.setrlimit(kind, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


class Trials:
    """Runs jobs with a server process, which is `python -m module arguments` and calls `serve`.

    The process starts with the first job, and is replaced when it ends, or does not answer for `timeout_s` seconds.
    """

    def __init__(self, module: str, *arguments: str, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.process: subprocess.Popen[bytes] | None = None
        self._command = [sys.executable, "-m", module, *arguments]
        self._lock = threading.Lock()

    def run(self, job: bytes) -> bytes:
        """Return what `job` has written before it ended: nothing, if a limit or a crash came first. Thread-safe.

        Raises `OSError` if the server does not work.
        """
        for _ in range(TRIES):
            process, control = self._running()
            ours, theirs = socket.socketpair()
            with ours, contextlib.suppress(OSError):  # the server has ended, or is frozen
                ours.settimeout(self.timeout_s)
                with theirs:
                    socket.send_fds(control, [b"."], [theirs.fileno()])
                ours.sendall(job)
                ours.shutdown(socket.SHUT_WR)
                with ours.makefile("rb") as answers:
                    if answers.read(1) == BEGUN:
                        return answers.read()
            process.kill()
            logger.warning("%s ended with %d", " ".join(self._command[1:]), process.wait())
        raise OSError(f"{' '.join(self._command[1:])} does not answer")

    def close(self) -> None:
        """End the server process. The next job starts another."""
        if self.process is not None:
            self._end()

    def _running(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        """Return the server process, and the socket that sends it connections; start another if it has ended."""
        with self._lock:
            if self.process is None or self.process.poll() is not None:
                self.close()
                self._control, theirs = socket.socketpair()
                with theirs:
                    self.process = subprocess.Popen(
                        self._command,
                        stdin=theirs.fileno(),
                        stdout=subprocess.DEVNULL,
                        env=module_environment(),
                        process_group=0,  # Ctrl-C in a terminal goes to the parent, whose end closes `_control`
                    )
                self._end = weakref.finalize(self, _end, self.process, self._control)
            return self.process, self._control


def _end(process: subprocess.Popen[bytes], control: socket.socket) -> None:
    control.close()
    process.kill()
    process.wait()


def serve(answer: Callable[[bytes], Iterable[bytes]], limits: TrialLimits) -> None:
    """Run the server until standard input is closed.

    For each connection that arrives there, fork, read the job, and send what `answer` yields.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the forks
    control = socket.socket(fileno=0)
    while fds := socket.recv_fds(control, 1, 1)[1]:
        with socket.socket(fileno=fds[0]) as connection:
            if os.fork() == 0:
                try:
                    for fd in 0, 2:  # only the server reads its input, and last words of libraries are not shown
                        os.dup2(1, fd)
                    job = connection.makefile("rb").read()
                    connection.sendall(BEGUN)
                    limits.apply()
                    for part in answer(job):
                        connection.sendall(part)
                finally:
                    os._exit(0)


def module_environment() -> dict[str, str]:
    """Return environment variables for `python -m` with a module of this package."""
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "TOKENIZERS_PARALLELISM": "false"}
