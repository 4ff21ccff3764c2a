"""The rank of this process, its shards, and where the ranks meet. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from minisgl.core.errors import ConfigError

if TYPE_CHECKING:
    from minisgl.settings.options import EngineConfig


@dataclass(frozen=True, slots=True)
class DistributedInfo:
    """Rank `rank` of `size`, with `local_size` ranks on each host; rank 0 schedules.

    The shards of all ranks, in rank order, make up the whole dimension.
    """

    rank: int = 0
    size: int = 1
    local_size: int = 1

    @property
    def local_rank(self) -> int:
        """The number of the rank on its host, which is also the index of its GPU."""
        return self.rank % self.local_size

    def shard(self, count: int, what: str) -> range:
        """Return this rank's equal shard of `count` units. Raises `ConfigError` if they do not divide evenly."""
        if count % self.size:
            raise ConfigError(f"{count} {what} cannot be divided among {self.size} ranks; give another --tp")
        each = count // self.size
        return range(each * self.rank, each * (self.rank + 1))

    def shard_or_replicate(self, count: int, what: str) -> range:
        """Return what `shard` does; if there are fewer units than ranks, adjacent ranks have the same unit."""
        if count >= self.size or self.size % count:
            return self.shard(count, what)
        index = self.rank * count // self.size
        return range(index, index + 1)

    def balanced_shard(self, count: int, rank: int | None = None) -> range:
        """Return this rank's (or `rank`'s) shard of `count` units. Sizes of shards differ by at most 1."""
        rank = self.rank if rank is None else rank
        return range(count * rank // self.size, count * (rank + 1) // self.size)


ALONE: Final = DistributedInfo()


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the ranks meet: a private folder if all ranks are on one host, else the address of rank 0."""

    info: DistributedInfo
    folder: str = ""
    address: tuple[str, int] | None = None

    @classmethod
    def of_local_ranks(cls, config: EngineConfig, folder: str) -> list[Rendezvous]:
        """Return the rendezvous of each rank on this host, in order. Raises `ConfigError` for impossible settings."""
        size, nodes, node = config.tp, config.nnodes, config.node_rank
        if size % nodes:
            raise ConfigError(f"--tp {size} ranks cannot be spread evenly over --nnodes {nodes} hosts")
        if node >= nodes:
            raise ConfigError(f"--node-rank {node} is not 0 to {nodes - 1}")
        if (nodes > 1) != bool(config.dist_init_addr):
            raise ConfigError("give --dist-init-addr HOST:PORT on all hosts if --nnodes is 2 or more, else not at all")
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
    """Split "host:port" into (host, port). Raises `ConfigError` for anything else."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"--dist-init-addr {text!r} is not HOST:PORT, the address of node 0")
    return host.strip("[]"), int(port)
