"""`minisgl bench online`: loads a server with OpenAI's API and measures the latencies of its clients. No torch."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import uvloop

from minisgl.core.errors import ConfigError, StartupError
from minisgl.process.trials import module_environment
from minisgl.settings.sources import args_from_options
from minisgl.tools.bench.load import LoadGenerator, Samples, Window, summarize
from minisgl.tools.bench.report import format_table, origin, plot_distribution, plot_throughput, provenance, shown
from minisgl.tools.bench.traffic import BACKGROUND, OnlineArgs, Point, Range, Request, make_points, random_requests
from minisgl.tools.chat.client import ChatClient

EXIT_S: Final = 15.0
POLL_S: Final = 0.05


def run_online(args: OnlineArgs, options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Samples]]:
    """Load the server at `args.url`, or one started with `options`; return the report, and the samples of each point.

    Raises `ConfigError` for settings that cannot work, and `StartupError` if no server answers.
    """
    points = make_points(args)
    key = options.get("api_key")
    with own_server(options) if args.url is None else nullcontext(args.url) as address:
        model = (options.get("model") if args.url else None) or ChatClient(address, key).model()
        generator = LoadGenerator(address, model, args, api_key=key)
        warm_up = random_requests(args.warm_up, Range(64, 64), Range(8, 8), args.vocab, "warm-up")
        uvloop.run(generator.closed(map(generator.job, warm_up), max(1, args.warm_up)))
        results = []
        samples = {}
        for point in points:
            result, samples[point.label] = _measure(point, args, generator)
            results.append(result)
    report = {
        "benchmark": "online",
        "settings": asdict(args) | {"options": {k: v for k, v in options.items() if k != "api_key"}},
        "url": args.url,
        "model": model,
        "machine": provenance(),
        "results": results,
    }
    return report, samples


def _measure(point: Point, args: OnlineArgs, generator: LoadGenerator) -> tuple[dict[str, Any], Samples]:
    def background(number: int) -> Request:
        return random_requests(1, *BACKGROUND, args.vocab, f"{args.seed} background {number}")[0]

    jobs = list(map(generator.job, point.requests))
    gc.collect()
    gc.freeze()  # scanning the prompts in a collection would look like a pause of the server
    cpu, wall = time.process_time(), time.perf_counter()
    window: Window | None = None
    if args.pattern == "burst":
        window = uvloop.run(generator.burst(jobs, background, args.background))
    elif point.streams is not None:
        uvloop.run(generator.closed(jobs, point.streams))
    else:
        uvloop.run(generator.open(jobs))
    busy = (time.process_time() - cpu) / (time.perf_counter() - wall)
    gc.unfreeze()
    figures, samples = summarize([job.record for job in jobs], window)
    head = {"label": point.label, "streams": point.streams, "offered_request_s": point.offered}
    return head | figures | {"client_cpu": busy}, samples


def online_table(report: dict[str, Any]) -> str:
    """Format a report as text."""
    rows = []
    for r in report["results"]:
        ttft, itl = r["ttft_ms"], r["itl_ms"]
        times = [ttft["p50"], ttft["p90"], ttft["p99"], itl["p50"], itl["p99"], r["tpot_ms"]["p50"], r["e2e_ms"]["p50"]]
        done = f"{r['completed']}/{r['requests']}"
        checks = [r["late_ms"]["p99"], 100 * r["client_cpu"]]
        rows.append([r["label"], done, r["request_s"], r["output_tok_s"], *times, *checks])
    headers = ["load", "done", "req/s", "out tok/s", "TTFT p50", "p90", "p99", "ITL p50", "p99", "TPOT p50", "E2E p50"]
    lines = [
        f"minisgl bench online · {report['model']} · {report['settings']['pattern']} · times in ms",
        _origin(report),
        format_table([*headers, "late p99", "client %"], rows),
    ]
    lines += [f"{r['label']}: {note}" for r in report["results"] for note in _notes(r)]
    return "\n".join(lines)


def _origin(report: dict[str, Any]) -> str:
    """Return where and when a report was measured. For `--url`, only the clients' machine is known."""
    clients = "" if report["url"] is None else f"{report['url']}, clients on "
    return clients + origin(report["machine"])


def _notes(r: dict[str, Any]) -> Iterator[str]:
    """Yield warnings about the figures of one point."""
    for message, count in r["error_messages"].items():
        yield f"{count} x {message}"
    if r["wrong_length"]:
        yield f"{r['wrong_length']} answers do not have the requested length"
    if r["cached_tokens"]:
        cached = 100 * r["cached_tokens"] / r["prompt_tokens"]
        yield f"{cached:.0f} % of the prompt tokens came from the server's prefix cache"
    if (per_event := r["tokens_per_event"]) is not None and per_event > 1.01:
        yield f"{per_event:.2f} tokens per event, so ITL is the time between events, not tokens"
    if (late := r["late_ms"]["p99"]) is not None and late > 10:
        yield f"the client sent requests {late:.0f} ms late (p99): the times above are too short"
    if r["client_cpu"] > 0.8:
        yield f"the client was busy {100 * r['client_cpu']:.0f} % of the time and may be the limit"
    if (background := r.get("background")) and background["requests"]:
        alone, beside = shown(r["own_itl_ms"]["p99"]), shown(background["itl_ms"]["p99"])
        yield f"ITL p99 of the burst {alone} ms, of the {background['requests']} requests beside it {beside} ms"


def draw(report: dict[str, Any], samples: dict[str, Samples], folder: Path) -> list[Path]:
    """Draw the plots of a report in `folder`; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / "ttft.png", folder / "itl.png"]
    title = f"{report['model']} · {report['settings']['pattern']}\n{_origin(report)}"
    plot_distribution({name: s.ttft for name, s in samples.items()}, "time to first token", title, paths[0])
    plot_distribution({name: s.itl for name, s in samples.items()}, "inter-token latency", title, paths[1])
    points = [
        (r["offered_request_s"] or r["streams"], r["output_tok_s"] or 0.0, r["ttft_ms"]["p50"])
        for r in report["results"]
        if r["offered_request_s"] or r["streams"]
    ]
    if len(points) > 1:
        paths.append(folder / "throughput.png")
        label = "requests offered per second" if report["results"][0]["offered_request_s"] else "streams"
        plot_throughput(points, label, title, paths[-1])
    return paths


def server_flags(options: dict[str, Any]) -> list[str]:
    """Return the command-line flags that set `options`."""
    flags = []
    for name, value in options.items():
        dashed = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{dashed}" if value else f"--no-{dashed}")
        else:
            flags.append(f"--{dashed}={value}")
    return flags


@contextmanager
def own_server(options: dict[str, Any], env: dict[str, str] | None = None) -> Iterator[str]:
    """Run `minisgl serve` with `options` on a free port; yield its URL.

    `env` is added to its environment. Raises `ConfigError` for options that cannot work, and `StartupError` with the
    last line of the log if the server does not start.
    """
    options = {"port": 0, **options}
    ready_s = args_from_options(options).ready_timeout
    with tempfile.TemporaryDirectory(prefix="minisgl-bench-") as folder:
        log = Path(folder) / "log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "minisgl", "serve", *server_flags(options)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=module_environment() | (env or {}),
            )
        try:
            yield _wait_ready(process, log, ready_s)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(EXIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_ready(process: subprocess.Popen[bytes], log: Path, seconds: float) -> str:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        _, found, rest = log.read_text(errors="replace").partition("\nready on ")
        if found and "\n" in rest:
            return rest.split()[0]
        if process.poll() is not None:
            lines = log.read_text(errors="replace").strip().splitlines() or [f"exit code {process.returncode}"]
            cause = lines[-1].removeprefix("minisgl: ")
            raise ConfigError(cause) if process.returncode == 2 else StartupError(f"the server did not start: {cause}")
        time.sleep(POLL_S)
    raise StartupError(f"the server is not ready after {seconds:g} s (--ready-timeout)")
