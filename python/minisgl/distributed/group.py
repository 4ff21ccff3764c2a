"""How the ranks meet: rank 0 listens, each other rank says hello, and rank 0 admits the expected ones.

On one host, the socket is a file in a private folder; between hosts, it is TCP at the given address. Once all ranks
have joined, the socket is closed.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Final

import msgspec
import torch
from torch.distributed import FileStore, TCPStore  # type: ignore[attr-defined]

from minisgl.core.errors import ConfigError, RankError
from minisgl.distributed.communicator import COMMUNICATORS, TIMEOUT, Communicator, SoloCommunicator, Store
from minisgl.distributed.control import PlanBus, PlanFeed
from minisgl.distributed.info import DistributedInfo, Rendezvous

POLL_S: Final = 0.05
HELLO_S: Final = 5.0
MAX_HELLO: Final = 65536
KEEPALIVE: Final = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}  # detects a lost host after 25 s


class Hello(msgspec.Struct, frozen=True):
    """The first message of a rank. All ranks must have been started with the same `settings`."""

    rank: int
    settings: dict[str, str]


class Welcome(msgspec.Struct, frozen=True):
    """The reply of rank 0: the location of the store for setting up collectives, or the reason for a refusal."""

    store: str | tuple[str, int] = ""
    error: str = ""


@dataclass(frozen=True)
class Group:
    """The ranks of one model. `host` is the address of this rank, `store` is shared by all ranks.

    Rank 0 publishes plans on `bus`. The other ranks receive them from their `feed`.
    """

    info: DistributedInfo
    host: str = ""
    store: Store | None = None
    bus: PlanBus = field(default_factory=PlanBus)
    feed: PlanFeed | None = None

    def communicator(self, device: torch.device, use_pynccl: bool) -> Communicator:
        """Create the collectives of this rank on `device`. Blocks until the other ranks do the same."""
        if self.store is None:
            assert self.info.size == 1, "the ranks have not met"
            return SoloCommunicator(self.info, device)
        create = COMMUNICATORS.resolve("auto", device.type, use_pynccl)
        comm = create(self.info, device, self.store, self.host)
        if comm.needs_abort:
            self.bus.watch(lambda rank: comm.close())  # or the running step would wait forever for the lost rank
        return comm


def meet(
    rendezvous: Rendezvous,
    settings: dict[str, str],
    is_checked: bool = False,
    check: Callable[[], None] = lambda: None,
) -> Group:
    """Block until all ranks have joined. Raises `ConfigError` if their `settings` differ.

    Rank 0 calls `check` repeatedly while it waits. With `is_checked`, it later sends digests of plans and results.
    """
    info = rendezvous.info
    if info.size == 1:
        return Group(info)
    if info.rank == 0:
        host, location, store = _make_store(rendezvous)
        links = _admit(rendezvous, settings, location, check)
        return Group(info, host, store, bus=PlanBus(links, is_checked))
    link, location, host = _join(rendezvous, settings)
    if isinstance(location, str):
        store = FileStore(location, info.size)
    else:
        store = TCPStore(*location, None, False, TIMEOUT)
    return Group(info, host, store, feed=PlanFeed(link))


def _make_store(rendezvous: Rendezvous) -> tuple[str, str | tuple[str, int], Store]:
    """Return the address of rank 0, the location of the store, and the store: a file, or a server between hosts."""
    if rendezvous.address is None:
        return "127.0.0.1", rendezvous.store_path, FileStore(rendezvous.store_path, rendezvous.info.size)
    host = rendezvous.address[0]
    sock = bind_tcp(host, 0)
    sock.listen()
    port = sock.getsockname()[1]
    # Without this socket, the store would listen at all addresses of the host.
    store = TCPStore(host, port, None, True, TIMEOUT, wait_for_workers=False, master_listen_fd=sock.detach())
    return host, (host, port), store


def _admit(
    rendezvous: Rendezvous, settings: dict[str, str], store: str | tuple[str, int], check: Callable[[], None]
) -> dict[int, Connection]:
    """Wait on rank 0 for all other ranks. `check` is called repeatedly, and raises if a rank has failed.

    Raises `ConfigError` for an unusable address, and for a rank with other settings.
    """
    links: dict[int, Connection] = {}
    with _listen(rendezvous) as listener:
        listener.settimeout(POLL_S)
        while len(links) < rendezvous.info.size - 1:
            check()
            with contextlib.suppress(TimeoutError):
                link = _connection(listener.accept()[0])
                hello = _receive_hello(link)
                if hello is None or not 0 < hello.rank < rendezvous.info.size:
                    link.close()  # not one of our ranks
                    continue
                if error := _refusal(hello, settings, links):
                    link.send_bytes(msgspec.msgpack.encode(Welcome(error=error)))
                    raise ConfigError(error)
                links[hello.rank] = link
    for link in links.values():
        link.send_bytes(msgspec.msgpack.encode(Welcome(store)))
    return dict(sorted(links.items()))


def _join(rendezvous: Rendezvous, settings: dict[str, str]) -> tuple[Connection, str | tuple[str, int], str]:
    """Wait on another rank for rank 0. Return the link, the store's location, and the address of this rank.

    Raises `ConfigError` if rank 0 refuses.
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
    return link, welcome.store, host


def _refusal(hello: Hello, settings: dict[str, str], links: Mapping[int, Connection]) -> str:
    if hello.rank in links:
        return f"two processes are rank {hello.rank}: give each host its own --node-rank"
    if different := sorted(
        k for k in settings.keys() | hello.settings.keys() if settings.get(k) != hello.settings.get(k)
    ):
        name = different[0]
        return (
            f"rank {hello.rank} has {name}={hello.settings.get(name)}, rank 0 has {settings.get(name)}; "
            "start all nodes with the same settings"
        )
    return ""


def _receive_hello(link: Connection) -> Hello | None:
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
    """Return a TCP socket bound to exactly this address. Raises `ConfigError` if the address is unusable."""
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
        except OSError:  # rank 0 does not listen yet; the parent process limits the wait
            time.sleep(POLL_S)


def _connection(sock: socket.socket) -> Connection:
    """Wrap a connected socket as a connection for messages, which takes over the socket."""
    sock.settimeout(None)
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, seconds in KEEPALIVE.items():
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)
    return Connection(sock.detach())
