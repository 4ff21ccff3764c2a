"""Grammars of requests: compiled by threads, never by the scheduler's loop, and turned into token masks.

The same threads read adapters into host memory.

Everything that the scheduler knows about masks is here. A mask depends on the newest token. Under overlap that token is
still in flight when the next step is planned; then the step is launched without masks, samples only when they arrive
(`StepOutput.sample`), and nothing is launched after it before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Final

import numpy as np

from minisgl.core.errors import ConfigError, RequestError
from minisgl.core.layout import NO_MASKS, Flag
from minisgl.grammar.thinking import ThinkingMatcher
from minisgl.scheduler.req import Status

if TYPE_CHECKING:
    from minisgl.core.params import SamplingParams
    from minisgl.core.plan import BatchPlan, Ints
    from minisgl.distributed.control import PlanBus
    from minisgl.grammar.compiler import TokenMatcher
    from minisgl.grammar.trial import TriedCompiler
    from minisgl.scheduler.plan import Launched
    from minisgl.scheduler.req import Req
    from minisgl.scheduler.rows import Index, Rows

    Matcher = TokenMatcher | ThinkingMatcher

THREADS: Final = 16  # they wait for trials
DRAFT_MASKS_S: Final = 1e-3  # the limit of the time for the masks after a request's drafts in a step
COMPILE_S: Final = 60.0  # the compile timeout; a trial has a lower one, so this ends only a wait in a queue of trials


SAMPLES_MASKED: Final = Flag.SAMPLES | Flag.MASKED
ON_DEVICE: Final = Flag.FROM_DEVICE | Flag.MASKED


class Grammars:
    """Compiles grammars and advances the matchers of requests. Without a `compiler` grammars are refused."""

    def __init__(self, compiler: TriedCompiler | None = None, executor: Executor | None = None) -> None:
        self._compiler = compiler
        self._executor = executor or ThreadPoolExecutor(THREADS, "grammar")
        self._known = executor or ThreadPoolExecutor(THREADS, "known-grammar")  # never waits for trials
        self._jobs: dict[int, tuple[Req, Future[Matcher | None], float]] = {}  # in order of arrival
        self.num_matchers = 0  # requests that have a matcher and have not ended
        self._draft_mask_s = 0.0  # the mean time for a mask after a draft

    # -- compiling

    def __len__(self) -> int:
        """The number of requests whose grammar is being compiled, or adapter read."""
        return len(self._jobs)

    def submit(self, req: Req, read_adapter: Callable[[str], None]) -> None:
        """Start to compile the grammar of `req`, and to read its adapter, if it has them; it is COMPILING until then.

        Raises `RequestError` if there are no grammars.
        """
        params = req.sampling_params
        if not params.has_masks and params.adapter is None:
            return
        if params.has_masks and self._compiler is None:
            raise RequestError("this engine has no grammars", param=_param(params), code="unsupported_value")
        is_known = params.grammar is None or self._compiler is None or self._compiler.is_known(params.grammar)
        executor = self._known if is_known else self._executor
        job = executor.submit(self._prepare, self._compiler, params, req.ids[req.prompt_len :], read_adapter)
        self._jobs[req.uid] = req, job, time.monotonic() + COMPILE_S
        req.status = Status.COMPILING

    @staticmethod
    def _prepare(
        compiler: TriedCompiler | None, params: SamplingParams, output: Ints, read_adapter: Callable[[str], None]
    ) -> Matcher | None:
        """Return a matcher, if any, that has advanced over the tokens `output`, which another replica has generated."""
        if params.adapter is not None:
            try:
                read_adapter(params.adapter.source)
            except ConfigError as e:
                raise RequestError(str(e), param="model", code="invalid_adapter") from None
        if compiler is None:
            return None
        grammar = None if params.grammar is None else compiler.compile(params.grammar, params.ignore_eos)
        matcher = grammar if params.thinking_limit is None else compiler.limit(params.thinking_limit, grammar)
        if matcher is not None:
            for token in output.tolist():
                matcher.advance(token)
        if grammar is not None and len(output):
            compiler.compute_masks([grammar])
        return matcher

    def forget(self, req: Req) -> None:
        """Stop following `req`, which has ended; a compilation that has not begun is cancelled."""
        self.num_matchers -= req.matcher is not None
        if (job := self._jobs.pop(req.uid, None)) is not None:
            job[1].cancel()

    def pop_compiled(self) -> Iterator[tuple[Req, RequestError | None]]:
        """Yield the requests whose grammar is compiled (WAITING, with a matcher), and those to refuse with an error."""
        for uid, (req, job, deadline) in list(self._jobs.items()):
            error: RequestError | None = None
            if not job.done():
                if time.monotonic() < deadline:
                    continue
                job.cancel()
                param = _param(req.sampling_params)
                message = f"{param} was not compiled within {COMPILE_S:g} s: too many grammars are being compiled"
                error = RequestError(message, param=param, code="overloaded", status=503)
            elif isinstance(failure := job.exception(), RequestError):
                error = failure
            elif failure is not None:  # a bug, ours or the library's on odd input, costs this request and no other
                error = RequestError(f"preparing the request failed: {failure}", status=500)
            else:
                req.matcher = job.result()
                req.status = Status.WAITING
                self.num_matchers += req.matcher is not None
            del self._jobs[uid]
            yield req, error

    def wait(self, seconds: float) -> None:
        """Wait until a grammar is compiled, for at most `seconds`."""
        if self._jobs:
            wait([job for _, job, _ in self._jobs.values()], seconds, return_when="FIRST_COMPLETED")

    # -- drafts

    def constrain(self, req: Req, guess: Ints) -> tuple[Ints, bool]:
        """Return the tokens that the grammar of `req` forces after its confirmed text, and True.

        If there are none, or no grammar, return as much of `guess` as the grammar allows, and False.
        """
        if req.matcher is None or not req.is_masked:
            return guess, False
        forced = req.matcher.forced()
        drafts = forced if len(forced) else guess[: req.matcher.count_allowed(guess)]
        return drafts[: 1 + int(DRAFT_MASKS_S / max(self._draft_mask_s, 1e-6))], len(forced) > 0

    # -- masks

    def toggled(self, rows: Rows, running: Index, most: int) -> list[int]:
        """Return which of the rows `running` begin or cease to need masks: for a limit of the reasoning.

        A row needs one if its limit is in reach of the tokens in flight and of the next step, which samples at most
        `most`. Others are not even looked at.
        """
        planned = rows.cached_len[running] + 1 + most
        found = []
        for i in np.flatnonzero(planned > rows.free_len[running]).tolist():
            row = int(running[i])
            matcher = self._caught_up(rows, row)
            assert isinstance(matcher, ThinkingMatcher), f"row {row} has no limit"
            rows.free_len[row] = rows.confirmed_len[row] + matcher.free
            if (planned[i] > rows.free_len[row]) != bool(rows.flags[row] & Flag.MASKED):
                found.append(row)
        return found

    @staticmethod
    def _caught_up(rows: Rows, row: int) -> Matcher:
        """Return the matcher of `row`, which has advanced over all confirmed tokens."""
        req = rows.requests[row]
        assert req is not None and req.matcher is not None, f"row {row} has no matcher: {req}"
        if req.sampling_params.grammar is None and isinstance(req.matcher, ThinkingMatcher):
            for token in rows.text(req, req.prompt_len + req.matcher.num_seen).tolist():
                req.matcher.advance(token)
        return req.matcher

    def plan_masks(self, plan: BatchPlan, rows: Rows) -> Ints:
        """Return the masks [M, W] of `plan`; none if one of them depends on a token in flight.

        Call this before `Rows.advance`.
        """
        sequences = plan.sequences[(plan.sequences["flags"] & ON_DEVICE) == ON_DEVICE]
        if (rows.confirmed_len[sequences["row"]] <= rows.cached_len[sequences["row"]]).any():
            return NO_MASKS
        return self._masks(plan, rows)

    @staticmethod
    def awaits_masks(launched: Sequence[Launched]) -> bool:
        """Return whether the newest step in flight has no masks yet, so that nothing may be launched after it."""
        return bool(launched) and launched[-1].output.awaits_masks

    def advance(self, rows: Rows, sampled: Index, tokens: Ints) -> Index:
        """Advance the matchers of the rows `sampled` [n] over their new `tokens` [n], while the device computes.

        Returns the indices of the rows whose grammar is complete, or can no longer be matched.
        """
        advanced: list[tuple[int, Matcher]] = []
        for i in np.flatnonzero(rows.flags[sampled] & Flag.MASKED).tolist():
            req, token = rows.requests[sampled[i]], int(tokens[i])
            assert req is not None and req.matcher is not None, f"row {sampled[i]} has no matcher: {req}"
            if req.sampling_params.grammar is None:
                self._caught_up(rows, int(sampled[i]))
            elif token not in rows.eos_ids:
                req.matcher.advance(token)
                advanced.append((i, req.matcher))
        if stale := [matcher for _, matcher in advanced if matcher.is_stale]:
            assert self._compiler is not None, "there are matchers, but no compiler"
            self._compiler.compute_masks(stale)
        return np.array([i for i, m in advanced if m.is_complete or m.error is not None], np.intp)

    def send_masks(self, launched: Sequence[Launched], rows: Rows, bus: PlanBus) -> None:
        """Give the oldest step in flight, and the other ranks, the masks that it waits for."""
        if launched and (step := launched[0]).output.awaits_masks:
            masks = self._masks(step.plan, rows)
            bus.publish_masks(masks)
            step.output.sample(masks)

    def _masks(self, plan: BatchPlan, rows: Rows) -> Ints:
        """Return the masks of what MASKED sequences of `plan` sample: after the confirmed text, and after drafts."""
        proposals = {int(p["row"]): p for p in plan.proposals}
        masks: list[Ints] = []
        began, count = time.perf_counter(), 0
        samples = (plan.sequences["flags"] & SAMPLES_MASKED) == SAMPLES_MASKED
        for row, start, stop, flags in plan.sequences[samples].tolist():
            matcher = self._caught_up(rows, row)
            masks.append(matcher.mask)
            if flags & Flag.DRAFTS and (width := stop - start) > 1:
                offset = int(rows.confirmed_len[row] - proposals[row]["first"])
                masks += matcher.along(proposals[row]["tokens"][offset : offset + width - 1])
                count += width - 1
        if count:
            self._draft_mask_s += 0.1 * ((time.perf_counter() - began) / count - self._draft_mask_s)
        return np.stack(masks) if masks else NO_MASKS


def _param(params: SamplingParams) -> str:
    """Return the field that asks for masks, or for an adapter."""
    source = params.grammar or params.thinking_limit
    return "model" if source is None else source.param
