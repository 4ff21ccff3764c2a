"""From bytes and time stamps to figures: the client, the percentiles, the probes."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from e2e.harness import PATIENCE_S
from minisgl.bench import ablate
from minisgl.bench.client import Endpoint, Record
from minisgl.bench.load import JobMaker, Load, Window
from minisgl.bench.metrics import summarize
from minisgl.bench.offline import OfflineSettings, TokenClock
from minisgl.bench.own_server import server_flags
from minisgl.bench.probe import HostProbe, replaced
from minisgl.bench.report import format_table, percentile, percentiles, spread, write_json
from minisgl.bench.timeline import read_bars
from minisgl.bench.traffic import Request
from minisgl.errors import ConfigError
from minisgl.message import DetokenizeMsg
from minisgl.settings.sources import parse_args


def test_percentiles() -> None:
    values = list(range(101))
    assert percentiles(values, scale=2) == {"p50": 100.0, "p90": 180.0, "p99": 198.0, "mean": 100.0}
    assert percentile([1.0, 2.0], 50) == 1.5 and percentile([], 50) is None
    assert percentiles([])["p99"] is None and percentiles([])["mean"] is None
    assert spread([3.0, 1.0, 2.0]) == {"median": 2.0, "min": 1.0, "max": 3.0}


def test_table_and_json(tmp_path: Path) -> None:
    table = format_table(["name", "x"], [["a", 1234567.8], ["bcdef", None], ["c", 0.123456]])
    assert table.splitlines() == ["name           x", "a      1,234,568", "bcdef          -", "c         0.1235"]
    with pytest.raises(ConfigError, match="cannot write"):
        write_json(str(tmp_path), {})


EVENT = b'data: {"choices":[{"index":0,"text":"data: \\n\\n"}],"usage":null}\n\n'
USAGE = (
    b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2,'
    b'"prompt_tokens_details":{"cached_tokens":1}}}\n\n'
)
DONE = b"data: [DONE]\n\n"
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"


def chunked(*parts: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(p), p) for p in (*parts,)) + b"0\r\n\r\n"


def crlf(events: bytes) -> bytes:
    return events.replace(b"\n", b"\r\n")


GOOD = {
    "chunked": STREAM + b"transfer-encoding: chunked\r\n\r\n" + chunked(EVENT, EVENT, USAGE, DONE),
    "chunks across events": STREAM
    + b"transfer-encoding: chunked\r\n\r\n"
    + chunked(EVENT[:9], EVENT[9:] + EVENT + USAGE[:4], USAGE[4:] + DONE),
    "until the end": STREAM + b"connection: close\r\n\r\n" + EVENT + EVENT + USAGE + DONE,
    "CRLF": STREAM + b"connection: close\r\n\r\n" + crlf(EVENT + EVENT + USAGE + DONE),
}
BAD = {
    "refused": (b'HTTP/1.1 400 Bad\r\ncontent-length: 28\r\n\r\n{"error":{"message":"no so"}}'[:-1] + b"}", "HTTP 400"),
    "broken": (STREAM + b"transfer-encoding: chunked\r\n\r\n40\r\n", "the connection broke"),
    "error event": (
        STREAM + b"connection: close\r\n\r\n" + EVENT + b'data: {"error":{"message":"bad luck"}}\n\n' + DONE,
        "bad luck",
    ),
    "no stream": (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}", "no stream"),
    "no HTTP": (b"SSH-2.0\r\n\r\n", "not HTTP"),
}


async def answer_with(response: bytes, step: int) -> Record:
    """What the client makes of `response`, sent in pieces of `step` bytes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for i in range(0, len(response), step):
            writer.write(response[i : i + step])
            await writer.drain()
            await asyncio.sleep(0)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        endpoint = Endpoint.parse(f"127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", "key")
        job = JobMaker(endpoint, "m", 0.0, False, True).job(Request([1, 2, 3], 2), "x")
        await Load(endpoint, PATIENCE_S).closed([job], 1)
        return job.record


@pytest.mark.parametrize("step", [1, 7, 10_000])
@pytest.mark.parametrize("name", GOOD)
def test_streams_are_read_however_they_are_cut(name: str, step: int) -> None:
    record = asyncio.run(answer_with(GOOD[name], step))
    assert (record.error, len(record.times)) == ("", 2)
    assert (record.prompt_tokens, record.output_tokens, record.cached_tokens) == (3, 2, 1)
    assert record.sent <= record.times[0] <= record.times[1] <= record.end


@pytest.mark.parametrize("name", BAD)
def test_failures_are_told(name: str) -> None:
    response, message = BAD[name]
    assert message in asyncio.run(answer_with(response, 10_000)).error


def test_the_message_asks_for_what_is_needed() -> None:
    endpoint = Endpoint.parse("http://h:1/base/v1", "secret")
    head, _, body = (
        JobMaker(endpoint, "m", 0.5, False, True).job(Request([7, 8], 9), "x").message.partition(b"\r\n\r\n")
    )
    assert head.startswith(b"POST /base/v1/completions HTTP/1.1\r\nHost: h:1\r\n") and b"Bearer secret" in head
    assert f"Content-Length: {len(body)}".encode() in head
    assert json.loads(body) == {
        "model": "m",
        "prompt": [7, 8],
        "max_tokens": 9,
        "temperature": 0.5,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    text = JobMaker(endpoint, "m", 0.5, True, False).job(Request([7, 8, 7], 9), "x").message
    sent = json.loads(text.partition(b"\r\n\r\n")[2])
    words = sent["prompt"].split()
    assert "ignore_eos" not in sent
    assert len(words) == 3 and words[0] == words[2] != words[1]
    for url in ("ftp://x", "http://", "http://x:99999"):
        with pytest.raises(ConfigError):
            Endpoint.parse(url, None)


def record(sent: float, times: list[float], error: str = "", scheduled: float | None = None) -> Record:
    return Record("g", 10, len(times), scheduled, sent, times, times[-1] if times else sent, 10, len(times), 0, error)


def test_figures() -> None:
    records = [
        record(0.0, [1.0, 1.5, 2.0], scheduled=-0.25),
        record(1.0, [3.0, 4.0], scheduled=1.0),
        record(1.0, [], "boom"),
    ]
    figures, samples = summarize(records)
    assert (figures["completed"], figures["errors"], figures["error_messages"]) == (2, 1, {"boom": 1})
    assert (figures["wall_s"], figures["output_tokens"], figures["output_tok_s"]) == (4.0, 5, 1.25)
    assert samples.ttft == [1.0, 2.0] and samples.itl == [0.5, 0.5, 1.0]
    assert figures["tpot_ms"]["mean"] == 750.0 and figures["e2e_ms"]["mean"] == 2500.0
    assert figures["late_ms"]["p50"] == 125.0 and figures["wrong_length"] == 0
    beside = [record(-5.0, [0.0, 1.5, 3.5, 9.0])]
    figures, samples = summarize(records[:2], Window(1.0, 4.0, beside))
    assert samples.itl == [0.5, 0.5, 1.0, 1.5, 2.0]
    assert figures["background"]["tokens"] == 2 and figures["own_itl_ms"]["p50"] == 500.0
    empty, _ = summarize([record(0.0, [], "boom")])
    assert empty["output_tok_s"] is None or empty["output_tok_s"] == 0


def test_token_clock() -> None:
    clock = TokenClock()
    for at, uids in [(1.0, [5, 6]), (2.0, [6]), (4.0, [6, 5])]:
        clock.record(DetokenizeMsg(uids=np.array(uids, "<i8").tobytes(), tokens=b"", started=[], finished=[]))
        clock._times[-1] = at
    figures = clock.figures(start=0.5)
    assert figures["steps"] == 3 and figures["ttft_ms"]["p50"] == 500.0
    assert figures["itl_ms"]["mean"] == 2000.0  # gaps 3, 1, 2
    assert figures["ms_per_token"] == 2250.0  # the median of 3 and 1.5


def test_replaced_hides_a_method_for_a_while() -> None:
    class Thing:
        def f(self) -> int:
            return 1

    thing = Thing()
    with replaced(thing, "f", lambda: 2):
        assert thing.f() == 2
    assert thing.f() == 1


def test_host_work_is_what_is_neither_model_nor_waiting() -> None:
    probe = HostProbe.__new__(HostProbe)
    parts = {
        "plan_us": 10,
        "launch_us": 500,
        "prepare_us": 50,
        "engine_launch_us": 300,
        "collect_us": 40,
        "wait_us": 30,
    }
    probe._limit = 2
    probe._other = []
    probe._steady = [[4, *parts.values(), 560]] * 12
    for is_async, host in ((True, 520), (False, 220)):
        probe._scheduler = type("S", (), {"engine": type("E", (), {"is_async": is_async})})  # type: ignore[assignment]
        figures = probe.figures()
        assert (figures["host_us"], figures["steps"], figures["rows"], figures["decode_only"]) == (host, 2, 4, True)


def test_the_timeline_shows_kernels_or_outermost_operators(tmp_path: Path) -> None:
    def bar(cat: str, ts: float, dur: float, name: str) -> dict[str, object]:
        return {"ph": "X", "cat": cat, "ts": ts, "dur": dur, "name": name, "pid": 1, "tid": 2}

    ops = [bar("cpu_op", 10, 5, "linear"), bar("cpu_op", 11, 2, "mm"), bar("cpu_op", 20, 1, "add"), {"ph": "M"}]
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"traceEvents": ops}))
    assert [b.name for b in read_bars(path)] == ["linear", "add"]
    path.write_text(json.dumps({"traceEvents": [*ops, bar("kernel", 12, 1, "gemm")]}))
    assert [(b.name, b.start) for b in read_bars(path)] == [("gemm", 0.0)]


def test_server_flags_are_the_options_again() -> None:
    flags = ["--page-size=8", "--no-overlap", "--dummy-weight", "--model=/x y", "--port=0"]
    args = parse_args(flags)
    options = {"page_size": 8, "overlap": False, "dummy_weight": True, "model": "/x y", "port": 0}
    assert server_flags(options) == ["--page-size=8", "--no-overlap", "--dummy-weight", "--model=/x y", "--port=0"]
    assert parse_args(server_flags(options)) == args


def test_the_load_generator_needs_no_torch() -> None:
    code = "import sys, minisgl.__main__, minisgl.bench.online; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_ablations_that_cannot_be_or_change_nothing_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    def fake_run(settings: OfflineSettings, options: dict[str, Any]) -> dict[str, Any]:
        if options.get("cache_type") == "naive":
            raise ConfigError("no naive cache")
        figure = {"median": 2.0 if options.get("overlap") else 4.0, "min": 2.0, "max": 4.0}
        result = {"workload": "single", "headline": "ms_per_token", "summary": {"ms_per_token": figure}}
        return {"engine": {"overlap": options.get("overlap"), "kv_pages": id(options)}, "results": [result]}

    settings = OfflineSettings(workloads=("single",), temperature=0.0, repeat=1)
    monkeypatch.setattr(ablate, "run_in_child", fake_run)
    monkeypatch.setattr(ablate, "ABLATIONS", {**ablate.ABLATIONS, "mixed batches": ("page_size", 16, 8)})
    report = ablate.run_ablations(settings, {})
    assert report["pairs"].keys() == {"overlap"}
    assert report["skipped"]["radix"] == "no naive cache"
    assert report["skipped"]["mixed batches"] == "it changes nothing here"
    row = ablate.ablation_table(report).splitlines()[1].split()
    assert row == ["overlap", "single", "ms_per_token", "2", "4", "2", "100"]  # fewer ms: a gain of 2
    monkeypatch.setattr(ablate, "ABLATIONS", {"radix": ablate.ABLATIONS["radix"]})
    with pytest.raises(ConfigError, match="no naive"):
        ablate.run_ablations(settings, {})
