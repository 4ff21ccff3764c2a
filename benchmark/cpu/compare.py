"""minisgl beside transformers and llama.cpp on a CPU, on one checkpoint with random weights, taking turns.

    PYTHONPATH=python python benchmark/cpu/compare.py                        # 10 M weights, bfloat16, two threads
    PYTHONPATH=python python benchmark/cpu/compare.py --shape qwen3-0.6b --repeat 3 --steps 12 --cases decode,prefill
    PYTHONPATH=python python benchmark/cpu/compare.py --quantization int8 --against minisgl,llama.cpp --cases decode

Prints medians and how many times as fast minisgl is. Engines that are not installed are skipped; for all of them:
pip install transformers accelerate psutil openai llama-cpp-python gguf. docs/benchmarks.md describes the cases.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from engines import (
    CONTEXT,
    STATIC_BATCH,
    ContinuousBatching,
    Minisgl,
    Runner,
    StaticBatches,
    missing_for_transformers,
    transformers_server,
)
from llama import LlamaCpp, missing_for_llama, write_gguf

from minisgl.core.errors import MinisglError
from minisgl.tools.bench.online import run_online
from minisgl.tools.bench.report import format_table, provenance, shown, spread, write_json
from minisgl.tools.bench.shapes import SHAPES
from minisgl.tools.bench.traffic import OnlineArgs

PROMPT = 64
MIXED = 48
LONG = 512
CASES = ("decode", "prefill", "mixed", "http")
ENGINES = ("minisgl", "transformers", "continuous", "serve", "llama.cpp")
# Threads of libgomp that spin longer than some microseconds make an engine ten times slower beside busy processes.
SPIN_COUNT = "2000"


@dataclass(frozen=True)
class Case:
    """One row of the table; each call of an engine's function in `figures` is one run."""

    name: str
    unit: str
    figures: dict[str, Callable[[], float]]
    higher_is_better: bool = False


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Run all cases, print each row when it is measured, and return everything measured, ready for JSON."""
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)  # before libgomp is loaded, with torch
    sys.path.append(str(Path(__file__).parents[1]))
    import torch
    from checkpoint import write_checkpoint

    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory(prefix="minisgl-bench-") as base, ExitStack() as stack:
        folder = write_checkpoint(args.shape, Path(base))
        _remove_eos(folder)
        ours = Minisgl(folder, args.dtype, args.threads, args.quantization)
        others, skipped = _other_engines(args, folder, stack)
        machine = provenance() | {"torch": torch.__version__, "step": ours.llm.scheduler.describe()["runners"]}
        for line in (_head(args, machine), *(f"skipped {name}: {why}" for name, why in skipped.items())):
            print(line, flush=True)
        results = []
        for case in _cases(args, [ours, *others], folder):
            results.append(_measure(case, args.repeat))
            for row in _rows(results[-1]):
                print("  ".join(map(shown, row)), flush=True)
    return {
        "benchmark": "cpu",
        "settings": vars(args),
        "machine": machine | {"load_at_the_end": round(os.getloadavg()[0], 2)},
        "skipped": skipped,
        "results": results,
    }


def _remove_eos(folder: Path) -> None:
    """Remove the end-of-sequence token from the checkpoint, so that all outputs have the requested length."""
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"eos_token_id": None}))
    (folder / "generation_config.json").write_text("{}")


def _head(args: argparse.Namespace, machine: dict[str, Any]) -> str:
    facts = (
        args.shape,
        args.quantization or args.dtype,
        f"{args.threads} threads",
        machine["step"],
        machine["cpu"],
    )
    return " · ".join((*facts, f"{machine['cores']} cores", f"torch {machine['torch']}", f"load {machine['load']}"))


def _other_engines(args: argparse.Namespace, folder: Path, stack: ExitStack) -> tuple[list[Runner], dict[str, str]]:
    """The other engines that are asked for and installed, until `stack` ends, and why some are skipped."""
    runners: list[Runner] = []
    skipped = {}
    reasons = {
        "minisgl": None,
        "transformers": missing_for_transformers(),
        "continuous": missing_for_transformers("psutil"),
        "serve": missing_for_transformers("accelerate", "psutil", "openai"),
        "llama.cpp": missing_for_llama(json.loads((folder / "config.json").read_text())),
    }
    for name in args.against:
        if (reason := reasons[name]) is not None:
            skipped[name] = reason
        elif name == "minisgl" and args.quantization is not None:
            runners.append(Minisgl(folder, args.dtype, args.threads))
        elif name == "transformers":
            runners.append(StaticBatches(folder, args.dtype))
        elif name == "continuous":
            continuous = ContinuousBatching(folder, args.dtype)
            stack.callback(continuous.close)
            runners.append(continuous)
        elif name == "llama.cpp":
            quantized = ("Q4_0", "Q4_K_M") if args.quantization == "int4" else ("Q8_0",)
            kinds = ("BF16" if args.dtype == "bfloat16" else "F32", *quantized)
            runners += [LlamaCpp(write_gguf(folder, kind), args.threads) for kind in kinds]
    return runners, skipped


def _cases(args: argparse.Namespace, runners: list[Runner], folder: Path) -> Iterator[Case]:
    rng = random.Random(0)

    def prompt(length: int) -> list[int]:
        return [rng.randrange(5, 4000) for _ in range(length)]

    def decode(runner: Runner, prompts: list[list[int]]) -> float:
        run = runner.run(prompts, [1 + args.steps] * len(prompts))
        return 1e3 * (run.seconds - run.first) / args.steps

    one, many, long = [prompt(PROMPT)], [prompt(PROMPT) for _ in range(STATIC_BATCH)], [prompt(LONG)]
    requests = [(prompt(rng.randint(16, 128)), rng.randint(16, 128)) for _ in range(MIXED)]

    def mixed(runner: Runner) -> float:
        lengths = [n for _, n in requests]
        return sum(lengths) / runner.run([p for p, _ in requests], lengths).seconds

    def each(figure: Callable[[Runner], float]) -> dict[str, Callable[[], float]]:
        return {runner.name: partial(figure, runner) for runner in runners}

    if "decode" in args.cases:
        yield Case("decode, batch 1", "ms/step", each(lambda r: decode(r, one)))
        yield Case("decode, batch 16", "ms/step", each(lambda r: decode(r, many)))
    if "prefill" in args.cases:
        yield Case(f"prefill, {LONG} tokens", "ms", each(lambda r: 1e3 * r.run(long, [1]).seconds))
    if "mixed" in args.cases:
        yield Case(f"{MIXED} mixed requests", "tok/s", each(mixed), True)
    if "http" in args.cases:
        figures: dict[str, Callable[[], float]] = {runners[0].name: partial(_served_by_us, args, folder)}
        if "serve" in args.against and missing_for_transformers("accelerate", "psutil", "openai") is None:
            figures["transformers serve"] = partial(_served_by_transformers, args, folder)
        figures |= {f"{r.name}, no server": partial(mixed, r) for r in runners if isinstance(r, StaticBatches)}
        yield Case(f"HTTP, {STATIC_BATCH} streams", "tok/s", figures, True)


def _http(url: str | None, options: dict[str, Any]) -> float:
    """Output tokens per second for as many requests as in the mixed case."""
    args = OnlineArgs(
        url=url,
        pattern="closed",
        num_requests=MIXED,
        input_len="16-128",
        output_len="16-128",
        streams=str(STATIC_BATCH),
        text=True,
        ignore_eos=False,
    )
    report, _ = run_online(args, options)
    (result,) = report["results"]
    if result["errors"] or result["wrong_length"]:
        raise MinisglError(f"{url or 'our server'}: {result['wrong_length']} wrong lengths, {result['error_messages']}")
    return float(result["output_tok_s"])


def _served_by_us(args: argparse.Namespace, folder: Path) -> float:
    options = {"model": str(folder), "dtype": args.dtype, "threads": args.threads, "device": "cpu"}
    if args.quantization is not None:
        options["quantization"] = args.quantization
    return _http(None, options | {"max_seq_len": CONTEXT})


def _served_by_transformers(args: argparse.Namespace, folder: Path) -> float:
    with transformers_server(folder, args.dtype, args.threads) as url:
        return _http(url, {"model": str(folder)})


def _measure(case: Case, repeat: int) -> dict[str, Any]:
    """Run each engine once to warm up, then all of them in turn."""
    for figure in case.figures.values():
        figure()
    values: dict[str, list[float]] = {name: [] for name in case.figures}
    for _ in range(repeat):
        for name, figure in case.figures.items():
            values[name].append(figure())
    return {
        "case": case.name,
        "unit": case.unit,
        "higher_is_better": case.higher_is_better,
        "figures": {name: spread(found) | {"repeats": found} for name, found in values.items()},
        "load": round(os.getloadavg()[0], 2),
    }


def _rows(result: dict[str, Any]) -> Iterator[list[Any]]:
    (_, ours), *others = ((name, figure["median"]) for name, figure in result["figures"].items())
    for name, theirs in others or [("-", None)]:
        ratio = None if theirs is None else ours / theirs if result["higher_is_better"] else theirs / ours
        yield [result["case"], result["unit"], ours, name, theirs, ratio]


def _names(known: tuple[str, ...]) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        names = tuple(text.split(","))
        if unknown := set(names) - set(known):
            raise argparse.ArgumentTypeError(f"there is no {min(unknown)!r}; known: {', '.join(known)}")
        return names

    return parse


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen3-10m", help="default: qwen3-10m")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="default: bfloat16")
    parser.add_argument(
        "--quantization", choices=("int8", "int4"), help="of our weights; ours without it is compared, too"
    )
    parser.add_argument("--threads", type=int, default=2, help="of each engine (default: 2)")
    parser.add_argument("--repeat", type=int, default=5, help="timed runs of each case (default: 5)")
    parser.add_argument("--steps", type=int, default=32, help="decode steps of a run (default: 32)")
    parser.add_argument("--cases", type=_names(CASES), default=CASES, help=f"of {','.join(CASES)}; default: all")
    help = f"of {','.join(ENGINES)} (continuous: transformers' generate_batch, serve: its server); default: all"
    parser.add_argument("--against", type=_names(ENGINES), default=ENGINES, help=help)
    parser.add_argument("--json", help="write everything measured to this file")
    args = parser.parse_args(argv)
    report = compare(args)
    rows = [row for result in report["results"] for row in _rows(result)]
    print(format_table(["case", "unit", "minisgl", "beside", "theirs", "ratio"], rows))
    print(f"load at the end {report['machine']['load_at_the_end']}")
    write_json(args.json, report)


if __name__ == "__main__":
    main()
