"""Grammars on their way from a request to a matcher: compiled by threads, never by the engine's loop."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from minisgl.errors import RequestError
from minisgl.scheduler.req import Status

if TYPE_CHECKING:
    from minisgl.core import Ints
    from minisgl.params import Grammar
    from minisgl.scheduler.req import Req
    from minisgl.scheduler.rows import Index, Rows

THREADS: Final = 2
COMPILE_S: Final = 10.0  # beyond which a request is refused; the compiler's own limits end its work


class Matcher(Protocol):
    """One request's place in its grammar (`grammar.compiler.TokenMatcher`)."""

    mask: Ints  # [ceil(V / 32)], bit i of word w: token 32 w + i may come next
    is_complete: bool  # the text is whole and nothing but an end may follow

    def advance(self, token: int) -> None:
        """`token`, no end, was chosen; the rest is out of date until `Compiler.look`."""


class Compiler(Protocol):
    """Makes matchers (`grammar.compiler.GrammarCompiler`)."""

    def compile(self, grammar: Grammar, ignore_eos: bool) -> Matcher:
        """Raises `RequestError`; called by several threads at once."""

    def look(self, matchers: Sequence[Any]) -> list[RequestError | None]:
        """Find out what may come next for each of these, which it has made, or why a grammar cannot be followed."""


class Grammars:
    """The requests whose grammar is being compiled, in order of arrival. Without a `compiler` there are none."""

    def __init__(self, compiler: Compiler | None = None, executor: Executor | None = None) -> None:
        self._compiler = compiler
        self._executor = executor or ThreadPoolExecutor(THREADS, "grammar")
        self._jobs: dict[int, tuple[Req, Future[Matcher], float]] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    def submit(self, req: Req) -> None:
        """Compile the grammar of `req`, which is COMPILING until then; raises `RequestError` if nobody can."""
        params = req.sampling_params
        assert params.grammar is not None, f"has no grammar: {req}"
        if self._compiler is None:
            raise RequestError("this engine has no grammars", param=params.grammar.param, code="unsupported_value")
        job = self._executor.submit(self._compiler.compile, params.grammar, params.ignore_eos)
        self._jobs[req.uid] = req, job, time.monotonic() + COMPILE_S
        req.status = Status.COMPILING

    def forget(self, req: Req) -> None:
        """`req` has ended; a compilation that has not begun does not begin any more."""
        if (job := self._jobs.pop(req.uid, None)) is not None:
            job[1].cancel()

    def take(self) -> Iterator[tuple[Req, RequestError | None]]:
        """The requests that have their matcher now (it is in `req.matcher`) and are WAITING, or an error instead."""
        for uid, (req, job, deadline) in list(self._jobs.items()):
            error: RequestError | None = None
            if not job.done():
                if time.monotonic() < deadline:
                    continue
                job.cancel()
                assert req.sampling_params.grammar is not None, f"nothing is compiled for {req}"
                param = req.sampling_params.grammar.param
                error = RequestError(
                    f"{param} was not compiled within {COMPILE_S:g} s", param=param, code="invalid_grammar"
                )
            elif isinstance(failure := job.exception(), RequestError):
                error = failure
            elif failure is not None:  # a bug of ours, or of the library on odd input, costs this request and no other
                error = RequestError(f"compiling the grammar failed: {failure}", status=500)
            else:
                req.matcher = job.result()
                req.status = Status.WAITING
            del self._jobs[uid]
            yield req, error

    def wait(self, seconds: float) -> None:
        """Until one is done, at most so long."""
        if self._jobs:
            wait([job for _, job, _ in self._jobs.values()], seconds, return_when="FIRST_COMPLETED")

    def follow(self, rows: Rows, sampled: Index, tokens: Ints) -> tuple[Index, list[tuple[Req, RequestError]]]:
        """Tell the matchers of the constrained rows among `sampled` [n] their new `tokens` [n].

        Returns the indices of those whose text is complete, and the requests whose grammar cannot be followed. What
        they may sample next is found out here, while the device computes.
        """
        complete, failed, advanced = [], [], []
        for i in np.flatnonzero(rows.is_constrained[sampled]).tolist():
            req, token = rows.requests[sampled[i]], int(tokens[i])
            assert req is not None, f"row {sampled[i]} is nobody's"
            if token not in rows.eos_ids:
                req.matcher.advance(token)
                advanced.append((i, req))
        if advanced:
            assert self._compiler is not None, "somebody made the matchers"
            for (i, req), error in zip(advanced, self._compiler.look([r.matcher for _, r in advanced]), strict=True):
                if error is not None:
                    failed.append((req, error))
                elif req.matcher.is_complete:
                    complete.append(i)
        return np.array(complete, np.intp), failed
