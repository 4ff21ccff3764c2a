"""The one brain: turns messages into plans and results into replies.

    handle   a message changes the queues
    plan     queues + free rows and pages -> Step (decode rows first, then chunks of prompts)
    launch   the engine starts the batch
    collect  results -> confirmed tokens, endings, prefix cache, replies
    release  the one place where a row and its pages are given back

A step in which nobody begins, ends or needs a page costs a handful of array operations (`rows.py`), however many
requests decode; only those to which something happens are looked at one by one.

Overlap is the length to which the queue of launched batches may grow: 1 plans the next step while the device computes
the last one, 0 waits for it.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np

from minisgl.core import FinishReason
from minisgl.distributed.control import PlanBus
from minisgl.errors import InvariantError, RequestError
from minisgl.kvcache import create_prefix_cache
from minisgl.message import AbortBackendMsg, BackendMsg, ExitMsg, Finished, FlushCacheMsg, UserMsg, ViewMsg
from minisgl.scheduler.budget import Pace
from minisgl.scheduler.cache import CacheManager
from minisgl.scheduler.check import check_idle, check_invariants
from minisgl.scheduler.decode import DecodeManager
from minisgl.scheduler.door import Door
from minisgl.scheduler.endings import Outbox, ending, failure, non_finite
from minisgl.scheduler.grammars import Grammars
from minisgl.scheduler.plan import Launched, Step
from minisgl.scheduler.prefill import PrefillManager
from minisgl.scheduler.req import Req, Status
from minisgl.scheduler.rows import Rows
from minisgl.scheduler.stats import HEARTBEAT_S, Stats
from minisgl.scheduler.step_clock import StepClock
from minisgl.scheduler.view import engine_view
from minisgl.settings.sources import is_check_mode, is_overlap_disabled

if TYPE_CHECKING:
    from minisgl.distributed.group import Group
    from minisgl.scheduler.engine_protocol import StepEngine
    from minisgl.scheduler.io import SchedulerIO
    from minisgl.settings.options import SchedulerConfig


COMPILE_POLL_S: Final = 0.005  # how long to wait for grammars when there is nothing else to do


class Scheduler:
    """Owns the requests; see the module's docstring for the cycle and docs/architecture.md for the rules."""

    def __init__(
        self,
        config: SchedulerConfig,
        engine: StepEngine,
        io: SchedulerIO,
        grammars: Grammars | None = None,
        bus: PlanBus | None = None,
    ) -> None:
        """`grammars` compiles those of requests; without it they are refused. `bus` leads to the other ranks."""
        self.engine = engine
        self.io = io
        self.bus = PlanBus() if bus is None else bus
        self.pace = Pace(config, engine.step_costs())
        overlap = engine.is_async if config.overlap is None else config.overlap
        self.depth = int(overlap and not is_overlap_disabled())
        pool_tokens = engine.num_pages * engine.page_size
        self.door = Door(config, engine.limits, pool_tokens)
        longest = min(engine.limits.max_model_len, pool_tokens + 1)
        self.rows = Rows(
            engine.max_running_requests, longest, engine.page_size, engine.limits.vocab_size, engine.eos_token_ids
        )
        prefix_cache = create_prefix_cache(config.cache_type, engine.page_size)
        self.cache = CacheManager(engine.num_pages, engine.page_size, prefix_cache, self.rows)
        self.is_mixed = config.mixed_batches
        self.prefill = PrefillManager(self.cache, self.rows, config.schedule_policy)
        self.decode = DecodeManager(self.cache, self.rows)
        self.grammars = Grammars() if grammars is None else grammars
        self.outbox = Outbox(io)
        self.live: dict[int, Req] = {}  # every accepted request that is not released yet
        self.leaving: dict[int, Req] = {}  # of those, who ended or was retracted, but is held by a batch in flight
        self.launched: deque[Launched] = deque()
        self.clock = StepClock()
        self.stats = Stats()
        self.step_number = 0
        self.is_exiting = False
        self._check = check_invariants if is_check_mode() else None

    @classmethod
    def from_config(cls, config: SchedulerConfig, io: SchedulerIO, group: Group) -> Scheduler:
        """A scheduler with a real engine: loads the model, of which this is rank 0."""
        from minisgl.engine.engine import Engine
        from minisgl.grammar.compiler import GrammarCompiler

        engine = Engine.from_config(config.engine, config.max_prefill_length, group)
        if engine.spec.pooling == "mean":
            config = replace(config, cache_type="naive")  # a prefix's K/V does not tell its hidden states
        compiler = GrammarCompiler(engine.spec.folder, engine.limits.vocab_size, engine.eos_token_ids)
        return cls(config, engine, io, Grammars(compiler), group.bus)

    # -- the cycle

    @property
    def num_queued(self) -> int:
        """Requests that wait to be computed."""
        return len(self.prefill.waiting) + len(self.grammars)

    @property
    def is_busy(self) -> bool:
        return bool(self.live or self.launched)

    def run_forever(self) -> None:
        """Serve until an ExitMsg comes; requests still alive then end with an error."""
        try:
            while not self.is_exiting:
                self.step(timeout=self._leisure() if self.is_busy else HEARTBEAT_S)
        finally:
            for req in list(self.live.values()):
                if req.status is not Status.FINISHED:
                    self.finish(req, failure(req.uid, RequestError("the server is shutting down", status=503)))
            self.outbox.flush()

    def _leisure(self) -> float:
        """Seconds to listen before the next step is planned: none while there are prompts for it, or nothing runs."""
        if not self.engine.is_async or len(self.launched) != 1 or len(self.grammars) or self.prefill.has_work:
            return 0.0
        return self.clock.spare(time.monotonic())

    def step(self, timeout: float = 0.0) -> None:
        """Once around: hear, plan, launch, collect. Waits up to `timeout` seconds for a message."""
        for msg in self.io.receive(timeout):
            self.handle(msg)
        self._enqueue_compiled()
        while self.launched and self.launched[-1].output.awaits_masks:  # with more than one in flight
            self.collect(self.launched.popleft())
        step = self.plan()
        if step is not None:
            self.launch(step)
        needs_tokens = self.rows.num_constrained and not self.engine.is_async
        while len(self.launched) > (0 if step is None or needs_tokens else self.depth):
            self.collect(self.launched.popleft())
        self.outbox.flush()
        if step is None and not self.launched:
            self.grammars.wait(COMPILE_POLL_S)
        if self._check is not None:
            self._check(self)
        if not self.is_busy:
            check_idle(self)
        if (heartbeat := self.stats.heartbeat(self, time.monotonic())) is not None:
            self.io.send_stats(heartbeat)

    # -- messages

    def handle(self, msg: BackendMsg) -> None:
        match msg:
            case UserMsg():
                self.accept(msg)
            case AbortBackendMsg(uid):
                if (req := self.live.get(uid)) is not None and req.status is not Status.FINISHED:
                    self.finish(req, Finished(uid=uid, reason=FinishReason.ABORT))
            case FlushCacheMsg():
                self.cache.flush()
            case ViewMsg(uid):
                self.io.send_view(engine_view(self, uid))
            case ExitMsg():
                self.is_exiting = True

    def accept(self, msg: UserMsg) -> None:
        """Queue a request, or refuse it with a terminal reply."""
        try:
            if msg.uid in self.live:
                raise RequestError(f"request {msg.uid} is running already", code="duplicate_request")
            req = self.door.admit(msg, self.num_queued)
            if msg.sampling_params.grammar is not None:
                self.grammars.submit(req)
        except RequestError as e:
            self.outbox.finish(failure(msg.uid, e))
            return
        self.live[req.uid] = req
        if req.status is Status.WAITING:
            self.prefill.add(req)
        self.stats.prompt_tokens += req.prompt_len

    def _enqueue_compiled(self) -> None:
        """Queue the requests whose grammar is ready, and refuse those whose grammar is none."""
        for req, error in self.grammars.take():
            if error is not None:
                self.finish(req, failure(req.uid, error))
            else:
                self.prefill.add(req)

    # -- plan and launch

    def plan(self) -> Step | None:
        """What the next step computes, if anything can be. Advances no request yet, but takes rows and pages."""
        self.step_number += 1
        self.cache.prefix.tick(self.step_number)
        running, is_short = self.decode.plan(self._make_room)
        if not is_short:
            self.prefill.growth.relax()
        chunks = []
        if self.prefill.has_work:
            context = int(self.rows.cached_len[running].sum())
            budget = self.pace.budget(len(running), context, self.prefill.backlog(self.pace.rush_tokens))
            # While running requests lack pages, nobody new may take the last ones.
            chunks = self.prefill.plan(budget, None if is_short else running)
            if chunks and not self.is_mixed:
                running = running[:0]
        if len(running) or chunks:
            return Step(running, chunks)
        if not self.launched and len(self.live) > len(self.grammars):
            raise InvariantError(f"no request can go on: {list(self.live.values())[:8]}")
        return None

    def _make_room(self, req: Req) -> bool:
        """Retract the newest request in favour of `req`; whether pages may have become free at once."""
        if self.leaving:
            return False
        candidates = [*self.decode.running, *self.prefill.chunked]
        victim = max(candidates, key=lambda r: r.order)
        if victim is req and len(candidates) == 1:
            return False  # alone: the pages it waits for are fenced or in flight
        self.prefill.growth.tighten()
        self.stats.preemptions += 1
        self._leave(victim, Status.RETRACTING)
        return victim is not req

    def launch(self, step: Step) -> None:
        """Advance the planned lengths and hand the batch to the engine."""
        plan = step.make_plan(self.step_number, self.rows)
        self.rows.advance(plan)
        for req in step.prompts():
            self.decode.add(req)
        self.stats.computed_prompt_tokens += len(plan.tokens)
        self.bus.publish(plan.pack)
        self.clock.launch(time.monotonic(), is_idle=not self.launched)
        output = self.engine.launch(plan)
        self.launched.append(Launched(plan, step.sampled_rows(), step.prompts(), step.prompt_logprobs(), output))

    # -- results

    def collect(self, step: Launched) -> None:
        """Confirm the tokens of an executed batch, end what has ended, and say so in one message."""
        result = self.clock.wait_for(step.output, is_decode=not len(step.plan.tokens))
        tokens, finite = result.tokens, result.finite
        self.bus.note_result(tokens)
        rows, sampled = self.rows, step.sampled
        rows.retired = step.plan.step
        self.cache.lower_fences()
        wanted = rows.is_wanted[sampled]
        usable = wanted & (finite != 0)
        if not usable.all():
            for req in rows.holders(sampled[wanted & (finite == 0)]):
                self.finish(req, failure(req.uid, non_finite(req)))
            sampled, tokens = sampled[usable], tokens[usable]
        if result.logprobs is not None:
            self.outbox.note_logprobs(step, result.logprobs, np.flatnonzero(usable), rows)
        uids = rows.uid[sampled]
        maybe_ended = rows.confirm(sampled, tokens)
        for column, req in enumerate(step.prompts, len(step.sampled) - len(step.prompts)):
            if req.status is not Status.FINISHED and len(req.ids) == req.prompt_len:
                self.stats.cached_tokens += req.prefix_hit
                self.outbox.start(req, result.embedding(column))
                req.prompt_logprobs = None
        failed: list[tuple[Req, RequestError]] = []
        if rows.num_constrained:
            complete, failed = self.grammars.follow(rows, sampled, tokens)
            maybe_ended = np.union1d(maybe_ended, complete)
        for req, token in zip(rows.holders(sampled[maybe_ended]), tokens[maybe_ended].tolist(), strict=True):
            if (end := ending(req, token, int(rows.confirmed_len[req.row]), rows.eos_ids)) is not None:
                self.finish(req, end)
        for req, cause in failed:
            if req.status is not Status.FINISHED:
                self.finish(req, failure(req.uid, cause))
        for req in step.prompts:
            if req.status is Status.RUNNING:
                # The prompt is computed: whoever comes with the same one need not wait for this request to end.
                self.cache.share(req)
        for req in list(self.leaving.values()):
            self.release(req)
        self.stats.generation_tokens += len(uids)
        if len(uids):
            self.outbox.send(uids, tokens)
        if self.launched and (following := self.launched[0]).output.awaits_masks:
            masks = rows.masks(following.sampled)
            self.bus.publish_masks(masks)
            following.output.sample(masks)

    def finish(self, req: Req, end: Finished) -> None:
        """End a request, whatever the reason: its one terminal reply, and its way out."""
        assert req.status is not Status.FINISHED, f"ended twice: {req}"
        self.outbox.finish(end)
        self.grammars.forget(req)
        self.rows.mute(req)  # what the device still computes for it is not reported
        self._leave(req, Status.FINISHED)

    def _leave(self, req: Req, status: Status) -> None:
        """Take a request out of the queues, to be released: for good (FINISHED) or to wait again (RETRACTING)."""
        self.decode.remove(req)
        self.prefill.remove(req)
        req.status = status
        self.leaving[req.uid] = req  # it is there already if it was retracted before it finished
        self.release(req)

    def release(self, req: Req) -> None:
        """Give back row and pages of a request that has left, once no batch in flight holds it. The only such place."""
        if self.rows.is_in_flight(req):
            return
        del self.leaving[req.uid]
        if req.table_idx is not None:
            self.cache.share(req)
            self.cache.release(req)
            if req.status is Status.RETRACTING:
                req.append_host(self.rows.sampled(req))  # with which it waits
            self.rows.free(req)
        if req.status is Status.FINISHED:
            del self.live[req.uid]
        else:
            req.status = Status.WAITING
            self.prefill.put_back(req)

    def describe(self) -> dict[str, str | int | float]:
        """Facts for the banner and /server_info."""
        return {
            **self.engine.describe(),
            "overlap": self.depth,
            "mixed_batches": int(self.is_mixed),
            "schedule_policy": self.prefill.policy,
            **self.pace.describe(),
            "cache": type(self.cache.prefix).__name__,
        }
