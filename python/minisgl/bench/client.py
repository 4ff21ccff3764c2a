"""The load generator's HTTP side: one streamed completion per connection, with a time stamp for each event.

It parses as little as it can, since it shares the machine with the server that it measures: HTTP by httptools, and of
an event only whether it carries a token, the usage or an error.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import ssl
import time
from dataclasses import dataclass, field
from typing import Final, cast

import httptools

from minisgl.chat.client import ServerAddress
from minisgl.errors import StartupError

CONNECT_S: Final = 10.0
_NO_CHOICES: Final = (b'"choices":[]', b'"choices": []')


@dataclass(frozen=True)
class Endpoint:
    """Where requests go."""

    host: str
    port: int
    prefix: str
    tls: ssl.SSLContext | None
    headers: bytes

    @classmethod
    def parse(cls, url: str, api_key: str | None) -> Endpoint:
        """From http://host:port; raises `ConfigError`."""
        address = ServerAddress.parse(url)
        headers = f"Host: {address.authority}\r\nConnection: close\r\nContent-Type: application/json\r\n"
        if api_key:
            headers += f"Authorization: Bearer {api_key}\r\n"
        tls = ssl.create_default_context() if address.is_tls else None
        return cls(address.host, address.port, address.prefix, tls, headers.encode())

    def message(self, method: str, path: str, body: bytes = b"") -> bytes:
        """A whole HTTP request."""
        head = f"{method} {self.prefix}{path} HTTP/1.1\r\n".encode()
        return b"".join([head, self.headers, b"Content-Length: %d\r\n\r\n" % len(body), body])


@dataclass
class Record:
    """What became of one request. Times are seconds of `time.perf_counter`."""

    group: str
    input_len: int
    output_len: int
    scheduled: float | None = None
    sent: float = 0.0
    times: list[float] = field(default_factory=list)  # of the events with a token
    end: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    error: str = ""


class _Exchange(asyncio.Protocol):
    """One request and its response; `done` is set when the response is complete or the connection is gone."""

    def __init__(self, message: bytes, record: Record, done: asyncio.Future[None]) -> None:
        self._message = message
        self._record = record
        self._done = done
        self._parser = httptools.HttpResponseParser(self)
        self._rest = b""
        self._now = 0.0
        self._status = 0
        self._is_complete = False
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        self._transport.write(self._message)

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as e:
            self._finish(f"the response is not HTTP: {e}")

    def connection_lost(self, exc: Exception | None) -> None:
        # Without a length the end of the connection is the end of the body: only [DONE] or a status tells.
        self._finish("" if self._is_complete else f"the connection broke{f': {exc}' if exc else ''}")

    # -- called by the parser

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        data = self._rest + body
        if self._status != 200:
            self._rest = data
            return
        if b"\r" in data:  # JSON has none, so it belongs to the ends of lines
            data = data.replace(b"\r\n", b"\n")
        *events, self._rest = data.split(b"\n\n")
        for event in events:
            self._on_event(event)

    def on_message_complete(self) -> None:
        if self._status != 200:
            self._finish(f"HTTP {self._status}: {_error_message(self._rest)}")
        else:
            self._finish("" if self._record.times else "the answer is no stream of events with tokens")

    def _on_event(self, event: bytes) -> None:
        if not event.startswith(b"data:"):
            return
        record = self._record
        if event.endswith(b"[DONE]"):
            self._is_complete = True
        elif event.startswith((b'data: {"error"', b'data:{"error"')):
            record.error = _error_message(event[5:])
        else:
            if not any(mark in event for mark in _NO_CHOICES):
                record.times.append(self._now)
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


def _error_message(body: bytes) -> str:
    try:
        value = json.loads(body)
        return str(value.get("error", value)["message"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return body[:200].decode(errors="replace")


async def exchange(endpoint: Endpoint, message: bytes, record: Record, timeout: float) -> None:
    """Send `message` and fill in `record` until its response is complete; whatever goes wrong is `record.error`.

    When cancelled, the connection is closed and the record says so.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()
    protocol = _Exchange(message, record, done)
    transport: asyncio.Transport | None = None
    record.sent = time.perf_counter()
    try:
        async with asyncio.timeout(timeout):
            transport, _ = await loop.create_connection(
                lambda: protocol, endpoint.host, endpoint.port, ssl=endpoint.tls
            )
            await done
    except TimeoutError:
        record.error = f"no complete answer within {timeout:g} s"
    except OSError as e:
        record.error = f"cannot connect: {e.strerror or e}"
    finally:
        record.end = record.end or time.perf_counter()
        if transport is not None:
            transport.close()


def served_model(endpoint: Endpoint) -> str:
    """The name of the first model that the server lists; raises `StartupError` when it does not say."""
    kind = http.client.HTTPSConnection if endpoint.tls else http.client.HTTPConnection
    connection = kind(endpoint.host, endpoint.port, timeout=CONNECT_S)
    try:
        headers = dict(line.split(": ", 1) for line in endpoint.headers.decode().splitlines())
        connection.request("GET", f"{endpoint.prefix}/v1/models", headers=headers)
        response = connection.getresponse()
        body = response.read()
        if response.status != 200:
            raise StartupError(f"GET /v1/models: HTTP {response.status}: {_error_message(body)}")
        return str(json.loads(body)["data"][0]["id"])
    except (OSError, http.client.HTTPException) as e:
        raise StartupError(f"no server answers at {endpoint.host} port {endpoint.port} ({e})") from e
    except (ValueError, LookupError, TypeError):
        raise StartupError("the server does not list its models at /v1/models; give --model NAME") from None
    finally:
        connection.close()
