"""The offline workloads with one optimisation on and off, each run in a fresh process.

    PYTHONPATH=python python benchmark/ablate.py --workload a,shared --shape qwen3-8b

Takes the options of `minisgl bench offline`. The two runs of a pair follow each other, so that a drifting machine hurts
both alike. `gain` is the headline figure with over without (above 1: it helps). `spread %` is the distance between the
repeats of one side, the larger of both: a gain within it is noise. An optimisation that this machine or model cannot
have, or that changes nothing here, is skipped.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from minisgl.core.errors import ConfigError
from minisgl.settings.sources import engine_options, given_options
from minisgl.tools.bench.command import add_offline, bench_args
from minisgl.tools.bench.offline import run_offline
from minisgl.tools.bench.report import format_table, spread_percent, write_json
from minisgl.tools.bench.shapes import shape_options
from minisgl.tools.bench.workloads import OfflineArgs

# Name -> the option, and its values with and without.
ABLATIONS: dict[str, tuple[str, Any, Any]] = {
    "overlap": ("overlap", True, False),
    "graphs": ("cuda_graph_max_bs", None, 0),
    "radix": ("cache_type", "radix", "naive"),
    "mixed batches": ("mixed_batches", True, False),
}


def run_in_child(args: OfflineArgs, options: dict[str, Any]) -> dict[str, Any]:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(run_offline, args, options).result()


def facts(report: dict[str, Any]) -> dict[str, Any]:
    """The engine's description without figures that depend on the free memory."""
    return {name: fact for name, fact in report["engine"].items() if not name.startswith(("kv_", "memory"))}


def ablate(args: OfflineArgs, options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """(reports with and without each optimisation, reasons of those that were skipped)."""
    pairs: dict[str, Any] = {}
    skipped: dict[str, str] = {}
    for name, (option, *values) in ABLATIONS.items():
        try:
            on, off = (run_in_child(args, options | {option: value}) for value in values)
        except ConfigError as e:
            skipped[name] = str(e)
            continue
        if facts(on) == facts(off):
            skipped[name] = "it changes nothing here"
        else:
            pairs[name] = [on, off]
    return pairs, skipped


def table(pairs: dict[str, Any]) -> str:
    rows = []
    for name, (on, off) in pairs.items():
        for result, without in zip(on["results"], off["results"], strict=True):
            headline = result["headline"]
            sides = [r["summary"][headline] for r in (result, without)]
            a, b = (side["median"] for side in sides)
            gain = b / a if headline == "ms_per_token" else a / b
            rows.append([name, result["workload"], headline, a, b, gain, max(map(spread_percent, sides))])
    return format_table(["ablation", "workload", "figure", "on", "off", "gain", "spread %"], rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_offline(parser)
    options = parser.parse_args()
    args = bench_args(OfflineArgs, options)
    with shape_options(args.shape, engine_options(given_options(options))) as given:
        pairs, skipped = ablate(args, given)
    print(table(pairs))
    for name, why in skipped.items():
        print(f"{name}: skipped ({why})")
    write_json(args.json, {"pairs": pairs, "skipped": skipped})
    return 0 if pairs else 1


if __name__ == "__main__":
    sys.exit(main())
