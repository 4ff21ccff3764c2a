"""Tries grammars in processes that can be killed, before the scheduler's process compiles them.

The grammar library is native code: a hostile grammar can make it crash, loop, or take gigabytes, and a thread cannot be
stopped. So a trial compiles the grammar and follows it over some tokens, with limits on time, memory and stack. Only a
grammar that passes is compiled for the request. The library is deterministic, so what has passed once passes again.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from minisgl.core.errors import RequestError
from minisgl.core.params import Grammar
from minisgl.grammar.compiler import INVALID, GrammarCompiler, TokenMatcher, refusal
from minisgl.process.trials import TrialLimits, Trials, serve

# To compile a grammar and follow it; common ones take a millisecond. The stack is half of that of the threads that
# compile for requests.
LIMITS: Final = TrialLimits(cpu_s=1, wall_s=4, memory=256 << 20, stack=4 << 20)
TOKENS: Final = 32  # random tokens over which the grammar is followed
VERDICTS: Final = 1024  # verdicts that are kept
FAILED: Final = (
    f"compiling it takes more than {LIMITS.cpu_s} s or {LIMITS.memory >> 20} MB, or crashes the grammar library "
    "(too deeply nested, too large, or a number out of its range)"
)


class TriedCompiler(GrammarCompiler):
    """Compiles grammars after their trial in a child process. Raises `RequestError` for those that fail it."""

    def __init__(self, folder: Path, vocab_size: int, eos_ids: frozenset[int]) -> None:
        super().__init__(folder, vocab_size, eos_ids)
        # Few threads wait for a verdict, so the server must not hang for long.
        arguments = str(folder), str(vocab_size), *map(str, sorted(eos_ids))
        self.trials = Trials(__name__, *arguments, timeout_s=4.0 * LIMITS.wall_s)
        self.close = self.trials.close
        self._lock = threading.Lock()
        self._verdicts: dict[bytes, str] = {}  # of the newest jobs: why they are refused, or ""

    def is_known(self, grammar: Grammar) -> bool:
        """Return whether `compile` need not wait for a trial."""
        return _job(grammar)[0] in self._verdicts

    def compile(self, grammar: Grammar, ignore_eos: bool) -> TokenMatcher:
        """As in `GrammarCompiler`; blocks until the grammar has passed its trial."""
        key, job = _job(grammar)
        error = self._verdicts.get(key)
        if error is None:
            answer = self.trials.run(job).decode()
            error = answer.strip() if answer else refusal(grammar, FAILED).message
            with self._lock:
                self._verdicts[key] = error
                if len(self._verdicts) > VERDICTS:
                    del self._verdicts[next(iter(self._verdicts))]
        if error:
            raise RequestError(error, param=grammar.param, code=INVALID)
        return super().compile(grammar, ignore_eos)


def _job(grammar: Grammar) -> tuple[bytes, bytes]:
    """Return the key of the verdict, and what the process is sent."""
    job = msgspec.msgpack.encode(grammar)
    return blake2b(job).digest(), job


def _answer(compiler: GrammarCompiler, job: bytes) -> Iterator[bytes]:
    """Compile and follow a grammar. Yield why it is refused; a blank if it is usable."""
    try:
        matcher = compiler.compile(msgspec.msgpack.decode(job, type=Grammar), ignore_eos=True)  # masks without EOS
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
        yield e.message.encode()
    else:
        yield b" "


def main(folder: str, vocab_size: str, *eos_ids: str) -> None:
    compiler = GrammarCompiler(Path(folder), int(vocab_size), frozenset(map(int, eos_ids)))
    compiler.load()
    serve(lambda job: _answer(compiler, job), LIMITS)


if __name__ == "__main__":
    main(*sys.argv[1:])
