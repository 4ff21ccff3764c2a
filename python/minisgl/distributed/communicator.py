"""Collectives over the ranks: the interface, the implementation for one rank, and those with torch (gloo and NCCL)."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol

import msgspec
import torch
from torch import Tensor

from minisgl.core.errors import RankError
from minisgl.core.registry import Registry
from minisgl.core.rounding import ceil_div

if TYPE_CHECKING:
    from minisgl.distributed.info import DistributedInfo

AddNorm = Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
"""The signature of `reference.add_rms_norm`."""
TIMEOUT: Final = timedelta(minutes=10)  # per collective; during the first one, ranks may still load weights
SIOCGIFADDR: Final = 0x8915  # linux/sockios.h


class Store(Protocol):
    """A key-value store that all ranks can reach, such as torch's FileStore and TCPStore."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes:
        """Return the value; block until the key has been set."""


class Communicator(ABC):
    """Collectives over all ranks: each rank makes the same calls in the same order, with tensors of the same shape.

    On a GPU, calls are ordered with the current stream and can be captured in CUDA graphs. Methods raise `RankError`
    when the loss of a rank is detected.
    """

    name: str
    is_nccl: ClassVar[bool] = False
    needs_abort: ClassVar[bool] = False  # collectives hang when a rank is lost, until `close` is called in a thread

    def __init__(self, info: DistributedInfo, device: torch.device) -> None:
        self.info = info
        self.device = device

    @abstractmethod
    def sum(self, x: Tensor) -> Tensor:
        """Return the sum over the ranks, bit-equal on all of them. May overwrite `x` with the sum."""

    @abstractmethod
    def all_gather(self, x: Tensor) -> Tensor:
        """Gather [...] to [ranks, ...]."""

    def sum_add_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, add_norm: AddNorm
    ) -> tuple[Tensor, Tensor]:
        """Apply `add_norm` to the sum of x [T, H] over the ranks and to `residual`, which is equal on all ranks.

        May overwrite `residual`.
        """
        return add_norm(self.sum(x), residual, weight, eps)

    @abstractmethod
    def close(self) -> None:
        """Leave the group without waiting for the other ranks."""

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return the `value` (of msgpack's types) of every rank, in rank order. Blocks until all ranks call this."""
        data = msgspec.msgpack.encode(value)
        sizes = self.all_gather_int(len(data))
        words = torch.zeros(ceil_div(max(sizes), 8), dtype=torch.int64)
        words.view(torch.uint8)[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        rows = self.all_gather(words.to(self.device)).cpu().view(torch.uint8)
        return [msgspec.msgpack.decode(row[:size].numpy().tobytes()) for row, size in zip(rows, sizes, strict=True)]

    def all_gather_int(self, value: int) -> list[int]:
        """Return the `value` of every rank, in rank order. Blocks until all ranks call this."""
        values: list[int] = (
            self.all_gather(torch.tensor([value], dtype=torch.int64, device=self.device)).view(-1).tolist()
        )
        return values


class SoloCommunicator(Communicator):
    """The collectives of a single rank."""

    name = "none"

    def sum(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x.unsqueeze(0)

    def close(self) -> None:
        pass


class TorchCommunicator(Communicator):
    """A process group of torch that belongs to this object and not to the process."""

    def __init__(self, info: DistributedInfo, device: torch.device, store: Store, host: str) -> None:
        """Block until all ranks have joined. `host` is the address of this rank."""
        super().__init__(info, device)
        try:
            self._group = self._join(store, host)
        except RuntimeError as e:
            raise RankError(f"the ranks cannot reach each other: {_first_line(e)}") from e

    @abstractmethod
    def _join(self, store: Store, host: str) -> Any:
        """Create the process group."""

    def sum(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        self._wait(self._group.allreduce, [x])
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        out = x.new_empty(self.info.size, *x.shape)
        self._wait(self._group._allgather_base, out.view(-1), x.contiguous().view(-1))
        return out

    def _wait(self, collective: Any, *args: Any) -> None:
        try:
            collective(*args).wait()
        except RuntimeError as e:
            raise RankError(f"rank {self.info.rank} has lost another rank: {_first_line(e)}") from e

    def close(self) -> None:
        self._group.abort()  # `shutdown` would wait for lost ranks


class GlooCommunicator(TorchCommunicator):
    """gloo, for ranks on CPUs."""

    name = "gloo"

    def _join(self, store: Store, host: str) -> Any:
        from torch.distributed import ProcessGroupGloo

        gloo: Any = ProcessGroupGloo
        options = gloo._Options()
        # By default, gloo listens at the address of the host's name.
        options._devices = [gloo.create_device(hostname=host)]
        options._timeout = TIMEOUT
        return gloo(store, self.info.rank, self.info.size, options)


class NcclCommunicator(TorchCommunicator):
    """NCCL through torch, for ranks on GPUs."""

    name = "nccl"
    is_nccl = True

    def _join(self, store: Store, host: str) -> Any:
        from torch import distributed as dist

        bind_nccl(host)
        nccl: Any = dist.ProcessGroupNCCL  # exists in CUDA builds only
        options = nccl.Options()
        options._timeout = TIMEOUT
        return nccl(store, self.info.rank, self.info.size, options)


def _requires(device_type: str, needs_pynccl: bool = False) -> Callable[[str, bool], str | None]:
    def refusal(given_type: str, use_pynccl: bool) -> str | None:
        if given_type != device_type:
            return f"needs device {device_type}, not {given_type}"
        return "--disable-pynccl was given" if needs_pynccl and not use_pynccl else None

    return refusal


# Chosen by (type of device, whether PyNCCL is allowed); constructed with (info, device, store, host).
COMMUNICATORS: Final[Registry[Callable[[DistributedInfo, torch.device, Store, str], Communicator]]] = Registry(
    "communicator"
)
COMMUNICATORS.add("pynccl", "minisgl.distributed.pynccl:PyNcclCommunicator", _requires("cuda", needs_pynccl=True))
COMMUNICATORS.add("nccl", "minisgl.distributed.communicator:NcclCommunicator", _requires("cuda"))
COMMUNICATORS.add("gloo", "minisgl.distributed.communicator:GlooCommunicator", _requires("cpu"))


def bind_nccl(host: str) -> None:
    """Restrict NCCL to the network interface with the IPv4 address `host`, unless the environment names another."""
    if interface := _interface(host):
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")


def _interface(host: str) -> str:
    """Return the name of the network interface with the IPv4 address `host`; "" if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(sock.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # an interface without an IPv4 address
                continue
            if socket.inet_ntoa(answer[20:24]) == host:
                return name
    return ""


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
