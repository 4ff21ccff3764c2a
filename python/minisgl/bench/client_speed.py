"""How many events a second the load generator takes: a stub in another process sends as fast as it can."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from multiprocessing.connection import Connection
from typing import Any, Final

import uvloop

from minisgl.bench.client import Endpoint
from minisgl.bench.load import JobMaker, Load
from minisgl.bench.report import provenance
from minisgl.bench.traffic import Request
from minisgl.errors import MinisglError

STREAMS: Final = 64
REQUESTS: Final = 256
TOKENS: Final = 1000
# A chunk of the size that the server sends, with HTTP's framing around it.
_EVENT: Final = (
    b'data: {"id":"cmpl-0123456789abcdef0123456789abcdef","object":"text_completion","created":1700000000,'
    b'"model":"minisgl-demo","choices":[{"index":0,"text":" word","finish_reason":null,"logprobs":null}],'
    b'"usage":null}\n\n'
)
_CHUNK: Final = b"%x\r\n%b\r\n" % (len(_EVENT), _EVENT)
_END: Final = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
_HEAD: Final = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(_HEAD)
    for _ in range(TOKENS):
        writer.write(_CHUNK)
        await writer.drain()
        await asyncio.sleep(0)  # each event is a write of its own, the streams take turns
    writer.write(_END)
    await writer.drain()
    writer.close()


async def _serve(ready: Connection) -> None:
    server = await asyncio.start_server(_answer, "127.0.0.1", 0, backlog=STREAMS)
    ready.send(server.sockets[0].getsockname()[1])
    await server.serve_forever()


def _stub(ready: Connection) -> None:
    uvloop.run(_serve(ready))


def measure_client() -> dict[str, Any]:
    """Events a second by wall time and by the client's own CPU time; raises `MinisglError` if one was missed."""
    context = multiprocessing.get_context("spawn")
    ready, ready_end = context.Pipe(duplex=False)
    stub = context.Process(target=_stub, args=(ready_end,), daemon=True)
    stub.start()
    try:
        endpoint = Endpoint.parse(f"http://127.0.0.1:{ready.recv()}", None)
        maker = JobMaker(endpoint, "stub", 0.0, False, True)
        jobs = [maker.job(Request([1] * 128, TOKENS), "speed") for _ in range(REQUESTS)]
        cpu, wall = time.process_time(), time.perf_counter()
        uvloop.run(Load(endpoint, 600.0).closed(jobs, STREAMS))
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    finally:
        stub.kill()
        stub.join()
    events = sum(len(job.record.times) for job in jobs)
    errors = {job.record.error for job in jobs if job.record.error}
    if events != REQUESTS * TOKENS or errors:
        raise MinisglError(f"the client saw {events} of {REQUESTS * TOKENS} events; errors: {sorted(errors)}")
    return {
        "benchmark": "client speed",
        "streams": STREAMS,
        "events": events,
        "events_s": events / wall,
        "events_cpu_s": events / cpu,
        "machine": provenance(),
    }
