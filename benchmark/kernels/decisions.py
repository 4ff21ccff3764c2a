"""Measures on one GPU whether two parts of the engine pay for their code. Takes about three minutes on an H200.

    PYTHONPATH=python python benchmark/kernels/decisions.py

(a) The Triton kernels for penalties, biases, masks and log-probabilities, against plain torch ops in the same captured
    graphs. `tail` is the graph that samples, alone; `step` is a whole decode step.
(b) The search over cuBLASLt's algorithms, against the choice of `F.linear`: decode steps, and a prefill of 8,192 tokens
    in prompts of 1,024. cuBLAS's kernels are loaded beforehand in both.

Real models with random weights. The variants take turns in one process; figures are medians, `gain` is the median over
the turns. Every table is printed as soon as it is complete.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from tails import KINDS, Rows, measure
from torch import Tensor

from minisgl.bench.report import format_table
from minisgl.bench.shapes import SHAPES, shape_options
from minisgl.core import BatchPlan, StepResult
from minisgl.device.device import create_device
from minisgl.distributed.group import Group
from minisgl.engine.config import resolve
from minisgl.engine.engine import Engine
from minisgl.engine.graphs import mixed
from minisgl.engine.graphs.capture import TAILS, Capture
from minisgl.engine.graphs.decode import GraphRunner
from minisgl.engine.trial import largest_prefill
from minisgl.layout import Flag
from minisgl.settings.options import EngineConfig
from minisgl.triton.cublas import cublas_linear

PREFILL_TOKENS, PROMPT_TOKENS, CONTEXT = 8192, 1024, 600
REPLAYS = 20
ADJUSTING, SCORING = TAILS[2], TAILS[3]
TAIL_OF_KIND = {
    "penalties": ADJUSTING,
    "300 biases, min_tokens": ADJUSTING,
    "mask": ADJUSTING,
    "penalties, one of them": ADJUSTING,
    "log-probabilities": SCORING,
    "log-probabilities, one of them": SCORING,
}
KINDS.setdefault("log-probabilities, one of them", KINDS["log-probabilities"])


# -- the alternative of (a): torch ops whose shapes depend on no flag, so that a graph can hold them


def apply_penalties(
    logits: Tensor, flags: Tensor, mask_index: Tensor, rows: Tensor, positions: Tensor, tables: Any
) -> Tensor:
    """As the op of this name, for all rows; factors that change nothing stand for flags that are not set."""
    x = logits.to(torch.float32, copy=True)
    is_penalized = (flags & Flag.PENALIZED).bool().unsqueeze(1)
    ids, biases = tables.bias_ids[rows], tables.biases[rows]
    is_used = torch.arange(ids.shape[1], device=ids.device) < tables.num_biases[rows].unsqueeze(1)
    is_used = is_used & is_penalized
    is_forbidden = is_used & (ids < 0) & (positions < tables.first_end[rows]).unsqueeze(1)
    biases = torch.where(is_forbidden, float("-inf"), torch.where(is_used, biases, 0.0))
    x.scatter_add_(1, torch.where(is_used, torch.where(ids < 0, ~ids, ids), 0).long(), biases)
    seen = tables.seen[rows]
    neutral = (torch.arange(3, device=x.device) == 2).float()  # [0, 0, 1] without a copy from the host
    factors = torch.where(is_penalized, tables.penalties[rows], neutral)
    presence, frequency, repetition = factors.unsqueeze(2).unbind(1)
    repetition = torch.where(seen > 0, repetition, 1.0)
    x = torch.where(x > 0, x / repetition, x * repetition)
    counts = (seen >> 1).float()
    x -= frequency * counts + presence * (counts > 0)
    masks = tables.masks[mask_index.clamp(min=0).long()]
    bits = masks.unsqueeze(2) >> torch.arange(32, dtype=torch.int32, device=masks.device)
    is_allowed = (bits & 1).bool().flatten(1)[:, : x.shape[1]]
    is_masked = (flags & Flag.MASKED).bool().unsqueeze(1)
    return x.masked_fill_(~is_allowed & is_masked, float("-inf"))


def count_tokens(tokens: Tensor, flags: Tensor, rows: Tensor, tables: Any) -> None:
    """As the op of this name."""
    added = torch.where((flags & Flag.PENALIZED) != 0, 2, 0).int()
    tables.seen.view(-1).index_add_(0, rows * tables.seen.shape[1] + tokens, added)


def token_logprobs(logits: Tensor, tokens: Tensor, flags: Tensor) -> Tensor:
    """As the op of this name; the order of equally likely tokens is not defined."""
    logprobs = torch.log_softmax(logits, -1, dtype=torch.float32)
    top = logits.topk(StepResult.TOP, dim=-1).indices
    found = logprobs.gather(1, torch.cat([tokens.long().unsqueeze(1), top], 1)).view(torch.int32)
    columns = torch.cat([found[:, :1], top.int(), found[:, 1:]], 1)
    return torch.where((flags & Flag.LOGPROBS).bool().unsqueeze(1), columns, 0).t().contiguous()


TORCH_OPS = {"apply_penalties": apply_penalties, "count_tokens": count_tokens, "token_logprobs": token_logprobs}


# -- the alternative of (b)


@contextmanager
def without_search() -> Iterator[None]:
    """Within, linear layers are `F.linear`'s, as if no search had found anything."""
    found = cublas_linear.chosen, cublas_linear._buckets, cublas_linear.search
    cublas_linear.chosen, cublas_linear._buckets, cublas_linear.search = {}, {}, False
    try:
        yield
    finally:
        cublas_linear.chosen, cublas_linear._buckets, cublas_linear.search = found


# -- measuring


class Clock:
    """How much of the time that this program may take is left."""

    def __init__(self, limit_s: float) -> None:
        self.start, self.limit_s = time.perf_counter(), limit_s

    def say(self, text: str) -> None:
        print(f"[{time.perf_counter() - self.start:5.0f} s] {text}", flush=True)

    @property
    def is_over(self) -> bool:
        return time.perf_counter() - self.start > self.limit_s


def start_engine(shape: str, rows: int, device: str) -> Engine:
    """An engine without graphs of its own; `spec.max_step_tokens` is PREFILL_TOKENS."""
    options: dict[str, Any] = {"device": device, "max_running_requests": rows, "max_seq_len": PREFILL_TOKENS + 1}
    if device == "cuda":
        options |= {"cuda_graph_max_bs": 0, "memory_ratio": 0.5}
    with shape_options(shape, options) as options:
        spec = resolve(EngineConfig(**options), device, PREFILL_TOKENS)
        engine = Engine(spec, create_device(device), Group(spec.info))
    engine.parts.kv_cache.data.zero_()  # keys that nothing has been written to
    return engine


def prefill_runner(engine: Engine, capture: Capture) -> list[Any]:
    """A graph of the prefill, if the engine would have captured one of this size."""
    m = engine.parts.model.config
    if not engine.parts.attention.captures_prompts:
        return []
    if PREFILL_TOKENS not in mixed.token_sizes(PREFILL_TOKENS, engine.parts.flops_per_token, m.num_layers):
        return []
    sizes = mixed.token_sizes
    mixed.token_sizes = lambda *_: [PREFILL_TOKENS]
    try:
        return [mixed.MixedGraphRunner(engine.parts, capture, PREFILL_TOKENS, engine.max_running_requests)]
    finally:
        mixed.token_sizes = sizes


def prefill_ms(engine: Engine, plan: BatchPlan, steps: int = 4) -> float:
    """Milliseconds of a step, several in a row."""
    start = time.perf_counter()
    waits = [engine.launch(plan) for _ in range(steps)]
    for wait in waits:
        wait.wait()
    return (time.perf_counter() - start) / steps * 1e3


def tail_us(runner: GraphRunner, rows: int, tail: int) -> float:
    """Microseconds of the graph that samples, REPLAYS in a row."""
    graph, _ = runner._graphs[rows].tails[tail]
    times = []
    for _ in range(4):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(REPLAYS):
            graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) / REPLAYS * 1e3)
    return statistics.median(times[1:])


def compare_search(engine: Engine, variants: dict[str, Any], counts: list[int], repeats: int, clock: Clock) -> None:
    """The table of (b)."""
    plan = largest_prefill(replace(engine.spec, max_seq_len=PROMPT_TOKENS + 1))
    rng = np.random.default_rng(0)
    plan = replace(plan, tokens=rng.integers(0, engine.limits.vocab_size, len(plan.tokens), dtype=np.int32))

    def step(count: int) -> Callable[[], float]:
        rows = Rows(engine, "plain", count, CONTEXT)
        return lambda: measure(engine, rows)[0]

    in_graph = any(runner.fits(plan) for runner in next(iter(variants.values()))[0][1:-1])
    print(f"a prefill runs {'as a graph' if in_graph else 'op by op'}")
    cells = [(f"prefill, {len(plan.tokens):,} tokens", lambda: prefill_ms(engine, plan))]
    cells += [(f"decode, {count} rows", step(count)) for count in counts]
    table = []
    for title, timed in cells:
        if clock.is_over:
            clock.say("out of time")
            break
        times: dict[str, list[float]] = {name: [] for name in variants}
        for repeat in range(repeats + 1):
            for name, (runners, context) in variants.items():
                engine.runners = runners
                with context():
                    ms = timed()
                if repeat:  # the first loads kernels
                    times[name].append(ms)
        searched, default = times.values()
        gain = statistics.median(b / a - 1 for a, b in zip(searched, default, strict=True))
        spread = max(max(t) / min(t) - 1 for t in times.values())
        row = [title, *(f"{statistics.median(t):.3f}" for t in times.values()), f"{gain:+.1%}", f"{spread:.1%}"]
        clock.say("  ".join(row))
        table.append(row)
    print(format_table(["step", *(f"{name} ms" for name in variants), "gain", "spread"], table), flush=True)


def compare_tails(engine: Engine, variants: dict[str, Any], counts: list[int], repeats: int, clock: Clock) -> None:
    """The tables of (a), one for each number of rows."""
    eager = engine.general
    for count in counts:
        table, plain = [], []
        rows_of = {name: Rows(engine, name, count, CONTEXT) for name in ("plain", *TAIL_OF_KIND)}
        engine.runners = [next(iter(variants.values())), eager]
        for _ in range(repeats + 1):
            plain.append(measure(engine, rows_of["plain"])[0])
        plain_ms = statistics.median(plain[1:])
        for kind, tail in TAIL_OF_KIND.items():
            if clock.is_over:
                clock.say("out of time")
                break
            if count == 1 and "one of" in kind:
                continue
            steps: dict[str, list[float]] = {name: [] for name in variants}
            tails: dict[str, float] = {}
            for repeat in range(repeats + 1):
                for name, runner in variants.items():
                    engine.runners = [runner, eager]
                    ms = measure(engine, rows_of[kind])[0]
                    if repeat:
                        steps[name].append(ms)
                    else:
                        tails[name] = tail_us(runner, count, tail)  # the device has the flags of this kind
            ours, torchs = (statistics.median(ms) for ms in steps.values())
            own_us, torch_us = tails.values()
            cells = [f"{own_us:.0f}", f"{torch_us:.0f}", f"{torch_us - own_us:+.0f}"]
            cells += [f"{(torch_us - own_us) / plain_ms / 10:+.1f} %", f"{ours:.3f}", f"{torchs:.3f}"]
            table.append([kind, *cells, f"{torchs / ours - 1:+.1%}"])
            clock.say("  ".join(table[-1]))
        print(f"{count} rows, a plain step takes {plain_ms:.3f} ms")
        headers = ["tokens sampled with", "tail us Triton", "torch", "more", "of a plain step", "step ms Triton"]
        print(format_table([*headers, "torch", "more"], table), flush=True)


def decide(shape: str, counts: list[int], repeats: int, device: str, clock: Clock) -> None:
    """Both decisions for one model."""
    clock.say(f"{shape}: starting")
    engine = start_engine(shape, max(counts), device)
    clock.say(f"{shape}: engine started; searching took {cublas_linear.seconds:.1f} s")
    parts, eager = engine.parts, engine.general
    torch_parts = replace(parts, ops=replace(parts.ops, **TORCH_OPS))
    with Capture() as capture:
        searched = GraphRunner(parts, counts, capture)
        prefill = prefill_runner(engine, capture)
        found = [product is not None for product in cublas_linear.chosen.values()]
        text = f"{sum(found)} of {len(found)} GEMMs have a faster algorithm, found in {cublas_linear.seconds:.1f} s"
        clock.say(f"{shape}: captured; {text}")
        with without_search():
            default = GraphRunner(parts, counts, capture)
            default_prefill = prefill_runner(engine, capture)
        torch_tails = None
        try:
            torch_tails = GraphRunner(torch_parts, counts, capture)
        except Exception:  # e.g. an op that synchronizes: the rest still gives its figures
            traceback.print_exc()
    print(f"\n(b) {shape}: search over cuBLASLt's algorithms")
    variants = {
        "searched": ([searched, *prefill, eager], nullcontext),
        "F.linear": ([default, *default_prefill, eager], without_search),
    }
    compare_search(engine, variants, counts, repeats + 4, clock)
    if torch_tails is not None:
        print(f"\n(a) {shape}: Triton against torch ops in the graph that samples")
        compare_tails(engine, {"Triton": searched, "torch": torch_tails}, counts, repeats, clock)
    engine.runners = []
    cublas_linear.chosen, cublas_linear._buckets, cublas_linear.seconds = {}, {}, 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default="qwen3-0.6b,qwen3-8b", help=", ".join(SHAPES))
    parser.add_argument("--rows", default="1,64,256")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--limit", type=float, default=225, help="seconds after which nothing more is measured")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    clock = Clock(args.limit)
    for shape in args.shapes.split(","):
        decide(shape, [int(n) for n in args.rows.split(",")], args.repeats, args.device, clock)
        gc.collect()
        torch.cuda.empty_cache()
    clock.say("done")


if __name__ == "__main__":
    main()
