"""`minisgl bench online`: load on any server with OpenAI's API, and what its clients would see. Imports no torch."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import uvloop

from minisgl.bench.client import Endpoint, served_model
from minisgl.bench.load import Job, JobMaker, Load, Window, endless
from minisgl.bench.metrics import Samples, summarize
from minisgl.bench.own_server import own_server
from minisgl.bench.patterns import BACKGROUND, OnlineSettings, Point, make_points
from minisgl.bench.plots import plot_distribution, plot_rates
from minisgl.bench.report import format_table, provenance
from minisgl.bench.traffic import Range, uniform_requests


def run_online(
    settings: OnlineSettings, url: str | None, options: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Samples]]:
    """Load the server at `url`, or one of our own with `options`; returns the report, and the samples of each point.

    Raises `ConfigError` for settings that cannot work and `StartupError` when there is no server.
    """
    points = make_points(settings)
    with _server(url, options) as address:
        endpoint = Endpoint.parse(address, options.get("api_key"))
        model = (options.get("model") if url else None) or served_model(endpoint)
        maker = JobMaker(endpoint, model, settings.temperature, settings.text, settings.ignore_eos)
        load = Load(endpoint, settings.timeout)
        warm_up = uniform_requests(settings.warm_up, Range(64, 64), Range(8, 8), settings.vocab, "warm-up")
        _run(load.closed([maker.job(r, "warm-up") for r in warm_up], max(1, settings.warm_up)))
        results, samples = [], {}
        for point in points:
            result, samples[point.label] = _measure(point, settings, maker, load)
            results.append(result)
    report = {
        "benchmark": "online",
        "settings": asdict(settings) | {"options": {k: v for k, v in options.items() if k != "api_key"}},
        "url": url,
        "model": model,
        "machine": provenance(),
        "results": results,
    }
    return report, samples


@contextmanager
def _server(url: str | None, options: dict[str, Any]) -> Iterator[str]:
    if url is not None:
        yield url
        return
    with own_server(options) as own:
        yield own


def _run(load: Coroutine[Any, Any, Any]) -> Any:
    return uvloop.run(load)


def _measure(point: Point, settings: OnlineSettings, maker: JobMaker, load: Load) -> tuple[dict[str, Any], Samples]:
    jobs = [maker.job(request, "load") for request in point.requests]
    gc.collect()
    gc.freeze()  # a collection among the prompts would look like a pause of the server
    cpu, wall = time.process_time(), time.perf_counter()
    window: Window | None = None
    if settings.pattern == "burst":
        window = _run(load.burst(jobs, _background(settings, maker), settings.background))
    elif point.streams is not None:
        _run(load.closed(jobs, point.streams))
    else:
        _run(load.open(jobs))
    busy = (time.process_time() - cpu) / (time.perf_counter() - wall)
    gc.unfreeze()
    figures, samples = summarize([job.record for job in jobs], window)
    head = {"label": point.label, "streams": point.streams, "offered_request_s": point.offered}
    return head | figures | {"client_cpu": busy}, samples


def _background(settings: OnlineSettings, maker: JobMaker) -> Callable[[], Job]:
    def job(number: int) -> Job:
        (request,) = uniform_requests(1, *BACKGROUND, settings.vocab, f"{settings.seed} background {number}")
        return maker.job(request, "background")

    return endless(job)


def online_table(report: dict[str, Any]) -> str:
    """The report for people."""
    rows = []
    for r in report["results"]:
        ttft, itl = r["ttft_ms"], r["itl_ms"]
        times = [ttft["p50"], ttft["p90"], ttft["p99"], itl["p50"], itl["p99"], r["tpot_ms"]["p50"], r["e2e_ms"]["p50"]]
        done = f"{r['completed']}/{r['requests']}"
        checks = [r["late_ms"]["p99"], 100 * r["client_cpu"]]
        rows.append([r["label"], done, r["request_s"], r["output_tok_s"], *times, *checks])
    headers = ["load", "done", "req/s", "out tok/s", "TTFT p50", "p90", "p99", "ITL p50", "p99", "TPOT p50", "E2E p50"]
    lines = [
        f"{report['model']} · {report['settings']['pattern']} · times in ms",
        format_table([*headers, "late p99", "client %"], rows),
    ]
    lines += [note for r in report["results"] for note in _notes(r)]
    return "\n".join(lines)


def _notes(r: dict[str, Any]) -> Iterator[str]:
    """What a reader of the figures has to know."""
    for message, count in r["error_messages"].items():
        yield f"{r['label']}: {count} x {message}"
    if r["wrong_length"]:
        yield f"{r['label']}: {r['wrong_length']} answers have another length than asked for"
    if r["cached_tokens"]:
        share = 100 * r["cached_tokens"] / r["prompt_tokens"]
        yield f"{r['label']}: {share:.0f} % of the prompt tokens came from the server's prefix cache"
    if (per_event := r["tokens_per_event"]) is not None and per_event > 1.01:
        yield f"{r['label']}: {per_event:.2f} tokens an event, so ITL is the time between events, not tokens"
    if (late := r["late_ms"]["p99"]) is not None and late > 10:
        yield f"{r['label']}: the client itself was late by {late:.0f} ms (p99): the times above are too good"
    if r["client_cpu"] > 0.8:
        yield f"{r['label']}: the client was busy {100 * r['client_cpu']:.0f} % of the time and may be the limit"
    if (background := r.get("background")) and background["requests"]:
        yield (
            f"{r['label']}: ITL p99 of the burst alone {_ms(r['own_itl_ms'])}, of the {background['requests']} "
            f"requests beside it {_ms(background['itl_ms'])}"
        )


def _ms(times: dict[str, float | None]) -> str:
    return "-" if times["p99"] is None else f"{times['p99']:.4g} ms"


def draw(report: dict[str, Any], samples: dict[str, Samples], folder: Path) -> list[Path]:
    """The pictures of a report in `folder`; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / "ttft.png", folder / "itl.png"]
    plot_distribution({name: s.ttft for name, s in samples.items()}, "time to first token", paths[0])
    plot_distribution({name: s.itl for name, s in samples.items()}, "time between tokens", paths[1])
    points = [
        (r["offered_request_s"] or r["streams"], r["output_tok_s"] or 0.0, r["ttft_ms"]["p50"])
        for r in report["results"]
        if r["offered_request_s"] or r["streams"]
    ]
    if len(points) > 1:
        paths.append(folder / "throughput.png")
        label = "requests offered per second" if report["results"][0]["offered_request_s"] else "streams"
        plot_rates(points, label, paths[-1])
    return paths
