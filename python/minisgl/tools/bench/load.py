"""The load generator: sends prepared requests over HTTP, records the time of each event, and computes the metrics.

The client shares the machine with the server under test, so its parser does little: httptools parses HTTP, and of an
event only the kind (a token, the usage, an error) is determined.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import ssl
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final, cast

import httptools

from minisgl.tools.bench.report import percentiles_ms
from minisgl.tools.bench.traffic import OnlineArgs, Request
from minisgl.tools.chat.client import ServerAddress, error_message

DEFAULTS: Final = OnlineArgs()
POLL_S: Final = 0.005
SHOWN_ERRORS: Final = 5
# Each is one token in common vocabularies, with the space before it.
WORDS: Final = ("time", "year", "people", "way", "day", "man", "thing", "life", "child", "world", "school", "state")
_NO_CHOICES: Final = (b'"choices":[]', b'"choices": []')


@dataclass
class Record:
    """The outcome of one request. Times are seconds of `time.perf_counter`."""

    input_len: int
    output_len: int
    scheduled: float | None = None
    sent: float = 0.0
    times: list[float] = field(default_factory=list)  # of events with a token
    end: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    error: str = ""
    events: list[bytes] = field(default_factory=list)  # those with a token, if the generator `keeps_events`

    @property
    def tokens(self) -> int:
        """Output tokens as counted by the server; without a count, one per event."""
        return self.output_tokens or len(self.times)

    def gaps(self, start: float = 0.0, end: float = float("inf")) -> list[float]:
        """Return the times between successive events, for gaps that end between `start` and `end`."""
        return [b - a for a, b in itertools.pairwise(self.times) if start <= b <= end]


@dataclass(frozen=True)
class Job:
    """A request as bytes, encoded before the measurement, and its record. `at` is as in `Request`."""

    message: bytes
    record: Record
    at: float | None


@dataclass(frozen=True)
class Window:
    """The time of a burst, from its first request to its last answer, and the background requests during it."""

    start: float
    end: float
    background: list[Record]


class LoadGenerator:
    """Sends completion requests to one server. A failed request has an error in its record and raises nothing."""

    def __init__(
        self,
        url: str,
        model: str,
        args: OnlineArgs = DEFAULTS,
        *,
        api_key: str | None = None,
        keeps_events: bool = False,
    ) -> None:
        """Of `args`, the fields of requests and the timeout count. Raise `ConfigError` for an invalid `url`."""
        self._address = ServerAddress.parse(url)
        self._tls = ssl.create_default_context() if self._address.is_tls else None
        self._args = args
        self._keeps_events = keeps_events
        self._headers = f"Host: {self._address.authority}\r\nConnection: close\r\nContent-Type: application/json\r\n"
        if api_key:
            self._headers += f"Authorization: Bearer {api_key}\r\n"
        self._common: dict[str, Any] = {
            "model": model,
            "temperature": args.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"ignore_eos": True} if args.ignore_eos else {}),
        }

    def job(self, request: Request) -> Job:
        """Encode `request` as an HTTP request."""
        prompt: str | list[int] = request.prompt
        if self._args.text:
            prompt = " ".join(WORDS[i % len(WORDS)] for i in request.prompt)
        body = json.dumps({**self._common, "prompt": prompt, "max_tokens": request.output_len}).encode()
        head = f"POST {self._address.prefix}/v1/completions HTTP/1.1\r\n{self._headers}Content-Length: {len(body)}"
        record = Record(len(request.prompt), request.output_len)
        return Job(head.encode() + b"\r\n\r\n" + body, record, request.at)

    async def closed(self, jobs: Iterable[Job], streams: int) -> None:
        """Send from `streams` streams: each sends its next request when its last one is answered."""
        waiting = iter(jobs)

        async def stream() -> None:
            for job in waiting:
                await self._send(job)

        await asyncio.gather(*(stream() for _ in range(streams)))

    async def open(self, jobs: list[Job]) -> None:
        """Send each request at its scheduled time, whether or not earlier ones are answered. Records show delays."""
        start = time.perf_counter()
        sending = []
        for job in sorted(jobs, key=lambda job: job.at or 0.0):
            job.record.scheduled = start + (job.at or 0.0)
            if (delay := job.record.scheduled - time.perf_counter()) > 0:
                await asyncio.sleep(delay)
            sending.append(asyncio.create_task(self._send(job)))
        await asyncio.gather(*sending)

    async def burst(self, jobs: list[Job], background: Callable[[int], Request], streams: int) -> Window:
        """Send all jobs at once while `streams` background streams are receiving answers; then end these streams.

        The streams send `background(0)`, `background(1)`, ...
        """
        records: list[Record] = []
        numbers = itertools.count()

        async def keep_busy() -> None:
            while True:
                job = self.job(background(next(numbers)))
                records.append(job.record)
                await self._send(job)
                if job.record.error:
                    return  # the next request would fail, too

        running = [asyncio.create_task(keep_busy()) for _ in range(streams)]
        try:
            while sum(bool(r.times or r.error) for r in records) < streams:
                await asyncio.sleep(POLL_S)
            start = time.perf_counter()
            await self.open(jobs)
            end = time.perf_counter()
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        return Window(start, end, records)

    async def _send(self, job: Job) -> None:
        """Send one request over its own connection, and fill in its record until the response is complete."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        record = job.record
        protocol = _Exchange(job.message, record, done, self._keeps_events)
        transport: asyncio.Transport | None = None
        record.sent = time.perf_counter()
        try:
            async with asyncio.timeout(self._args.timeout):
                transport, _ = await loop.create_connection(
                    lambda: protocol, self._address.host, self._address.port, ssl=self._tls
                )
                await done
        except TimeoutError:
            record.error = f"no complete answer within {self._args.timeout:g} s"
        except OSError as e:
            record.error = f"cannot connect: {e.strerror or e}"
        finally:
            record.end = record.end or time.perf_counter()
            if transport is not None:
                transport.close()


class _Exchange(asyncio.Protocol):
    """One request and its response. `done` is set when the response is complete or the connection is closed."""

    def __init__(self, message: bytes, record: Record, done: asyncio.Future[None], keeps_events: bool) -> None:
        self._message = message
        self._keeps_events = keeps_events
        self._record = record
        self._done = done
        self._parser = httptools.HttpResponseParser(self)
        self._rest = b""
        self._now = 0.0
        self._status = 0
        self._is_complete = False
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's does not inherit from it
        self._transport.write(self._message)

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as e:
            self._finish(f"the response is not HTTP: {e}")

    def connection_lost(self, exc: Exception | None) -> None:
        # Without a length, the body ends with the connection: only [DONE] shows that it is complete.
        self._finish("" if self._is_complete else f"the connection broke{f': {exc}' if exc else ''}")

    # -- called by the parser

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        data = self._rest + body
        if self._status != 200:
            self._rest = data
            return
        if b"\r" in data:  # JSON escapes it, so it ends a line
            data = data.replace(b"\r\n", b"\n")
        *events, self._rest = data.split(b"\n\n")
        for event in events:
            self._on_event(event)

    def on_message_complete(self) -> None:
        if self._status != 200:
            self._finish(f"HTTP {self._status}: {error_message(self._rest)}")
        else:
            self._finish("" if self._record.times else "the answer is not a stream of events with tokens")

    def _on_event(self, event: bytes) -> None:
        if not event.startswith(b"data:"):
            return
        record = self._record
        if event.endswith(b"[DONE]"):
            self._is_complete = True
        elif event.startswith((b'data: {"error"', b'data:{"error"')):
            record.error = error_message(event[5:])
        else:
            if not any(mark in event for mark in _NO_CHOICES):
                record.times.append(self._now)
                if self._keeps_events:
                    record.events.append(event)
            if b'"usage":{' in event or b'"usage": {' in event:
                usage = json.loads(event[5:])["usage"]
                record.prompt_tokens = usage["prompt_tokens"]
                record.output_tokens = usage["completion_tokens"]
                record.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0

    def _finish(self, error: str) -> None:
        if not self._done.done():
            self._record.error = self._record.error or error
            self._record.end = time.perf_counter()
            self._done.set_result(None)
            if self._transport is not None:
                self._transport.close()


@dataclass(frozen=True)
class Samples:
    """The samples behind the percentiles, in seconds."""

    ttft: list[float]
    itl: list[float]


def summarize(records: list[Record], window: Window | None = None) -> tuple[dict[str, Any], Samples]:
    """Return the metrics of a run, and the samples for plots. Failed requests count only as errors.

    With the `window` of a burst, `itl_ms` covers the burst and the background streams during it.
    """
    done = [r for r in records if not r.error and r.times]
    gaps = [gap for r in done for gap in r.gaps()]
    background = [gap for r in window.background for gap in r.gaps(window.start, window.end)] if window else []
    samples = Samples([r.times[0] - r.sent for r in done], gaps + background)
    late = [r.sent - r.scheduled for r in records if r.scheduled is not None]
    wall = max((r.end for r in records), default=0.0) - min((r.sent for r in records), default=0.0)
    tokens = sum(r.tokens for r in done)
    events = sum(len(r.times) for r in done)
    failures = [*records, *(window.background if window else [])]
    errors = Counter(r.error for r in failures if r.error)
    figures: dict[str, Any] = {
        "requests": len(records),
        "completed": len(done),
        "errors": errors.total(),
        "error_messages": dict(errors.most_common(SHOWN_ERRORS)),
        "wrong_length": sum(r.tokens != r.output_len for r in done),
        "wall_s": wall,
        "prompt_tokens": sum(r.prompt_tokens or r.input_len for r in done),
        "cached_tokens": sum(r.cached_tokens for r in done),
        "output_tokens": tokens,
        "tokens_per_event": tokens / events if events else None,
        "request_s": len(done) / wall if wall else None,
        "output_tok_s": tokens / wall if wall else None,
        "ttft_ms": percentiles_ms(samples.ttft),
        "itl_ms": percentiles_ms(samples.itl),
        "tpot_ms": percentiles_ms([(r.times[-1] - r.times[0]) / (r.tokens - 1) for r in done if r.tokens > 1]),
        "e2e_ms": percentiles_ms([r.end - r.sent for r in done]),
        "late_ms": percentiles_ms(late),
    }
    if window is not None:
        figures["own_itl_ms"] = percentiles_ms(gaps)
        figures["background"] = {
            "requests": len(window.background),
            "tokens": sum(window.start <= t <= window.end for r in window.background for t in r.times),
            "itl_ms": percentiles_ms(background),
        }
    return figures, samples
