"""Tries grammars in processes that can be killed, before the scheduler's process compiles them.

The grammar library is native code: a hostile grammar can make it crash, loop, or take gigabytes, and a thread cannot be
stopped. So a small process loads the tokenizer and forks for every grammar, which arrives on a socket of its own. The
fork compiles the grammar and follows it over some tokens, with limits on time, memory and stack. Only a grammar that
passes is compiled for the request. The library is deterministic, so what has passed once passes again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from minisgl.errors import RequestError
from minisgl.grammar.compiler import INVALID, GrammarCompiler, TokenMatcher, refusal
from minisgl.params import Grammar
from minisgl.process.limits import limit_resources, module_environment

logger = logging.getLogger(__name__)
CPU_S: Final = 1  # to compile a grammar and follow it; common ones take a millisecond
WALL_S: Final = 4  # the same in wall time, for busy machines
FROZEN_S: Final = 4.0 * WALL_S  # without a verdict for so long, the process hangs: few threads wait for one
POLL_S: Final = 0.02  # after which the end of a fork without a verdict is noticed
TRIES: Final = 3
MEMORY: Final = 256 << 20  # bytes, besides those of the tokenizer
STACK: Final = 4 << 20  # bytes, half of that of the threads that compile for requests
TOKENS: Final = 32  # random tokens over which the grammar is followed
VERDICTS: Final = 1024  # verdicts that are kept
DIED: Final = "the grammar library cannot compile it (too deeply nested, too large, or a number out of its range)"
TOO_SLOW: Final = f"it takes more than {CPU_S} s to compile"


# The process, and what sends it the connections of its jobs.
_Server = tuple[subprocess.Popen[bytes], socket.socket]


class TriedCompiler(GrammarCompiler):
    """Compiles grammars after their trial in a child process. Raises `RequestError` for those that fail it."""

    def __init__(self, folder: Path, vocab_size: int, eos_ids: frozenset[int]) -> None:
        super().__init__(folder, vocab_size, eos_ids)
        self._arguments = [str(folder), str(vocab_size), *map(str, sorted(eos_ids))]
        self._lock = threading.Lock()
        self._server: _Server | None = None
        self._verdicts: dict[bytes, str] = {}  # of the newest jobs: why they are refused, or ""

    def is_known(self, grammar: Grammar) -> bool:
        """Return whether `compile` need not wait for a trial."""
        return _job(grammar)[0] in self._verdicts

    def compile(self, grammar: Grammar, ignore_eos: bool) -> TokenMatcher:
        """As in `GrammarCompiler`; blocks until the grammar has passed its trial."""
        key, job = _job(grammar)
        error = self._verdicts.get(key)
        if error is None:
            error = self._try(job)
            if error in (DIED, TOO_SLOW):
                error = refusal(grammar, error).message
            with self._lock:
                self._verdicts[key] = error
                if len(self._verdicts) > VERDICTS:
                    del self._verdicts[next(iter(self._verdicts))]
        if error:
            raise RequestError(error, param=grammar.param, code=INVALID)
        return super().compile(grammar, ignore_eos)

    def close(self) -> None:
        """End the child process. The next grammar starts another."""
        if self._server is not None:
            self._end()

    def _try(self, job: bytes) -> str:
        """Return why the grammar is refused, or how its trial has ended; "" if it is usable."""
        for _ in range(TRIES):
            process, control = self._running()
            ours, theirs = socket.socketpair()
            with ours, contextlib.suppress(OSError):  # the process is gone, or does not answer
                ours.settimeout(FROZEN_S)
                with theirs:
                    socket.send_fds(control, [b"."], [theirs.fileno()])
                _send(ours, job)
                if answer := _receive(ours):
                    return answer.decode().strip()
            process.kill()
            logger.warning("the process that tries grammars ended with %d", process.wait())
        raise OSError("the process that tries grammars does not answer")

    def _running(self) -> _Server:
        """Return the process; start another if it has ended."""
        with self._lock:
            if self._server is None or self._server[0].poll() is not None:
                self.close()
                control, theirs = socket.socketpair()
                with theirs:
                    process = subprocess.Popen(
                        [sys.executable, "-m", "minisgl.grammar.trial", *self._arguments],
                        stdin=theirs.fileno(),
                        stdout=subprocess.DEVNULL,
                        env=module_environment(),
                        process_group=0,  # Ctrl-C in a terminal goes to the parent, whose end closes `control`
                    )
                self._server = process, control
                self._end = weakref.finalize(self, _end, *self._server)
            return self._server


def _end(process: subprocess.Popen[bytes], control: socket.socket) -> None:
    control.close()
    process.kill()
    process.wait()


def _job(grammar: Grammar) -> tuple[bytes, bytes]:
    """Return the key of the verdict, and what the process is sent."""
    job = msgspec.msgpack.encode(grammar)
    return blake2b(job).digest(), job


def _send(connection: socket.socket, data: bytes) -> None:
    """Send `data`, and that there is no more."""
    connection.sendall(data)
    connection.shutdown(socket.SHUT_WR)


def _receive(connection: socket.socket) -> bytes:
    """Return all that the other side sends."""
    return b"".join(iter(partial(connection.recv, 1 << 16), b""))


# -- the process


def main(folder: str, vocab_size: str, *eos_ids: str) -> None:
    """Answer on the connections that arrive on standard input, until it is closed."""
    compiler = GrammarCompiler(Path(folder), int(vocab_size), frozenset(map(int, eos_ids)))
    compiler.load()
    control = socket.socket(fileno=0)
    running: dict[int, socket.socket] = {}  # the connections of the forks, by process id
    while True:
        if select.select([control], [], [], POLL_S if running else None)[0]:
            fds = socket.recv_fds(control, 1, 1)[1]
            if not fds:
                return
            connection = socket.socket(fileno=fds[0])
            running[_fork(compiler, connection)] = connection
        for pid in list(running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if not ended:
                continue
            with running.pop(pid) as connection, contextlib.suppress(OSError):  # the client may be gone
                if status:
                    is_slow = os.waitstatus_to_exitcode(status) in (-signal.SIGXCPU, -signal.SIGALRM)
                    _send(connection, (TOO_SLOW if is_slow else DIED).encode())


def _fork(compiler: GrammarCompiler, connection: socket.socket) -> int:
    """Answer in a fork: why the grammar is refused, or a blank. If its status is not 0, it has not."""
    if pid := os.fork():
        return pid
    try:
        for fd in 0, 2:  # the first process reads its input alone, and the library's last words are not shown
            os.dup2(1, fd)
        grammar = msgspec.msgpack.decode(_receive(connection), type=Grammar)
        limit_resources(CPU_S, MEMORY, STACK)
        signal.alarm(WALL_S)
        _send(connection, _try(compiler, grammar).encode() or b" ")
        os._exit(0)
    finally:
        os._exit(1)


def _try(compiler: GrammarCompiler, grammar: Grammar) -> str:
    """Compile and follow a grammar. Return why it is refused; "" if it is usable."""
    try:
        matcher = compiler.compile(grammar, ignore_eos=True)  # the same masks, without EOS
        rng = random.Random(0)
        for _ in range(TOKENS):
            allowed = np.flatnonzero(np.unpackbits(matcher.mask.view(np.uint8), bitorder="little"))
            matcher.advance(int(rng.choice(allowed)))
            compiler.compute_masks([matcher])
            if matcher.error is not None:
                raise matcher.error
            if matcher.is_complete:
                break
    except RequestError as e:
        return e.message
    return ""


if __name__ == "__main__":
    main(*sys.argv[1:])
