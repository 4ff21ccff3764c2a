"""`minisgl bench`: from what the command line says to a report. Imports nothing heavy before it is needed."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from minisgl.errors import ConfigError
from minisgl.settings.sources import engine_options, server_options, take_options

T = TypeVar("T")


def _numbers(text: str, kind: Callable[[str], T], flag: str) -> tuple[T, ...]:
    """From "1,2,4"; raises `ConfigError`."""
    try:
        return tuple(kind(part) for part in text.split(",") if part)
    except ValueError:
        raise ConfigError(f"{flag} {text!r} is not a list of numbers like 1,2,4") from None


def run_bench(options: argparse.Namespace) -> int:
    """Run what the command line says; returns the exit code, 1 when a request failed."""
    from minisgl.bench.report import check_writable

    check_writable(options.json, "--json")
    kinds = {"offline": _offline, "online": _online, "loading": _loading, "frontend": _frontend, "cpu": _cpu}
    return kinds[options.kind](options)


def _write(report: dict[str, Any], path: str | None) -> None:
    from minisgl.bench.report import write_json

    if path is not None:
        write_json(path, report)


def _offline(options: argparse.Namespace) -> int:
    from minisgl.bench.ablate import ablation_table, run_ablations
    from minisgl.bench.offline import OfflineSettings, offline_table, run_offline
    from minisgl.bench.shapes import shape_options

    settings = OfflineSettings(
        workloads=tuple(options.workload.split(",")),
        num_prompts=options.num_prompts,
        input_len=options.input_len,
        output_len=options.output_len,
        temperature=options.temperature,
        repeat=options.repeat,
        profile_steps=options.profile_steps,
        timeline=options.timeline,
    )
    run, table = (run_ablations, ablation_table) if options.ablate else (run_offline, offline_table)
    with shape_options(options.shape, engine_options(take_options(options))) as given:
        report = run(settings, given)
    print(table(report))
    _write(report, options.json)
    return 0


def _frontend(options: argparse.Namespace) -> int:
    from minisgl.bench.frontend_speed import WARM_UP_STEPS, frontend_table, measure_frontend

    if options.steps <= WARM_UP_STEPS:
        raise ConfigError(f"--steps must be more than {WARM_UP_STEPS}, which are not measured")
    report = measure_frontend(options.steps)
    print(frontend_table(report))
    _write(report, options.json)
    return 0


def _cpu(options: argparse.Namespace) -> int:
    from minisgl.bench.cpu import CASES, RIVALS, CpuSettings, cpu_table, run_cpu

    settings = CpuSettings(
        shape=options.shape,
        dtype=options.dtype,
        quantization=options.quantization,
        threads=options.threads,
        repeat=options.repeat,
        steps=options.steps,
        cases=CASES if options.cases is None else tuple(options.cases.split(",")),
        against=RIVALS if options.against is None else tuple(options.against.split(",")),
    )
    report = run_cpu(settings, lambda line: print(line, flush=True))
    print(cpu_table(report))
    _write(report, options.json)
    return 0


def _online(options: argparse.Namespace) -> int:
    from minisgl.bench.online import draw, online_table, run_online
    from minisgl.bench.patterns import OnlineSettings
    from minisgl.bench.plots import require_matplotlib
    from minisgl.bench.shapes import shape_options

    if options.client_speed:
        from minisgl.bench.client_speed import measure_client

        report = measure_client()
        print(f"the client took {report['events_s']:,.0f} events a second, {report['streams']} streams at once")
        _write(report, options.json)
        return 0
    if options.plot is not None:
        require_matplotlib()
    settings = OnlineSettings(
        pattern=options.pattern,
        num_requests=options.num_requests,
        input_len=options.input_len,
        output_len=options.output_len,
        streams=_numbers(options.streams, int, "--streams"),
        rates=_numbers(options.rates, float, "--rates"),
        background=options.background,
        trace=options.trace,
        speed=options.speed,
        temperature=options.temperature,
        vocab=options.vocab,
        seed=options.seed,
        warm_up=options.warm_up,
        timeout=options.timeout,
        text=options.text,
        ignore_eos=options.ignore_eos,
    )
    given = take_options(options)
    if options.url is None:
        given = server_options(given)
    elif extra := given.keys() - {"model", "api_key"} | ({"shape"} if options.shape else set()):
        raise ConfigError(f"--url measures a running server, so {', '.join(sorted(extra))} cannot be used")
    with shape_options(options.shape, given) as server:
        report, samples = run_online(settings, options.url, server)
    print(online_table(report))
    _write(report, options.json)
    if options.plot is not None:
        for path in draw(report, samples, Path(options.plot)):
            print(f"drew {path}")
    return 1 if any(result["errors"] for result in report["results"]) else 0


def _loading(options: argparse.Namespace) -> int:
    from minisgl.bench.checkpoint import write_checkpoint
    from minisgl.bench.loading import LoadingSettings, loading_table, run_loading
    from minisgl.checkpoint.hf import resolve_model

    settings = LoadingSettings(
        tp=_numbers(options.tp, int, "--tp"),
        threads=options.threads,
        repeat=options.repeat,
        device=options.device,
        dtype=options.dtype,
        cold=options.cold,
    )
    if (options.shape is None) != (options.folder is None):
        raise ConfigError("--shape and --folder go together: the checkpoint is written there")
    if options.shape is not None and options.positional_model is not None:
        raise ConfigError("give --shape or a model, not both")
    if options.shape is None:
        folder = resolve_model(options.positional_model or "")
    else:
        folder = write_checkpoint(options.shape, Path(options.folder).expanduser())
    report = run_loading(settings, folder)
    print(loading_table(report))
    _write(report, options.json)
    return 0
