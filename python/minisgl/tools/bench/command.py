"""The `minisgl bench` command. `minisgl --help` imports this module, so its imports are light."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from inspect import getdoc
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from minisgl.core.errors import ConfigError
from minisgl.settings.options import SchedulerConfig, ServerArgs, build_config, options_of
from minisgl.settings.sources import (
    add_model_argument,
    add_options,
    engine_options,
    given_options,
    server_options,
)
from minisgl.tools.bench.shapes import adapter_options, shape_options
from minisgl.tools.bench.traffic import OnlineArgs
from minisgl.tools.bench.workloads import OfflineArgs

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from minisgl.settings.sources import Parser

T = TypeVar("T")


@dataclass(frozen=True)
class _Offline:
    """The options of `minisgl bench offline`."""

    bench: OfflineArgs
    scheduler: SchedulerConfig


@dataclass(frozen=True)
class _Online:
    """The options of `minisgl bench online`."""

    bench: OnlineArgs
    server: ServerArgs


def add_bench(commands: _SubParsersAction[Parser]) -> None:
    """Add the `bench` command."""
    bench = commands.add_parser("bench", help="measure the engine or a server", description=getdoc(run_bench))
    kinds = bench.add_subparsers(dest="kind", metavar="KIND")
    add_offline(kinds.add_parser("offline", help="the engine alone", description=getdoc(_offline)))
    online = kinds.add_parser("online", help="any server", description=getdoc(_online))
    add_model_argument(online)
    add_options(online, _Online)


def add_offline(parser: argparse.ArgumentParser) -> None:
    """Add the options of `minisgl bench offline`."""
    add_model_argument(parser)
    add_options(parser, _Offline)


def bench_args(cls: type[T], options: argparse.Namespace) -> T:
    """Build `OfflineArgs` or `OnlineArgs` from a parsed command line. Raises `ConfigError` for invalid values."""
    return build_config(cls, {name: value for name, value in vars(options).items() if name in options_of(cls)})


def run_bench(options: argparse.Namespace) -> int:
    """Measure the engine or a server. docs/benchmarks.md explains each figure.

    minisgl bench offline     the engine alone, in this process
    minisgl bench online      any server with OpenAI's API; without --url, one that is started for the run
    """
    if options.kind is None:
        raise ConfigError("`minisgl bench offline` measures the engine, `minisgl bench online` a server")
    return _offline(options) if options.kind == "offline" else _online(options)


def _offline(options: argparse.Namespace) -> int:
    """Measure the engine alone, with MODEL or the built-in model.

    minisgl bench offline --num-prompts 8 --input-len 64 --output-len 32        seconds, on any CPU
    minisgl bench offline --workload a,batch64,single,prefill --shape qwen3-8b  random weights, no download
    minisgl bench offline ~/models/Qwen3-0.6B --workload a --repeat 5 --json a.json
    """
    from minisgl.tools.bench.offline import offline_table, run_offline
    from minisgl.tools.bench.report import check_writable, write_json

    args = bench_args(OfflineArgs, options)
    check_writable(args.json, "--json")
    given = engine_options(given_options(options))
    with shape_options(args.shape, given) as given, adapter_options(args.adapters, args.adapter_rank, given) as given:
        report = run_offline(args, given)
    print(offline_table(report))
    write_json(args.json, report)
    return 0


def _online(options: argparse.Namespace) -> int:
    """Send requests to a server and measure the latencies that clients see. Without --url, start a server for the run.

    minisgl bench online --streams 4 --num-requests 16 --input-len 32-128 --output-len 32    seconds, on any CPU
    minisgl bench online --shape qwen3-8b --json closed.json         64 streams, 192 requests
    minisgl bench online --url http://host:8000 --pattern poisson --rates 1,2,4,8,16 --plot plots
    minisgl bench online --pattern burst --background 16             stalls of running streams
    minisgl bench online --pattern sharegpt --rates 4
    minisgl bench online --pattern trace --trace qwen_traceA_blksz_16.jsonl --num-requests 1000 --speed 2
    """
    from minisgl.tools.bench.online import draw, online_table, run_online
    from minisgl.tools.bench.report import check_writable, new_figure, write_json

    args = bench_args(OnlineArgs, options)
    check_writable(args.json, "--json")
    if args.plot is not None:
        new_figure()  # without matplotlib, fail before the measurement
    given = given_options(options)
    if args.url is None:
        given = server_options(given)
    elif extra := given.keys() - {"model", "api_key"} | ({"shape"} if args.shape else set()):
        raise ConfigError(f"--url measures a running server, so {', '.join(sorted(extra))} cannot be used")
    with shape_options(args.shape, given) as server:
        report, samples = run_online(args, server)
    print(online_table(report))
    write_json(args.json, report)
    if args.plot is not None:
        for path in draw(report, samples, Path(args.plot)):
            print(f"drew {path}")
    return 1 if any(result["errors"] for result in report["results"]) else 0
