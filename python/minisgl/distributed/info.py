"""Which rank this process is, what its share of a model is, and where the ranks meet. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from minisgl.errors import ConfigError

if TYPE_CHECKING:
    from minisgl.settings.config import EngineConfig


@dataclass(frozen=True, slots=True)
class DistributedInfo:
    """Rank `rank` of `size`, of which `local_size` are on each host; rank 0 is the one that schedules.

    The shares of all ranks together are everything, in the order of the ranks.
    """

    rank: int = 0
    size: int = 1
    local_size: int = 1

    @property
    def local_rank(self) -> int:
        """Its number on its host, which is also that of its GPU."""
        return self.rank % self.local_size

    def shard(self, count: int, what: str) -> range:
        """This rank's part of `count` things, as many for each; raises `ConfigError` when they do not divide."""
        if count % self.size:
            raise ConfigError(f"{count} {what} cannot be divided among {self.size} ranks; give another --tp")
        each = count // self.size
        return range(each * self.rank, each * (self.rank + 1))

    def shard_or_replicate(self, count: int, what: str) -> range:
        """As `share`, but where there are fewer things than ranks, neighbouring ranks have the same one."""
        if count >= self.size or self.size % count:
            return self.shard(count, what)
        own = self.rank * count // self.size
        return range(own, own + 1)

    def balanced_shard(self, count: int, rank: int | None = None) -> range:
        """This rank's (or another `rank`'s) part of `count` things that need not divide: sizes differ by at most 1."""
        rank = self.rank if rank is None else rank
        return range(count * rank // self.size, count * (rank + 1) // self.size)


ALONE: Final = DistributedInfo()


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the ranks meet: a folder that only this user can enter when all are on one host, else rank 0's address."""

    info: DistributedInfo
    folder: str = ""
    address: tuple[str, int] | None = None

    @classmethod
    def of_local_ranks(cls, config: EngineConfig, folder: str) -> list[Rendezvous]:
        """Those of the ranks on this host, in order; raises `ConfigError` for settings that cannot work."""
        size, nodes, node = config.tp, config.nnodes, config.node_rank
        if size < 1 or nodes < 1 or size % nodes:
            raise ConfigError(f"--tp {size} ranks cannot be on --nnodes {nodes} hosts, as many on each")
        if not 0 <= node < nodes:
            raise ConfigError(f"--node-rank {node} is not 0 to {nodes - 1}")
        if (nodes > 1) != bool(config.dist_init_addr):
            raise ConfigError("--dist-init-addr HOST:PORT goes with --nnodes 2 or more, on all of them")
        address = parse_address(config.dist_init_addr) if nodes > 1 else None
        each = size // nodes
        return [cls(DistributedInfo(r, size, each), folder, address) for r in range(each * node, each * (node + 1))]

    @property
    def socket_path(self) -> str:
        return f"{self.folder}/ranks"

    @property
    def store_path(self) -> str:
        return f"{self.folder}/store"


def parse_address(text: str) -> tuple[str, int]:
    """ "host:port" -> (host, port); raises `ConfigError`."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"--dist-init-addr {text!r} is not HOST:PORT, the address of node 0")
    return host.strip("[]"), int(port)
