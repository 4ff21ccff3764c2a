"""Times decode steps by how their tokens are sampled: plain, filtered, penalized, biased, masked, with logprobs.

    PYTHONPATH=python python benchmark/kernels/tails.py --shape qwen3-8b --rows 1,64,256

Random weights, all rows at one context. The kinds take turns in one process. `step` is the median time of a step with
two more in flight, as under load; `more` compares it with the plain one; `host` is the host's time to launch one on an
idle device. `one of them` penalizes one row only.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np
import torch

from minisgl.core.layout import FULL, NO_MASKS, PAGE_WRITE, ROW_STATE, SEQUENCE, Flag
from minisgl.core.params import Grammar, SamplingParams
from minisgl.core.plan import BatchPlan
from minisgl.device.create import create_device
from minisgl.distributed.group import Group
from minisgl.engine.engine import Engine
from minisgl.engine.resolve import resolve
from minisgl.scheduler.req import Req
from minisgl.scheduler.writes import decode_flags, penalty_record, sampling_flags
from minisgl.settings.options import EngineConfig
from minisgl.tools.bench.report import format_table
from minisgl.tools.bench.shapes import SHAPES, shape_options

PROMPT, STEPS, REPEATS, AHEAD = 16, 25, 7, 2
WARM = {"temperature": 0.6}
MASK = Grammar("regex", "")
PENALTIES = {"frequency_penalty": 0.5, "presence_penalty": 0.5, "repetition_penalty": 1.1}
BIASES = tuple((token * 7, 0.5) for token in range(300))
KINDS = {
    "plain": SamplingParams(**WARM),
    "top_k 50, top_p 0.95": SamplingParams(**WARM, top_k=50, top_p=0.95),
    "penalties": SamplingParams(**WARM, **PENALTIES),
    "300 biases, min_tokens": SamplingParams(**WARM, logit_bias=BIASES, min_tokens=999),
    "mask": SamplingParams(**WARM, grammar=MASK),
    "log-probabilities": SamplingParams(**WARM, logprobs=20),
    "all of these": SamplingParams(
        **WARM, **PENALTIES, top_k=50, top_p=0.95, logit_bias=BIASES, grammar=MASK, logprobs=20
    ),
    "penalties, one of them": SamplingParams(**WARM, **PENALTIES),
}


class Rows:
    """`count` rows of one kind, whose plans begin at `context`."""

    def __init__(self, engine: Engine, name: str, count: int, context: int) -> None:
        self.engine, self.context = engine, context
        vocab, rng = engine.limits.vocab_size, np.random.default_rng(0)
        self.reqs = []
        for row in range(count):
            params = KINDS["plain" if "one of" in name and row else name]
            ids = rng.integers(0, vocab, PROMPT, dtype=np.int32)
            self.reqs.append(Req(row, ids, params, 999, row, row * 977))
        self.masks = NO_MASKS
        if KINDS[name].grammar:
            bits = rng.integers(-(2**31), 2**31, (count, -(-vocab // 32)), dtype=np.int64)
            self.masks = bits.astype(np.int32)

    def fill(self) -> BatchPlan:
        """Return the plan of all prompts, with their page writes, sampling states and penalties."""
        pages_per_row = -(-(self.context + STEPS * 2) // self.engine.page_size)
        total = self.engine.num_pages
        index = range(pages_per_row)
        pages = [(FULL, r.order, i, (r.order * pages_per_row + i) % total) for r in self.reqs for i in index]
        sequences, states, penalties = [], [], [np.empty(0, np.int32)]
        for r in self.reqs:
            p = r.sampling_params
            sequences.append((r.order, 0, PROMPT, Flag.SAMPLES | sampling_flags(r)))
            states.append((r.order, p.temperature, p.top_k, p.top_p, p.min_p, r.noise_key))
            if p.has_penalties:
                penalties.append(penalty_record(r, r.order, frozenset({2})))
        tokens = np.concatenate([r.ids for r in self.reqs])
        return self._plan(sequences, tokens, pages, states, np.concatenate(penalties))

    def decode(self, i: int) -> BatchPlan:
        """Return the plan of decode step `i`."""
        start = self.context + i
        sequences = [(r.order, start, start + 1, decode_flags(r)) for r in self.reqs]
        return self._plan(sequences, np.empty(0, np.int32), [], [], np.empty(0, np.int32))

    def _plan(self, sequences: Any, tokens: Any, pages: Any, states: Any, penalties: Any) -> BatchPlan:
        records = np.array(sequences, SEQUENCE), tokens, np.array(pages, PAGE_WRITE), np.array(states, ROW_STATE)
        return BatchPlan(0, *records, penalties, self.masks)


def measure(engine: Engine, rows: Rows) -> tuple[float, float]:
    """Fill the rows again; return (ms a step, us of host time to launch one)."""
    engine.launch(rows.fill()).wait()
    plans = [rows.decode(i) for i in range(STEPS)]
    waits = []
    for i, plan in enumerate(plans):
        if i == 5:
            start = time.perf_counter()
        waits.append(engine.launch(plan))
        if len(waits) > AHEAD:
            waits.pop(0).wait()
    for wait in waits:
        wait.wait()
    step_ms = (time.perf_counter() - start) / (STEPS - 5) * 1e3
    host = []
    for plan in plans[:10]:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter()
        wait = engine.launch(plan)
        host.append(time.perf_counter() - start)
        wait.wait()
    return step_ms, statistics.median(host) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--rows", default="1,64,256")
    parser.add_argument("--context", type=int, default=600)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    counts = [int(n) for n in args.rows.split(",")]
    with shape_options(args.shape, {}) as options:
        config = EngineConfig(**options, device=args.device, max_running_requests=max(counts), max_seq_len=4096)
        start = time.perf_counter()
        spec = resolve(config, args.device)
        engine = Engine(spec, create_device(args.device), Group(spec.info))
        print(f"{args.shape}: the engine started in {time.perf_counter() - start:.1f} s")
    engine.parts.store.memory.zero_()  # keys were never written
    for count in counts:
        kinds = [name for name in KINDS if count > 1 or "one of" not in name]
        figures: dict[str, list[tuple[float, float]]] = {name: [] for name in kinds}
        for repeat in range(REPEATS + 1):
            for name in kinds:
                figure = measure(engine, Rows(engine, name, count, args.context))
                if repeat:  # in the first repeat kernels are loaded
                    figures[name].append(figure)
        step_ms = {name: statistics.median(step for step, _ in rows) for name, rows in figures.items()}
        host_us = {name: statistics.median(host for _, host in rows) for name, rows in figures.items()}
        table = [
            [name, f"{ms:.3f}", f"{(ms - step_ms['plain']) * 1e3:+.0f} us", f"{host_us[name]:.0f}"]
            for name, ms in step_ms.items()
        ]
        print(f"\n{count} rows at context {args.context}")
        print(format_table(["sampling", "step ms", "more", "host us"], table))


if __name__ == "__main__":
    main()
