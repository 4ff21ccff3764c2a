"""What the host adds to an offline batch: `python benchmark/scheduler/batch.py --shape qwen3-0.6b a batch64 prefill`.

The real `LLM` with its scheduler and detokenizer on a simulated device: steps take as long as `StepCosts` predict, one
after the other, and all tokens are the same. Prints milliseconds: the wall time, the device's busy time, and the idle
time of the device before the first step, between steps and after the last one.
"""

from __future__ import annotations

import argparse
import os
import time
from unittest.mock import patch

os.environ["MINISGL_CHECK"] = "0"

import numpy as np

from minisgl import LLM, SamplingParams
from minisgl.core.layout import Flag
from minisgl.core.params import Limits
from minisgl.core.plan import BatchPlan, StepCosts, StepResult
from minisgl.kvcache.arena import Blocks
from minisgl.llm import llm as llm_module
from minisgl.scheduler.scheduler import Scheduler
from minisgl.tools.bench.workloads import WORKLOADS, OfflineArgs, make_workloads

# Seconds on an H200: a step of one row, a token of a long prompt, a token of K/V.
COSTS = {
    "qwen3-0.6b": StepCosts(0.71e-3, 2.0e-6, 25e-9),
    "qwen3-8b": StepCosts(3.9e-3, 21e-6, 33e-9),
    "qwen3-14b": StepCosts(6.9e-3, 39e-6, 36e-9),
}
LAUNCH_S = 60e-6  # of the host, for two graphs


class Output:
    awaits_masks = False

    def __init__(self, count: int, end: float) -> None:
        self._count, self._end = count, end

    def wait(self) -> StepResult:
        while (left := self._end - time.perf_counter()) > 0:
            if left > 3e-4:  # sleep is late by up to 0.1 ms
                time.sleep(left - 2e-4)
        return StepResult(np.full(self._count, 7, np.int32), np.ones(self._count, np.int32))


class SimulatedEngine:
    is_async = True
    tiers = ()
    bounded = ()
    eos_token_ids = frozenset({1})
    limits = Limits(max_model_len=16_384, vocab_size=150_000)
    max_running_requests, page_size, blocks = 256, 64, Blocks(16_384)

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs
        self.reset()

    def reset(self) -> None:
        self.first: float | None = None
        self.end = self.busy = self.idle = 0.0

    def step_costs(self) -> StepCosts:
        return self._costs

    def launch(self, plan: BatchPlan) -> Output:
        launched = time.perf_counter() + LAUNCH_S
        while (now := time.perf_counter()) < launched:
            pass
        start = max(now, self.end)
        if self.first is None:
            self.first = now
        else:
            self.idle += start - self.end
        stops, flags = plan.sequences["stop"], plan.sequences["flags"]
        context = int(stops[(flags & Flag.FROM_DEVICE) != 0].sum())
        took = self._costs.decode_seconds(int((stops - plan.sequences["start"]).sum()), context)
        self.end, self.busy = start + took, self.busy + took
        return Output(int(np.count_nonzero(flags & Flag.SAMPLES)), self.end)

    def shutdown(self) -> None:
        pass

    def describe(self) -> dict[str, str | int | float]:
        shown = dict.fromkeys(("dtype", "quantization", "device"), "simulated")
        return {**shown, "kv_tokens": 16_384 * self.page_size, "max_model_len": self.limits.max_model_len}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=f"of {', '.join(WORKLOADS)}; default: a")
    parser.add_argument("--shape", choices=COSTS, default="qwen3-0.6b")
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    engine = SimulatedEngine(COSTS[args.shape])
    with patch.object(llm_module, "create_scheduler", lambda config, io, group: Scheduler(config, engine, io)):
        llm = LLM()
    for workload in make_workloads(OfflineArgs(workload=",".join(args.workloads or ["a"])), 4000):
        params = [SamplingParams(ignore_eos=True, max_tokens=item.output_len) for item in workload.requests]
        for _ in range(args.repeat):
            llm.scheduler.cache.flush()
            engine.reset()
            start = time.perf_counter()
            llm.generate([item.prompt for item in workload.requests], params)
            stop = time.perf_counter()
            assert engine.first is not None
            parts = engine.first - start, engine.idle, stop - engine.end
            print(
                f"{workload.name}: {(stop - start) * 1e3:.1f} ms, device {engine.busy * 1e3:.1f}; "
                "before {:.1f}, between {:.1f}, after {:.1f}".format(*(part * 1e3 for part in parts))
            )


if __name__ == "__main__":
    main()
