"""Decides how many tokens each running row drafts in the next step, from past acceptance and the costs of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from minisgl.core.layout import (
    HISTORY_HEAD,
    MAX_DRAFT_MASKS,
    MAX_DRAFT_TOKENS,
    NO_INTS,
    NO_PROPOSALS,
    PROPOSAL,
    PROPOSED,
    Flag,
    words,
)
from minisgl.core.plan import StepCosts
from minisgl.scheduler.plan import PlannedDrafts, Step
from minisgl.speculative.lookup import MAX_MATCH, MIN_MATCH, look_up

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from minisgl.core.layout import Records
    from minisgl.core.plan import BatchPlan, Ints, StepResult
    from minisgl.scheduler.cache import CacheManager
    from minisgl.scheduler.plan import StepEngine
    from minisgl.scheduler.req import Req
    from minisgl.scheduler.rows import Index, Rows
    from minisgl.settings.options import EngineConfig

    Constrain = Callable[[Req, Ints], tuple[Ints, bool]]

# The decay of a row's acceptance estimate in a step with drafts, in a step without, and in a pause.
DECAY, IDLE_DECAY, PAUSE_DECAY = 0.9, 0.98, 0.5
HOST_S, HOST_ROW_S = 4e-4, 4e-5  # the host's cost of a step with drafts and of a row in it, which counts on a CPU
GAIN_DECAY: Final = 0.8  # of earlier gains, in a step with drafts
PRIOR: Final = 0.5  # the first estimate of the acceptance rate
PRIOR_TRIES, ROW_TRIES = 1.0, 3.0  # the weights of PRIOR, and of the estimate for all rows in that of one row
MODEL_PRIOR: Final = 0.8  # the same if a model drafts; n-gram lookup then needs a long match
PAST_TRIES: Final = 32.0  # the weight of earlier results in the first estimate, if a model drafts
DEVICE, HOST = 0, 1  # the source of drafts
MIN_PAUSE, MAX_PAUSE = 4, 32  # plain steps until the drafter is asked again; a row's own first pause is 1
PEEK_ROWS, PEEK_TOKENS = 64, 1 << 16  # limits of n-gram lookup on the host, which then takes less than a millisecond
NEVER: Final = 1 << 62
NO_COSTS: Final = StepCosts(1.0, 0.0)  # if steps are not measured
NO_RATES: Final = np.zeros((2, 0))


class Drafts:
    """State of the rows that may draft, indexed by row; arrays [2, row] are indexed by DEVICE or HOST first.

    resumes_at       int64, the first step in which a drafter is asked again; NEVER if the row may not draft
    is_tracked       bool, the row's last sequence had DRAFTS, so the device knows its length and its history
    known            int32, tokens in the device's history of a row that is not tracked
    in_flight        int32, drafts in the steps in flight; `Rows.cached_len` may be too high by up to this many
    ready            [2, row] int32, drafts that the drafter had at the newest result, and those that the host proposes
    is_forced        bool, a grammar forces these
    accepted_weight  [2, row] float64, accepted drafts, with decaying weights
    tried_weight     [2, row] float64, accepted drafts and first rejected ones, with the same weights
    accepted         int32, drafts accepted since the request has had the row
    pause            int32, the last pause: the number of plain steps before the drafter was asked again
    """

    def __init__(
        self,
        rows: Rows,
        cache: CacheManager,
        constrain: Constrain,
        costs: StepCosts | None,
        is_async: bool,
        max_drafts: int,
        kind: str,
    ) -> None:
        """A row drafts `max_drafts` tokens by `kind` of drafter; with auto, as many of them as pay by `costs`.

        A drafter with a model (mtp, draft:PATH, or a head that auto found) has drafts after every prompt, and reads one
        token after a chunk of it.
        `constrain` returns as many of a request's drafts as its grammar allows, or those that it forces, and whether
        they are forced. `is_async`: as of the engine.
        """
        self._is_async = is_async
        self.rows = rows
        self.cache = cache
        self._constrain = constrain
        self._costs = costs or NO_COSTS
        self.max_drafts = max_drafts
        self._index = np.arange(max_drafts + 1)
        self._known_seconds: dict[tuple[int, int], npt.NDArray[np.float64]] = {}
        self._adapts = kind == "auto"
        self._asks_tree = kind in ("auto", "tree")
        # Where the host is the device, it looks up before a sequence has DRAFTS, for a few array operations.
        self._looks_up = kind in ("auto", "ngram") and not is_async
        self._has_model = ":" in kind or kind == "mtp" or bool(self._costs.proposed)
        self._asks_device = kind != "tree" and (self._has_model or not self._looks_up)
        self._is_shared = self._adapts and self._asks_device  # the pause
        self._resumes_at = 0  # of rows that begin, where it is
        self._gain = 0.0  # seconds, by the last steps with drafts
        self._min_match = MAX_MATCH if self._has_model else MIN_MATCH
        self._first_prior = self._prior = np.full(2, MODEL_PRIOR if self._has_model else PRIOR)
        self.resumes_at = np.zeros(rows.num_rows, np.int64)
        self.is_tracked = np.zeros(rows.num_rows, np.bool_)
        self.is_forced = np.zeros(rows.num_rows, np.bool_)
        self.known, self.in_flight, self.accepted, self.pause = np.zeros((4, rows.num_rows), np.int32)
        self.ready = np.zeros((2, rows.num_rows), np.int32)
        self.accepted_weight, self.tried_weight = np.zeros((2, 2, rows.num_rows))

    def add(self, req: Req) -> None:
        """Reset the row of `req`, whose prompt is completely planned."""
        if not self._is_shared:
            self.pause[req.row] = 0
        elif np.count_nonzero(self.rows.is_live) <= 1:
            self._resumes_at = 0  # no other row pays for asking
        self.resumes_at[req.row] = self._resumes_at if req.sampling_params.speculate else NEVER
        self.is_tracked[req.row] = False
        for values in (self.is_forced, self.known, self.ready, self.accepted, self.accepted_weight, self.tried_weight):
            values[..., req.row] = 0
        self.ready[DEVICE, req.row] = self.max_drafts * self._has_model

    def plan(self, step: int, running: Index, max_tokens: int) -> PlannedDrafts | None:
        """Return which of the rows `running` have DRAFTS, and how many; None if no row has. Allocates pages for drafts.

        `step` is the number of the step, which has at most `max_tokens` drafts in total.
        """
        rows = self.rows
        max_tokens = min(max_tokens, max(0, MAX_DRAFT_TOKENS - len(running)))
        if self._is_shared and not self._has_model:
            self._peek(step, running)
        may_ask, is_masked = self.resumes_at[running] <= step, (rows.flags[running] & Flag.MASKED) != 0
        in_flight = self.in_flight[running] > 0
        if not (may_ask | is_masked | in_flight).any():
            return None
        proposals = NO_PROPOSALS
        if self._asks_tree or self._looks_up or is_masked.any():
            proposals = self._propose(step, running, may_ask, is_masked)
        # A row whose length only the device knows keeps DRAFTS until its last draft is collected.
        is_drafted = (may_ask & ~is_masked & self._asks_device) | in_flight
        is_found = self._have_proposal(proposals, running)
        if not (is_drafted | is_found).any():
            return None
        is_proposed = is_found | is_masked
        rates = self._rates(running) if self._adapts else NO_RATES
        if self._adapts and self._has_model and is_proposed.any():
            expected = self._expected(running, rates)
            is_proposed &= ~(is_drafted & ~is_masked) | (expected[HOST] >= expected[DEVICE])
        counts = self._worthwhile(running, rates, is_proposed.astype(np.intp), is_drafted | is_proposed)
        if self._adapts:
            self._decay(running[may_ask & (counts == 0)], IDLE_DECAY)
            if not self._is_shared:
                self._pause(running[is_found & (counts == 0)], step)
            elif self._has_model and may_ask.any() and not counts.any():
                self._pause_all(step)
        if self._has_model:  # which need not be asked
            is_drafted &= (counts > 0) | in_flight
        counts[np.cumsum(counts) > max_tokens] = 0
        counts[is_masked & (np.cumsum(counts * is_masked) > MAX_DRAFT_MASKS)] = 0
        counts = self._with_pages(running, counts)
        if len(proposals):
            is_used = np.zeros(rows.num_rows, np.bool_)
            is_used[running] = is_proposed & (counts > 0)
            proposals = proposals[is_used[proposals["row"]]]
        return PlannedDrafts(is_drafted | (counts > 0), counts, proposals)

    def _with_pages(self, running: Index, counts: Ints) -> Ints:
        """Allocate pages for so many drafts of the rows `running`; return for how many there are pages."""
        rows = self.rows
        length, limit = rows.cached_len[running], rows.limit[running]
        for i in np.flatnonzero((length + counts + 1 > limit) & (limit < rows.max_len[running] - 1)).tolist():
            req = rows.requests[running[i]]
            assert req is not None, f"row {running[i]} runs without a request"
            missing = self.cache.pages_for(int(min(length[i] + counts[i] + 1, req.max_len - 1))) - len(req.pages)
            if missing > 0 and (pages := self.cache.allocate(missing)) is not None:
                rows.set_pages(req, len(req.pages), pages)
                if self.cache.bounded is not None:
                    self.cache.bounded.extend(req)
        affordable: Ints = np.minimum(counts, rows.limit[running] - length - 1).astype(np.int32)
        return affordable

    def _peek(self, step: int, running: Index) -> None:
        """Extend a pause that is about to end if n-gram lookup on the host finds no drafts worth computing.

        All rows pay for a step in which the device is asked. The host finds the same drafts, a little later.
        """
        rows = self.rows
        asking = running[(self.resumes_at[running] <= step) & ((rows.flags[running] & Flag.MASKED) == 0)]
        is_much = len(asking) > PEEK_ROWS or rows.confirmed_len[asking].sum() > PEEK_TOKENS
        if not len(asking) or is_much or self.is_tracked[asking].any():
            return
        for req in rows.holders(asking):
            self.ready[DEVICE, req.row] = len(self._constrain(req, look_up(rows.text(req)))[0])
        source = np.full(len(asking), DEVICE)
        if not self._worthwhile(asking, self._rates(asking), source, np.ones(len(asking), np.bool_)).any():
            self._pause_all(step)
        self.ready[DEVICE, asking] = 0

    def _propose(
        self, step: int, running: Index, may_ask: npt.NDArray[np.bool_], is_masked: npt.NDArray[np.bool_]
    ) -> Records:
        """Return the host's proposals for the rows `running`, and set `ready` of these rows.

        Only the host knows grammars and the radix tree. Its proposals continue the confirmed text, so they begin with
        the tokens in flight.
        """
        rows, is_asked = self.rows, is_masked | (may_ask & (self._asks_tree or self._looks_up))
        is_asked &= self.resumes_at[running] < NEVER
        if not is_asked.any():
            return NO_PROPOSALS
        found: list[tuple[int, int, Ints]] = []
        for i in np.flatnonzero(is_asked).tolist():
            req = rows.requests[running[i]]
            assert req is not None, f"row {running[i]} runs without a request"
            if not (is_masked[i] or self._looks_up or self.cache.prefix.has_continuation(req.cache_handle)):
                continue
            first = int(rows.confirmed_len[req.row])
            in_flight = int(rows.cached_len[req.row]) + 1 - first  # tokens, at most
            tokens, is_forced = self._constrain(req, self.guess(req) if may_ask[i] else NO_INTS)
            if self._adapts and may_ask[i] and not len(tokens) and not self._asks_device:
                self._pause(running[i : i + 1], step)
            count = min(len(tokens), PROPOSED) - in_flight
            if is_masked[i] or count > 0:
                self.ready[HOST, req.row], self.is_forced[req.row] = max(0, count), is_forced
            if count > 0:
                found.append((req.row, first, np.resize(tokens, PROPOSED)))
        return np.array(found, PROPOSAL)

    def guess(self, req: Req) -> Ints:
        """Return what followed the text of `req` in the radix tree or, unless the device is asked, earlier in it."""
        found = self.cache.continuation(req, PROPOSED) if self._asks_tree else NO_INTS
        if not len(found) and (self._looks_up or (self._asks_device and req.is_masked)):
            found = look_up(self.rows.text(req), MIN_MATCH if req.is_masked else self._min_match)
        return found

    def _rates(self, running: Index) -> npt.NDArray[np.float64]:
        """Return the probability [2, row] that a draft is accepted if its predecessors are, by source (DEVICE, HOST).

        For rows with few results it is close to that of all rows.
        """
        accepted, tried = self.accepted_weight[:, running], self.tried_weight[:, running]
        mean = (accepted.sum(1) + self._prior * PRIOR_TRIES) / (tried.sum(1) + PRIOR_TRIES)
        rates: npt.NDArray[np.float64] = (accepted + mean[:, None] * ROW_TRIES) / (tried + ROW_TRIES)
        rates[HOST, self.is_forced[running]] = 1.0
        return rates

    def _expected(self, running: Index, rates: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return the expected number of accepted drafts of each row, [2, row]."""
        drafts = np.minimum(self.ready[:, running], self.max_drafts)
        index = self._index[1:]
        expected: npt.NDArray[np.float64] = (rates[..., None] ** index * (index <= drafts[..., None])).sum(2)
        return expected

    def _worthwhile(
        self, running: Index, rates: npt.NDArray[np.float64], source: Index, has_drafts: npt.NDArray[np.bool_]
    ) -> Ints:
        """Return how many drafts each row should compute to maximise the expected tokens per second.

        Rows with `has_drafts` take those of `source`, DEVICE or HOST.
        """
        ready: Ints = np.minimum(self.ready[source, running], self.max_drafts) * has_drafts
        if not self._adapts or not ready.any():
            return ready
        index = self._index[1:]
        gains = rates[source, np.arange(len(running))][:, None] ** index * (index <= ready[:, None])
        order = np.argsort(-gains, axis=None, kind="stable")[: int(ready.sum())]  # earlier drafts of a row come first
        seconds = self._seconds(running, are_proposed=bool(source.all()))[: len(order) + 1]
        tokens = np.full(len(order) + 1, float(len(running)))
        tokens[1:] += gains.ravel()[order].cumsum()
        best = order[: (tokens / seconds).argmax()]
        return np.bincount(best // self.max_drafts, minlength=len(running)).astype(np.int32)

    def _seconds(self, running: Index, are_proposed: bool) -> npt.NDArray[np.float64]:
        """Return the seconds of a step in which the rows `running` have 0, 1, ... drafts in total."""
        count = len(running)
        known = self._known_seconds.get((count, are_proposed))
        if known is None:
            number = np.arange(count * self.max_drafts + 1)
            known = self._costs.draft_seconds(count, number, are_proposed=are_proposed)
            known[1:] += 0.0 if self._is_async else HOST_S + HOST_ROW_S * count
            self._known_seconds[count, are_proposed] = known
        return known + self._costs.draft_context_seconds(count, int(self.rows.cached_len[running].sum()))

    def _have_proposal(self, proposals: Records, running: Index) -> npt.NDArray[np.bool_]:
        """Return which of the rows `running` have a proposal."""
        if not len(proposals):
            return np.zeros(len(running), np.bool_)
        is_in = np.zeros(self.rows.num_rows, np.bool_)
        is_in[proposals["row"]] = True
        return is_in[running]

    def histories(self, step: Step) -> Ints:
        """Return the history records of the rows that begin to draft. Call this before `advance`."""
        records = [NO_INTS]
        rows = self.rows
        if self._has_model:
            for c in step.chunks:
                if not c.samples:
                    records += _record(c.req, c.stop, c.req.ids[c.stop : c.stop + 1], c.stop + 1)
        if step.drafts is not None:
            for req in rows.holders(step.running[step.drafts.is_drafted & ~self.is_tracked[step.running]]):
                first = int(self.known[req.row])
                sampled = rows.sampled(req)
                tokens = np.concatenate([req.ids[first:], sampled[max(0, first - len(req.ids)) :]])
                records += _record(req, first, tokens, int(rows.cached_len[req.row]) + 1)
        return np.concatenate(records)

    def advance(self, running: Index, planned: PlannedDrafts | None) -> None:
        """Count the drafts of a step as planned. Call this before `Rows.advance`."""
        if planned is None:
            plain = running
        else:
            plain, drafted = running[~planned.is_drafted], running[planned.is_drafted]
            self.in_flight[drafted] += planned.counts[planned.is_drafted]
            self.is_tracked[drafted] = True
        left = plain[self.is_tracked[plain]]
        if len(left):
            self.known[left] = self.rows.cached_len[left] + 1  # the device writes the tokens in flight
            self.is_tracked[left] = False

    def collect(self, step: int, plan: BatchPlan, result: StepResult) -> tuple[int, int]:
        """Correct the planned lengths of a step's rows; return its numbers of drafts and of accepted drafts.

        `step` is the number of the newest step that was planned.
        """
        assert result.confirmed is not None and result.ready is not None, "the result has no drafts"
        sequences = plan.sequences[(plan.sequences["flags"] & Flag.SAMPLES) != 0]
        first = np.cumsum(plan.widths) - plan.widths
        is_drafted = (sequences["flags"] & Flag.DRAFTS) != 0
        rows, drafts = sequences["row"][is_drafted].astype(np.intp), plan.widths[is_drafted] - 1
        accepted = np.add.reduceat(result.confirmed, first)[is_drafted] - 1
        self.rows.cached_len[rows] -= drafts - accepted
        self.in_flight[rows] -= drafts
        self.accepted[rows] += accepted
        # Drafts looked up for a row that decodes plainly by now are outdated.
        is_current = self.is_tracked[rows] | self._has_model
        self.ready[DEVICE, rows] = np.where(is_current, result.ready[first[is_drafted]], 0)
        from_host = self._have_proposal(plan.proposals, rows)
        at = from_host.astype(np.intp), rows
        is_guess = (drafts > 0) & ~(self.is_forced[rows] & from_host)
        decay = np.where(is_guess, DECAY, 1.0)
        found, tries = accepted * is_guess, np.minimum(drafts, accepted + 1) * is_guess
        self.accepted_weight[at] = decay * self.accepted_weight[at] + found
        self.tried_weight[at] = decay * self.tried_weight[at] + tries
        if self._adapts and self._has_model:
            found, tries = np.bincount(at[0], found, 2), np.bincount(at[0], tries, 2)
            self._prior = (self._prior * PAST_TRIES + found) / (PAST_TRIES + tries)
        if self._is_shared:
            self._judge(sequences["row"].astype(np.intp), int(drafts.sum()), int(accepted.sum()), step)
        elif self._adapts:
            self.pause[rows[accepted > 0]] = 0
            self._pause(rows[is_guess & (accepted == 0)], step)
        return int(drafts.sum()), int(accepted.sum())

    def _judge(self, rows: Index, drafts: int, accepted: int, step: int) -> None:
        """Let all rows decode plainly for a while if drafts do not pay, since asking for them slows every row.

        The gain of drafts is the extra time that plain steps would have taken for the same tokens.
        """
        seconds = self._seconds(rows, are_proposed=False)
        self._gain = GAIN_DECAY * self._gain + (1 + accepted / len(rows)) * seconds[0] - seconds[max(1, drafts)]
        if self._gain > 0:
            self.pause[:] = 0
        pays = self._gain > 0
        if not pays and not drafts:  # the drafter was asked: is any draft worth trying?
            source, may_draft = np.full(len(rows), DEVICE), self.resumes_at[rows] < NEVER
            pays = bool(self._worthwhile(rows, self._rates(rows), source, may_draft).any())
        if self._resumes_at <= step and not pays:
            self._pause_all(step)

    def _pause_all(self, step: int) -> None:
        self._pause(np.flatnonzero(self.resumes_at < NEVER), step)
        self._resumes_at = int(self.resumes_at[self.resumes_at < NEVER].max(initial=0))
        self._gain = 0.0
        self._prior = IDLE_DECAY * self._prior + (1 - IDLE_DECAY) * self._first_prior  # so drafts are tried again

    def _pause(self, rows: npt.NDArray[np.intp], step: int) -> None:
        """Let `rows` decode plainly, longer each time, and lower the weight of a bad estimate for the next try."""
        if not len(rows):
            return
        self.pause[rows] = np.clip(2 * self.pause[rows], MIN_PAUSE if self._is_shared else 1, MAX_PAUSE)
        resumes_at = step + 1 + self.pause[rows]
        self.resumes_at[rows] = resumes_at + -resumes_at % self.pause[rows]  # the same step for many rows
        self.ready[DEVICE, rows] = self.max_drafts * self._has_model
        self._decay(rows, PAUSE_DECAY)

    def _decay(self, rows: npt.NDArray[np.intp], decay: float) -> None:
        self.accepted_weight[:, rows] *= decay
        self.tried_weight[:, rows] *= decay


def create_drafts(
    config: EngineConfig, engine: StepEngine, rows: Rows, cache: CacheManager, constrain: Constrain
) -> Drafts | None:
    """Return the drafts of a scheduler; None if there are none."""
    costs = engine.step_costs()
    has_head = costs is not None and bool(costs.proposed)  # the engine found one that ships with the model
    kind = config.speculate or ("auto" if has_head else "off")
    if kind == "off" or engine.limits.embeds:
        return None
    return Drafts(rows, cache, constrain, costs, engine.is_async, config.num_draft_tokens, kind)


def _record(req: Req, first: int, tokens: Ints, length: int) -> tuple[Ints, Ints]:
    """Return the history record of `tokens` from position `first` on, in two parts."""
    head = np.zeros(1, HISTORY_HEAD)
    head[0] = words(HISTORY_HEAD) + len(tokens), req.row, first, length
    return head.view(np.int32), tokens
