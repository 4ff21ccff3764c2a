"""How the ranks find each other, and what they have then."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import torch
from torch.distributed import FileStore, TCPStore  # type: ignore[attr-defined]

from minisgl.distributed.communicator import TIMEOUT, Communicator, SoloCommunicator, Store, TorchCommunicator
from minisgl.distributed.handshake import bind_tcp, follow, lead
from minisgl.distributed.info import DistributedInfo
from minisgl.distributed.link import PlanBus, PlanFeed

if TYPE_CHECKING:
    from minisgl.distributed.info import Rendezvous

SIOCGIFADDR: Final = 0x8915  # linux/sockios.h


@dataclass(frozen=True)
class Group:
    """The ranks of one model: `host` is this one's address, `store` where they leave notes for each other.

    Rank 0 publishes on `bus` what the others hear from their `feed`.
    """

    info: DistributedInfo
    host: str = ""
    store: Store | None = None
    bus: PlanBus = field(default_factory=PlanBus)
    feed: PlanFeed | None = None

    def communicator(self, device: torch.device, use_pynccl: bool) -> Communicator:
        """This rank's collectives on `device`; waits for the other ranks to do the same."""
        if self.store is None:
            assert self.info.size == 1, "the ranks have not met"
            return SoloCommunicator(self.info, device)
        if device.type == "cuda":
            if interface := _interface(self.host):
                os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
            if use_pynccl:
                from minisgl.distributed.pynccl import PyNcclCommunicator

                comm = PyNcclCommunicator(self.info, device, self.store)
                self.bus.watch(lambda rank: comm.close())  # or the step under way would wait for it for ever
                return comm
        return TorchCommunicator(self.info, device, self.store, self.host)


def meet(
    rendezvous: Rendezvous,
    settings: dict[str, str],
    is_checked: bool = False,
    check: Callable[[], None] = lambda: None,
) -> Group:
    """Wait until all ranks have come, which must have the same `settings`.

    Rank 0 calls `check` now and then; `is_checked` makes it send digests of plans and results. Raises `ConfigError`.
    """
    info = rendezvous.info
    if info.size == 1:
        return Group(info)
    if info.rank == 0:
        host, place, store = _make_store(rendezvous)
        links = lead(rendezvous, settings, place, check)
        return Group(info, host, store, bus=PlanBus(links, is_checked))
    link, welcome, host = follow(rendezvous, settings)
    place = welcome.store
    if isinstance(place, str):
        store = FileStore(place, info.size)
    else:
        store = TCPStore(*place, None, False, TIMEOUT)
    return Group(info, host, store, feed=PlanFeed(link))


def _make_store(rendezvous: Rendezvous) -> tuple[str, str | tuple[str, int], Store]:
    """Rank 0's address, where the store is, and the store: a file on one host, else a server at rank 0's address."""
    if rendezvous.address is None:
        return "127.0.0.1", rendezvous.store_path, FileStore(rendezvous.store_path, rendezvous.info.size)
    host = rendezvous.address[0]
    sock = bind_tcp(host, 0)
    sock.listen()
    port = sock.getsockname()[1]
    # By itself the store would listen at every address of the host.
    store = TCPStore(host, port, None, True, TIMEOUT, wait_for_workers=False, master_listen_fd=sock.detach())
    return host, (host, port), store


def _interface(host: str) -> str:
    """The network interface that has the IPv4 address `host`, for NCCL to listen there only; "" = NCCL's choice."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(sock.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has no IPv4 address
                continue
            if socket.inet_ntoa(answer[20:24]) == host:
                return name
    return ""
