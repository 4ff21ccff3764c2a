"""What the device does in a few steady steps: a Chrome trace by torch.profiler, and a picture of it."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from minisgl.bench.plots import Bar, plot_timeline
from minisgl.bench.probe import SKIPPED_STEPS, is_steady, replaced

if TYPE_CHECKING:
    from minisgl.core import BatchPlan
    from minisgl.llm.llm import LLM

TIMELINE_STEPS: Final = 4
# In order: what a GPU did, else what ran on the CPU.
CATEGORIES: Final = (("kernel", "gpu_memcpy", "gpu_memset"), ("cpu_op",))


class _Recorder:
    """Profiles `TIMELINE_STEPS` steps of a scheduler, from the first steady one after a few others."""

    def __init__(self) -> None:
        import torch

        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(activities=activities)
        self._seen = 0
        self.recorded = 0

    def before_step(self) -> None:
        if self._seen == SKIPPED_STEPS and not self.recorded:
            self._profiler.start()

    def planned(self, plan: BatchPlan) -> None:
        self._seen += is_steady(plan)

    def after_step(self) -> None:
        if self._seen > SKIPPED_STEPS and self.recorded < TIMELINE_STEPS:
            self.recorded += 1
            if self.recorded == TIMELINE_STEPS:
                self._profiler.stop()

    def finish(self, path: Path) -> None:
        if 0 < self.recorded < TIMELINE_STEPS:
            self._profiler.stop()
        if self.recorded:
            self._profiler.export_chrome_trace(str(path))


def record_timeline(llm: LLM, work: Callable[[], Any], file: str) -> dict[str, Any]:
    """Run `work` and write the trace of a few of its steady steps to `file`, and a picture beside it if matplotlib is
    there; returns what was written."""
    path = Path(file).expanduser()
    recorder = _Recorder()
    prepare, step = llm.scheduler.engine.prepare, llm.scheduler.step

    def watched_prepare(plan: BatchPlan) -> Any:
        recorder.planned(plan)
        return prepare(plan)

    def watched_step(timeout: float = 0.0) -> None:
        recorder.before_step()
        step(timeout)
        recorder.after_step()

    with replaced(llm.scheduler.engine, "prepare", watched_prepare), replaced(llm.scheduler, "step", watched_step):
        work()
    recorder.finish(path)
    written: dict[str, Any] = {"trace": str(path) if recorder.recorded else None, "steps": recorder.recorded}
    if recorder.recorded and importlib.util.find_spec("matplotlib") is not None:
        picture = path.with_suffix(".png")
        plot_timeline(read_bars(path), picture)
        written["picture"] = str(picture)
    return written


def read_bars(path: Path) -> list[Bar]:
    """The kernels of a Chrome trace, or on a CPU its outermost operators, ordered by time; seconds from the first."""
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("ph") == "X"]
    chosen: list[dict[str, Any]] = []
    for category in CATEGORIES:
        if chosen := [e for e in events if e.get("cat") in category]:
            break
    chosen.sort(key=lambda e: float(e["ts"]))
    bars: list[Bar] = []
    ends: dict[str, float] = {}
    for e in chosen:
        lane, start, duration = f"{e['pid']}/{e['tid']}", float(e["ts"]) * 1e-6, float(e["dur"]) * 1e-6
        if start >= ends.get(lane, 0.0):  # otherwise it is inside the last one
            ends[lane] = start + duration
            bars.append(Bar(lane, start, duration, str(e["name"])))
    if not bars:
        return bars
    zero = bars[0].start
    return [Bar(b.lane, b.start - zero, b.duration, b.name) for b in bars]
