"""What a step costs on the host: stopwatches around the scheduler's methods during the offline workloads.

    PYTHONPATH=python python benchmark/host_steps.py --workload batch64 --shape qwen3-0.6b --steps 100

Takes the options of `minisgl bench offline`, and prints medians in microseconds over steps that only decode (over all
steps of a workload that has none). Host work = plan + launch + collect, without the time blocked on the device (wait).
launch contains prepare (build the batch) and engine_launch (start it); on a CPU engine_launch is the model itself and
does not count as host work. step is the whole step. Detokenizing is not part of it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np

from minisgl.core.layout import Flag
from minisgl.core.plan import BatchPlan
from minisgl.settings.sources import engine_options, given_options
from minisgl.tools.bench.command import add_offline, bench_args
from minisgl.tools.bench.offline import generate, start_engine
from minisgl.tools.bench.report import provenance, shown, write_json
from minisgl.tools.bench.shapes import shape_options
from minisgl.tools.bench.traffic import Request
from minisgl.tools.bench.workloads import OfflineArgs, Workload

if TYPE_CHECKING:
    from minisgl.scheduler.scheduler import Scheduler

SKIPPED_STEPS = 8  # steady steps before the first one that counts
SLACK = 64  # tokens generated beyond the measured steps, so that those are in the steady middle
PARTS = ("plan", "launch", "engine_launch", "collect", "wait", "step")


def is_steady(plan: BatchPlan) -> bool:
    """Whether a step only decodes."""
    return bool((plan.sequences["flags"] & Flag.FROM_DEVICE).all())


def truncated(workload: Workload, output_len: int) -> Workload:
    """The same prompts with at most `output_len` tokens each."""
    return replace(workload, requests=[Request(i.prompt, min(i.output_len, output_len)) for i in workload.requests])


class TimedOutput:
    """The engine's output of a step; `waited` gets the seconds of each `wait`."""

    def __init__(self, output: Any, waited: Callable[[float], None]) -> None:
        self._output = output
        self._waited = waited

    def __getattr__(self, name: str) -> Any:
        return getattr(self._output, name)

    def wait(self) -> Any:
        start = time.perf_counter()
        result = self._output.wait()
        self._waited(time.perf_counter() - start)
        return result


class HostProbe:
    """Seconds of each part of each step; use `attach` around the run."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._now = dict.fromkeys(PARTS, 0.0)
        self._rows = 0
        self._is_steady = False
        self.steady: list[list[float]] = []  # rows, then PARTS
        self.other: list[list[float]] = []

    @contextmanager
    def attach(self) -> Iterator[None]:
        """Time the scheduler's steps inside the block."""
        scheduler, engine = self._scheduler, self._scheduler.engine
        launch = self._timed("engine_launch", engine.launch)
        step = self._timed("step", scheduler.step)

        def noted_launch(plan: BatchPlan) -> TimedOutput:
            self._rows, self._is_steady = len(plan.sequences), is_steady(plan)
            return TimedOutput(launch(plan), lambda seconds: self._add("wait", seconds))

        def noted_step(timeout: float = 0.0) -> None:
            self._now, self._rows = dict.fromkeys(PARTS, 0.0), 0
            step(timeout)
            if self._rows:
                (self.steady if self._is_steady else self.other).append([self._rows, *self._now.values()])

        with ExitStack() as stack:
            for name in ("plan", "launch", "collect"):
                stack.enter_context(patch.object(scheduler, name, self._timed(name, getattr(scheduler, name))))
            stack.enter_context(patch.object(engine, "launch", noted_launch))
            stack.enter_context(patch.object(scheduler, "step", noted_step))
            yield

    def _add(self, part: str, seconds: float) -> None:
        self._now[part] += seconds * 1e6

    def _timed(self, part: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            start = time.perf_counter()
            result = method(*args)
            self._add(part, time.perf_counter() - start)
            return result

        return timed

    def figures(self, limit: int) -> dict[str, float]:
        """Medians in microseconds over up to `limit` steps, and the number of steps and rows."""
        samples = np.array(self.steady[SKIPPED_STEPS:][:limit] or self.other[:limit])
        parts = dict(zip(PARTS, samples[:, 1:].T, strict=True))
        host = parts["plan"] + parts["launch"] + parts["collect"] - parts["wait"]
        if not self._scheduler.engine.is_async:
            host = host - parts["engine_launch"]
        medians = {name: float(np.median(values)) for name, values in {"host": host, **parts}.items()}
        return {"steps": len(samples), "rows": float(np.median(samples[:, 0])), **medians}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_offline(parser)
    parser.add_argument("--steps", type=int, default=100, help="measured steps of each workload (default: 100)")
    options = parser.parse_args(argv)
    args = bench_args(OfflineArgs, options)
    results = {}
    with shape_options(args.shape, engine_options(given_options(options))) as given:
        llm, workloads = start_engine(args, given)
        for workload in workloads:
            generate(llm, workload.warm_up(llm.scheduler.engine.limits.vocab_size), args.temperature)
            probe = HostProbe(llm.scheduler)
            with probe.attach():
                generate(llm, truncated(workload, options.steps + SLACK), args.temperature)
            results[workload.name] = host = probe.figures(options.steps)
            parts = ", ".join(f"{name} {shown(host[name])}" for name in PARTS[:-1])
            print(
                f"{workload.name}: host work {shown(host['host'])} us of a step of {shown(host['step'])} us "
                f"({host['steps']} steps, {shown(host['rows'])} rows; {parts})"
            )
    write_json(args.json, {"results": results, "machine": provenance()})


if __name__ == "__main__":
    main()
