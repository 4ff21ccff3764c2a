"""CPU time of one API process per event, beside the usual ways to write a streaming server.

    PYTHONPATH=python python benchmark/frontend.py [--steps 2000] [--json FILE]

A stub engine sends a frame with one token of each of 64 streams and waits until every token has become an event, so no
two tokens are merged. Streams end where the HTTP server begins (ASGI's `send`): the write per event that follows is the
same for all. The contestants take turns in processes of their own, and the best time of each counts: `fastapi` yields
pydantic objects to `EventSourceResponse`, `pydantic` streams text that pydantic has serialized, both around minisgl's
frontend; `minisgl` is the real server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import tempfile
import time
import uuid
from collections.abc import AsyncIterable, AsyncIterator, Callable
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from typing import Any

import uvloop
from fastapi import FastAPI
from fastapi.sse import EventSourceResponse
from pydantic import BaseModel
from starlette.responses import StreamingResponse

from minisgl.api.app import create_app
from minisgl.api.frontend import FrontendManager
from minisgl.api.metrics import Metrics
from minisgl.api.requests import SamplingDefaults, ServedModel
from minisgl.core.message import FrontendMsg, TokenizeMsg, TokenizerMsg, UserReply
from minisgl.core.params import Limits, SamplingParams
from minisgl.core.plan import FinishReason
from minisgl.process.queues import Codec, ZmqAsyncPullQueue, ZmqPushQueue
from minisgl.settings.options import ServerArgs
from minisgl.tools.bench.report import format_table, provenance, write_json

LIMITS = Limits(max_model_len=1 << 20, vocab_size=1 << 17)
STREAMS = 64
WARM_UP_STEPS = 100
REPEATS = 3
TIMEOUT_S = 300.0
BODY = b'{"model":"stub","messages":[{"role":"user","content":"Hello"}],"stream":true}'
WORDS = (" word", " the", ",", " naïve", "\n", ' "quoted"', " 東京", " end")
SCOPE: dict[str, Any] = {
    "type": "http",
    "asgi": {"version": "3.0", "spec_version": "2.3"},
    "http_version": "1.1",
    "method": "POST",
    "scheme": "http",
    "path": "/v1/chat/completions",
    "raw_path": b"/v1/chat/completions",
    "root_path": "",
    "query_string": b"",
    "headers": [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(BODY))],
    "client": ("127.0.0.1", 1),
    "server": ("127.0.0.1", 2),
}


class Message(BaseModel):
    role: str
    content: str


class ChatRequest(BaseModel):
    model: str
    messages: list[Message]
    stream: bool = False


class Delta(BaseModel):
    role: str | None = None
    content: str | None = None


class Choice(BaseModel):
    index: int
    delta: Delta
    finish_reason: str | None = None
    logprobs: dict[str, Any] | None = None


class Chunk(BaseModel):
    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[Choice]


def _app(args: ServerArgs) -> FastAPI:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.frontend = FrontendManager(args, LIMITS, Metrics("stub"))
        yield
        await app.state.frontend.close()

    return FastAPI(lifespan=lifespan)


async def _chunks(frontend: FrontendManager, body: ChatRequest) -> AsyncIterator[Chunk]:
    """Submit `body` and yield a pydantic object for each event."""
    messages = [m.model_dump() for m in body.messages]
    request_id, created = f"chatcmpl-{uuid.uuid4().hex}", int(time.time())

    def chunk(delta: Delta, reason: str | None = None) -> Chunk:
        choice = Choice(index=0, delta=delta, finish_reason=reason)
        return Chunk(id=request_id, created=created, model=body.model, choices=[choice])

    message = TokenizeMsg(uid=0, sampling_params=SamplingParams(), messages=messages)
    async with frontend.submit([message]) as submission:
        yield chunk(Delta(role="assistant", content=""))
        while not submission.is_done:
            for _, reply in await submission.next_replies():
                yield chunk(Delta(content=reply.text), reply.finish_reason)


def fastapi_app(args: ServerArgs) -> FastAPI:
    """Yield pydantic objects, of which FastAPI makes server-sent events, as in its documentation."""
    app = _app(args)

    @app.post("/v1/chat/completions", response_class=EventSourceResponse)
    async def chat(body: ChatRequest) -> AsyncIterable[Chunk]:
        async for chunk in _chunks(app.state.frontend, body):
            yield chunk
        # no [DONE]: the type of the stream does not allow it

    return app


def pydantic_app(args: ServerArgs) -> FastAPI:
    """Stream text that pydantic has serialized."""
    app = _app(args)

    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest) -> StreamingResponse:
        async def stream() -> AsyncIterator[str]:
            async for chunk in _chunks(app.state.frontend, body):
                yield f"data: {chunk.model_dump_json()}\n\n"
            yield "data: [DONE]\n\n"

        return StreamingResponse(stream(), media_type="text/event-stream")

    return app


def minisgl_app(args: ServerArgs) -> FastAPI:
    """The real server."""
    return create_app(args, ServedModel("stub", LIMITS, SamplingDefaults()))


APPS: dict[str, Callable[[ServerArgs], FastAPI]] = {
    "fastapi": fastapi_app,
    "pydantic": pydantic_app,
    "minisgl": minisgl_app,
}


class Stream:
    """One request and its events: HTTP server and client in one."""

    def __init__(self, on_event: asyncio.Event) -> None:
        self._on_event = on_event
        self._has_body = False
        self._text = b""
        self.events = 0

    async def run(self, app: FastAPI) -> None:
        await app({**SCOPE, "state": {}}, self._receive, self._send)

    async def _receive(self) -> dict[str, Any]:
        if self._has_body:
            await asyncio.Event().wait()  # the client stays
        self._has_body = True
        return {"type": "http.request", "body": BODY, "more_body": False}

    async def _send(self, message: Any) -> None:
        if body := message.get("body"):
            self.events += body.count(b"data: {")
            self._on_event.set()
            if self.events < 4:
                self._text += body

    def check(self, steps: int) -> None:
        """Fail unless each step was an event and the first events are right."""
        chunks = [json.loads(line[6:])["choices"][0]["delta"] for line in self._text.decode().split("\n\n") if line]
        wanted = [{"role": "assistant", "content": ""}, *({"content": WORDS[n]} for n in range(2))]
        shown = [{name: value for name, value in chunk.items() if value is not None} for chunk in chunks]
        assert shown[:3] == wanted, f"the stream begins with {shown}"
        # One more has the role, and the end is one or two.
        assert self.events in (steps + 2, steps + 3), f"{self.events} events for {steps} tokens"


async def cpu_per_event(name: str, args: ServerArgs, steps: int) -> float:
    """Microseconds of CPU time for each event."""
    app = APPS[name](args)
    inbox: ZmqAsyncPullQueue[TokenizerMsg] = ZmqAsyncPullQueue(args.zmq_detokenizer_addr, Codec(TokenizerMsg))
    codec: Codec[FrontendMsg] = Codec(FrontendMsg)
    event = asyncio.Event()
    streams = [Stream(event) for _ in range(STREAMS)]
    async with asyncio.timeout(TIMEOUT_S), app.router.lifespan_context(app):
        engine: ZmqPushQueue[Any] = ZmqPushQueue(args.zmq_frontend_addr, Encoded(Any))
        tasks = [asyncio.create_task(stream.run(app)) for stream in streams]
        uids: list[int] = []
        while len(uids) < STREAMS:
            uids += [m.uid for m in await inbox.get() if isinstance(m, TokenizeMsg)]
        frames = [
            codec.encode(
                [
                    UserReply(uid=uid, text=WORDS[n % len(WORDS)], completion_tokens=n + 1, prompt_tokens=5)
                    for uid in uids
                ]
            )
            for n in range(steps)
        ]
        cpu = 0.0
        for n, frame in enumerate(frames):
            if n == WARM_UP_STEPS:
                cpu = time.process_time()
            engine.put([frame])
            while min(s.events for s in streams) < n + 2:  # the first one has the role
                event.clear()
                await event.wait()
        cpu = time.process_time() - cpu
        end = [
            UserReply(uid=uid, text="", completion_tokens=steps, prompt_tokens=5, finish_reason=FinishReason.LENGTH)
            for uid in uids
        ]
        engine.put([codec.encode(end)])
        await asyncio.gather(*tasks)
        for stream in streams:
            stream.check(steps)
        engine.close()
    inbox.close()
    return 1e6 * cpu / (STREAMS * (steps - WARM_UP_STEPS))


class Encoded(Codec[Any]):
    """A codec for frames that are encoded already: the stub's encoding must not be measured."""

    def encode(self, messages: Any) -> bytes:
        frame: bytes = messages[0]
        return frame


def run(name: str, steps: int, report: Connection) -> None:
    with tempfile.TemporaryDirectory(prefix="minisgl-") as folder:
        report.send(uvloop.run(cpu_per_event(name, ServerArgs(run_dir=folder, num_tokenizer=0), steps)))


def measure_frontend(steps: int, repeats: int = REPEATS) -> dict[str, list[float]]:
    """Microseconds per event of each contestant, `repeats` times; `EOFError` if one fails."""
    context = multiprocessing.get_context("spawn")
    times: dict[str, list[float]] = {name: [] for name in APPS}
    for _ in range(repeats):
        for name, measured in times.items():
            report, child_end = context.Pipe(duplex=False)
            process = context.Process(target=run, args=(name, steps, child_end), daemon=True)
            process.start()
            child_end.close()
            measured.append(report.recv())
            process.join()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000, help="events of each stream (default: 2000)")
    parser.add_argument("--json", help="write everything measured to this file")
    args = parser.parse_args()
    if args.steps <= WARM_UP_STEPS:
        parser.error(f"--steps must be more than {WARM_UP_STEPS}, which are not measured")
    times = measure_frontend(args.steps)
    ours = min(times["minisgl"])
    rows = [[name, min(t), 1e6 / min(t), min(t) / ours] for name, t in times.items()]
    print(format_table(["", "CPU us/event", "events/s of CPU", "minisgl is, x"], rows))
    write_json(args.json, {"streams": STREAMS, "steps": args.steps, "cpu_us": times, "machine": provenance()})


if __name__ == "__main__":
    main()
