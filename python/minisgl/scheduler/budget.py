"""The budget of prompt tokens per step, so that running streams keep their pace; and how late a step may be planned."""

from __future__ import annotations

import math
import time
from collections import deque
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from minisgl.core import TILE_TOKENS
from minisgl.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from minisgl.core import StepCosts, StepResult
    from minisgl.scheduler.plan import Chunk, StepOutput
    from minisgl.settings.options import SchedulerConfig

# The minimum number of prompt tokens per step: otherwise slow decode steps would starve prompts.
FLOOR_TOKENS: Final = 64
# The default target. Streams are then faster than people read, and a step is long enough to spend most of its time on
# the prompt: a step with a fixed cost of 7 ms spends three quarters of it, on 1,024 tokens of an 8B model beside 64
# streams. Steps may take 8 % longer when the device has reached its power limit. If decoding alone takes more than half
# of the target, prompts may double the step's time: with a fixed target they would get only the minimum.
AUTO_TARGET_S: Final = 0.029
AUTO_STRETCH: Final = 2.0
# While prompts wait, a step may take as long as all waiting prompts but the longest, up to this limit. A queue is then
# served at nearly the full rate: streams stutter for a moment, but the last request of the queue waits half as long.
# The longest prompt does not count, since it runs last and no other request waits for it.
AUTO_RUSH_S: Final = 0.075
# If no stream runs, a step is limited to this time, so that new requests need not wait long, but it has at least
# TILE_TOKENS. Such steps compute prompts of 8B on a GPU at nearly the full rate. On a CPU, 128 tokens are enough for
# it.
ALONE_S: Final = 0.1
# A step that cuts a prompt has whole tiles of TILE_TOKENS, since kernels for other numbers of rows may not be loaded
# yet (`triton/cublas.py`). If the pace allows three times this number, the budget is a multiple of it: 8B computes
# 44,500 tokens/s in steps of 3,072, 43,900 in steps of 3,328, and 42,700 in steps of 3,200.
LARGE_TILE_TOKENS: Final = 512
# A CPU computes a few dozen tokens at nearly the full rate. There a step takes this many times its base cost, or
# AUTO_STRETCH times the time of decoding: a new request waits for the step in flight and joins the next one.
SYNC_STEP: Final = 8
SYNC_TILE_TOKENS: Final = 16  # the C++ step needs no whole tiles; fewer tokens would be mostly overhead

RECENT_STEPS: Final = 4  # the shortest of these predicts the time of the next
PLAN_MARGIN_S: Final = 0.0015  # for planning and launching
LATE_S: Final = 0.0001  # a result that arrives within this time may have been ready earlier


class StepBudget:
    """What remains of one step for prompts: `tokens` and, if a pace must be kept, `seconds`.

    `floor` tokens are granted in any case; beyond them, chunks take no more than `seconds`. A prompt that does not fit
    is cut so that the step has whole tiles of `tile` tokens.
    """

    def __init__(
        self,
        tokens: int,
        costs: StepCosts | None = None,
        seconds: float = math.inf,
        floor: int = FLOOR_TOKENS,
        tile: int = TILE_TOKENS,
    ) -> None:
        self._tokens = tokens
        self._tile = tile
        self._floor = floor
        self._costs = costs
        self._seconds = seconds

    @property
    def is_spent(self) -> bool:
        """Whether no prompt can get another token; the first tokens of a prompt are the cheapest."""
        return self._affordable(0) <= 0

    def take(self, start: int, wanted: int, most: float = math.inf) -> int:
        """Grant a prompt up to `wanted` tokens from position `start` on, but not more than `most`; return how many."""
        count = int(max(0, min(wanted, most, self._affordable(start))))
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
        return min(self._tokens, max(self._floor, _tokens_within(self._costs, self._seconds, start, self._tokens)))


class LoadBudget:
    """The number of pages that a step may load from tiers: as many as take `seconds`, the time of the step in flight.

    The first request gets at least a page, and as many as take `least` seconds.
    """

    def __init__(self, seconds: float = math.inf, least: float = math.inf) -> None:
        self.granted = 0
        self._seconds = seconds
        self._least = least

    def grant(self, seconds: npt.NDArray[np.float64]) -> int:
        """Grant a prefix of the loads that take `seconds` [n]; return its length."""
        is_first, limit = self.granted == 0, self._seconds
        if is_first:
            limit = max(limit, self._least, *seconds[:1])
        count = int(np.searchsorted(np.cumsum(seconds), limit, "right"))
        self.granted += count
        self._seconds -= float(seconds[:count].sum())
        return count


class Pace:
    """Turns the target for the time between two tokens of a stream into a budget for each step.

    A step's time is predicted from costs measured at the start and not corrected by later steps. So the same requests
    lead to the same plans; and under overlap the host could not tell queueing from computing.
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
        self._target = AUTO_TARGET_S if target is None else target / 1e3
        self._is_auto = target is None
        self._most = math.inf if is_async or costs is None else SYNC_STEP * costs.base

    @property
    def rush_tokens(self) -> int:
        """The number of waiting prompt tokens beyond which steps do not grow; 0 if the user set a target."""
        if self.costs is None or not self._is_auto or self.costs.per_token == 0:
            return 0
        return int(AUTO_RUSH_S / self.costs.per_token)

    def budget(self, num_running: int, context: int, backlog: int = 0) -> StepBudget:
        """Return the budget of a step in which `num_running` requests decode, with `context` tokens of K/V in total.

        `backlog` is the number of tokens of all waiting prompts but the longest, counted up to `rush_tokens`.
        """
        tokens = self.max_tokens - num_running
        if self.costs is None:
            return StepBudget(tokens)
        if num_running == 0:
            seconds = max(ALONE_S, self.costs.base + self.costs.chunk_seconds(0, TILE_TOKENS))
            return StepBudget(tokens, self.costs, min(seconds, self._most) - self.costs.base, self.tile, self.tile)
        decode = self.costs.decode_seconds(num_running, context)
        seconds = self._target
        if self._is_auto:
            rush = min(AUTO_RUSH_S, decode + self.costs.per_token * backlog)
            seconds = max(min(max(seconds, rush), self._most), AUTO_STRETCH * decode)
        if self.costs.per_token > 0:  # whole tiles, decoding rows included
            capacity = num_running + int((seconds - decode) / self.costs.per_token)
            tile = LARGE_TILE_TOKENS if capacity >= 3 * LARGE_TILE_TOKENS else self.tile
            tokens = min(tokens, max(self.floor, capacity // tile * tile - num_running))
        return StepBudget(tokens, self.costs, seconds - decode, self.floor, self.tile)

    def seconds(self, num_running: int, context: int, chunks: Sequence[Chunk] = ()) -> float:
        """Return the time of a step; infinite if costs were not measured, so that nothing is held back."""
        if (costs := self._measured) is None:
            return math.inf
        return costs.decode_seconds(num_running, context) + sum(
            costs.chunk_seconds(c.start, c.stop - c.start) for c in chunks
        )

    def loads(self, num_running: int, context: int, beside: float) -> LoadBudget:
        """Return the seconds of loads that a step may start while a step of `beside` seconds is in flight.

        Loads that end with the step in flight delay no request. Longer ones delay running requests by at most a step.
        """
        return LoadBudget(beside, self.seconds(num_running, context) if num_running else ALONE_S)

    def describe(self) -> dict[str, str | int | float]:
        """Facts for the banner and /server_info."""
        if self.costs is None:
            return {"token_budget": self.max_tokens}
        return {"token_budget": self.max_tokens, "itl_target_ms": self._target * 1e3}


class StepClock:
    """Predicts when the device will finish the step in flight, from the latest steps that only decoded.

    The next step is best planned just before that time, so that it has the requests that arrive until then. If a plan
    came too late, the device has been idle and the step's time is unknown: the history is dropped, and the next plan
    does not wait.
    """

    def __init__(self) -> None:
        self.seconds = 0.0  # the time of the last collected step
        self._started = 0.0
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS)

    def launch(self, now: float, is_idle: bool) -> None:
        """Record a launch; the step begins at once if the device is idle."""
        if is_idle:
            self._started = now

    def wait_for(self, output: StepOutput, is_decode: bool) -> StepResult:
        """Block until the oldest step in flight is done, and return its result."""
        asked = time.monotonic()
        result = output.wait()
        self.collect(asked, time.monotonic(), is_decode)
        return result

    def collect(self, asked: float, now: float, is_decode: bool) -> None:
        """Record the end of the oldest step in flight, waited for since `asked`, and the begin of the next."""
        if now - asked < LATE_S:
            self._recent.clear()
        elif is_decode:
            self._recent.append(now - self._started)
        self.seconds = now - self._started
        self._started = now

    def slack(self, now: float) -> float:
        """Return the seconds until the next step must be planned, to begin when the one in flight ends."""
        return max(0.0, self._started + min(self._recent) - PLAN_MARGIN_S - now) if self._recent else 0.0


def _tokens_within(costs: StepCosts, seconds: float, start: int, limit: int) -> int:
    """Return the largest chunk from position `start` on, of at most `limit` tokens, that takes at most `seconds`.

    This is the larger root of pair/2 n^2 + (token + pair start) n = seconds, in a form that is exact for pair = 0.
    """
    linear = costs.per_token + costs.per_pair * start
    root = math.sqrt(linear * linear + 2 * costs.per_pair * max(seconds, 0.0))
    count = 2 * max(seconds, 0.0) / (linear + root) if linear + root > 0 else math.inf
    most = int(min(count, limit))
    # Rounding may have added one.
    while most > 0 and costs.chunk_seconds(start, most) > seconds:
        most -= 1
    return most
