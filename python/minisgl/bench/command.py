"""The `minisgl bench` command. `minisgl --help` imports this module too, so it imports nothing heavy."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from minisgl.bench.shapes import SHAPES, shape_options
from minisgl.bench.traffic import OnlineSettings
from minisgl.bench.workloads import OfflineSettings
from minisgl.errors import ConfigError
from minisgl.settings.options import SchedulerConfig, ServerArgs
from minisgl.settings.sources import (
    add_model_argument,
    add_options,
    engine_options,
    server_options,
    take_options,
)

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from minisgl.settings.sources import Parser

T = TypeVar("T")

DESCRIPTION: Final = """\
Measure the engine or a server; docs/benchmarks.md explains each figure.

  minisgl bench offline     the engine alone, in this process
  minisgl bench online      any server with OpenAI's API, or one of our own
"""
OFFLINE: Final = """\
Measure the engine alone, without MODEL the built-in one.

  minisgl bench offline --num-prompts 8 --input-len 64 --output-len 32        seconds, on any CPU
  minisgl bench offline --workload a,batch64,single,prefill --shape qwen3-8b  random weights, no download
  minisgl bench offline ~/models/Qwen3-0.6B --workload a --repeat 5 --json a.json
"""
ONLINE: Final = """\
Send requests to a server and measure the latencies that clients see. Without --url, a server is started.

  minisgl bench online --streams 4 --num-requests 16 --input-len 32-128 --output-len 32    seconds, on any CPU
  minisgl bench online --shape qwen3-8b --json closed.json         64 streams, 192 requests
  minisgl bench online --url http://host:8000 --pattern poisson --rates 1,2,4,8,16 --plot plots
  minisgl bench online --pattern burst --background 16             stalls of running streams
  minisgl bench online --pattern sharegpt --rates 4
  minisgl bench online --pattern trace --trace qwen_traceA_blksz_16.jsonl --num-requests 1000 --speed 2
"""
KINDS: Final[dict[str, type]] = {"str": str, "int": int, "float": float, "bool": bool}


def add_bench(commands: _SubParsersAction[Parser]) -> None:
    """Add the `bench` command."""
    raw = argparse.RawDescriptionHelpFormatter
    bench = commands.add_parser(
        "bench", help="measure the engine or a server", description=DESCRIPTION, formatter_class=raw, allow_abbrev=False
    )
    kinds = bench.add_subparsers(dest="kind", metavar="KIND", required=True)
    offline = kinds.add_parser(
        "offline", help="the engine alone", description=OFFLINE, formatter_class=raw, allow_abbrev=False
    )
    add_offline(offline)
    online = kinds.add_parser("online", help="any server", description=ONLINE, formatter_class=raw, allow_abbrev=False)
    group = _add_settings(online, OnlineSettings)
    group.add_argument("--url", help="a running server, http://host:port; --model is then the name to ask for")
    group.add_argument("--plot", metavar="DIR", help="draw throughput and distributions (needs matplotlib)")
    add_options(online, ServerArgs)


def add_offline(parser: argparse.ArgumentParser) -> None:
    """Add the options of `minisgl bench offline`."""
    _add_settings(parser, OfflineSettings)
    add_options(parser, SchedulerConfig)


def _add_settings(parser: argparse.ArgumentParser, cls: type) -> argparse._ArgumentGroup:
    """Add MODEL, --shape, --json, and an option for each field of the settings class `cls`."""
    add_model_argument(parser)
    group = parser.add_argument_group("benchmark")
    group.add_argument("--shape", metavar="NAME", help=f"random weights in the shape of {', '.join(SHAPES)}")
    group.add_argument("--json", metavar="FILE", help="write everything measured to this file")
    for f in fields(cls):
        flag, help = "--" + f.name.replace("_", "-"), f.metadata["help"]
        if str(f.type) == "bool":
            group.add_argument(flag, action=argparse.BooleanOptionalAction, default=f.default, help=help)
            continue
        default = ",".join(map(str, f.default)) if isinstance(f.default, tuple) else f.default
        if default not in (None, ""):
            help += f" (default: {default})"
        kind = KINDS.get(str(f.type).removesuffix(" | None"), str)  # tuples are parsed by `settings_from`
        metavar = "X,Y" if isinstance(f.default, tuple) else kind.__name__.upper()
        group.add_argument(flag, type=kind, default=default, metavar=metavar, help=help)
    return group


def settings_from(cls: type[T], options: argparse.Namespace) -> T:
    """The settings `cls` of a parsed command line; raises `ConfigError` for values that cannot work."""
    values: dict[str, Any] = {}
    for f in fields(cls):  # type: ignore[arg-type]
        value = getattr(options, f.name)
        if str(f.type).startswith("tuple["):
            kind = KINDS[str(f.type)[6:].partition(",")[0]]
            try:
                value = tuple(kind(part) for part in value.split(",") if part)
            except ValueError:
                raise ConfigError(f"--{f.name} {value!r} is not a list of numbers like 1,2,4") from None
        values[f.name] = value
    return cls(**values)


def run_bench(options: argparse.Namespace) -> int:
    """Run a parsed command line; returns the exit code, 1 when a request failed."""
    from minisgl.bench.report import check_writable

    check_writable(options.json, "--json")
    return _offline(options) if options.kind == "offline" else _online(options)


def _offline(options: argparse.Namespace) -> int:
    from minisgl.bench.offline import offline_table, run_offline
    from minisgl.bench.report import write_json

    settings = settings_from(OfflineSettings, options)
    with shape_options(options.shape, engine_options(take_options(options))) as given:
        report = run_offline(settings, given)
    print(offline_table(report))
    if options.json is not None:
        write_json(options.json, report)
    return 0


def _online(options: argparse.Namespace) -> int:
    from minisgl.bench.online import draw, online_table, run_online
    from minisgl.bench.report import new_figure, write_json

    if options.plot is not None:
        new_figure()  # no matplotlib: an error before the measurement
    settings = settings_from(OnlineSettings, options)
    given = take_options(options)
    if options.url is None:
        given = server_options(given)
    elif extra := given.keys() - {"model", "api_key"} | ({"shape"} if options.shape else set()):
        raise ConfigError(f"--url measures a running server, so {', '.join(sorted(extra))} cannot be used")
    with shape_options(options.shape, given) as server:
        report, samples = run_online(settings, options.url, server)
    print(online_table(report))
    if options.json is not None:
        write_json(options.json, report)
    if options.plot is not None:
        for path in draw(report, samples, Path(options.plot)):
            print(f"drew {path}")
    return 1 if any(result["errors"] for result in report["results"]) else 0
