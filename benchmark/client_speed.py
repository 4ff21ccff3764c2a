"""How many events per second the load generator of `minisgl bench online` takes: `python benchmark/client_speed.py`.

A stub server in another process sends 256 answers of 1,000 events over 64 connections as fast as it can.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from multiprocessing.connection import Connection

import uvloop

from minisgl.tools.bench.load import LoadGenerator
from minisgl.tools.bench.traffic import Request

STREAMS = 64
REQUESTS = 256
TOKENS = 1000
# A chunk of the size that the server sends, with HTTP's framing around it.
EVENT = (
    b'data: {"id":"cmpl-0123456789abcdef0123456789abcdef","object":"text_completion","created":1700000000,'
    b'"model":"minisgl-demo","choices":[{"index":0,"text":" word","finish_reason":null,"logprobs":null}],'
    b'"usage":null}\n\n'
)
CHUNK = b"%x\r\n%b\r\n" % (len(EVENT), EVENT)
END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(HEAD)
    for _ in range(TOKENS):
        writer.write(CHUNK)
        await writer.drain()
        await asyncio.sleep(0)  # one write per event, and the streams take turns
    writer.write(END)
    await writer.drain()
    writer.close()


async def serve(ready: Connection) -> None:
    server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=STREAMS)
    ready.send(server.sockets[0].getsockname()[1])
    await server.serve_forever()


def run_stub(ready: Connection) -> None:
    uvloop.run(serve(ready))


def main() -> None:
    context = multiprocessing.get_context("spawn")
    ready, child_end = context.Pipe(duplex=False)
    stub = context.Process(target=run_stub, args=(child_end,), daemon=True)
    stub.start()
    try:
        generator = LoadGenerator(f"http://127.0.0.1:{ready.recv()}", "stub")
        jobs = [generator.job(Request([1] * 128, TOKENS)) for _ in range(REQUESTS)]
        cpu, wall = time.process_time(), time.perf_counter()
        uvloop.run(generator.closed(jobs, STREAMS))
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    finally:
        stub.kill()
        stub.join()
    events = sum(len(job.record.times) for job in jobs)
    errors = {job.record.error for job in jobs if job.record.error}
    assert events == REQUESTS * TOKENS and not errors, f"{events} of {REQUESTS * TOKENS} events; errors: {errors}"
    print(f"{events / wall:,.0f} events/s over {STREAMS} streams; {events / cpu:,.0f} per second of CPU time")


if __name__ == "__main__":
    main()
