"""Times to first token and between tokens of online traffic, simulated: `python benchmark/scheduler/online.py`.

The scheduler is real, with the loop that the server runs. The device, the channels and the clock are simulated, so a
run takes seconds and repeats exactly. Steps take what an H200 was measured to take for Qwen3-8B in bf16 at its power
limit; the scheduler plans with the costs that such an engine measures at its start. Prints milliseconds, means over
--seeds:

closed   64 streams, 192 requests of 100-1,024 tokens in, 100-512 out
burst    64 requests of 1,024 in, 32 out at once
poisson  192 requests as in closed, 8 and 16 arrivals a second
beside   8 arrivals a second beside one prompt of 100,000 tokens, whose own TTFT is not counted
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import os
import random
import time
from collections import defaultdict
from collections.abc import Callable
from unittest.mock import patch

os.environ["MINISGL_CHECK"] = "0"

import numpy as np

from minisgl.core.layout import Flag
from minisgl.core.message import BackendMsg, DetokenizeMsg, UserMsg, ids_to_bytes
from minisgl.core.params import Limits, SamplingParams
from minisgl.core.plan import BatchPlan, StepCosts, StepResult
from minisgl.kvcache.arena import Blocks
from minisgl.scheduler.io import OfflineIO
from minisgl.scheduler.scheduler import Scheduler
from minisgl.scheduler.stats import HEARTBEAT_S
from minisgl.settings.options import SchedulerConfig

COSTS = StepCosts(base=5.77e-3, per_token=1.78e-5, per_context=3.4e-8)  # as measured at the start, with a cool chip
# Seconds of a step by its tokens, without reading K/V: docs/notebook/scheduling.md, "How many tokens in a step".
TOKENS = (1, 8, 64, 128, 256, 384, 512, 768, 1024, 1280, 1536, 2048, 3072, 4096, 8192)
SECONDS = np.array((3.94, 4.4, 5.0, 6.0, 7.8, 9.8, 13.2, 18.5, 24.1, 29.4, 35.1, 46.4, 69.0, 92.0, 184.0)) / 1e3
CONTEXT_S = 3.4e-8  # of a token of K/V that a decoding row reads
TILE = 128
HOST_S = 4e-4  # to plan and launch a step
TO_SCHEDULER_S, TO_CLIENT_S = 5e-3, 4e-3  # HTTP and tokenizing, detokenizing and HTTP
APART_S = 7e-4  # between the requests of a burst, one after the other in the tokenizer


class Device:
    """A clock, and an engine whose steps take their time on it, one after the other."""

    is_async = True
    tiers = ()
    bounded = ()
    eos_token_ids = frozenset({1})
    limits = Limits(max_model_len=131_072, vocab_size=150_000)
    max_running_requests, page_size, blocks = 256, 64, Blocks(8192)

    def __init__(self) -> None:
        self.now = 0.0
        self._end = 0.0

    def step_costs(self) -> StepCosts:
        return COSTS

    def launch(self, plan: BatchPlan) -> Output:
        self.now += HOST_S
        widths = plan.sequences["stop"] - plan.sequences["start"]
        tokens, decodes = int(widths.sum()), (plan.sequences["flags"] & Flag.FROM_DEVICE) != 0
        if len(plan.tokens):
            tokens = -(-tokens // TILE) * TILE
        seconds = float(np.interp(tokens, TOKENS, SECONDS)) + CONTEXT_S * int(plan.sequences["stop"][decodes].sum())
        self._end = max(self._end, self.now) + seconds
        return Output(self, int(np.count_nonzero(plan.sequences["flags"] & Flag.SAMPLES)), self._end)


class Output:
    awaits_masks = False

    def __init__(self, device: Device, count: int, end: float) -> None:
        self._device, self._count, self._end = device, count, end

    def wait(self) -> StepResult:
        self._device.now = max(self._device.now, self._end)
        return StepResult(np.full(self._count, 7, np.int32), np.ones(self._count, np.int32))


class Clients(OfflineIO):
    """Sends requests on time, and notes when tokens reach them."""

    def __init__(self, device: Device, done: Callable[[Clients, float], None]) -> None:
        super().__init__()
        self._device, self._done = device, done
        self._due: list[tuple[float, int, UserMsg]] = []
        self.sent: dict[int, float] = {}
        self.times: dict[int, list[float]] = defaultdict(list)
        self.left = 0

    def add(self, at: float, input_len: int, output_len: int) -> int:
        uid = len(self.sent)
        ids = ids_to_bytes(np.arange(uid * 7, uid * 7 + input_len, dtype=np.int32) % 149_000 + 10)
        params = SamplingParams(max_tokens=output_len, ignore_eos=True)
        heapq.heappush(self._due, (at + TO_SCHEDULER_S, uid, UserMsg(uid=uid, input_ids=ids, sampling_params=params)))
        self.sent[uid], self.left = at, self.left + 1
        return uid

    def receive(self, timeout: float) -> list[BackendMsg]:
        if self._due and timeout > 0:
            self._device.now = max(self._device.now, min(self._due[0][0], self._device.now + timeout))
        elif timeout > 0:
            self._device.now += timeout
        messages: list[BackendMsg] = []
        while self._due and self._due[0][0] <= self._device.now:
            messages.append(heapq.heappop(self._due)[2])
        return messages

    def send(self, msg: DetokenizeMsg) -> None:
        at = self._device.now + TO_CLIENT_S
        for uid in np.frombuffer(msg.uids, "<i8").tolist():
            self.times[uid].append(at)
        for _ in msg.finished:
            self.left -= 1
            self._done(self, at)


def run(traffic: str, seed: int) -> tuple[list[float], list[float]]:
    """Return all TTFTs and ITLs of one run in seconds."""
    rng, device = random.Random(seed), Device()
    lengths = [(rng.randint(100, 1024), rng.randint(100, 512)) for _ in range(192)]
    more = iter(lengths[64:])

    def again(io: Clients, now: float) -> None:
        if traffic == "closed" and (job := next(more, None)) is not None:
            io.add(now, *job)

    io, measured = Clients(device, again), slice(None)
    if traffic == "closed":
        for i, job in enumerate(lengths[:64]):
            io.add(i * APART_S, *job)
    elif traffic == "burst":
        for i in range(64):
            io.add(i * APART_S, 1024, 32)
    else:
        at = 0.0
        if traffic == "beside":
            io.add(0.0, 100_000, 2)
            measured = slice(1, None)
        for job in lengths:
            at += rng.expovariate(16 if traffic == "poisson16" else 8)
            io.add(at, *job)
    with patch.object(time, "monotonic", lambda: device.now):
        scheduler = Scheduler(SchedulerConfig(), device, io, clock=lambda: device.now)
        while io.left:
            scheduler.step(scheduler._listen_seconds() if scheduler.is_busy else HEARTBEAT_S)
    uids = sorted(io.sent)[measured]
    ttft = [io.times[uid][0] - io.sent[uid] for uid in uids]
    return ttft, [b - a for uid in uids for a, b in itertools.pairwise(io.times[uid])]


TRAFFIC = ("closed", "burst", "poisson8", "poisson16", "beside")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traffic", nargs="+", choices=TRAFFIC, default=TRAFFIC)
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    for traffic in args.traffic:
        cells = []
        for seed in range(1 if traffic == "burst" else args.seeds):
            ttft, itl = (np.array(values) * 1e3 for values in run(traffic, seed))
            cells.append([ttft.mean(), *np.percentile(ttft, (50, 90, 99)), *np.percentile(itl, (50, 99))])
        mean, p50, p90, p99, itl50, itl99 = np.mean(cells, 0)
        print(
            f"{traffic:10} TTFT mean {mean:7.1f} p50 {p50:7.1f} p90 {p90:7.1f} p99 {p99:7.1f} | "
            f"ITL p50 {itl50:5.2f} p99 {itl99:6.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
