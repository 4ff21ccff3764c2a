"""The same workload with one thing on and off, each run in a process of its own, one after the other."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Final

from minisgl.bench.offline import OfflineSettings, run_offline
from minisgl.bench.report import format_table, spread_percent
from minisgl.errors import ConfigError, StartupError
from minisgl.settings.options import SchedulerConfig, options_of

# Name -> the option, and its values with and without. An option that this version does not have is left out, and said.
ABLATIONS: Final[dict[str, tuple[str, Any, Any]]] = {
    "overlap": ("overlap", True, False),
    "graphs": ("cuda_graph_max_bs", None, 0),
    "radix": ("cache_type", "radix", "naive"),
    "mixed batches": ("mixed_batches", True, False),
}


def run_ablations(settings: OfflineSettings, options: dict[str, Any]) -> dict[str, Any]:
    """A report of each pair of runs; those of a pair follow each other, so that a drifting machine hurts both alike.

    Raises `ConfigError` for settings that cannot work with any of the options.
    """
    known = options_of(SchedulerConfig)
    pairs: dict[str, Any] = {}
    skipped: dict[str, str] = {}
    failure: ConfigError | None = None
    for name, (option, *values) in ABLATIONS.items():
        if option not in known:
            skipped[name] = f"this version has no option {option}"
            continue
        try:
            on, off = (run_in_child(settings, options | {option: value}) for value in values)
        except ConfigError as e:  # this machine or model cannot have it; the others can still be measured
            skipped[name] = str(e)
            failure = e
            continue
        if _facts(on) == _facts(off):
            skipped[name] = "it changes nothing here"
        else:
            pairs[name] = [on, off]
    if not pairs and failure is not None:
        raise failure
    return {"benchmark": "offline ablation", "pairs": pairs, "skipped": skipped}


def _facts(report: dict[str, Any]) -> dict[str, Any]:
    """How the engine describes itself, but for what depends on the memory that happens to be free."""
    return {name: fact for name, fact in report["engine"].items() if not name.startswith(("kv_", "memory"))}


def run_in_child(settings: OfflineSettings, options: dict[str, Any]) -> dict[str, Any]:
    """`run_offline` in a fresh process; raises what it raises, or `StartupError` when the process dies."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(run_offline, settings, options).result()
        except BrokenProcessPool:
            raise StartupError("the benchmark's process died") from None


def ablation_table(report: dict[str, Any]) -> str:
    """For each pair and workload the headline figure with and without, and their ratio (above 1: it helps).

    `spread` is how far the repeats of one side lie apart, the larger of both: a gain within it is noise.
    """
    rows = []
    for name, (on, off) in report["pairs"].items():
        for with_it, without in zip(on["results"], off["results"], strict=True):
            headline = with_it["headline"]
            sides = [r["summary"][headline] for r in (with_it, without)]
            a, b = (side["median"] for side in sides)
            ratio = b / a if headline == "ms_per_token" else a / b
            rows.append([name, with_it["workload"], headline, a, b, ratio, max(spread_percent(s) for s in sides)])
    lines = [format_table(["ablation", "workload", "figure", "on", "off", "gain", "spread %"], rows)]
    lines += [f"{name}: skipped ({why})" for name, why in report["skipped"].items()]
    return "\n".join(lines)
