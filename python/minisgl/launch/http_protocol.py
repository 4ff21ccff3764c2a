"""Limits the bytes, the time and the number of HTTP/1.1 connections, on top of uvicorn's protocol.

All limits apply before the API key is checked, so they bound what a client without a key can occupy.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import struct
from http import HTTPStatus
from typing import Any, Final

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from minisgl.api.http import DROP, error_body, to_json
from minisgl.core.errors import ConfigError, RequestError

HEAD_BYTES: Final = 64 * 1024  # of request line, headers and trailers together; also of pipelined requests
HEAD_S: Final = 10.0  # from the first byte of a request (or from connecting) to the end of its headers
IDLE_S: Final = 30.0  # from a response to the next request
LINGER_S: Final = 2.0  # for a client to read a response that was sent before its request was complete
OTHER_FILES: Final = 128  # file descriptors that are not connections
MAX_CONNECTIONS: Final = 16_384
LOG_EVERY_S: Final = 60.0

logger = logging.getLogger(__name__)


def connection_limit() -> int:
    """Raise the soft limit on open files as far as allowed; return the number of connections that it allows.

    Raises `ConfigError` if it allows none.
    """
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_CONNECTIONS + OTHER_FILES
    soft, allowed = (wanted if n == resource.RLIM_INFINITY else min(n, wanted) for n in limits)
    if soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, limits[1]))
    if allowed <= OTHER_FILES:
        raise ConfigError(
            f"only {allowed} open files are allowed (ulimit -n), and a server needs more than {OTHER_FILES}"
        )
    return allowed - OTHER_FILES


class Connections:
    """The connections that wait for a complete request head, oldest first. Limits the number of all connections."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._deadlines: dict[BoundedHttpProtocol, asyncio.TimerHandle] = {}
        self._logged = -LOG_EVERY_S

    def wait(self, connection: BoundedHttpProtocol, seconds: float) -> None:
        """Expire `connection` after `seconds`, unless `done` is called before; it becomes the newest."""
        self.done(connection)
        self._deadlines[connection] = connection.loop.call_later(seconds, self._expire, connection)

    def done(self, connection: BoundedHttpProtocol) -> None:
        """Cancel the deadline of `connection`."""
        if (deadline := self._deadlines.pop(connection, None)) is not None:
            deadline.cancel()

    def admit(self, connection: BoundedHttpProtocol, total: int) -> None:
        """Admit `connection`, the last of `total`. If that is too many, close the one that has waited longest."""
        if total > self._limit:
            now = connection.loop.time()
            if now - self._logged >= LOG_EVERY_S:
                self._logged = now
                logger.warning("%d connections are open, which is the limit: idle ones are closed", self._limit)
            if (oldest := next(iter(self._deadlines), None)) is None:
                connection.refuse(503, "too many connections")
                return
            self._expire(oldest)
        self.wait(connection, HEAD_S)

    def _expire(self, connection: BoundedHttpProtocol) -> None:
        self.done(connection)
        connection.expire()


def _without_chunks(app: Any, cycle: RequestResponseCycle) -> Any:
    """Return `app` for a client of HTTP/1.0: the end of the connection is the end of the response (RFC 9112, 6.1)."""

    async def plain(scope: Any, receive: Any, send: Any) -> None:
        async def send_plain(message: Any) -> None:
            cycle.chunked_encoding = False
            cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_plain)

    return plain


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection.

    If a request is answered before it has arrived completely, the connection ends: further bytes are read and dropped
    for `LINGER_S`. Pipelined requests never pause reading, so a client that disconnects is always noticed.
    """

    def __init__(self, connections: Connections, **uvicorn: Any) -> None:
        super().__init__(**uvicorn)
        self._connections = connections
        self._running: RequestResponseCycle | None = None
        self._in_head = True
        self._is_complete = True  # the last request has arrived completely
        self._is_lingering = False
        self._is_parsed_again = False  # the head, without its wish for another protocol
        self._keeps_alive = False
        self._line_bytes = 0  # since the last byte of a body
        self._head_bytes = 0
        self._pipelined_bytes = 0

    # -- the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.write, self.is_closing = transport.write, transport.is_closing
        self._connections.admit(self, len(self.connections))

    def connection_lost(self, exc: Exception | None) -> None:
        if isinstance(exc, TimeoutError):
            logger.warning("a client did not read for --write-timeout seconds; its connection is closed")
        self._connections.done(self)
        self.pipeline.clear()
        self._disconnect()
        super().connection_lost(exc)

    def expire(self) -> None:
        """End a connection whose deadline has passed."""
        if self._is_lingering:
            self.drop()
        elif self._line_bytes:
            self.refuse(408, "the request's headers did not arrive in time")
        else:
            self.transport.close()

    def drop(self) -> None:
        """Reset the connection, and discard what is in its buffers."""
        self._disconnect()
        if self.transport.is_closing():  # its socket may be closed already
            return
        sock = self.transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def _disconnect(self) -> None:
        """Tell the request that is being answered that its client is gone."""
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()

    def close(self) -> None:
        """Close the connection after a response: now, or after LINGER_S if the request is incomplete.

        So the client can read a response to a request that it is still sending. With `write` and `is_closing` this
        is the transport of responses.
        """
        if self._is_complete:
            self.transport.close()
        else:
            self._is_lingering = True
            self.flow.resume_reading()
            self._connections.wait(self, LINGER_S)

    def refuse(self, status: int, message: str) -> None:
        """Send an error response, unless another response has begun, and end the connection."""
        running = self._running
        if running is not None and not running.response_complete:
            if running.response_started or not running.more_body:
                self.drop()
                return
            self._disconnect()
        body = to_json(error_body(RequestError(message, status=status)))
        head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
        self.transport.write(f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
        self._is_complete = False
        self.close()

    # -- bytes

    def data_received(self, data: bytes) -> None:
        if self._is_lingering:
            return
        if self._is_answering:
            self._pipelined_bytes += len(data)
            if self._pipelined_bytes > HEAD_BYTES:
                self.drop()
                return
        elif self._is_complete and not self._line_bytes:
            self._connections.wait(self, HEAD_S)
        self._line_bytes += len(data)
        self._unset_keepalive_if_required()
        rest, is_valid = memoryview(data), True
        try:
            while rest:
                rest = rest[self._feed(rest) :]
        except httptools.HttpParserError:
            is_valid = False
        if self.transport.is_closing() or self._is_lingering:
            return
        if max(self._line_bytes, self._head_bytes) > HEAD_BYTES:
            self.refuse(431, "the request's headers are too large")
        elif not is_valid:
            self.refuse(400, "the request is not valid HTTP/1.1")
        elif self._is_answering:
            self.flow.resume_reading()

    def _feed(self, data: memoryview) -> int:
        """Parse `data` up to its end or the head of a request for another protocol. Return the number of bytes parsed.

        Such a request may be answered as if it had no Upgrade field (RFC 9110, 7.8), but the parser skips its body.
        """
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as e:
            if self._is_parsed_again:
                line = b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
                fields = [b"%b: %b" % field for field in self.headers if field[0] != b"upgrade"]
                self.parser.feed_data(b"\r\n".join([line, *fields, b"", b""]))
            size: int = e.args[0]
            return size
        return len(data)

    @property
    def _is_answering(self) -> bool:
        """Whether a complete request waits for the end of its response."""
        running = self._running
        return running is not None and not running.response_complete and not running.more_body

    # -- the parser's events

    def on_message_begin(self) -> None:
        self._in_head = True
        self._is_complete = False
        self._head_bytes = 0
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value) + 4
        if self._in_head:  # a trailer must not change the request that is being answered
            super().on_header(name, value.rstrip(b" \t"))

    def on_headers_complete(self) -> None:
        self._head_bytes += len(self.url)
        hosts = sum(name == b"host" for name, _ in self.headers)
        if self._head_bytes > HEAD_BYTES or (hosts != 1 and self.parser.get_http_version() == "1.1"):
            raise httptools.HttpParserError("headers too large, or not one Host (RFC 9112, 3.2)")
        self._is_parsed_again = self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"
        if self._is_parsed_again:
            return
        self._in_head = False
        self._connections.done(self)
        super().on_headers_complete()
        self._keeps_alive, self.cycle.keep_alive = self.cycle.keep_alive, False
        self.cycle.transport = self  # type: ignore[assignment]

    def on_body(self, body: bytes) -> None:
        self._line_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._is_parsed_again:
            return
        self._is_complete = True
        self._line_bytes = 0
        self.cycle.keep_alive = self._keeps_alive
        super().on_message_complete()

    # -- responses

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        cycle.scope[DROP] = self.drop  # type: ignore[typeddict-unknown-key]
        super()._start_asgi_task(cycle, app if cycle.scope["http_version"] != "1.0" else _without_chunks(app, cycle))

    def on_response_complete(self) -> None:
        self._pipelined_bytes = 0
        super().on_response_complete()
        if not (self._is_answering or self._is_lingering or self.transport.is_closing()):
            self._connections.wait(self, IDLE_S if self._is_complete else HEAD_S)
