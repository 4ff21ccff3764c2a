"""Two replicas behind one router (`--dp 2`), beside one replica and beside two servers in turn (round robin).

    python benchmark/replicas.py                         the built-in model on a CPU, one thread a replica: minutes
    python benchmark/replicas.py --shape qwen3-8b --max-running-requests 320                      on two GPUs
    python benchmark/replicas.py --what death --dtype float32                   compares the texts of answers, too

throughput  workload A, all requests at once: on one replica, on two (strong scaling), and twice as many requests on two
            (weak scaling). All of them have the same lengths and other tokens.
prefixes    prompts with shared prefixes in random order. All prefixes do not fit into one pool, but half of them do,
            beside the running requests.
death       `kill -9` of one replica when its streams have a quarter of their tokens. Prints the longest time between
            two events of a stream after the kill, and the time of the moved requests' prefill alone. For that, both
            replicas compute as many new prompts as there are streams, each as long as a prompt and a quarter of its
            answer. About half of the streams move, and each replica computes half of these prompts.

Any flag of `minisgl serve` goes to all servers.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import signal
import sys
import time
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final
from urllib.request import ProxyHandler, build_opener

import uvloop

from minisgl.core.errors import MinisglError
from minisgl.device.machine import choose_device
from minisgl.settings.sources import add_model_argument, add_options, given_options, server_options
from minisgl.tools.bench.load import Job, LoadGenerator, Record, summarize
from minisgl.tools.bench.online import own_server
from minisgl.tools.bench.report import format_table, origin, provenance
from minisgl.tools.bench.shapes import SHAPE_HELP, shape_options
from minisgl.tools.bench.traffic import OnlineArgs, Range, Request, random_prompt, random_requests
from minisgl.tools.bench.workloads import OfflineArgs, make_workloads
from minisgl.tools.chat.client import ChatClient

PARTS: Final = ("throughput", "prefixes", "death")
VOCAB: Final = 4096  # every model has these ids
SUFFIX: Final = 20  # tokens after a shared prefix
KILLED_AT: Final = 4  # the kill comes after one token in so many
RESTART_S: Final = 120.0
POLL_S: Final = 0.01
HEADERS: Final = ("", "requests", "s", "out tok/s", "TTFT ms", "cached %", "ratio")


@dataclass(frozen=True)
class Sizes:
    """The loads; each field is a flag."""

    num_pages: int
    requests: int  # of workload A
    longest: int  # of its prompts and of its answers, in tokens
    prefixes: int
    prefix_len: int
    each: int  # requests of a prefix
    clients: int  # that send them
    streams: int  # at the death of a replica
    stream_len: int  # tokens of the prompt, and of the answer, of such a stream


SIZES: Final = {
    "cpu": Sizes(1500, 32, 128, 24, 1500, 10, 8, 32, 128),
    "cuda": Sizes(4700, 256, 1024, 110, 4000, 6, 32, 200, 512),
}
PREFIX_ANSWER: Final = 16


class Server:
    """A running server and the requests that it gets."""

    def __init__(self, url: str, sizes: Sizes) -> None:
        """Send a first load, as large as workload A, to the server at `url`."""
        self.url = url
        model = ChatClient(url, None).model()
        self.sampling = LoadGenerator(url, model, OnlineArgs(temperature=0.6))
        self.greedy = LoadGenerator(url, model, keeps_events=True)
        self.send(random_requests(sizes.requests, Range(sizes.longest, sizes.longest), Range(8, 8), VOCAB, "warm-up"))

    def send(self, requests: Sequence[Request], is_greedy: bool = False) -> tuple[list[Record], float]:
        """Send all at once; return their records and the CPU seconds of this process."""
        generator = self.greedy if is_greedy else self.sampling
        jobs = list(map(generator.job, requests))
        return run(generator.closed(jobs, len(jobs)), jobs)

    def info(self) -> dict[str, Any]:
        """Return the body of /server_info."""
        result: dict[str, Any] = json.loads(self.get("/server_info"))
        return result

    def get(self, path: str) -> bytes:
        """Return the body of `path`."""
        with build_opener(ProxyHandler({})).open(self.url + path) as response:
            body: bytes = response.read()
        return body

    def cpu_seconds(self) -> dict[str, float]:
        """Return the CPU time of each process that is not a scheduler."""
        seconds = {}
        for name, pid in self.info()["processes"].items():
            if "scheduler" not in name:
                stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                seconds[name] = (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")
        return seconds


def run(load: Coroutine[Any, Any, Any], jobs: Sequence[Job]) -> tuple[list[Record], float]:
    """Run `load`, which sends `jobs`; return their records and the CPU seconds of this process."""
    gc.collect()
    gc.freeze()  # a collection would look like a pause of the server
    began = time.process_time()
    uvloop.run(load)
    seconds = time.process_time() - began
    gc.unfreeze()
    return [job.record for job in jobs], seconds


class Report:
    """The rows of the table, and the lines below it."""

    def __init__(self) -> None:
        self.rows: list[list[Any]] = []
        self.notes: list[str] = []

    def add(self, name: str, records: list[Record], base: float | None = None) -> float:
        """Add a row; return its output tokens per second, of which `base` are those of the row to compare with."""
        figures, _ = summarize(records)
        speed = float(figures["output_tok_s"] or 0.0)
        cached = 100 * figures["cached_tokens"] / figures["prompt_tokens"] if figures["prompt_tokens"] else None
        ratio = None if base is None else f"{speed / base:.2f}"
        row = [name, len(records), figures["wall_s"], speed, figures["ttft_ms"]["mean"], cached, ratio]
        self.rows.append(row)
        if figures["errors"] or figures["wrong_length"]:
            self.note(f"{name}: {figures['error_messages']}, {figures['wrong_length']} answers of a wrong length")
        print(format_table(HEADERS, [row]).splitlines()[1], flush=True)
        return speed

    def note(self, text: str) -> None:
        self.notes.append(text)
        print(text, flush=True)

    def __str__(self) -> str:
        return "\n".join([format_table(HEADERS, self.rows), *self.notes])


# -- throughput


def workload_a(sizes: Sizes, copy: int) -> list[Request]:
    """Return workload A, of which each `copy` has other tokens and the same lengths."""
    longest = sizes.longest
    args = OfflineArgs(workload="a", num_prompts=sizes.requests, input_len=longest, output_len=longest)
    (workload,) = make_workloads(args, VOCAB)
    return [Request([(i + copy) % VOCAB for i in r.prompt], r.output_len) for r in workload.requests]


def one_throughput(server: Server, sizes: Sizes, report: Report) -> float:
    """Measure the one replica; return its tokens per second."""
    records, _ = server.send(workload_a(sizes, 0))
    return report.add("workload A, one replica", records)


def pair_throughput(server: Server, sizes: Sizes, report: Report, one: float) -> None:
    """Measure two replicas, with the CPU time of the processes that they share."""
    records, _ = server.send(workload_a(sizes, 1))
    report.add("workload A, --dp 2 (strong scaling)", records, one)
    before = server.cpu_seconds()
    records, client = server.send(workload_a(sizes, 2) + workload_a(sizes, 3))
    after = server.cpu_seconds()
    report.add("2 x workload A, --dp 2 (weak scaling)", records, one)
    wall = max(r.end for r in records) - min(r.sent for r in records)
    shares = {name: after[name] - before[name] for name in after} | {"client": client}
    per_event = sum(r.tokens for r in records) / max(1, sum(len(r.times) for r in records))
    busy = ", ".join(f"{name} {100 * cpu / wall:.0f} %" for name, cpu in shares.items())
    report.note(f"weak scaling: busy {busy}; {per_event:.2f} tokens an event")


# -- prefixes


def prefix_requests(sizes: Sizes) -> list[Request]:
    """Return the requests in their random order."""
    rng = random.Random(1)
    prefixes = [random_prompt(rng, sizes.prefix_len, VOCAB) for _ in range(sizes.prefixes)]
    prompts = [p + random_prompt(rng, SUFFIX, VOCAB) for p in prefixes for _ in range(sizes.each)]
    rng.shuffle(prompts)
    return [Request(prompt, PREFIX_ANSWER) for prompt in prompts]


def prefix_load(servers: Sequence[Server], sizes: Sizes) -> list[Record]:
    """Send the requests to `servers` in turn, each from its part of the clients."""
    n = len(servers)
    jobs = [servers[i % n].sampling.job(request) for i, request in enumerate(prefix_requests(sizes))]

    async def load() -> None:
        loads = (s.sampling.closed(jobs[i::n], sizes.clients // n) for i, s in enumerate(servers))
        await asyncio.gather(*loads)

    return run(load(), jobs)[0]


# -- death


def death(server: Server, sizes: Sizes, report: Report, has_texts: bool) -> None:
    """Kill a replica under streams; with `has_texts` compare them with those of a run without a death."""
    n, length = sizes.streams, sizes.stream_len
    size, moved_size = Range(length, length), Range(length + length // KILLED_AT, length + length // KILLED_AT)
    records, _ = server.send(random_requests(n, moved_size, Range(1, 1), VOCAB, "prefill"), is_greedy=True)
    prefill = max(r.end for r in records) - min(r.sent for r in records)
    requests = random_requests(n, size, size, VOCAB, "death")
    jobs, again = ([server.greedy.job(request) for request in requests] for _ in range(2))
    victim = next(pid for name, pid in server.info()["processes"].items() if "DP0-TP0" in name)
    killed = open_streams = 0.0

    async def load() -> None:
        nonlocal killed, open_streams
        sending = asyncio.create_task(server.greedy.closed(jobs, n))
        while sum(len(job.record.times) for job in jobs) < n * length // KILLED_AT and not sending.done():
            await asyncio.sleep(POLL_S)
        open_streams = sum(not job.record.end for job in jobs)
        os.kill(victim, signal.SIGKILL)
        killed = time.perf_counter()
        await sending

    records, _ = run(load(), jobs)
    report.add("death of one of two replicas", records)
    pause = max((gap for r in records for gap in r.gaps(killed)), default=0.0)
    before = max((gap for r in records for gap in r.gaps(0.0, killed)), default=0.0)
    whole = sum(r.output_tokens == length and not r.error for r in records)
    report.note(
        f"death: {open_streams:.0f} of {n} streams open, {_moved(server)} moved, {whole} got all {length} tokens"
    )
    report.note(
        f"death: longest pause {pause:.2f} s (before the death {before:.2f} s); prefill of the moved requests about "
        f"{prefill:.2f} s"
    )
    if has_texts:
        deadline = time.monotonic() + RESTART_S
        while len(server.info()["replicas"]) < 2 and time.monotonic() < deadline:
            time.sleep(POLL_S)
        report.note(f"death: both replicas run {time.perf_counter() - killed:.1f} s after it")
        expected, _ = run(server.greedy.closed(again, n), again)
        equal = sum(_text(a) == _text(b) for a, b in zip(records, expected, strict=True))
        report.note(f"death: {equal} of {n} texts are equal to those without a death")


def _moved(server: Server) -> int:
    lines = server.get("/metrics").decode().splitlines()
    return sum(int(float(line.split()[-1])) for line in lines if line.startswith("minisgl:moved_requests_total"))


def _text(record: Record) -> str:
    choices = [json.loads(event.removeprefix(b"data:"))["choices"] for event in record.events]
    return "".join(choice["text"] for group in choices for choice in group)


# -- all


def start(options: Sequence[tuple[dict[str, Any], dict[str, str]]], sizes: Sizes, stack: ExitStack) -> list[Server]:
    """Start servers with their options and environment at once; they run until `stack` closes."""
    with ThreadPoolExecutor(len(options)) as threads:
        urls = list(threads.map(lambda pair: stack.enter_context(own_server(*pair)), options))
        return [Server(url, sizes) for url in urls]


def measure(what: Sequence[str], sizes: Sizes, given: dict[str, Any], report: Report) -> None:
    """Measure the parts named in `what`."""
    is_cuda = choose_device(given.get("device", "auto")) == "cuda"
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    one = robin = 0.0
    count = 2 if "prefixes" in what else 1 if "throughput" in what else 0
    with ExitStack() as stack:
        envs = [{"CUDA_VISIBLE_DEVICES": shown[i]} if is_cuda else {} for i in range(count)]
        servers = start([(given, env) for env in envs], sizes, stack) if count else []
        if "throughput" in what:
            one = one_throughput(servers[0], sizes, report)
        if "prefixes" in what:
            robin = report.add("prefixes, two servers in turn", prefix_load(servers, sizes))
    with ExitStack() as stack:
        (pair,) = start([(given | {"dp": 2}, {})], sizes, stack)
        if "throughput" in what:
            pair_throughput(pair, sizes, report, one)
        if "prefixes" in what:
            report.add("prefixes, --dp 2", prefix_load([pair], sizes), robin)
        if "death" in what:
            death(pair, sizes, report, given.get("dtype") == "float32")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--what", default=",".join(PARTS), help="what to measure (default: %(default)s)")
    parser.add_argument("--shape", help=SHAPE_HELP)
    for field in fields(Sizes)[1:]:  # the first is an option of the server, too
        shown = " or ".join(f"{getattr(sizes, field.name)} ({device})" for device, sizes in SIZES.items())
        kind = int if isinstance(getattr(SIZES["cpu"], field.name), int) else str
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind, help=f"default: {shown}")
    add_model_argument(parser)
    add_options(parser)
    args = parser.parse_args(argv)
    if unknown := set(args.what.split(",")) - set(PARTS):
        parser.error(f"--what {', '.join(sorted(unknown))}: choose from {', '.join(PARTS)}")
    report = Report()
    try:
        given = server_options(given_options(args))
        device = choose_device(given.get("device", "auto"))
        wanted = {f.name: getattr(args, f.name, None) for f in fields(Sizes)} | {"num_pages": given.get("num_pages")}
        sizes = Sizes(**vars(SIZES[device]) | {name: value for name, value in wanted.items() if value is not None})
        given["num_pages"] = sizes.num_pages
        if device == "cpu":
            given.setdefault("threads", 1)
        with shape_options(args.shape, given) as options:
            measure(args.what.split(","), sizes, options, report)
    except MinisglError as e:
        sys.exit(f"replicas.py: {e}")
    finally:
        print(f"\n{origin(provenance())}\n{report}" if report.rows else "nothing was measured", flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("replicas.py: ended by a signal"))  # so that the servers end, too
    main()
