"""What a step with drafts costs beside a step that only decodes: random weights in the shape of a model.

    PYTHONPATH=python python benchmark/draft_steps.py --shape qwen3-8b --tokens 1 2 4 5 8

Each row has a context of `--context` tokens. Steps are launched back to back, as under load. Prints the median
milliseconds of a step, and its ratio to the step of as many rows that only decodes (1 token without drafts).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

import numpy as np

from minisgl.core.layout import HISTORY_HEAD, NO_INTS, NO_PAGE_WRITES, Flag, words
from minisgl.core.plan import BatchPlan
from minisgl.device.create import create_device
from minisgl.device.machine import choose_device
from minisgl.engine.engine import Engine
from minisgl.engine.resolve import resolve
from minisgl.engine.trial import spread_plan
from minisgl.settings.options import SchedulerConfig, build_config
from minisgl.tools.bench.shapes import shape_options

STEPS, REPEATS = 24, 5


def plan_of(engine: Engine, rows: int, tokens: int, context: int) -> BatchPlan:
    """A step of `tokens` tokens a row; with 1, rows only decode, and with 0 they have DRAFTS without any."""
    stop, flags = context + max(1, tokens), Flag.SAMPLES | Flag.FROM_DEVICE
    slack = STEPS * (REPEATS + 1) * max(1, tokens)
    plan = spread_plan([(row, 0, stop + slack, flags) for row in range(rows)], engine.page_size, engine.blocks)
    plan.sequences["start"], plan.sequences["stop"] = context, stop
    if tokens == 1:
        return plan
    plan.sequences["flags"] |= Flag.DRAFTS
    heads = np.zeros(rows, HISTORY_HEAD)
    heads["words"], heads["row"], heads["length"] = words(HISTORY_HEAD), np.arange(rows), context + 1
    return replace(plan, histories=heads.view(np.int32))


def seconds(engine: Engine, plan: BatchPlan) -> tuple[float, str]:
    """The time of a step, and its runner."""
    engine.launch(plan).wait()
    # On a CPU each step begins with the same lengths, which the plan bounds.
    histories, times = NO_INTS if engine.is_async else plan.histories, []
    plan = replace(plan, page_writes=NO_PAGE_WRITES, histories=histories)
    for _ in range(REPEATS):
        began = time.perf_counter()
        outputs = [engine.launch(plan) for _ in range(STEPS)]
        outputs[-1].wait()
        times.append((time.perf_counter() - began) / STEPS)
    return median(times), next(r for r in engine.runners if r.fits(plan)).name


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--quantization")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--tokens", type=int, nargs="+", default=[0, 2, 4, 5, 8])
    parser.add_argument("--context", type=int, default=512)
    args = parser.parse_args(argv)
    options = {"speculate": "ngram", "num_draft_tokens": max(1, *args.tokens) - 1, "quantization": args.quantization}
    with shape_options(args.shape, options) as given:
        config = build_config(SchedulerConfig, given).engine
        device = choose_device(config.device)
        engine = Engine(resolve(config, device), create_device(device))
    print(f"{args.shape} {args.quantization or ''}: {engine.step_costs()}", flush=True)
    for rows in args.rows:
        plain, name = seconds(engine, plan_of(engine, rows, 1, args.context))
        line = f"{rows:3} rows: plain {plain * 1e3:.3f} ms ({name})"
        for tokens in args.tokens:
            took, name = seconds(engine, plan_of(engine, rows, tokens, args.context))
            line += f" | {tokens} tokens {took * 1e3:.3f} = {took / plain:.3f} x{' EAGER' * (name == 'eager')}"
        print(line, flush=True)


if __name__ == "__main__":
    main()
