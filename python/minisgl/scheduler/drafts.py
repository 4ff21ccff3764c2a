"""How many tokens each running row drafts in the next step, from the results so far and the costs of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from minisgl.core import StepCosts
from minisgl.layout import HISTORY_HEAD, NO_INTS, Flag, words
from minisgl.scheduler.plan import DraftSlots, Step

if TYPE_CHECKING:
    import numpy.typing as npt

    from minisgl.core import BatchPlan, Ints, StepResult
    from minisgl.scheduler.cache import CacheManager
    from minisgl.scheduler.req import Req
    from minisgl.scheduler.rows import Index, Rows

MEMORY: Final = 0.9  # how much of the estimate of a row's acceptance stays after a step with drafts
# What a step with drafts costs besides its tokens where the host is the device: two cores need this for the built-in
# model. The rows share it.
HOST_S: Final = 5e-4
MAX_PAUSE: Final = 16  # plain steps until the drafter is asked again
NEVER: Final = 1 << 62
FREE: Final = StepCosts(1.0, 0.0)  # where steps are not measured


class Drafts:
    """State of the rows that may draft, indexed by row.

    resumes_at  int64, the first step in which the row has DRAFTS again; NEVER if it may not draft
    is_tracked  bool, the row's last slot had DRAFTS, so the device knows its length and its history
    known       int32, tokens in the device's history of a row that is not tracked
    in_flight   int32, drafts in the steps in flight: by so many tokens at most `Rows.cached_len` is too high
    ready       int32, drafts that the drafter had at the newest result
    right       float64, drafts that were right, the older ones counted less
    tried       float64, drafts that were right, or the first that was not, likewise
    pause       int32, the last pause: how many steps the row decoded plainly before the drafter was asked again
    """

    def __init__(
        self,
        rows: Rows,
        cache: CacheManager,
        costs: StepCosts | None,
        is_async: bool,
        most: int,
        adapts: bool,
        has_model: bool = False,
    ) -> None:
        """A row drafts `most` tokens; `adapts`: as many of them as pay by `costs`. `is_async`: as of the engine.

        A drafter that `has_model` has drafts behind every prompt, and reads one token behind a chunk of it.
        """
        self._host_s = 0.0 if is_async else HOST_S
        self.rows = rows
        self.cache = cache
        self._costs = costs or FREE
        self._most = most
        self._adapts = adapts
        self._has_model = has_model
        self.resumes_at = np.zeros(rows.num_rows, np.int64)
        self.is_tracked = np.zeros(rows.num_rows, np.bool_)
        self.known, self.in_flight, self.ready, self.pause = np.zeros((4, rows.num_rows), np.int32)
        self.right, self.tried = np.zeros((2, rows.num_rows))

    def add(self, req: Req) -> None:
        """Forget who held the row of `req` before, whose prompt is planned completely."""
        # A mask depends on the newest token, so drafts would need masks along them.
        self.resumes_at[req.row] = 0 if req.sampling_params.speculate and req.matcher is None else NEVER
        self.is_tracked[req.row] = False
        for values in (self.known, self.ready, self.pause, self.right, self.tried):
            values[req.row] = 0
        self.ready[req.row] = self._most * self._has_model

    def plan(self, step: int, running: Index, max_tokens: int) -> DraftSlots | None:
        """Return which of the rows `running` have DRAFTS, and how many drafts; takes pages for them, if there are any.

        `step` is the number of the step, which has at most `max_tokens` drafts in all. None if no row has DRAFTS.
        """
        # A row whose length only the device knows stays with it until the last draft is collected.
        is_drafted = (self.resumes_at[running] <= step) | (self.in_flight[running] > 0)
        if not is_drafted.any():
            return None
        counts = np.where(is_drafted, self._worthwhile(running), 0)
        counts[np.cumsum(counts) > max_tokens] = 0
        rows = self.rows
        length, limit = rows.cached_len[running], rows.limit[running]
        for i in np.flatnonzero((length + counts + 1 > limit) & (limit < rows.max_len[running] - 1)).tolist():
            req = rows.requests[running[i]]
            assert req is not None, f"row {running[i]} runs without a request"
            missing = self.cache.pages_for(int(min(length[i] + counts[i] + 1, req.max_len - 1))) - len(req.pages)
            if missing > 0 and (pages := self.cache.allocate(missing)) is not None:
                rows.set_pages(req, len(req.pages), pages)
        return DraftSlots(is_drafted, np.minimum(counts, rows.limit[running] - length - 1).astype(np.int32))

    def _worthwhile(self, running: Index) -> Ints:
        """Return how many of its drafts each row should compute: those with the most expected tokens per second.

        A row's choice assumes that the others decode one token.
        """
        ready: Ints = np.minimum(self.ready[running], self._most).astype(np.int32)
        if not self._adapts or not ready.any():
            return ready
        rate = (self.right[running] + 0.5) / (self.tried[running] + 1.0)
        index = np.arange(self._most + 1)
        tokens = len(running) - 1 + np.cumsum(rate[:, None] ** index, axis=1)
        context = int(self.rows.cached_len[running].sum())
        seconds = self._costs.decode_seconds(len(running), context) + self._costs.per_token * index
        seconds[1:] += self._host_s / len(running)
        best: Ints = np.where(index <= ready[:, None], tokens / seconds, 0.0).argmax(1).astype(np.int32)
        return best

    def histories(self, step: Step) -> Ints:
        """Return the history records of the rows that begin to draft; call it before `advance`."""
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

    def advance(self, running: Index, slots: DraftSlots | None) -> None:
        """Count the drafts of a step as planned; call it before `Rows.advance`."""
        if slots is None:
            plain = running
        else:
            plain, drafted = running[~slots.is_drafted], running[slots.is_drafted]
            self.in_flight[drafted] += slots.counts[slots.is_drafted]
            self.is_tracked[drafted] = True
        left = plain[self.is_tracked[plain]]
        if len(left):
            self.known[left] = self.rows.cached_len[left] + 1  # those in flight are written by the device
            self.is_tracked[left] = False

    def collect(self, step: int, plan: BatchPlan, result: StepResult) -> tuple[int, int]:
        """Correct the planned lengths of a step's rows; return how many drafts it had, and how many were right.

        `step` is the number of the newest step that was planned.
        """
        assert result.confirmed is not None and result.ready is not None, "the result of a step without DRAFTS"
        slots = plan.slots[(plan.slots["flags"] & Flag.SAMPLES) != 0]
        first = np.cumsum(plan.widths) - plan.widths
        is_drafted = (slots["flags"] & Flag.DRAFTS) != 0
        rows, drafts = slots["row"][is_drafted].astype(np.intp), plan.widths[is_drafted] - 1
        right = np.add.reduceat(result.confirmed, first)[is_drafted] - 1
        self.rows.cached_len[rows] -= drafts - right
        self.in_flight[rows] -= drafts
        self.ready[rows] = result.ready[first[is_drafted]]
        memory = np.where(drafts > 0, MEMORY, 1.0)
        self.right[rows] = memory * self.right[rows] + right
        self.tried[rows] = memory * self.tried[rows] + np.minimum(drafts, right + 1)
        self.pause[rows[right > 0]] = 0
        if self._adapts:
            self._pause(rows[((drafts > 0) & (right == 0)) | (self._worthwhile(rows) == 0)], step)
        return int(drafts.sum()), int(right.sum())

    def _pause(self, rows: npt.NDArray[np.intp], step: int) -> None:
        """Let `rows` decode plainly, for longer each time, and trust a bad estimate less when they draft again."""
        self.pause[rows] = np.clip(2 * self.pause[rows], 1, MAX_PAUSE)
        self.resumes_at[rows] = step + 1 + self.pause[rows]
        self.ready[rows] = 0
        self.right[rows] *= 0.5
        self.tried[rows] *= 0.5


def _record(req: Req, first: int, tokens: Ints, length: int) -> tuple[Ints, Ints]:
    """The history record of `tokens` from position `first` on, in two parts."""
    head = np.zeros(1, HISTORY_HEAD)
    head[0] = words(HISTORY_HEAD) + len(tokens), req.row, first, length
    return head.view(np.int32), tokens
