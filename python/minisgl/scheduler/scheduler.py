"""Turns messages into plans and results into replies. Only rank 0 has a scheduler.

    handle   a message changes the queues
    plan     queues + free rows and pages -> Step (decode rows first, then chunks of prompts)
    launch   the engine starts the step
    collect  confirm tokens, end requests, share prefixes, reply
    release  the one place where a row and its pages are given back

A step in which no request begins, ends or needs a page costs a handful of array operations (`rows.py`), however many
requests decode; single requests are only looked at when something happens to them.

Overlap is the number of launched steps that may stay in flight: with 1 the next step is planned while the device
computes the last one, with 0 it waits for the result.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np

from minisgl.core.errors import InvariantError, RequestError
from minisgl.core.layout import NO_INTS
from minisgl.core.message import (
    AbortMsg,
    BackendMsg,
    ExitMsg,
    Finished,
    FlushCacheMsg,
    TellPrefixesMsg,
    UserMsg,
    ViewMsg,
)
from minisgl.distributed.control import PlanBus
from minisgl.kvcache.arena import Arena
from minisgl.kvcache.snapshots import IdPool
from minisgl.scheduler import endings
from minisgl.scheduler.adapters import Adapters
from minisgl.scheduler.budget import LoadBudget, Pace, StepClock
from minisgl.scheduler.cache import CacheManager
from minisgl.scheduler.check import check_idle, check_invariants
from minisgl.scheduler.decode import DecodeManager
from minisgl.scheduler.drafts import create_drafts
from minisgl.scheduler.grammars import Grammars
from minisgl.scheduler.io import Replies
from minisgl.scheduler.plan import Launched, Step
from minisgl.scheduler.prefill import MUCH_LONGER, PrefillManager
from minisgl.scheduler.req import Admission, Req, Status
from minisgl.scheduler.rows import Rows
from minisgl.scheduler.stats import HEARTBEAT_S, Stats, engine_view
from minisgl.settings.sources import is_check_mode, is_overlap_disabled

if TYPE_CHECKING:
    from collections.abc import Callable

    from minisgl.core.plan import Ints, StepResult
    from minisgl.scheduler.io import SchedulerIO
    from minisgl.scheduler.plan import ConfirmedTokens, StepEngine
    from minisgl.scheduler.rows import Index
    from minisgl.settings.options import SchedulerConfig

logger = logging.getLogger(__name__)

COMPILE_POLL_S: Final = 0.005  # how long to wait for grammars when there is nothing else to do
EXIT_S: Final = 1.0  # the time limit of `save`


class Scheduler:
    """Owns the requests; see the module's docstring for the cycle and docs/architecture.md for the rules."""

    def __init__(
        self,
        config: SchedulerConfig,
        engine: StepEngine,
        io: SchedulerIO,
        grammars: Grammars | None = None,
        bus: PlanBus | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Without `grammars` requests that have one are refused. `bus` leads to the other ranks.

        `clock`: in seconds, read once a step.
        """
        self.engine = engine
        self.io = io
        self.bus = PlanBus() if bus is None else bus
        costs = engine.step_costs()
        self.pace = Pace(config, costs, engine.is_async)
        overlap = engine.is_async if config.overlap is None else config.overlap
        self.depth = int(overlap and not is_overlap_disabled())
        limits, arena = engine.limits, Arena(engine.blocks)
        pools = [IdPool(arena, bounded, engine.page_size, config.max_prefill_length) for bounded in engine.bounded]
        self.admission = Admission(config, limits, arena.max_pages * engine.page_size)
        max_tokens = self.admission.max_tokens
        self.rows = Rows(
            engine.max_running_requests, max_tokens, engine.page_size, limits.vocab_size, engine.eos_token_ids
        )
        self.cache = CacheManager(config, engine, arena, pools, self.rows)
        self.is_mixed = config.mixed_batches
        self.adapters = Adapters(engine.adapter_slots)
        self.prefill = PrefillManager(self.cache, self.rows, self.adapters, config.schedule_policy)
        self.decode = DecodeManager(self.cache, self.rows)
        self.grammars = Grammars() if grammars is None else grammars
        self.drafts = create_drafts(config.engine, engine, self.rows, self.cache, self.grammars.constrain)
        self.replies = Replies(io)
        self.live: dict[int, Req] = {}  # every accepted request that is not released yet
        self.leaving: dict[int, Req] = {}  # of those, ended or preempted ones that a step in flight holds
        self.launched: deque[Launched] = deque()
        self.clock = StepClock()
        self._clock = clock
        self.now = clock()
        self.stats = Stats()
        self.step_number = 0
        self.is_exiting = False
        self.shows_texts = config.view_texts
        self._max_queue_time = config.max_queue_time
        self._arrivals: deque[tuple[float, int]] = deque()  # the latest time to begin, uid; in order
        self._check = check_invariants if is_check_mode() else None

    # -- the cycle

    @property
    def num_queued(self) -> int:
        """The number of requests that wait to be computed."""
        return len(self.prefill.waiting) + len(self.grammars)

    @property
    def is_busy(self) -> bool:
        return bool(self.live or self.launched)

    def run_forever(self) -> None:
        """Serve until an ExitMsg arrives; requests still alive then end with an error."""
        try:
            while not self.is_exiting:
                self.step(timeout=self._listen_seconds() if self.is_busy else HEARTBEAT_S)
        finally:
            for req in list(self.live.values()):
                if req.status is not Status.FINISHED:
                    self.finish(req, endings.shut_down(req))
            self.replies.flush()
        while self.launched:
            self.collect(self.launched.popleft())
        self.save()

    def save(self) -> None:
        """Copy cached pages to the tiers that outlive this process, as many as EXIT_S allows; nothing if busy."""
        deadline = time.monotonic() + EXIT_S
        while not self.is_busy and time.monotonic() < deadline and (step := self._write_back(lasting=True)) is not None:
            self.step_number += 1
            self.launch(step)
            self.collect(self.launched.popleft())

    def _listen_seconds(self) -> float:
        """Return how long to listen before the next step is planned: 0 if the device idles, or a queue waits."""
        backlog = self.prefill.backlog(self.pace.max_backlog)
        if not self.engine.is_async or len(self.grammars) or self.pace.is_queue(backlog):
            return 0.0
        return self.clock.slack(time.monotonic())

    def step(self, timeout: float = 0.0) -> None:
        """Handle messages, plan, launch and collect, once. Waits up to `timeout` seconds for the first message."""
        messages = self.io.receive(timeout)
        self.now = self._clock()
        for msg in messages:
            self.handle(msg)
        for req, error in self.grammars.pop_compiled():
            if error is None:
                self.prefill.add(req)
            else:
                self.finish(req, endings.failed(req.uid, error))
        self._refuse_late()
        while self.grammars.awaits_masks(self.launched):  # only with more than one step in flight
            self.collect(self.launched.popleft())
        step = self.plan()
        if step is not None:
            self.launch(step)
        needs_tokens = self.grammars.num_matchers and not self.engine.is_async
        while len(self.launched) > (0 if step is None or needs_tokens else self.depth):
            self.collect(self.launched.popleft())
        self.replies.flush()
        if (changes := self.cache.changes()) is not None:
            self.io.send_prefixes(changes)
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
            case AbortMsg(uid):
                if (req := self.live.get(uid)) is not None and req.status is not Status.FINISHED:
                    self.finish(req, endings.aborted(req))
            case FlushCacheMsg():
                self.cache.flush()
            case TellPrefixesMsg():
                self.cache.prefix.track_changes()
            case ViewMsg(uid):
                self.io.send_view(engine_view(self, uid, self.stats))
            case ExitMsg():
                self.is_exiting = True

    def accept(self, msg: UserMsg) -> None:
        """Queue a request, or refuse it with a terminal reply. A message that contradicts itself is dropped."""
        try:
            if msg.uid in self.live:
                raise ValueError(f"request {msg.uid} is running already")
            num_queued = len(self.grammars) + sum(req.rank[0] <= msg.level for req in self.prefill.waiting)
            req = self.admission.admit(msg, num_queued, self.prefill.is_full)
            if msg.sampling_params.adapter is not None and not self.engine.adapter_slots:
                raise RequestError("this engine has no room for adapters", param="model", code="model_not_found")
            self.grammars.submit(req, self.engine.read_adapter)
        except RequestError as e:
            self.replies.finish(endings.failed(msg.uid, e))
            return
        except ValueError as e:
            self.stats.dropped += 1
            logger.error("dropped a UserMsg: %s", e)
            return
        self.live[req.uid] = req
        if req.status is Status.WAITING:
            self.prefill.add(req)
        self._arrivals.append((self.now + self._max_queue_time, req.uid))
        self.stats.prompt_tokens += req.prompt_len

    def _refuse_late(self) -> None:
        """Refuse the requests that have waited too long. Those that have begun, or ended, just leave the list."""
        while self._arrivals and self._arrivals[0][0] <= self.now:
            req = self.live.get(self._arrivals.popleft()[1])
            if req is None or req.status not in (Status.WAITING, Status.COMPILING):
                continue
            if len(req.ids) == req.prompt_len:  # not preempted
                self.finish(req, endings.too_late(req, self._max_queue_time))

    # -- plan and launch

    def plan(self) -> Step | None:
        """Return the work of the next step, if any. Takes rows and pages, but advances no request yet."""
        self.step_number += 1
        self.cache.prefix.tick(self.step_number)
        if (req := self.prefill.starved(self.step_number)) is not None and not self.leaving:
            self._preempt_longer(req)
        for req in self.prefill.blocked:
            if req.status is Status.WAITING and req.rank < self.prefill.least_urgent and not self.leaving:
                self._preempt_less_urgent(req)
        if self.grammars.num_matchers:
            most = 1 + (0 if self.drafts is None else self.drafts.max_drafts)
            self.rows.toggle_masks(self.grammars.toggled(self.rows, self.decode.index, most))
        running, is_short = self.decode.plan(self._preempt_for)
        drafts = None
        if self.drafts is not None:
            drafts = self.drafts.plan(self.step_number, running, max(0, self.pace.max_tokens - len(running)))
        chunks, loads = [], LoadBudget()
        if self.prefill.has_work:
            context = int(self.rows.cached_len[running].sum())
            num_decoded = len(running) + (0 if drafts is None else int(drafts.counts.sum()))
            loads = self.pace.load_budget(num_decoded, context, self.clock.predicted)
            budget = self.pace.budget(num_decoded, context, self.prefill.backlog(self.pace.max_backlog))
            # While running requests lack pages, new requests must not take the last ones; with `fcfs`, neither those of
            # a preempted one that a step in flight still holds.
            is_short |= self.prefill.is_fcfs and any(r.status is Status.PREEMPTED for r in self.leaving.values())
            chunks = self.prefill.plan(budget, None if is_short else running, loads, self.step_number)
            if chunks and not self.is_mixed:
                running, drafts = running[:0], None
        if len(running) or chunks or loads.granted or self.adapters.has_loads:
            if not is_short:
                self.prefill.growth.relax()  # not in an idle step, which a record leaves out
            return Step(running, chunks, drafts)
        if not self.launched and len(self.live) > len(self.grammars):
            raise InvariantError(f"no request can go on: {list(self.live.values())[:8]}")
        return None if self.live else self._write_back()

    def _write_back(self, *, lasting: bool = False) -> Step | None:
        """Return a step that copies cached pages to tiers, for idle times; `lasting`: that outlive this process."""
        return Step(self.decode.index, []) if self.cache.write_back(lasting=lasting) else None

    def _preempt_for(self, req: Req) -> bool:
        """Preempt the newest request of the least urgent that is not much shorter than others, in favour of `req`.

        With `fcfs`, the newest of these. Return whether pages may have become free at once.
        """
        if self.leaving:
            return False
        candidates = self._by_urgency()
        # The oldest of the most urgent is never preempted, so that some request always ends.
        others = candidates[1:] or candidates
        others = [r for r in others if self.prefill.rank(r) == self.prefill.rank(others[-1])]
        longest = 0 if self.prefill.is_fcfs else max(map(self._tokens_left, others))
        victim = next(r for r in reversed(others) if MUCH_LONGER * self._tokens_left(r) >= longest)
        if victim is req and len(candidates) == 1:
            return False  # alone: the pages it waits for are fenced or in flight
        self.prefill.growth.tighten()
        self.stats.preemptions += 1
        self._leave(victim, Status.PREEMPTED)
        return victim is not req

    def _by_urgency(self) -> list[Req]:
        """Return the running requests, the most urgent first, and equal ones in order of arrival."""
        running = [*self.decode.running, *self.prefill.chunked]
        return sorted(running, key=lambda r: (self.prefill.rank(r), r.order))

    def _preempt_less_urgent(self, req: Req) -> None:
        """Preempt the newest of the least urgent requests, until there may be a row and pages for `req`.

        If it lacks a slot for its adapter, preempt those of the slot whose requests are the least urgent.
        """
        victims, available, has_slot = self._by_urgency(), self.cache.available, self.adapters.has_slot(req)
        if not has_slot:
            first = {r.adapter_slot: r for r in reversed(victims) if r.adapter_slot}  # the most urgent of each slot
            slot = max(first, key=lambda slot: (self.prefill.rank(first[slot]), first[slot].order), default=-1)
            victims = [r for r in victims if r.adapter_slot == slot and self.prefill.rank(first[slot]) > req.rank]
        for victim in reversed(victims):
            if self.prefill.rank(victim) <= req.rank:
                return
            available += len(victim.pages)
            self.stats.preemptions += 1
            self._leave(victim, Status.PREEMPTED)
            if has_slot and available >= self.cache.pages_for(len(req.ids)):
                return

    def _tokens_left(self, req: Req) -> int:
        return req.max_len - int(self.rows.confirmed_len[req.row])

    def _preempt_longer(self, req: Req) -> None:
        """Preempt the newest request that is much longer than `req` and not more urgent, and queue it after `req`."""
        for victim in reversed(self.decode.running):
            is_urgent = self.prefill.rank(victim) < req.rank
            if not is_urgent and self._tokens_left(victim) > MUCH_LONGER * req.max_len:
                victim.new_tokens = max(victim.new_tokens, req.queue_tokens + 1)
                victim.deadline = max(victim.deadline, req.deadline + 1)
                self.stats.preemptions += 1
                self._leave(victim, Status.PREEMPTED)
                return

    def launch(self, step: Step) -> None:
        """Advance the planned lengths and start the step on every rank."""
        histories = NO_INTS
        if self.drafts is not None:
            histories = self.drafts.histories(step)
            self.drafts.advance(step.running, step.drafts)
        # Of steps that only decode, the clock compares the time with that of the last ones: their context is the same.
        counts_context = step.chunks or self.cache.prefix.tiers
        context = int(self.rows.cached_len[step.running].sum()) if counts_context else 0
        seconds = self.pace.seconds(len(step.running), context, step.chunks)
        moves = self.cache.pop_moves(seconds, is_idle=not (len(step.running) or step.chunks))
        plan = step.make_plan(self.step_number, self.rows, histories, moves)
        if self.grammars.num_matchers:
            plan = replace(plan, masks=self.grammars.plan_masks(plan, self.rows))
        if self.adapters.has_loads:
            plan = replace(plan, adapters=self.adapters.pop_loads())
        self.rows.advance(plan)
        for req in step.prompts():
            self.decode.add(req)
            if self.drafts is not None:
                self.drafts.add(req)
        self.stats.computed_prompt_tokens += len(plan.tokens)
        self.bus.publish(plan.pack)
        self.clock.launch(time.monotonic(), seconds, has_prompts=bool(step.chunks))
        output = self.engine.launch(plan)
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug(
                "step %d: %d prompt tokens of %d requests, %d requests decode, %d wait; %d of %d pages are free",
                plan.step,
                len(plan.tokens),
                len(step.chunks),
                len(step.running),
                self.num_queued,
                self.cache.free_size,
                self.cache.num_pages,
            )
        self.launched.append(Launched(plan, step.sampled_rows(), step.prompts(), step.prompt_logprobs(), output))

    # -- results

    def collect(self, step: Launched) -> None:
        """Confirm the tokens of the oldest step in flight, and reply in one message.

        One token of each row at a time: a request may end before its last draft.
        """
        result = self.clock.wait_for(step.output)
        self.bus.note_result(result.tokens)
        self.rows.last_collected = step.plan.step
        self.cache.lower_fences()
        drafted = accepted = 0
        if self.drafts is not None and result.confirmed is not None:
            self.replies.drafted(step.plan.sequences, self.rows)
            drafted, accepted = self.drafts.collect(self.step_number, step.plan, result)
            self.stats.drafted_tokens += drafted
            self.stats.accepted_tokens += accepted
        self.stats.note_step(step, self.clock.seconds, drafted, accepted)
        for number, confirmed in enumerate(step.confirmed(result)):
            sampled, tokens, maybe_ended = self._confirm(confirmed, result)
            if number == 0:
                self._begin(step, result)
            self._end(sampled, tokens, maybe_ended)
            self._reply(sampled, tokens, number > 0)
        if self.cache.bounded is not None:
            self.cache.bounded.collect(step.plan)
        self._share_prefixes(step.prompts)
        self.grammars.send_masks(self.launched, self.rows, self.bus)

    def _confirm(self, confirmed: ConfirmedTokens, result: StepResult) -> tuple[Index, Ints, Index]:
        """Append the sampled tokens to their requests; a request with non-finite logits ends without one.

        Returns the rows [n], their tokens [n], and the indices of those that may have ended with these.
        """
        rows = self.rows
        sampled, tokens = confirmed.rows, confirmed.tokens
        is_live = rows.is_live[sampled]
        usable = is_live & (confirmed.finite != 0)
        if not usable.all():
            for req in [req for req in self.prefill.chunked if req.is_loading]:  # maybe what is damaged
                self._leave(req, Status.PREEMPTED)
            for req in rows.holders(sampled[is_live & ~usable]):
                if self.cache.drop_damaged(req):  # a damaged page of a tier: compute the prompt
                    rows.end(req)
                    self._leave(req, Status.PREEMPTED)
                else:
                    self.finish(req, endings.not_finite(req))
            sampled, tokens = sampled[usable], tokens[usable]
        if result.logprobs is not None:
            self.replies.add_logprobs(result.logprobs[:, confirmed.columns[usable]], rows.holders(sampled))
        return sampled, tokens, rows.confirm(sampled, tokens)

    def _begin(self, step: Launched, result: StepResult) -> None:
        """Announce the requests whose prompt is computed, and keep the log-probabilities of prompts."""
        if result.logprobs is not None:
            self.replies.add_prompt_logprobs(result.logprobs[:, len(result.tokens) :], step.prompt_logprobs)
        for column, req in enumerate(step.prompts, len(step.sampled) - len(step.prompts)):
            if self.rows.is_reported(req) and len(req.ids) == req.prompt_len:
                self.stats.looked_up_tokens += req.prompt_len
                self.stats.cached_tokens += req.prefix_hit
                self.replies.start(req, result.embedding(column))

    def _end(self, sampled: Index, tokens: Ints, maybe_ended: Index) -> None:
        """End the requests that are complete with their newest token (`endings.py`)."""
        rows = self.rows
        if self.grammars.num_matchers:
            maybe_ended = np.union1d(maybe_ended, self.grammars.advance(rows, sampled, tokens))
        for req, token in zip(rows.holders(sampled[maybe_ended]), tokens[maybe_ended].tolist(), strict=True):
            if (end := endings.ended_by(req, token, int(rows.confirmed_len[req.row]), rows.eos_ids)) is not None:
                self.finish(req, end)

    def _share_prefixes(self, prompts: list[Req]) -> None:
        """Insert computed prompts into the prefix cache, and release leaving requests that no other step holds."""
        for req in prompts:
            if req.status is Status.RUNNING:
                self.cache.share_prefix(req)  # requests with the same prompt need not wait for this one to end
        for req in list(self.leaving.values()):
            self.release(req)

    def _reply(self, sampled: Index, tokens: Ints, are_drafts: bool) -> None:
        """Send one token of each of these rows, with beginnings and endings."""
        self.stats.generation_tokens += len(sampled)
        if len(sampled):
            self.replies.send(self.rows.uid[sampled], tokens, are_drafts)

    def finish(self, req: Req, end: Finished) -> None:
        """End a request for any reason, with its one terminal reply."""
        assert req.status is not Status.FINISHED, f"the request has ended already: {req}"
        self.replies.finish(end)
        self.grammars.forget(req)
        self.rows.end(req)
        self._leave(req, Status.FINISHED)

    def _leave(self, req: Req, status: Status) -> None:
        """Remove a request from the queues: for good (FINISHED), or until it is released (PREEMPTED)."""
        self.decode.remove(req)
        self.prefill.remove(req)
        req.status = status
        self.leaving[req.uid] = req  # already there if the request was preempted before it finished
        self.release(req)

    def release(self, req: Req) -> None:
        """Give back row and pages of a leaving request, once no step in flight holds it. The only such place."""
        if self.rows.is_in_flight(req):
            return
        del self.leaving[req.uid]
        if req.table_idx is not None:
            self.cache.share_prefix(req, is_leaving=True)
            self.cache.release(req)
            self.adapters.release(req)
            if req.status is Status.PREEMPTED:
                req.append_sampled(self.rows.sampled(req))
            self.rows.free(req)
        if req.status is Status.FINISHED:
            del self.live[req.uid]
        else:
            req.status = Status.WAITING
            self.prefill.requeue(req)

    def describe(self) -> dict[str, str | int | float]:
        """Return facts for the banner and /server_info."""
        return {
            **self.engine.describe(),
            "overlap": self.depth,
            "mixed_batches": int(self.is_mixed),
            "schedule_policy": self.prefill.policy,
            **self.pace.describe(),
            "cache": type(self.cache.prefix).__name__,
        }
