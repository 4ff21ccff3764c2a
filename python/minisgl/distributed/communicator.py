"""What the ranks exchange: tensors on their way through a step, and a few numbers at the start."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec
import torch
from torch import Tensor

from minisgl.errors import RankError

if TYPE_CHECKING:
    from minisgl.distributed.info import DistributedInfo

AddNorm = Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
"""`reference.add_rms_norm`."""
TIMEOUT: Final = timedelta(minutes=10)  # of one exchange: the slowest is the first, in which ranks wait for weights


class Store(Protocol):
    """Where ranks leave notes for each other; torch's stores are some."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes:
        """Waits until it has been set."""


class Communicator(ABC):
    """Collectives over all ranks: each calls the same ones in the same order, with tensors of the same shape.

    On a GPU they are ordered with the current stream and can be captured. Raises `RankError` when a rank is gone, as
    far as that can be told.
    """

    name: str

    def __init__(self, info: DistributedInfo, device: torch.device) -> None:
        self.info = info
        self.device = device

    @abstractmethod
    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over the ranks, bit for bit the same on all; `x` may be overwritten with it."""

    @abstractmethod
    def all_gather(self, x: Tensor) -> Tensor:
        """[...] -> [ranks, ...]."""

    def all_reduce_add_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, add_norm: AddNorm
    ) -> tuple[Tensor, Tensor]:
        """`add_norm` of the sum over the ranks of x [T, H]; `residual` is the same on all and may be overwritten."""
        return add_norm(self.all_reduce(x), residual, weight, eps)

    @abstractmethod
    def close(self) -> None:
        """Leave the group."""

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's `value`, in order, of types that msgpack has; waits for all of them."""
        data = msgspec.msgpack.encode(value)
        sizes = self.all_gather_int(len(data))
        words = torch.zeros(-(-max(sizes) // 8), dtype=torch.int64)
        words.view(torch.uint8)[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        rows = self.all_gather(words.to(self.device)).cpu().view(torch.uint8)
        return [msgspec.msgpack.decode(row[:size].numpy().tobytes()) for row, size in zip(rows, sizes, strict=True)]

    def all_gather_int(self, value: int) -> list[int]:
        """Every rank's `value`, in order; waits for all of them."""
        values: list[int] = (
            self.all_gather(torch.tensor([value], dtype=torch.int64, device=self.device)).view(-1).tolist()
        )
        return values


class SoloCommunicator(Communicator):
    """One rank: nothing to exchange."""

    name = "none"

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x.unsqueeze(0)

    def close(self) -> None:
        pass


class TorchCommunicator(Communicator):
    """gloo on a CPU, NCCL on a GPU, by a process group of torch that is this object's own, not the process's."""

    def __init__(self, info: DistributedInfo, device: torch.device, store: Store, host: str) -> None:
        """`host` is the address at which gloo listens. Waits until all ranks are there."""
        super().__init__(info, device)
        self.name = "nccl" if device.type == "cuda" else "gloo"
        try:
            self._group = _nccl_group(info, store) if device.type == "cuda" else _gloo_group(info, store, host)
        except RuntimeError as e:
            raise RankError(f"the ranks cannot reach each other: {_first_line(e)}") from e

    def all_reduce(self, x: Tensor) -> Tensor:
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
            raise RankError(f"rank {self.info.rank} has lost another one: {_first_line(e)}") from e

    def close(self) -> None:
        self._group.abort()  # `shutdown` would wait for ranks that are gone


def _gloo_group(info: DistributedInfo, store: Store, host: str) -> Any:
    from torch.distributed import ProcessGroupGloo

    gloo: Any = ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=host)]  # else it listens where the host's name leads
    options._timeout = TIMEOUT
    return gloo(store, info.rank, info.size, options)


def _nccl_group(info: DistributedInfo, store: Store) -> Any:
    from torch import distributed as dist

    nccl: Any = dist.ProcessGroupNCCL  # only builds for CUDA have it
    options = nccl.Options()
    options._timeout = TIMEOUT
    return nccl(store, info.rank, info.size, options)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
