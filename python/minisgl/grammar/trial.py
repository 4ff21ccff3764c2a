"""Tries grammars in processes that can be killed, before the scheduler's process compiles them.

The grammar library is native code: a hostile grammar can make it crash, loop, or take gigabytes, and a thread cannot be
stopped. So a small process loads the tokenizer and forks for every grammar. The fork compiles the grammar and follows
it over some tokens, with limits on time, memory and stack. Only a grammar that passes is compiled for the request. The
library is deterministic, so what has passed once passes again.
"""

from __future__ import annotations

import logging
import os
import random
import select
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict, deque
from concurrent.futures import Future
from dataclasses import dataclass, field
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
WALL_S: Final = 4.0  # the same in wall time, for busy machines
FROZEN_S: Final = 4 * WALL_S  # without a verdict for so long, the process hangs: at most AT_ONCE wait for it
TRIES: Final = 3
MEMORY: Final = 256 << 20  # bytes, besides those of the tokenizer
STACK: Final = 4 << 20  # bytes, half of that of the threads that compile for requests
TOKENS: Final = 32  # random tokens over which the grammar is followed
AT_ONCE: Final = 16
VERDICTS: Final = 1024  # verdicts that are kept
DIED: Final = "the grammar library cannot compile it (too deeply nested, too large, or a number out of its range)"
TOO_SLOW: Final = f"it takes more than {CPU_S} s to compile"


class _Job(msgspec.Struct, array_like=True):
    id: int
    grammar: Grammar
    ignore_eos: bool


class _Verdict(msgspec.Struct, array_like=True):
    """The result of a trial. `error` is the message of the refusal; "" for a usable grammar."""

    id: int
    error: str = ""


def _write(fd: int, message: msgspec.Struct) -> None:
    """Write a message. Raises `OSError` if the reader is gone, or does not read for `FROZEN_S`."""
    data = msgspec.msgpack.encode(message)
    rest = memoryview(len(data).to_bytes(4, "little") + data)
    writable = select.poll()
    writable.register(fd, select.POLLOUT)
    while rest:
        if not writable.poll(1000 * FROZEN_S):
            raise TimeoutError("the other side does not read")
        rest = rest[os.write(fd, rest[: select.PIPE_BUF]) :]


def _read(fd: int) -> bytes:
    """Read one message; b"" at the end. Reads nothing more, so that `fd` stays ready while there are messages."""
    return _read_exactly(fd, int.from_bytes(_read_exactly(fd, 4), "little"))


def _read_exactly(fd: int, size: int) -> bytes:
    data = b""
    while len(data) < size and (part := os.read(fd, size - len(data))):
        data += part
    return data


class Trials:
    """Tries grammars in a child process. The arguments are those of `GrammarCompiler`."""

    def __init__(self, folder: Path, vocab_size: int, eos_ids: frozenset[int]) -> None:
        self._arguments = [str(folder), str(vocab_size), *map(str, sorted(eos_ids))]
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._pending: dict[int, Future[str]] = {}
        self._verdicts: OrderedDict[bytes, str] = OrderedDict()
        self._count = 0

    def require(self, grammar: Grammar, ignore_eos: bool) -> None:
        """Block until `grammar` has passed its trial. Raises `RequestError` if it fails. Call this in a thread."""
        error = self.verdict(grammar, ignore_eos)
        if error is None:
            error = self._try(grammar, ignore_eos)
            with self._lock:
                self._verdicts[_key(grammar, ignore_eos)] = error
                if len(self._verdicts) > VERDICTS:
                    self._verdicts.popitem(last=False)
        if error:
            raise RequestError(error, param=grammar.param, code=INVALID)

    def verdict(self, grammar: Grammar, ignore_eos: bool) -> str | None:
        """Return why the grammar is refused: "" if it is usable, None if it was not tried yet."""
        with self._lock:
            return self._verdicts.get(_key(grammar, ignore_eos))

    def close(self) -> None:
        """End the child process. The next grammar starts another."""
        with self._lock:
            self._kill()

    def _try(self, grammar: Grammar, ignore_eos: bool) -> str:
        for _ in range(TRIES):
            try:
                return self._submit(grammar, ignore_eos).result(FROZEN_S)
            except TimeoutError:
                self.close()
            except OSError as e:
                logger.warning("%s", e)
        raise OSError("the process that tries grammars does not answer")

    def _submit(self, grammar: Grammar, ignore_eos: bool) -> Future[str]:
        future: Future[str] = Future()
        with self._lock:
            if self._process is None:
                self._process = self._start()
            self._count += 1
            self._pending[self._count] = future
            assert self._process.stdin is not None, "a pipe"
            try:
                _write(self._process.stdin.fileno(), _Job(self._count, grammar, ignore_eos))
            except OSError:
                self._kill()
        return future

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process = None

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-m", "minisgl.grammar.trial", *self._arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=module_environment(),
            process_group=0,  # Ctrl-C in a terminal goes to the parent, whose end closes standard input
        )
        self._pending = {}
        arguments = process, self._pending
        threading.Thread(target=self._collect, args=arguments, name="grammar-trials", daemon=True).start()
        return process

    def _collect(self, process: subprocess.Popen[bytes], pending: dict[int, Future[str]]) -> None:
        assert process.stdin is not None and process.stdout is not None, "pipes"
        while data := _read(process.stdout.fileno()):
            verdict = msgspec.msgpack.decode(data, type=_Verdict)
            with self._lock:
                future = pending.pop(verdict.id)
            future.set_result(verdict.error)
        with self._lock:
            if self._process is process:
                self._process = None
        process.stdin.close()
        process.stdout.close()
        process.wait()
        for future in pending.values():
            future.set_exception(OSError(f"the process that tries grammars ended with {process.returncode}"))


def _key(grammar: Grammar, ignore_eos: bool) -> bytes:
    return blake2b(msgspec.msgpack.encode((grammar, ignore_eos))).digest()


class TriedCompiler(GrammarCompiler):
    """Compiles grammars after their trial. Raises `RequestError` for those that fail it."""

    def __init__(self, folder: Path, vocab_size: int, eos_ids: frozenset[int]) -> None:
        super().__init__(folder, vocab_size, eos_ids)
        self._trials = Trials(folder, vocab_size, eos_ids)

    def is_known(self, grammar: Grammar, ignore_eos: bool) -> bool:
        return self._trials.verdict(grammar, ignore_eos) is not None

    def compile(self, grammar: Grammar, ignore_eos: bool) -> TokenMatcher:
        self._trials.require(grammar, ignore_eos)
        return super().compile(grammar, ignore_eos)


# -- the process


@dataclass
class _Trial:
    """A running fork."""

    job: _Job
    pid: int
    deadline: float
    output: bytearray = field(default_factory=bytearray)


def main(folder: str, vocab_size: str, *eos_ids: str) -> None:
    """Try the grammars that arrive on standard input, until it is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    compiler = GrammarCompiler(Path(folder), int(vocab_size), frozenset(map(int, eos_ids)))
    compiler.load()
    requests, answers = sys.stdin.fileno(), sys.stdout.fileno()
    waiting: deque[_Job] = deque()
    running: dict[int, _Trial] = {}  # by file descriptor
    selector = selectors.DefaultSelector()
    selector.register(requests, selectors.EVENT_READ)
    while True:
        now = time.monotonic()
        for trial in running.values():
            if trial.deadline <= now:
                os.kill(trial.pid, signal.SIGXCPU)
                trial.deadline = float("inf")
        for key, _ in selector.select(0.1 if running else None):
            if key.fd == requests:
                if not (data := _read(requests)):
                    return
                waiting.append(msgspec.msgpack.decode(data, type=_Job))
            elif part := os.read(key.fd, 4096):
                running[key.fd].output += part
            else:
                selector.unregister(key.fd)
                os.close(key.fd)
                _write(answers, _finish(running.pop(key.fd)))
        while waiting and len(running) < AT_ONCE:
            fd, trial = _fork(compiler, waiting.popleft())
            running[fd] = trial
            selector.register(fd, selectors.EVENT_READ)


def _fork(compiler: GrammarCompiler, job: _Job) -> tuple[int, _Trial]:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writer)
        return reader, _Trial(job, pid, time.monotonic() + WALL_S)
    try:
        nothing = os.open(os.devnull, os.O_RDWR)
        for fd in range(3):
            os.dup2(nothing, fd)
        limit_resources(CPU_S, MEMORY, STACK)
        os.write(writer, (_try(compiler, job) or " ").encode())
    finally:
        os._exit(0)


def _try(compiler: GrammarCompiler, job: _Job) -> str:
    """Compile and follow a grammar. Return why it is refused; "" if it is usable."""
    try:
        matcher = compiler.compile(job.grammar, job.ignore_eos)
        rng = random.Random(0)
        for _ in range(TOKENS):
            allowed = np.flatnonzero(np.unpackbits(matcher.continuations.view(np.uint8), bitorder="little"))
            matcher.advance(int(rng.choice(allowed)))
            compiler.compute_masks([matcher])
            if matcher.error is not None:
                raise matcher.error
            if matcher.is_complete:
                break
    except RequestError as e:
        return e.message
    except MemoryError:
        return refusal(job.grammar, DIED).message
    return ""


def _finish(trial: _Trial) -> _Verdict:
    _, status = os.waitpid(trial.pid, 0)
    if trial.output:
        return _Verdict(trial.job.id, trial.output.decode().strip())
    is_slow = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU
    return _Verdict(trial.job.id, refusal(trial.job.grammar, TOO_SLOW if is_slow else DIED).message)


if __name__ == "__main__":
    main(*sys.argv[1:])
