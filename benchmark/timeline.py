"""What the device does in four steady steps of an offline workload: a Chrome trace by torch.profiler, and a picture.

    PYTHONPATH=python python benchmark/timeline.py trace.json --workload batch64 --shape qwen3-8b

Takes the options of `minisgl bench offline`. Open the trace in chrome://tracing or Perfetto. The picture beside it, a
row per stream, needs matplotlib. On a CPU it shows the outermost operators, with `--attn cpu`:
the C++ step is one call.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from host_steps import SKIPPED_STEPS, SLACK, is_steady, truncated

from minisgl.core.plan import BatchPlan
from minisgl.llm.llm import LLM
from minisgl.settings.sources import engine_options, given_options
from minisgl.tools.bench.command import add_offline, bench_args
from minisgl.tools.bench.offline import generate, start_engine
from minisgl.tools.bench.report import check_writable, new_figure
from minisgl.tools.bench.shapes import shape_options
from minisgl.tools.bench.workloads import OfflineArgs, Workload

STEPS = 4
TOP_KERNELS = 9  # kernels with a colour and a name of their own
# In this order: what a GPU did, else what ran on the CPU.
CATEGORIES = (("kernel", "gpu_memcpy", "gpu_memset"), ("cpu_op",))


class Bar(NamedTuple):
    """One kernel, in seconds from the beginning of the trace; bars of one lane do not overlap."""

    lane: str
    start: float
    duration: float
    name: str


def record(llm: LLM, workload: Workload, path: Path) -> None:
    """Run `workload` and write the trace of `STEPS` steady steps to `path`, after a few others."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    profiler = torch.profiler.profile(activities=activities)
    launch, step = llm.scheduler.engine.launch, llm.scheduler.step
    seen = recorded = 0

    def counted_launch(plan: BatchPlan) -> Any:
        nonlocal seen
        seen += is_steady(plan)
        return launch(plan)

    def profiled_step(timeout: float = 0.0) -> None:
        nonlocal recorded
        if seen == SKIPPED_STEPS and not recorded:
            profiler.start()
        step(timeout)
        if seen > SKIPPED_STEPS and recorded < STEPS:
            recorded += 1
            if recorded == STEPS:
                profiler.stop()

    with (
        patch.object(llm.scheduler.engine, "launch", counted_launch),
        patch.object(llm.scheduler, "step", profiled_step),
    ):
        generate(llm, workload, 0.6)
    assert recorded == STEPS, f"the workload has only {seen} steps that only decode"
    profiler.export_chrome_trace(str(path))


def read_bars(path: Path) -> list[Bar]:
    """The kernels of a Chrome trace, or on a CPU its outermost operators, in order of time."""
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("ph") == "X"]
    shown = next((found for c in CATEGORIES if (found := [e for e in events if e.get("cat") in c])), [])
    zero = min(float(e["ts"]) for e in shown)
    bars: list[Bar] = []
    ends: dict[str, float] = {}
    for e in sorted(shown, key=lambda e: float(e["ts"])):
        lane, start, duration = f"{e['pid']}/{e['tid']}", 1e-6 * (float(e["ts"]) - zero), 1e-6 * float(e["dur"])
        if start >= ends.get(lane, 0.0):  # otherwise it is inside the last one
            ends[lane] = start + duration
            bars.append(Bar(lane, start, duration, str(e["name"])))
    return bars


def draw(bars: list[Bar], path: Path) -> None:
    """Draw the kernels over time, a row per stream, the longest ones in colour."""
    lanes = sorted({bar.lane for bar in bars})
    figure = new_figure(14, 2.5 + 0.6 * len(lanes))
    axes = figure.subplots()
    total: dict[str, float] = {}
    for bar in bars:
        total[bar.name] = total.get(bar.name, 0.0) + bar.duration
    names = sorted(total, key=lambda name: -total[name])[:TOP_KERNELS]
    for i, name in enumerate([*names, None]):
        shown = [bar for bar in bars if (bar.name == name if name else bar.name not in names)]
        text = f"{name[:60]} ({1e3 * total[name]:.2f} ms)" if name else "others"
        for lane in lanes:
            if spans := [(1e3 * b.start, 1e3 * b.duration) for b in shown if b.lane == lane]:
                color = f"C{i}" if name else "0.7"
                axes.broken_barh(spans, (lanes.index(lane) - 0.4, 0.8), color=color, label=text)
                text = "_"  # one entry in the legend
    axes.set(xlabel="ms", yticks=range(len(lanes)), yticklabels=lanes)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.25), fontsize="x-small", ncols=2)
    figure.savefig(path, dpi=120)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", help="where the trace is written")
    add_offline(parser)
    options = parser.parse_args(argv)
    check_writable(options.file, "FILE")
    path = Path(options.file).expanduser()
    args = bench_args(OfflineArgs, options)
    with shape_options(args.shape, engine_options(given_options(options))) as given:
        llm, workloads = start_engine(args, given)
        generate(llm, workloads[0].warm_up(llm.scheduler.engine.limits.vocab_size), args.temperature)
        record(llm, truncated(workloads[0], SLACK), path)
    print(f"wrote {path}")
    if importlib.util.find_spec("matplotlib") is not None:
        draw(read_bars(path), path.with_suffix(".png"))
        print(f"drew {path.with_suffix('.png')}")


if __name__ == "__main__":
    main()
