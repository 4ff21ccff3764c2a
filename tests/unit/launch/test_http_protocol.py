"""Limits on connections, with real sockets and a small application: bytes, deadlines, number, early leavers."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import uvicorn

from minisgl.api.http import DROP
from minisgl.launch import http_protocol
from minisgl.launch.http_protocol import HEAD_BYTES, BoundedHttpProtocol, Connections, connection_limit

GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
PATIENCE_S = 20.0


class Application:
    """/ answers when the body has come, /early before, /stream with a byte each 10 ms until the client leaves. /drop
    resets its connection, also when that is gone.
    """

    def __init__(self) -> None:
        self.left = threading.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/stream":
            await self._stream(receive, send)
            return
        if scope["path"] == "/drop":
            for _ in range(2):
                scope[DROP]()
                await asyncio.sleep(0.05)  # the socket is closed by then
            assert (await receive())["type"] == "http.disconnect"
            self.left.set()
            return
        body = b""
        while scope["path"] != "/early":
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message["body"]
            if not message["more_body"]:
                break
        content = b"<%d %d>" % (len(body), len(scope["headers"]))
        headers = [(b"content-length", b"%d" % len(content))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    async def _stream(self, receive: Any, send: Any) -> None:
        await receive()
        gone = asyncio.create_task(receive())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not gone.done():
            await send({"type": "http.response.body", "body": b"x", "more_body": True})
            await asyncio.sleep(0.01)
        self.left.set()


class Client:
    """A socket to the server."""

    def __init__(self, port: int) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)

    def send(self, data: bytes) -> Client:
        self.sock.sendall(data)
        return self

    def read_until(self, end: bytes) -> bytes:
        data = b""
        while end not in data and (more := self.sock.recv(4096)):
            data += more
        return data

    def read_all(self) -> bytes:
        data = b""
        with contextlib.suppress(ConnectionError):
            while more := self.sock.recv(65536):
                data += more
        return data


@pytest.fixture
def app() -> Application:
    return Application()


@pytest.fixture
def connect(app: Application, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Client]]:
    """Connections to a server that allows four, with short deadlines."""
    for name, seconds in {"HEAD_S": 1.0, "IDLE_S": 1.0, "LINGER_S": 0.5}.items():
        monkeypatch.setattr(http_protocol, name, seconds)
    protocol: Any = partial(BoundedHttpProtocol, Connections(4))
    server = uvicorn.Server(uvicorn.Config(app, http=protocol, lifespan="off", log_config=None, timeout_keep_alive=30))
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
    thread.start()
    clients: list[Client] = []

    def new() -> Client:
        clients.append(Client(listener.getsockname()[1]))
        return clients[-1]

    yield new
    for client in clients:
        client.sock.close()
    server.should_exit = True
    thread.join()


def test_requests_share_a_connection(connect: Callable[[], Client]) -> None:
    client = connect()
    for _ in range(3):
        assert client.send(GET).read_until(b"<0 1>").startswith(b"HTTP/1.1 200")


def test_pipelined_requests_are_answered_in_order(connect: Callable[[], Client]) -> None:
    post = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\nabc"
    assert connect().send(GET + post).read_until(b"<3 2>").count(b"HTTP/1.1 200") == 2


HTTP2 = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n"


@pytest.mark.parametrize(
    "wish",
    [
        HTTP2,  # curl --http2, Java's HttpClient
        b"connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n",
        b"Connection: keep-alive, , UPGRADE\r\nUpgrade: TLS/1.2, HTTP/2.0\r\nUpgrade: x\r\n",
        b"upgrade: h2c\r\n",
        b"connection: upgrade\r\n",
    ],
)
@pytest.mark.parametrize("cut", [None, 30, -9, -4])
@pytest.mark.parametrize(
    "rest", [b"content-length: 5\r\n\r\nabcde", b"transfer-encoding: chunked\r\n\r\n5\r\nabcde\r\n0\r\n\r\n"]
)
def test_a_request_for_another_protocol_is_answered_as_it_stands(
    connect: Callable[[], Client], wish: bytes, rest: bytes, cut: int | None
) -> None:
    post = b"POST / HTTP/1.1\r\nhost: x\r\n" + wish + rest
    client = connect()
    for _ in range(2):
        if cut is not None:
            client.send(post[:cut])
            time.sleep(0.01)
        data = client.send(post[cut:] + GET[:20]).read_until(b">")
        assert data.startswith(b"HTTP/1.1 200") and b"<5 " in data
        assert b"<0 1>" in client.send(GET[20:]).read_until(b"<0 1>")


def test_a_client_of_http_1_0_gets_no_chunks(connect: Callable[[], Client]) -> None:
    data = connect().send(b"GET /stream HTTP/1.0\r\n\r\n").read_until(b"xxx")
    assert b"connection: close" in data and b"transfer-encoding" not in data
    assert connect().send(b"GET / HTTP/1.0\r\nconnection: keep-alive\r\n\r\n").read_all().endswith(b"<0 1>")


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET / HTTP/1.1\r\n", 400),  # RFC 9112, 3.2: exactly one Host
        (b"GET / HTTP/1.1\r\nhost: x\r\nHost: y\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost:\r\n", 200),
        (b"GET / HTTP/1.0\r\n", 200),
        (b"GET http://x:80/ HTTP/1.1\r\nhost: x\r\n", 200),
        (b"CONNECT x:80 HTTP/1.1\r\nhost: x\r\n", 400),
    ],
)
def test_heads_that_are_not_http(connect: Callable[[], Client], head: bytes, status: int) -> None:
    assert connect().send(head + b"\r\n").read_until(b">" if status == 200 else b"}}").split()[1] == b"%d" % status


def require_end(client: Client) -> None:
    """Send until the server ends the connection."""
    began = time.monotonic()
    with contextlib.suppress(ConnectionError):
        while time.monotonic() - began < PATIENCE_S:
            client.send(b"a:\r\n" * 1000)
            time.sleep(0.01)
    assert time.monotonic() - began < PATIENCE_S / 2


@pytest.mark.parametrize(
    "begin", [b"GET / HTTP/1.1\r\nhost: x\r\n", CHUNKED + b"1\r\na\r\n0\r\n"], ids=["head", "trailers"]
)
@pytest.mark.parametrize(
    "line", [b"a:\r\n", b"a: %b\r\n" % (b"x" * 1000), b"x" * 1000], ids=["short", "long", "endless"]
)
def test_heads_and_trailers_are_bounded(connect: Callable[[], Client], begin: bytes, line: bytes) -> None:
    client = connect().send(begin + b"b: " * (not line.endswith(b"\n")))
    for _ in range(20):
        client.send(line * (HEAD_BYTES // len(line) // 10))
        time.sleep(0.005)
    assert b" 431 " in (answer := client.read_until(b"}}")) or b" 400 " in answer
    require_end(client)


def test_a_large_head_in_one_piece_is_refused_by_its_status(connect: Callable[[], Client]) -> None:
    client = connect().send(GET[:-2] + b"a: " + b"x" * HEAD_BYTES + b"\r\n\r\n")
    assert client.read_until(b"}}").startswith(b"HTTP/1.1 431 ")


def test_trailers_do_not_become_headers(connect: Callable[[], Client]) -> None:
    client = connect().send(CHUNKED + b"1\r\na\r\n0\r\nx-a: b\r\n\r\n")
    assert client.read_until(b"<1 2>").endswith(b"<1 2>")


@pytest.mark.parametrize("begin", [b"", b"G", b"GET / HTTP/1.1\r\nhost: x\r\n"], ids=["silent", "byte", "half"])
def test_slow_heads_are_given_up(connect: Callable[[], Client], begin: bytes) -> None:
    started = time.monotonic()
    answer = connect().send(begin).read_all()
    assert time.monotonic() - started < PATIENCE_S / 2
    assert (b" 408 " in answer) == bool(begin)


def test_slow_second_head_is_given_up(connect: Callable[[], Client]) -> None:
    client = connect()
    client.send(GET).read_until(b"<0 1>")
    assert b" 408 " in client.send(b"GET / HT").read_all()


def test_idle_connections_are_closed(connect: Callable[[], Client]) -> None:
    client = connect()
    client.send(GET).read_until(b"<0 1>")
    started = time.monotonic()
    assert client.read_all() == b""
    assert 0.5 < time.monotonic() - started < PATIENCE_S / 2


def test_request_answered_early_ends_the_connection(connect: Callable[[], Client]) -> None:
    client = connect().send(CHUNKED.replace(b"/ ", b"/early ") + b"5\r\nabcde\r\n")
    assert b"connection: close" in client.read_until(b"<0 2>")
    require_end(client)


def test_oldest_idle_connection_makes_room(connect: Callable[[], Client]) -> None:
    silent = [connect() for _ in range(4)]
    time.sleep(0.1)
    assert connect().send(GET).read_until(b"<0 1>").startswith(b"HTTP/1.1 200")
    assert silent[0].read_all() == b""


def test_busy_connections_are_kept(connect: Callable[[], Client]) -> None:
    busy = [connect().send(GET.replace(b"/ ", b"/stream ")) for _ in range(4)]
    for client in busy:
        client.read_until(b"x")
    assert b" 503 " in connect().read_all()
    for client in busy:
        client.read_until(b"x")


@pytest.mark.parametrize(
    "ahead", [b"", GET, GET[:9], b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 99999\r\n\r\n" + b"x" * 70_000]
)
def test_client_that_leaves_is_seen_behind_pipelined_bytes(
    connect: Callable[[], Client], app: Application, ahead: bytes
) -> None:
    client = connect().send(GET.replace(b"/ ", b"/stream "))
    client.read_until(b"x")
    with contextlib.suppress(ConnectionError):
        client.send(ahead)
        time.sleep(0.1)
    client.sock.close()
    assert app.left.wait(PATIENCE_S)


def test_requests_ahead_of_their_turn_are_bounded(connect: Callable[[], Client], app: Application) -> None:
    client = connect().send(GET.replace(b"/ ", b"/stream "))
    client.read_until(b"x")
    with contextlib.suppress(ConnectionError):
        while not app.left.is_set():
            client.send(GET * 1000)
    assert app.left.wait(PATIENCE_S)


def test_connections_fit_below_the_open_file_limit() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        assert 0 < connection_limit() < resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_connection_may_be_reset_twice(connect: Callable[[], Client], app: Application) -> None:
    with pytest.raises(ConnectionResetError):
        connect().send(GET.replace(b"/ ", b"/drop ", 1)).sock.recv(1)
    assert app.left.wait(PATIENCE_S / 4)
