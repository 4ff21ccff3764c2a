"""How rank 0 and the others get the sockets between them: each says hello, and rank 0 lets in who belongs here.

On one host the socket is a file in a private folder, else it is TCP at the address given. Once all ranks are there,
nothing listens any more.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Final

import msgspec

from minisgl.distributed.info import Rendezvous
from minisgl.errors import ConfigError, RankError

POLL_S: Final = 0.05
HELLO_S: Final = 5.0
MAX_HELLO: Final = 65536
KEEPALIVE: Final = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}  # a host that is gone: after 25 s


class Hello(msgspec.Struct, frozen=True):
    """A rank's first word. All ranks must have been started with the same `settings`."""

    rank: int
    settings: dict[str, str]


class Welcome(msgspec.Struct, frozen=True):
    """The answer: where the store is, through which the ranks set up their collectives; or why there is none."""

    store: str | tuple[str, int] = ""
    error: str = ""


def lead(
    rendezvous: Rendezvous, settings: dict[str, str], store: str | tuple[str, int], check: Callable[[], None]
) -> dict[int, Connection]:
    """Rank 0: wait until all others have come; `check` is called now and then, to raise when one cannot.

    Raises `ConfigError` for an address that cannot be had and for a rank that was started otherwise.
    """
    links: dict[int, Connection] = {}
    with _listen(rendezvous) as listener:
        listener.settimeout(POLL_S)
        while len(links) < rendezvous.info.size - 1:
            check()
            with contextlib.suppress(TimeoutError):
                link = _connection(listener.accept()[0])
                hello = _hear_hello(link)
                if hello is None or not 0 < hello.rank < rendezvous.info.size:
                    link.close()  # a stranger
                    continue
                if error := _refusal(hello, settings, links):
                    link.send_bytes(msgspec.msgpack.encode(Welcome(error=error)))
                    raise ConfigError(error)
                links[hello.rank] = link
    for link in links.values():
        link.send_bytes(msgspec.msgpack.encode(Welcome(store)))
    return dict(sorted(links.items()))


def follow(rendezvous: Rendezvous, settings: dict[str, str]) -> tuple[Connection, Welcome, str]:
    """Another rank: reach rank 0, however long that takes. Returns the link, the welcome and this rank's own address.

    Raises `ConfigError` when rank 0 refuses.
    """
    sock = _connect(rendezvous)
    host = "127.0.0.1" if rendezvous.address is None else str(sock.getsockname()[0])
    link = _connection(sock)
    link.send_bytes(msgspec.msgpack.encode(Hello(rendezvous.info.rank, settings)))
    try:
        welcome = msgspec.msgpack.decode(link.recv_bytes(), type=Welcome)
    except (EOFError, OSError) as e:
        raise RankError("rank 0 is gone") from e
    if welcome.error:
        raise ConfigError(welcome.error)
    return link, welcome, host


def _refusal(hello: Hello, settings: dict[str, str], links: Mapping[int, Connection]) -> str:
    if hello.rank in links:
        return f"rank {hello.rank} came twice: give each host its own --node-rank"
    if different := sorted(
        k for k in settings.keys() | hello.settings.keys() if settings.get(k) != hello.settings.get(k)
    ):
        name = different[0]
        return (
            f"rank {hello.rank} has {name}={hello.settings.get(name)}, rank 0 has {settings.get(name)}; "
            "start all nodes with the same settings"
        )
    return ""


def _hear_hello(link: Connection) -> Hello | None:
    try:
        return msgspec.msgpack.decode(link.recv_bytes(MAX_HELLO), type=Hello) if link.poll(HELLO_S) else None
    except (EOFError, OSError, msgspec.MsgspecError):
        return None


def _listen(rendezvous: Rendezvous) -> socket.socket:
    if rendezvous.address is None:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(rendezvous.socket_path)
    else:
        listener = bind_tcp(*rendezvous.address)
    listener.listen(rendezvous.info.size)
    return listener


def bind_tcp(host: str, port: int) -> socket.socket:
    """A TCP socket bound to this one address; raises `ConfigError` when it cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as e:
        raise ConfigError(f"--dist-init-addr {host}: {e.strerror or e}") from e
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as e:
        sock.close()
        raise ConfigError(f"--dist-init-addr: cannot listen on {host} port {port}: {e.strerror or e}") from e
    return sock


def _connect(rendezvous: Rendezvous) -> socket.socket:
    while True:
        try:
            if rendezvous.address is not None:
                return socket.create_connection(rendezvous.address, timeout=HELLO_S)
            sock = socket.socket(socket.AF_UNIX)
            try:
                sock.connect(rendezvous.socket_path)
            except OSError:
                sock.close()
                raise
            return sock
        except OSError:  # rank 0 is not there yet; whoever started this process limits the wait
            time.sleep(POLL_S)


def _connection(sock: socket.socket) -> Connection:
    """Messages over a connected socket, which it takes over."""
    sock.settimeout(None)
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, seconds in KEEPALIVE.items():
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)
    return Connection(sock.detach())
