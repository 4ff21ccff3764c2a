"""The budget of prompt tokens per step, so that running streams keep their pace; and how late a step may be planned."""

from __future__ import annotations

import math
import time
from collections import deque
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from minisgl.core.errors import ConfigError
from minisgl.core.plan import TILE_TOKENS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from minisgl.core.plan import StepCosts, StepResult
    from minisgl.scheduler.plan import Chunk, StepOutput
    from minisgl.settings.options import SchedulerConfig

# The minimum number of prompt tokens per step: otherwise slow decode steps would starve prompts.
FLOOR_TOKENS: Final = 64
# The default target. Streams are then faster than people read, and a step is long enough to spend most of its time on
# the prompt: a step with a fixed cost of 7 ms spends three quarters of it, on 1,024 tokens of an 8B model beside 64
# streams. Steps may take 8 % longer when the device has reached its power limit.
TARGET_S: Final = 0.029
# The limit of a step that serves a queue of prompts, or runs beside no stream. Such steps compute prompts of 8B on a
# GPU at nearly the full rate, and new requests need not wait long.
QUEUE_S: Final = 0.075
# On a CPU the limit is this many times the base cost. It computes a few dozen tokens at nearly the full rate, and a new
# request waits for the step in flight and joins the next one.
SYNC_STEP: Final = 8
STRETCH: Final = 2.0  # if decoding alone takes more than half of the limit, prompts may double the step's time
# A step that cuts a prompt has whole tiles of TILE_TOKENS, since kernels for other numbers of rows may not be loaded
# yet (`kernels/triton/cublas.py`). If the pace allows three times this number, the budget is a multiple of it: 8B
# computes 44,500 tokens/s in steps of 3,072, 43,900 in steps of 3,328, and 42,700 in steps of 3,200.
LARGE_TILE_TOKENS: Final = 512
SYNC_TILE_TOKENS: Final = 16  # the C++ step needs no whole tiles; fewer tokens would be mostly overhead

RECENT_STEPS: Final = 4  # the fastest of these predicts the time of the next
PLAN_MARGIN_S: Final = 0.0015  # for planning and launching
LATE_S: Final = 0.0001  # a result that arrives within this time may have been ready earlier


class StepBudget:
    """What remains of one step for prompts: `tokens` and, if a pace must be kept, `seconds`.

    `floor` tokens are granted in any case; beyond them, chunks take no more than `seconds`. A prompt that does not fit
    is cut so that the step has whole tiles of `tile` tokens. With `keeps_whole`, a prompt that the next step can
    compute as a whole is not cut for the sake of the last tokens of this one: both would have to compute a part.
    """

    def __init__(
        self,
        tokens: int,
        costs: StepCosts | None = None,
        seconds: float = math.inf,
        floor: int = FLOOR_TOKENS,
        tile: int = TILE_TOKENS,
        *,
        keeps_whole: bool = False,
    ) -> None:
        self._tokens = tokens
        self._tile = tile
        self._floor = floor
        self._costs = costs
        self._seconds = seconds
        self._whole = self._affordable(0) if keeps_whole else 0

    @property
    def is_spent(self) -> bool:
        """Whether no prompt can get another token; the first tokens of a prompt are the cheapest."""
        return self._affordable(0) <= 0

    def grant(self, start: int, wanted: int, limit: float = math.inf) -> int:
        """Grant a prompt up to `wanted` tokens from position `start` on, but not more than `limit`; return how many."""
        count = int(max(0, min(wanted, limit, self._affordable(start))))
        if count < wanted <= self._whole and self._affordable(0) < self._whole:
            return 0
        if count < wanted:  # cut to whole tiles
            whole = count - (count - self._tokens) % self._tile
            count = max(whole, min(count, self._floor), 0)
        self._tokens -= count
        self._floor -= count
        if self._costs is not None:
            self._seconds -= self._costs.chunk_seconds(start, count)
        return count

    def _affordable(self, start: int) -> int:
        if self._costs is None:
            return self._tokens
        return min(self._tokens, max(self._floor, self._costs.chunk_tokens(start, self._seconds, self._tokens)))


class LoadBudget:
    """The number of pages that a step may load from tiers: as many as take `seconds`, the time of the step in flight.

    The first request gets at least a page, and as many as take `min_seconds` seconds.
    """

    def __init__(self, seconds: float = math.inf, min_seconds: float = math.inf) -> None:
        self.granted = 0
        self._seconds = seconds
        self._min_seconds = min_seconds

    def grant(self, seconds: npt.NDArray[np.float64]) -> int:
        """Grant a prefix of the loads that take `seconds` [n]; return its length."""
        is_first, limit = self.granted == 0, self._seconds
        if is_first:
            limit = max(limit, self._min_seconds, *seconds[:1])
        count = int(np.searchsorted(np.cumsum(seconds), limit, "right"))
        self.granted += count
        self._seconds -= float(seconds[:count].sum())
        return count


class Pace:
    """Decides how long a step may take, from the target for the time between two tokens and the measured costs.

    Without a target of the user, with D seconds for decoding and Q for all waiting prompts but the longest:

        seconds = max(2 D, min(max(TARGET_S, D + Q), limit)),   limit = QUEUE_S, on a CPU at most SYNC_STEP x base

    So a queue is served at nearly the full rate: streams stutter for a moment, but the last request of the queue waits
    half as long. The longest prompt does not count, since it runs last and no other request waits for it.

    The costs are not corrected by later steps. So the same requests lead to the same plans; and under overlap the host
    could not tell queueing from computing.
    """

    def __init__(self, config: SchedulerConfig, costs: StepCosts | None, is_async: bool = True) -> None:
        """`is_async`: whether the device computes beside the host (a GPU does, a CPU does not)."""
        target = config.itl_target_ms
        if target and costs is None:
            raise ConfigError("--itl-target-ms needs the costs of a step, which are not measured on this device")
        self.max_tokens = config.max_prefill_length
        self.tile = TILE_TOKENS if is_async else SYNC_TILE_TOKENS
        self.floor = min(FLOOR_TOKENS, self.tile)
        self.costs = None if target == 0 else costs
        self._measured = costs
        self._target = None if target is None else target / 1e3
        self._limit = QUEUE_S if is_async or costs is None else min(QUEUE_S, SYNC_STEP * costs.base)

    @property
    def max_backlog(self) -> int:
        """The number of waiting prompt tokens that count: with more, steps do not grow."""
        return 0 if self.costs is None or self.costs.per_token == 0 else int(QUEUE_S / self.costs.per_token)

    def is_queue(self, backlog: int) -> bool:
        """Whether the prompts in `backlog` take longer than a step within the target."""
        return self._measured is not None and self._measured.per_token * backlog > (self._target or TARGET_S)

    def budget(self, num_running: int, context: int, backlog: int = 0) -> StepBudget:
        """Return the budget of a step in which `num_running` requests decode, with `context` tokens of K/V in total.

        `backlog` is the number of tokens of all waiting prompts but the longest, counted up to `max_backlog`.
        """
        tokens, costs = self.max_tokens - num_running, self.costs
        if costs is None:
            return StepBudget(tokens)
        if num_running == 0:
            return StepBudget(tokens, costs, self._limit - costs.base, self.tile, self.tile)
        decode = costs.decode_seconds(num_running, context)
        seconds = self._target
        if seconds is None:
            seconds = max(STRETCH * decode, min(max(TARGET_S, decode + costs.per_token * backlog), self._limit))
        if costs.per_token > 0:  # whole tiles, decoding rows included
            capacity = num_running + int((seconds - decode) / costs.per_token)
            tile = LARGE_TILE_TOKENS if capacity >= 3 * LARGE_TILE_TOKENS else self.tile
            tokens = min(tokens, max(self.floor, capacity // tile * tile - num_running))
        keeps_whole = not self.is_queue(backlog)
        return StepBudget(tokens, costs, seconds - decode, self.floor, self.tile, keeps_whole=keeps_whole)

    def seconds(self, num_running: int, context: int, chunks: Sequence[Chunk] = ()) -> float:
        """Return the time of a step; infinite if costs were not measured, so that nothing is held back."""
        if (costs := self._measured) is None:
            return math.inf
        return costs.decode_seconds(num_running, context) + sum(
            costs.chunk_seconds(c.start, c.stop - c.start) for c in chunks
        )

    def load_budget(self, num_running: int, context: int, in_flight: float) -> LoadBudget:
        """Return the budget of loads that a step may start while one of `in_flight` seconds computes.

        Loads that end with the step in flight delay no request. Longer ones delay running requests by at most a step.
        """
        return LoadBudget(in_flight, self.seconds(num_running, context) if num_running else QUEUE_S)

    def describe(self) -> dict[str, str | int | float]:
        """Facts for the banner and /server_info."""
        if self.costs is None:
            return {"token_budget": self.max_tokens}
        return {"token_budget": self.max_tokens, "itl_target_ms": 1e3 * (self._target or TARGET_S)}


class StepClock:
    """Predicts when the device will finish the step in flight, so that the next one can be planned just before.

    A plan that comes late has the requests that arrive until then. A step is expected to take its predicted time, times
    the smallest ratio of measured to predicted time among the latest steps of its kind, with prompts or without. If a
    plan came too late, the device has been idle and the step's time is unknown: the history is dropped, and the next
    plan does not wait.
    """

    def __init__(self) -> None:
        self.seconds = 0.0  # the time of the last collected step
        self._started = 0.0
        self._launched: deque[tuple[bool, float]] = deque()  # of each step in flight: has prompts, predicted seconds
        self._ratios = tuple(deque[float](maxlen=RECENT_STEPS) for _ in range(2))  # without prompts, and with

    def launch(self, now: float, predicted: float, *, has_prompts: bool) -> None:
        """Record a launch; the step begins at once if the device is idle."""
        if not self._launched:
            self._started = now
        self._launched.append((has_prompts, predicted))

    @property
    def predicted(self) -> float:
        """The predicted seconds of the newest step in flight; 0 if there is none."""
        return self._launched[-1][1] if self._launched else 0.0

    def wait_for(self, output: StepOutput) -> StepResult:
        """Block until the oldest step in flight is done, and return its result."""
        asked = time.monotonic()
        result = output.wait()
        self.collect(asked, time.monotonic())
        return result

    def collect(self, asked: float, now: float) -> None:
        """Record the end of the oldest step in flight, waited for since `asked`, and the begin of the next."""
        has_prompts, predicted = self._launched.popleft()
        self.seconds = now - self._started
        if now - asked < LATE_S:
            self._ratios[has_prompts].clear()
        else:
            self._ratios[has_prompts].append(self.seconds / predicted)
        self._started = now

    def slack(self, now: float) -> float:
        """Return the seconds until the next step must be planned, to begin when the one in flight ends."""
        if len(self._launched) != 1:
            return 0.0
        has_prompts, predicted = self._launched[0]
        ratios = self._ratios[has_prompts]
        if not ratios or predicted == math.inf:
            return 0.0
        return max(0.0, self._started + min(ratios) * predicted - PLAN_MARGIN_S - now)
