"""`minisgl bench cpu`: ours beside transformers and llama.cpp on one checkpoint with random weights, taking turns."""

from __future__ import annotations

import json
import os
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from minisgl.bench.checkpoint import write_checkpoint
from minisgl.bench.online import run_online
from minisgl.bench.patterns import OnlineSettings
from minisgl.bench.report import format_table, provenance, shown, spread
from minisgl.bench.rival_llama import LlamaCpp, refusal_of_llama, write_gguf
from minisgl.bench.rivals import (
    CONTEXT,
    STATIC_BATCH,
    ContinuousBatching,
    Minisgl,
    Runner,
    StaticBatches,
    refusal_of_transformers,
    transformers_server,
)
from minisgl.errors import ConfigError, MinisglError

PROMPT: Final = 64
MIXED: Final = 48
LONG: Final = 512
CASES: Final = ("decode", "prefill", "mixed", "http")
RIVALS: Final = ("minisgl", "transformers", "continuous", "serve", "llama.cpp")
# Threads of libgomp that wait longer than some microseconds make a rival up to ten times slower beside busy processes.
SPIN_COUNT: Final = "2000"


@dataclass(frozen=True, kw_only=True)
class CpuSettings:
    """What to compare; `steps` is the number of timed decode steps in a run. The defaults are the command line's.

    With a `quantization` of ours, ours without it is a rival too.
    """

    shape: str
    dtype: str
    quantization: str | None
    threads: int
    repeat: int
    steps: int
    cases: tuple[str, ...]
    against: tuple[str, ...]

    def __post_init__(self) -> None:
        """Raises `ConfigError` for a value that cannot work."""
        for names, known, flag in ((self.cases, CASES, "--cases"), (self.against, RIVALS, "--against")):
            if unknown := set(names) - set(known):
                raise ConfigError(f"{flag}: there is no {', '.join(sorted(unknown))}; known: {', '.join(known)}")
        if min(self.repeat, self.steps, self.threads) < 1:
            raise ConfigError("--repeat, --steps and --threads must be at least 1")


@dataclass(frozen=True)
class Case:
    """`figures` has a function for each engine, by its name; each call is one run."""

    name: str
    unit: str
    figures: dict[str, Callable[[], float]]
    higher_is_better: bool = False


def run_cpu(settings: CpuSettings, note: Callable[[str], None]) -> dict[str, Any]:
    """Everything measured, ready for JSON; `note` gets each row of the table as soon as it is there.

    Raises `ConfigError` for settings that cannot work and `MinisglError` when an engine does something else than asked.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)  # before the libraries that read it are loaded
    import torch

    torch.set_num_threads(settings.threads)
    with tempfile.TemporaryDirectory(prefix="minisgl-bench-") as base, ExitStack() as stack:
        folder = write_checkpoint(settings.shape, Path(base))
        _forget_ends(folder)
        ours = Minisgl(folder, settings.dtype, settings.threads, settings.quantization)
        rivals, skipped = _rivals(settings, folder, stack)
        machine = provenance() | {"torch": torch.__version__, "step": ours.llm.scheduler.describe()["runners"]}
        for line in (_head(settings, machine), *(f"skipped {name}: {why}" for name, why in skipped.items())):
            note(line)
        results = []
        for case in _cases(settings, [ours, *rivals], folder):
            results.append(_measure(case, settings.repeat))
            for row in _rows(results[-1]):
                note("  ".join(map(shown, row)))
    return {
        "benchmark": "cpu",
        "settings": asdict(settings),
        "machine": machine | {"load_at_the_end": round(os.getloadavg()[0], 2)},
        "skipped": skipped,
        "results": results,
    }


def _forget_ends(folder: Path) -> None:
    """Leave the checkpoint without an end of sequence, so that all answers are as long as was asked."""
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"eos_token_id": None}))
    (folder / "generation_config.json").write_text("{}")


def _head(settings: CpuSettings, machine: dict[str, Any]) -> str:
    facts = (
        settings.shape,
        settings.quantization or settings.dtype,
        f"{settings.threads} threads",
        machine["step"],
        machine["cpu"],
    )
    return " · ".join((*facts, f"{machine['cores']} cores", f"torch {machine['torch']}", f"load {machine['load']}"))


def _rivals(settings: CpuSettings, folder: Path, stack: ExitStack) -> tuple[list[Runner], dict[str, str]]:
    """Those that are wanted and there, until `stack` ends, and why the others are not."""
    runners: list[Runner] = []
    skipped = {}
    reasons = {
        "minisgl": None,
        "transformers": refusal_of_transformers(),
        "continuous": refusal_of_transformers("psutil"),
        "serve": refusal_of_transformers("accelerate", "psutil", "openai"),
        "llama.cpp": refusal_of_llama(json.loads((folder / "config.json").read_text())),
    }
    for name in settings.against:
        if (reason := reasons[name]) is not None:
            skipped[name] = reason
        elif name == "minisgl" and settings.quantization is not None:
            runners.append(Minisgl(folder, settings.dtype, settings.threads))
        elif name == "transformers":
            runners.append(StaticBatches(folder, settings.dtype))
        elif name == "continuous":
            continuous = ContinuousBatching(folder, settings.dtype)
            stack.callback(continuous.close)
            runners.append(continuous)
        elif name == "llama.cpp":
            kinds = ("BF16" if settings.dtype == "bfloat16" else "F32", "Q8_0")
            runners += [LlamaCpp(write_gguf(folder, kind), settings.threads) for kind in kinds]
    return runners, skipped


def _cases(settings: CpuSettings, runners: list[Runner], folder: Path) -> Iterator[Case]:
    rng = random.Random(0)

    def prompt(length: int) -> list[int]:
        return [rng.randrange(5, 4000) for _ in range(length)]

    def decode(runner: Runner, prompts: list[list[int]]) -> float:
        run = runner.run(prompts, [1 + settings.steps] * len(prompts))
        return 1e3 * (run.seconds - run.first) / settings.steps

    one, many, long = [prompt(PROMPT)], [prompt(PROMPT) for _ in range(STATIC_BATCH)], [prompt(LONG)]
    requests = [(prompt(rng.randint(16, 128)), rng.randint(16, 128)) for _ in range(MIXED)]

    def mixed(runner: Runner) -> float:
        lengths = [n for _, n in requests]
        return sum(lengths) / runner.run([p for p, _ in requests], lengths).seconds

    def each(figure: Callable[[Runner], float]) -> dict[str, Callable[[], float]]:
        return {runner.name: partial(figure, runner) for runner in runners}

    if "decode" in settings.cases:
        yield Case("decode, batch 1", "ms/step", each(lambda r: decode(r, one)))
        yield Case("decode, batch 16", "ms/step", each(lambda r: decode(r, many)))
    if "prefill" in settings.cases:
        yield Case(f"prefill, {LONG} tokens", "ms", each(lambda r: 1e3 * r.run(long, [1]).seconds))
    if "mixed" in settings.cases:
        yield Case(f"{MIXED} mixed requests", "tok/s", each(mixed), True)
    if "http" in settings.cases:
        figures: dict[str, Callable[[], float]] = {runners[0].name: partial(_served_by_us, settings, folder)}
        if "serve" in settings.against and refusal_of_transformers("accelerate", "psutil", "openai") is None:
            figures["transformers serve"] = partial(_served_by_transformers, settings, folder)
        figures |= {f"{r.name}, no server": partial(mixed, r) for r in runners if isinstance(r, StaticBatches)}
        yield Case(f"HTTP, {STATIC_BATCH} streams", "tok/s", figures, True)


def _http(url: str | None, options: dict[str, Any]) -> float:
    """Output tokens a second of requests of mixed length, as many as there are in the mixed case."""
    settings = OnlineSettings(
        pattern="closed",
        num_requests=MIXED,
        input_len="16-128",
        output_len="16-128",
        streams=(STATIC_BATCH,),
        text=True,
        ignore_eos=False,
    )
    report, _ = run_online(settings, url, options)
    (result,) = report["results"]
    if result["errors"] or result["wrong_length"]:
        raise MinisglError(f"{url or 'our server'}: {result['wrong_length']} wrong lengths, {result['error_messages']}")
    return float(result["output_tok_s"])


def _served_by_us(settings: CpuSettings, folder: Path) -> float:
    options = {"model": str(folder), "dtype": settings.dtype, "threads": settings.threads, "device": "cpu"}
    if settings.quantization is not None:
        options["quantization"] = settings.quantization
    return _http(None, options | {"max_seq_len": CONTEXT})


def _served_by_transformers(settings: CpuSettings, folder: Path) -> float:
    with transformers_server(folder, settings.dtype, settings.threads) as url:
        return _http(url, {"model": str(folder)})


def _measure(case: Case, repeat: int) -> dict[str, Any]:
    """Each engine once to warm up, then all of them in turn."""
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


def cpu_table(report: dict[str, Any]) -> str:
    """The report for people: medians, and how many times as fast ours is."""
    rows = [row for result in report["results"] for row in _rows(result)]
    table = format_table(["case", "unit", "minisgl", "beside", "theirs", "ratio"], rows)
    return f"{table}\nload at the end {report['machine']['load_at_the_end']}"
