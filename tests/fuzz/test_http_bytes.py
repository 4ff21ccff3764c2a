"""Any bytes on a connection: an answer of HTTP or none, no error of ours, and nothing left afterwards."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import uvicorn
from hypothesis import example, given
from hypothesis import strategies as st
from uvicorn.server import ServerState

from minisgl.launch.http_protocol import BoundedHttpProtocol, Connections
from support.fuzz import fuzz

PIECES = [
    b"GET / HTTP/1.1\r\n",
    b"POST /early HTTP/1.1\r\n",
    b"POST / HTTP/1.0\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"CONNECT a:1 HTTP/1.1\r\n",
    b"host: x\r\n",
    b"content-length: 3\r\n",
    b"content-length: -1\r\n",
    b"content-length: 99999999999999999999\r\n",
    b"transfer-encoding: chunked\r\n",
    b"transfer-encoding: gzip, chunked\r\n",
    b"connection: close\r\n",
    b"connection: upgrade\r\nupgrade: h2c\r\n",
    b"expect: 100-continue\r\n",
    b": empty\r\n",
    b" folded\r\n",
    b"x: \0\xff\r\n",
    b"\r\n",
    b"\n",
    b"\r",
    b"abc",
    b"3\r\nabc\r\n",
    b"0\r\n\r\n",
    b"0\r\na: b\r\n\r\n",
    b"ffffffffffffffff\r\n",
    b"a" * 70_000,
    b"\x16\x03\x01\x02\x00\x01",
]
WISH = b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n"
REQUEST = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\nabc"


class Transport(asyncio.Transport):
    """Keeps what is written; no client reads."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2), "socket": self})
        self.getsockname = self.getpeername = lambda: ("127.0.0.1", 1)
        self.written = b""
        self.is_closed = False

    def write(self, data: Any) -> None:
        assert not self.is_closed, f"{data!r} is written after the end"
        self.written += data

    def close(self) -> None:
        self.is_closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.is_closed

    def is_reading(self) -> bool:
        return True

    def pause_reading(self) -> None:
        pass

    resume_reading = pause_reading

    def setsockopt(self, *_: Any) -> None:
        pass


async def app(scope: Any, receive: Any, send: Any) -> None:
    more = scope["path"] != "/early"
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        more = message["more_body"]
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


CONFIG = uvicorn.Config(app, lifespan="off", log_config=None)
CONFIG.load()


async def answer(pieces: list[bytes], leaves_early: bool) -> bytes:
    """What a connection that sends these pieces gets."""
    loop = asyncio.get_running_loop()
    problems: list[Any] = []
    loop.set_exception_handler(lambda _, context: problems.append(context))
    state = ServerState()
    connections = Connections(4)
    protocol = BoundedHttpProtocol(connections, config=CONFIG, server_state=state, app_state={})
    transport = Transport()
    protocol.connection_made(transport)
    for piece in pieces:
        if transport.is_closed:
            break
        protocol.data_received(piece)
        await asyncio.sleep(0)
    if not leaves_early:
        for _ in range(30):
            await asyncio.sleep(0)
    protocol.connection_lost(None)
    for _ in range(30):
        await asyncio.sleep(0)
    assert not state.tasks, "a request outlives its connection"
    assert not state.connections
    assert not connections._deadlines
    assert not problems, problems
    return transport.written


@fuzz(150)
@given(st.lists(st.one_of(st.sampled_from(PIECES), st.binary(max_size=12)), max_size=12), st.booleans())
@example([REQUEST * 3], False)
@example([REQUEST, REQUEST[:-1]], True)
def test_any_bytes_get_an_answer_of_http_or_none(pieces: list[bytes], leaves_early: bool) -> None:
    written = asyncio.run(answer(pieces, leaves_early))
    statuses = [int(s) for s in re.findall(rb"HTTP/1\.1 (\d\d\d) ", written)]
    assert not written or (statuses and written.startswith(b"HTTP/1.1 "))
    assert all(s in (100, 200, 400, 404, 408, 413, 431) for s in statuses), written


@fuzz(60)
@given(st.lists(st.integers(0, 3 * len(REQUEST + WISH)), max_size=6), st.lists(st.booleans(), min_size=1, max_size=3))
def test_requests_may_come_in_any_pieces(cuts: list[int], wishes: list[bool]) -> None:
    """Also those that ask for another protocol."""
    data = b"".join(REQUEST.replace(b"content", WISH + b"content") if wish else REQUEST for wish in wishes)
    ends = sorted([*cuts, len(data)])
    pieces = [data[a:b] for a, b in zip([0, *ends], ends, strict=False) if a < b]
    written = asyncio.run(answer(pieces, False))
    assert written.count(b"HTTP/1.1 200") == len(wishes) and written.endswith(b"ok")
