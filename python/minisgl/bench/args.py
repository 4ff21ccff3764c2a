"""The flags of `minisgl bench`. Imports nothing heavy: `minisgl --help` reads it too."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from minisgl.bench.examples import (
    CPU_EXAMPLES,
    DESCRIPTION,
    LOADING_EXAMPLES,
    OFFLINE_EXAMPLES,
    ONLINE_EXAMPLES,
)
from minisgl.settings.options import SchedulerConfig, ServerArgs
from minisgl.settings.sources import add_model_argument, add_options

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from minisgl.settings.sources import Parser


def add_bench(commands: _SubParsersAction[Parser]) -> None:
    """The `bench` command with its kinds."""
    raw = argparse.RawDescriptionHelpFormatter
    bench = commands.add_parser(
        "bench", help="measure the engine or a server", description=DESCRIPTION, formatter_class=raw, allow_abbrev=False
    )
    kinds = bench.add_subparsers(dest="kind", metavar="KIND", required=True)
    for kind, help, examples, add in (
        ("offline", "the engine alone", OFFLINE_EXAMPLES, _add_offline),
        ("online", "any server", ONLINE_EXAMPLES, _add_online),
        ("loading", "weights", LOADING_EXAMPLES, _add_loading),
        ("cpu", "beside other engines", CPU_EXAMPLES, _add_cpu),
    ):
        add(kinds.add_parser(kind, help=help, description=examples, formatter_class=raw, allow_abbrev=False))
    frontend = kinds.add_parser("frontend", help="one API process without an engine", allow_abbrev=False)
    frontend.add_argument(
        "--steps", type=int, default=2000, metavar="INT", help="events of each stream (default: 2000)"
    )
    frontend.add_argument("--json", metavar="FILE", help="write everything measured to this file")


def _add_offline(parser: Parser) -> None:
    from minisgl.bench.workloads import WORKLOADS

    add_model_argument(parser)
    group = parser.add_argument_group("benchmark")
    names = "; ".join(f"{name} = {kind.help}" for name, kind in WORKLOADS.items())
    group.add_argument("--workload", default="a", metavar="NAMES", help=f"comma-separated (default: a): {names}")
    group.add_argument("--num-prompts", type=int, metavar="INT", help="requests (default: the workload's)")
    group.add_argument("--input-len", type=int, metavar="INT", help="tokens of a prompt, for a the most")
    group.add_argument("--output-len", type=int, metavar="INT", help="tokens of an output, for a the most")
    group.add_argument("--temperature", type=float, default=0.6, metavar="FLOAT", help="default: 0.6")
    group.add_argument("--repeat", type=int, default=3, metavar="INT", help="timed runs of each workload (default: 3)")
    help = "also measure the host's work in this many steady steps, in a run of their own"
    group.add_argument("--profile-steps", type=int, default=0, metavar="INT", help=help)
    help = "also write a Chrome trace of a few steady steps of the first workload, and a picture beside it"
    group.add_argument("--timeline", metavar="FILE", help=help)
    help = "run everything with overlap, CUDA graphs and radix cache on and off instead, as far as there is a choice"
    group.add_argument("--ablate", action="store_true", help=help)
    _add_common(group)
    add_options(parser, SchedulerConfig)


def _add_online(parser: Parser) -> None:
    from minisgl.bench.patterns import PATTERNS, OnlineSettings

    add_model_argument(parser)
    own = OnlineSettings()
    group = parser.add_argument_group("benchmark")
    group.add_argument("--url", help="a running server, http://host:port; --model is then the name to ask for")
    names = "; ".join(f"{name} = {pattern.help}" for name, pattern in PATTERNS.items())
    group.add_argument("--pattern", default=own.pattern, metavar="NAME", help=f"default: closed. {names}")
    group.add_argument("--num-requests", type=int, metavar="INT", help="for each point (default: the pattern's)")
    group.add_argument("--input-len", metavar="N-M", help="tokens of a prompt; for sharegpt and trace the limits")
    group.add_argument("--output-len", metavar="N-M", help="tokens of an output; for sharegpt and trace the limits")
    group.add_argument("--streams", default="64", metavar="N,M", help="of the closed loop; several = several points")
    group.add_argument("--rates", default="", metavar="X,Y", help="requests per second; several = several points")
    group.add_argument("--background", type=int, default=0, metavar="INT", help="streams that run when the burst comes")
    group.add_argument("--trace", metavar="FILE", help="JSONL file in the format of the Qwen-Bailian traces")
    group.add_argument("--speed", type=float, default=own.speed, metavar="FLOAT", help="of the replay (default: 1)")
    group.add_argument("--temperature", type=float, default=own.temperature, metavar="FLOAT", help="default: 0")
    help = f"prompt ids are below this (default: {own.vocab})"
    group.add_argument("--vocab", type=int, default=own.vocab, metavar="INT", help=help)
    help = "of prompts and arrivals; give a server that remembers the last run's prompts another one (default: 0)"
    group.add_argument("--seed", type=int, default=own.seed, metavar="INT", help=help)
    help = f"short requests before the clock runs (default: {own.warm_up})"
    group.add_argument("--warm-up", type=int, default=own.warm_up, metavar="INT", help=help)
    help = "seconds for one request (default: 600)"
    group.add_argument("--timeout", type=float, default=own.timeout, metavar="FLOAT", help=help)
    group.add_argument("--text", action="store_true", help="send prompts as text, for servers that take no token ids")
    help = "ask for answers that go on to --output-len; off for servers that refuse the field"
    group.add_argument("--ignore-eos", action=argparse.BooleanOptionalAction, default=own.ignore_eos, help=help)
    group.add_argument("--plot", metavar="DIR", help="draw throughput and distributions (needs matplotlib)")
    group.add_argument("--client-speed", action="store_true", help="measure the load generator instead of a server")
    _add_common(group)
    add_options(parser, ServerArgs)


def _add_loading(parser: Parser) -> None:
    add_model_argument(parser)
    group = parser.add_argument_group("benchmark")
    group.add_argument("--folder", metavar="DIR", help="where the checkpoint of --shape is written and kept")
    group.add_argument("--tp", default="1,2,4", metavar="N,M", help="ranks, each a process (default: 1,2,4)")
    group.add_argument("--threads", type=int, metavar="INT", help="of each rank (default: the loader's choice)")
    group.add_argument("--repeat", type=int, default=3, metavar="INT", help="timed runs of each (default: 3)")
    group.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    help = "what the weights are kept in (default: bfloat16)"
    group.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16", "float16"), help=help)
    help = "also with the files dropped from the page cache"
    group.add_argument("--cold", action=argparse.BooleanOptionalAction, default=True, help=help)
    _add_common(group)


def _add_cpu(parser: Parser) -> None:
    group = parser.add_argument_group("benchmark")
    group.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="default: bfloat16")
    group.add_argument("--quantization", choices=("int8",), help="of our weights; the others keep what they have")
    group.add_argument("--threads", type=int, default=2, metavar="INT", help="of each engine (default: 2)")
    group.add_argument("--repeat", type=int, default=5, metavar="INT", help="timed runs of each case (default: 5)")
    group.add_argument("--steps", type=int, default=32, metavar="INT", help="decode steps of a run (default: 32)")
    group.add_argument("--cases", metavar="NAMES", help="decode, prefill, mixed, http; default: all")
    help = "minisgl (without --quantization), transformers (generate), continuous (its generate_batch), serve (its "
    help += "server), llama.cpp; default: all"
    group.add_argument("--against", metavar="NAMES", help=help)
    _add_common(group)
    parser.set_defaults(shape="qwen3-10m")


def _add_common(group: argparse._ArgumentGroup) -> None:
    from minisgl.bench.shapes import SHAPES

    help = f"this model's shape with random weights: {', '.join(SHAPES)}"
    group.add_argument("--shape", metavar="NAME", help=help)
    group.add_argument("--json", metavar="FILE", help="write everything measured to this file")
