"""The one brain: turns messages into plans and results into replies.

    handle   a message changes the queues
    plan     queues + free rows and pages -> BatchPlan (decode rows first, then chunks of prompts)
    launch   the engine starts the batch
    collect  results -> confirmed tokens, endings, prefix cache, replies
    release  the one place where a row and its pages are given back

Overlap is the length to which the queue of launched batches may grow: 1 plans the next step while the device computes
the last one, 0 waits for it.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from minisgl.core import BatchPlan, FinishReason, Req, SeqSlot, Status
from minisgl.env import is_check_mode, is_overlap_disabled
from minisgl.kvcache import create_prefix_cache
from minisgl.message import (
    AbortBackendMsg,
    BackendMsg,
    DetokenizeMsg,
    ExitMsg,
    Finished,
    FlushCacheMsg,
    Started,
    UserMsg,
    ids_from_bytes,
    ids_to_bytes,
)
from minisgl.scheduler.cache import CacheManager
from minisgl.scheduler.check import check_idle, check_invariants
from minisgl.scheduler.decode import DecodeManager
from minisgl.scheduler.door import output_budget
from minisgl.scheduler.plan import make_plan, noise_key
from minisgl.scheduler.prefill import PrefillManager
from minisgl.scheduler.stats import HEARTBEAT_S, Stats
from minisgl.scheduler.table import TableManager
from minisgl.utils.errors import InvariantError, RequestError

if TYPE_CHECKING:
    from minisgl.config import SchedulerConfig
    from minisgl.scheduler.engine_protocol import StepEngine, StepOutput
    from minisgl.scheduler.io import SchedulerIO


@dataclass(frozen=True, slots=True)
class Launched:
    """A batch in flight. Holding it keeps the plan's buffers and the batch's tensors alive until it is collected."""

    plan: BatchPlan
    slots: list[SeqSlot]
    batch: Any
    output: StepOutput


class Scheduler:
    """Owns the requests; see the module's docstring for the cycle and docs/architecture.md for the rules."""

    def __init__(self, config: SchedulerConfig, engine: StepEngine, io: SchedulerIO) -> None:
        self.engine = engine
        self.io = io
        self.limits = engine.limits
        self.budget = config.max_prefill_length
        self.max_queued = config.max_queued_requests
        self.sampling_seed = config.sampling_seed
        overlap = engine.is_async if config.overlap is None else config.overlap
        self.depth = int(overlap and not is_overlap_disabled())
        self.table = TableManager(engine.max_running_requests, engine.eos_token_ids)
        prefix_cache = create_prefix_cache(config.cache_type, engine.page_size)
        self.cache = CacheManager(engine.num_pages, engine.page_size, prefix_cache, self.table)
        self.prefill = PrefillManager(self.cache, self.table, config.schedule_policy)
        self.decode = DecodeManager(self.cache, self.table)
        self.live: dict[int, Req] = {}  # every accepted request that is not released yet
        self.leaving = 0  # requests that ended or were retracted, but are held by a batch in flight
        self.launched: deque[Launched] = deque()
        self.stats = Stats()
        self.step_number = 0
        self.last_launched = 0  # step of the newest batch that was launched
        self.is_exiting = False
        self._arrivals = 0
        self._finished: list[Finished] = []  # endings not sent yet
        self._check = check_invariants if is_check_mode() else None

    @classmethod
    def from_config(cls, config: SchedulerConfig, io: SchedulerIO) -> Scheduler:
        """A scheduler with a real engine: loads the model."""
        from minisgl.engine.engine import Engine

        return cls(config, Engine.from_config(config.engine), io)

    # -- the cycle

    @property
    def is_busy(self) -> bool:
        return bool(self.live or self.launched)

    def run_forever(self) -> None:
        """Serve until an ExitMsg comes; requests still alive then end with an error."""
        try:
            while not self.is_exiting:
                self.step(timeout=0.0 if self.is_busy else HEARTBEAT_S)
        finally:
            for req in list(self.live.values()):
                self.finish(req, FinishReason.ERROR, error="the server is shutting down", status=503)
            self._send([], [], [])

    def step(self, timeout: float = 0.0) -> None:
        """Once around: hear, plan, launch, collect. Waits up to `timeout` seconds for a message."""
        for msg in self.io.receive(timeout):
            self.handle(msg)
        slots = self.plan()
        if slots:
            self.launch(slots)
        while len(self.launched) > (self.depth if slots else 0):
            self.collect(self.launched.popleft())
        if self._finished:
            self._send([], [], [])
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
                    self.finish(req, FinishReason.ABORT)
            case FlushCacheMsg():
                self.cache.flush()
            case ExitMsg():
                self.is_exiting = True

    def accept(self, msg: UserMsg) -> None:
        """Queue a request, or refuse it with a terminal reply."""
        try:
            req = self._make_req(msg)
        except RequestError as e:
            error = Finished(msg.uid, FinishReason.ERROR, False, e.message, e.code or "", e.status)
            self._finished.append(error)
            return
        self.live[req.uid] = req
        self.prefill.add(req)
        self.stats.prompt_tokens += req.prompt_len

    def check_request(self, msg: UserMsg) -> int:
        """The number of tokens that a request may generate; raises `RequestError` if it can never be served."""
        return output_budget(msg, self.limits, self.cache.num_pages * self.cache.page_size)

    def _make_req(self, msg: UserMsg) -> Req:
        max_tokens = self.check_request(msg)
        if msg.uid in self.live:
            raise RequestError(f"request {msg.uid} is running already", code="duplicate_request")
        if len(self.prefill.waiting) >= self.max_queued:
            raise RequestError(
                f"{self.max_queued} requests are waiting already; try again later", code="queue_full", status=429
            )
        self._arrivals += 1
        key = noise_key(msg.sampling_params.seed, self.sampling_seed, msg.uid)
        return Req(msg.uid, ids_from_bytes(msg.input_ids), msg.sampling_params, max_tokens, self._arrivals, key)

    # -- plan and launch

    def plan(self) -> list[SeqSlot]:
        """What the next step computes; empty when nothing can. Advances no request yet, but takes rows and pages."""
        self.step_number += 1
        self.cache.prefix.tick(self.step_number)
        preemptions = self.stats.preemptions
        slots = self.decode.plan(self._make_room)
        running = [r for r in self.decode.running.values() if r.can_decode]
        # While running requests lack pages, nobody new may take the last ones.
        is_short = len(slots) < len(running) or self.stats.preemptions > preemptions
        if not is_short:
            self.prefill.growth.relax()
        slots += self.prefill.plan(self.budget - len(slots), None if is_short else running, self._admitted)
        if not slots and not self.launched and self.live:
            raise InvariantError(f"no request can go on: {list(self.live.values())[:8]}")
        return slots

    def _admitted(self, req: Req) -> None:
        if not req.started and req.confirmed_len == req.prompt_len:
            req.prefix_hit = req.cached_len
            self.stats.cached_tokens += req.cached_len

    def _make_room(self, req: Req) -> bool:
        """Retract the newest request in favour of `req`; whether pages may have become free at once."""
        if self.leaving:
            return False
        victim = max([*self.decode.running.values(), *self.prefill.chunked], key=lambda r: r.order)
        if victim is req and len(self.decode.running) + len(self.prefill.chunked) == 1:
            return False  # alone: the pages it waits for are fenced or in flight
        self.prefill.growth.tighten()
        self.stats.preemptions += 1
        self._retract(victim)
        return victim is not req

    def _retract(self, req: Req) -> None:
        """Send a running request back to the queue; its tokens so far become part of its prompt."""
        req.status = Status.RETRACTING
        self.decode.remove(req)
        self.prefill.remove(req)
        self.leaving += 1
        self.release(req)

    def launch(self, slots: list[SeqSlot]) -> None:
        """Advance the planned lengths and hand the batch to the engine."""
        for slot in slots:
            req = slot.req
            assert req.status is Status.RUNNING and req.table_idx == slot.row, f"planned while not running: {req}"
            req.in_flight += 1
            req.cached_len = slot.stop
            if slot.samples:
                req.device_len += 1
                if not slot.from_device:
                    self.decode.add(req)
            if not slot.from_device:
                self.stats.computed_prompt_tokens += slot.stop - slot.start
        plan = make_plan(self.step_number, slots, *self.table.take_writes())
        self.io.publish(plan)
        self.last_launched = plan.step
        batch = self.engine.prepare(plan)
        self.launched.append(Launched(plan, slots, batch, self.engine.launch(batch)))

    # -- results

    def collect(self, step: Launched) -> None:
        """Confirm the tokens of an executed batch, end what has ended, and say so in one message."""
        tokens, finite = (a.tolist() for a in step.output.wait())
        self.cache.retire(step.plan.step)
        uids: list[int] = []
        shown: list[int] = []
        started: list[Started] = []
        sampled = 0
        for slot in step.slots:
            req = slot.req
            req.in_flight -= 1
            if slot.samples:
                token, is_finite = tokens[sampled], finite[sampled]
                sampled += 1
                if req.status is not Status.FINISHED:
                    if is_finite:
                        uids.append(req.uid)
                        shown.append(token)
                        if not req.started:
                            req.started = True
                            started.append(_started(req))
                        self._confirm(req, token, slot)
                    else:
                        self.finish(req, FinishReason.ERROR, error="the model's output is not a number (NaN or Inf)")
            self.release(req)
        self.stats.generation_tokens += len(uids)
        if uids:
            self._send(uids, shown, started)

    def _confirm(self, req: Req, token: int, slot: SeqSlot) -> None:
        req.append_host(token)
        req.sound_len = slot.stop
        params = req.sampling_params
        if token in self.engine.eos_token_ids and not params.ignore_eos:
            self.finish(req, FinishReason.STOP, has_text=False)
        elif token in params.stop_token_ids:
            self.finish(req, FinishReason.STOP, has_text=False, stop_token=token)
        elif req.confirmed_len == req.max_device_len:
            self.finish(req, FinishReason.LENGTH)
        elif not slot.from_device and req.status is Status.RUNNING:
            # The prompt is computed: whoever comes with the same one need not wait for this request to end.
            self.cache.share(req, fence=self.last_launched)

    def finish(
        self,
        req: Req,
        reason: FinishReason,
        *,
        has_text: bool = True,
        stop_token: int | None = None,
        error: str = "",
        status: int = 500,
    ) -> None:
        """End a request, whatever the reason: its one terminal reply, and its way out."""
        assert req.status is not Status.FINISHED, f"ended twice: {req}"
        if req.status is Status.RETRACTING:
            self.leaving -= 1  # it leaves for another reason now
        req.status = Status.FINISHED
        req.finish_reason = reason
        self.decode.remove(req)
        self.prefill.remove(req)
        self.leaving += 1
        self._finished.append(Finished(req.uid, reason, has_text, error, "", status, stop_token))
        self.release(req)

    def release(self, req: Req) -> None:
        """Give back row and pages of a request that has left, once no batch in flight holds it. The only such place."""
        if req.in_flight or req.is_released or req.status not in (Status.FINISHED, Status.RETRACTING):
            return
        if req.table_idx is not None:
            self.cache.share(req, fence=self.last_launched)
            self.cache.release(req)
            self.table.free(req.table_idx)
            req.table_idx = None
        self.leaving -= 1
        if req.status is Status.FINISHED:
            del self.live[req.uid]
            req.is_released = True
        else:
            req.status = Status.WAITING
            req.cached_len, req.device_len, req.sound_len = 0, req.confirmed_len, 0
            self.prefill.add(req)

    def _send(self, uids: list[int], tokens: list[int], started: list[Started]) -> None:
        finished, self._finished = self._finished, []
        if uids or finished:
            packed = np.array(uids, "<i8").tobytes()
            self.io.send(DetokenizeMsg(packed, ids_to_bytes(tokens), started, finished))

    def describe(self) -> dict[str, str | int | float]:
        """Facts for the banner and /server_info."""
        return {
            **self.engine.describe(),
            "overlap": self.depth,
            "token_budget": self.budget,
            "cache": type(self.cache.prefix).__name__,
        }


def _started(req: Req) -> Started:
    p = req.sampling_params
    return Started(req.uid, req.prompt_len, req.prefix_hit, p.stop, p.skip_special_tokens)
