"""The load generator: reads streams however they are cut, reports failures, and computes the metrics."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys

import pytest

from minisgl.core.errors import ConfigError
from minisgl.tools.bench.load import LoadGenerator, Record, Window, summarize
from minisgl.tools.bench.traffic import OnlineArgs, Request
from support.processes import PATIENCE_S

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
    "not a stream": (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}", "not a stream"),
    "not HTTP": (b"SSH-2.0\r\n\r\n", "not HTTP"),
}


async def answer_with(response: bytes, step: int) -> Record:
    """The client's record of `response`, sent in pieces of `step` bytes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for i in range(0, len(response), step):
            writer.write(response[i : i + step])
            await writer.drain()
            await asyncio.sleep(0)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        url = f"127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        generator = LoadGenerator(url, "m", OnlineArgs(timeout=PATIENCE_S), api_key="key")
        job = generator.job(Request([1, 2, 3], 2))
        await generator.closed([job], 1)
        return job.record


@pytest.mark.parametrize("step", [1, 7, 10_000])
@pytest.mark.parametrize("name", GOOD)
def test_streams_are_read_however_they_are_cut(name: str, step: int) -> None:
    record = asyncio.run(answer_with(GOOD[name], step))
    assert (record.error, len(record.times)) == ("", 2)
    assert (record.prompt_tokens, record.output_tokens, record.cached_tokens) == (3, 2, 1)
    assert record.sent <= record.times[0] <= record.times[1] <= record.end


@pytest.mark.parametrize("name", BAD)
def test_failures_are_reported(name: str) -> None:
    response, message = BAD[name]
    assert message in asyncio.run(answer_with(response, 10_000)).error


def test_requests_ask_for_exact_lengths_and_usage() -> None:
    generator = LoadGenerator("http://h:1/base/v1", "m", OnlineArgs(temperature=0.5), api_key="secret")
    head, _, body = generator.job(Request([7, 8], 9)).message.partition(b"\r\n\r\n")
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
    generator = LoadGenerator("http://h:1", "m", OnlineArgs(text=True, ignore_eos=False))
    sent = json.loads(generator.job(Request([7, 8, 7], 9)).message.partition(b"\r\n\r\n")[2])
    words = sent["prompt"].split()
    assert "ignore_eos" not in sent
    assert len(words) == 3 and words[0] == words[2] != words[1]
    for url in ("ftp://x", "http://", "http://x:99999"):
        with pytest.raises(ConfigError):
            LoadGenerator(url, "m")


def record(sent: float, times: list[float], error: str = "", scheduled: float | None = None) -> Record:
    return Record(10, len(times), scheduled, sent, times, times[-1] if times else sent, 10, len(times), 0, error)


def test_metrics_of_complete_requests_and_bursts() -> None:
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


def test_the_load_generator_needs_no_torch() -> None:
    code = "import sys, minisgl.__main__, minisgl.tools.bench.online; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
