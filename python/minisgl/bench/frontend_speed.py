"""How many events a second one API process makes of the engine's replies, beside the usual way to write such a server.

A stub engine sends a frame with one token of every stream and waits until each has become an event, so no two tokens
are ever merged. Streams end where the HTTP server begins (ASGI's `send`), because what follows, a write for each event,
is the same for all.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import tempfile
import time
from multiprocessing.connection import Connection
from typing import Any, Final

import uvloop
from fastapi import FastAPI

from minisgl.bench.plain_server import APPS
from minisgl.bench.report import provenance
from minisgl.core import FinishReason
from minisgl.errors import MinisglError
from minisgl.message import FrontendMsg, TokenizeMsg, TokenizerMsg, UserReply
from minisgl.process.queues import Codec, ZmqAsyncPullQueue, ZmqPushQueue
from minisgl.settings.options import ServerArgs

STREAMS: Final = 64
STEPS: Final = 2000
WARM_UP_STEPS: Final = 100
REPEATS: Final = 3
TIMEOUT_S: Final = 300.0
_BODY: Final = b'{"model":"stub","messages":[{"role":"user","content":"Hello"}],"stream":true}'
_WORDS: Final = (" word", " the", ",", " naïve", "\n", ' "quoted"', " 東京", " end")
_SCOPE: Final[dict[str, Any]] = {
    "type": "http",
    "asgi": {"version": "3.0", "spec_version": "2.3"},
    "http_version": "1.1",
    "method": "POST",
    "scheme": "http",
    "path": "/v1/chat/completions",
    "raw_path": b"/v1/chat/completions",
    "root_path": "",
    "query_string": b"",
    "headers": [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(_BODY))],
    "client": ("127.0.0.1", 1),
    "server": ("127.0.0.1", 2),
}


class _Stream:
    """One request and what comes back: HTTP server and client in one."""

    def __init__(self, on_event: asyncio.Event) -> None:
        self._on_event = on_event
        self._has_body = False
        self._text = b""
        self.events = 0

    async def run(self, app: FastAPI) -> None:
        await app({**_SCOPE, "state": {}}, self._receive, self._send)

    async def _receive(self) -> dict[str, Any]:
        if self._has_body:
            await asyncio.Event().wait()  # the client stays
        self._has_body = True
        return {"type": "http.request", "body": _BODY, "more_body": False}

    async def _send(self, message: Any) -> None:
        if body := message.get("body"):
            self.events += body.count(b"data: {")
            self._on_event.set()
            if self.events < 4:
                self._text += body

    def check(self, steps: int) -> None:
        """Raises `MinisglError` unless each step was an event, and the first tokens are what they should be."""
        chunks = [json.loads(line[6:])["choices"][0]["delta"] for line in self._text.decode().split("\n\n") if line]
        wanted = [{"role": "assistant", "content": ""}, *({"content": _WORDS[n]} for n in range(2))]
        shown = [{name: value for name, value in chunk.items() if value is not None} for chunk in chunks]
        if shown[:3] != wanted:
            raise MinisglError(f"the stream begins with {shown}")
        if self.events not in (steps + 2, steps + 3):  # one with the role; the end is one or two
            raise MinisglError(f"{self.events} events came of {steps} tokens")


async def _measure(name: str, args: ServerArgs, steps: int) -> float:
    """Microseconds of CPU time for each event."""
    app = APPS[name](args)
    inbox: ZmqAsyncPullQueue[TokenizerMsg] = ZmqAsyncPullQueue(args.zmq_detokenizer_addr, Codec(TokenizerMsg))
    codec: Codec[FrontendMsg] = Codec(FrontendMsg)
    event = asyncio.Event()
    streams = [_Stream(event) for _ in range(STREAMS)]
    async with asyncio.timeout(TIMEOUT_S), app.router.lifespan_context(app):
        engine: ZmqPushQueue[Any] = ZmqPushQueue(args.zmq_frontend_addr, _Encoded(Any))
        tasks = [asyncio.create_task(stream.run(app)) for stream in streams]
        uids: list[int] = []
        while len(uids) < STREAMS:
            uids += [m.uid for m in await inbox.get() if isinstance(m, TokenizeMsg)]
        frames = [
            codec.encode(
                [
                    UserReply(uid=uid, text=_WORDS[n % len(_WORDS)], completion_tokens=n + 1, prompt_tokens=5)
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


class _Encoded(Codec[Any]):
    """A codec for frames that are bytes already: making them is the stub's work, not to be measured."""

    def encode(self, messages: Any) -> bytes:
        frame: bytes = messages[0]
        return frame


def _run(name: str, steps: int, report: Connection) -> None:
    with tempfile.TemporaryDirectory(prefix="minisgl-") as folder:
        report.send(uvloop.run(_measure(name, ServerArgs(run_dir=folder), steps)))


def measure_frontend(steps: int = STEPS, repeats: int = REPEATS) -> dict[str, Any]:
    """Each way `repeats` times in processes of its own, taking turns; the best time of each counts.

    Raises `MinisglError` when one fails or loses an event.
    """
    context = multiprocessing.get_context("spawn")
    times: dict[str, list[float]] = {name: [] for name in APPS}
    for _ in range(repeats):
        for name, measured in times.items():
            report, report_end = context.Pipe(duplex=False)
            process = context.Process(target=_run, args=(name, steps, report_end), daemon=True)
            process.start()
            report_end.close()
            try:
                measured.append(report.recv())
            except EOFError:
                raise MinisglError(f"{name} failed; see above") from None
            finally:
                process.join()
    return {
        "benchmark": "frontend",
        "streams": STREAMS,
        "events": STREAMS * (steps - WARM_UP_STEPS),
        "cpu_us": times,
        "events_s": {name: 1e6 / min(measured) for name, measured in times.items()},
        "speedup": {name: min(t) / min(times["minisgl"]) for name, t in times.items()},
        "machine": provenance(),
    }


def frontend_table(report: dict[str, Any]) -> str:
    """A line for each way."""
    lines = [f"{'':<10}{'CPU us/event':>14}{'events/s of CPU':>18}{'minisgl is':>14}"]
    for name, times in report["cpu_us"].items():
        ratio = f"{report['speedup'][name]:.1f} x"
        lines.append(f"{name:<10}{min(times):>14.1f}{report['events_s'][name]:>18,.0f}{ratio:>14}")
    return "\n".join(lines)
