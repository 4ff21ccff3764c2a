"""All-reduce between the GPUs of one host through peer memory: its setup, and the choice of an algorithm by size.

Memory is shared through CUDA IPC handles, as torch does it for tensors. (torch's symmetric memory, still alpha, creates
NVLink multicast objects by default; this module needs none.)
"""

from __future__ import annotations

import logging
import os
import statistics
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from minisgl.core.errors import ConfigError
from minisgl.core.rounding import ceil_div
from minisgl.distributed.communicator import AddNorm, Communicator
from minisgl.kernels.triton.all_reduce import DTYPES, MAX_RANKS, PATIENCE, Inbox, all_reduce

if TYPE_CHECKING:
    from minisgl.ops.table import OpTable

_log = logging.getLogger("minisgl.distributed")

DEVICE_TYPES: Final = ("cuda",)
MAX_TOKENS: Final = 2048  # beyond this, NCCL is as fast or faster on 2 and 4 H200s
ONE_SHOT_ROWS: Final = 512  # capacity of an inbox for one shot, even if two shots would need less
UNMEASURED_ONE_SHOT_ROWS: Final = 64
TIMED_CALLS: Final = 20  # per graph
TIMED_REPLAYS: Final = 5  # of two replays each; the median counts
ONE_SHOT: Final = "one shot"
TWO_SHOTS: Final = "two shots"
OTHER: Final = "other"


@dataclass(frozen=True, slots=True)
class Choice:
    """The algorithm for up to `rows` rows: one shot or two; if not `is_own`, the other communicator."""

    rows: int
    two_shot: bool
    is_own: bool


def choices(times: Mapping[int, Mapping[str, float]]) -> tuple[Choice, ...]:
    """Return the fastest algorithm up to each measured size. `times` are in us, by rows and algorithm."""
    best = []
    for rows, by_algorithm in sorted(times.items()):
        fastest = min((name for name in by_algorithm if name != OTHER), key=by_algorithm.__getitem__)
        best.append(Choice(rows, fastest == TWO_SHOTS, by_algorithm[fastest] <= by_algorithm[OTHER]))
    return tuple(best)


class PeerAllReduce:
    """Sums [tokens, hidden] over the ranks of `comm`, each on a GPU of one host that can access the others' memory.

    All methods except `supports` are collective: all ranks make the same calls in the same order, each in one stream.
    CUDA graphs can capture the calls. Results are bit-equal on all ranks, with either algorithm. The constructor raises
    `ConfigError` on all ranks if the GPUs, their number or the shape do not allow this.
    """

    def __init__(
        self, comm: Communicator, max_tokens: int, hidden: int, dtype: torch.dtype, *, patience: int = PATIENCE
    ) -> None:
        device = comm.device
        self.comm = comm
        self.ranks = comm.info.size
        self.rank = comm.info.rank
        self.device = device
        self.max_tokens = max_tokens
        self.hidden = hidden
        self.dtype = dtype
        self._patience = patience
        one_shot_rows = max(ceil_div(max_tokens, self.ranks), min(max_tokens, ONE_SHOT_ROWS))
        self._peers: list[torch.UntypedStorage] = []  # keeps the other ranks' inboxes mapped
        refusal = self._refusal()
        words, handles = torch.empty(0, dtype=torch.int32), []
        try:
            if refusal is None:
                words = Inbox.empty(self.ranks, one_shot_rows, max_tokens, hidden, device)
                torch.cuda.synchronize(device)
                # Make one for each reader: handles are counted, and memory with an unopened handle is never freed.
                handles = [() if rank == self.rank else _handle(words) for rank in range(self.ranks)]
        except RuntimeError as error:  # out of memory, or an allocator that cannot share
            refusal = _first_line(error)
        reports = comm.all_gather_object((os.uname().nodename, refusal, handles))
        if len({host for host, _, _ in reports}) > 1:
            raise ConfigError("peer-to-peer all-reduce: the ranks are on several hosts")
        self._require_none([refusal for _, refusal, _ in reports])
        try:
            for rank, (_, _, handles) in enumerate(reports):
                self._peers.append(
                    words.untyped_storage() if rank == self.rank else _open(handles[self.rank], words.device)
                )
        except RuntimeError as error:
            refusal = f"cannot reach the memory of rank {len(self._peers)}: {_first_line(error)}"
        self._require_none(comm.all_gather_object(refusal))
        addresses = torch.tensor([peer.data_ptr() for peer in self._peers], dtype=torch.int64, device=device)
        self.inbox = Inbox(words, addresses, torch.zeros(2, dtype=torch.int32, device=device), self.rank, one_shot_rows)
        self.choices: tuple[Choice, ...] = (
            Choice(min(max_tokens, UNMEASURED_ONE_SHOT_ROWS), two_shot=False, is_own=True),
            Choice(max_tokens, two_shot=True, is_own=True),
        )

    def _refusal(self) -> str | None:
        if not 2 <= self.ranks <= MAX_RANKS:
            return f"needs 2 to {MAX_RANKS} ranks, not {self.ranks}"
        if self.dtype not in DTYPES:
            return f"needs bfloat16 or float16, not {self.dtype}"
        if self.hidden % 8:
            return f"needs rows of whole 16 bytes, not {self.hidden} numbers"
        return None if self.device.type in DEVICE_TYPES else f"needs NVIDIA GPUs, not {self.device.type}"

    def _require_none(self, refusals: list[str | None]) -> None:
        for rank, refusal in enumerate(refusals):
            if refusal is not None:
                raise ConfigError(f"peer-to-peer all-reduce: rank {rank} {refusal}")

    # -- use

    def supports(self, rows: int) -> bool:
        """Return whether `rows` rows fit, and the other communicator is not faster for them."""
        return rows <= self.max_tokens and self._choice(rows).is_own

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' x [T, hidden], with T <= `max_tokens`, as a new tensor."""
        return self._run(x, self._choice(len(x)).two_shot, None)

    def all_reduce_add_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Apply `reference.add_rms_norm` to the sum of all ranks' x [T, hidden], with T <= `max_tokens`.

        `residual` [T, hidden] is equal on all ranks; it is overwritten and returned. weight is [hidden].
        """
        return self._run(x, self._choice(len(x)).two_shot, (residual, weight, eps)), residual

    def _choice(self, rows: int) -> Choice:
        """Return the choice for the smallest measured size >= rows."""
        assert rows <= self.max_tokens, f"an all-reduce of {rows} rows exceeds {self.max_tokens}"
        return self.choices[bisect_left(self.choices, rows, key=lambda choice: choice.rows)]

    def _run(self, x: Tensor, two_shot: bool, norm: tuple[Tensor, Tensor, float] | None) -> Tensor:
        return all_reduce(x.contiguous(), self.inbox, two_shot=two_shot, norm=norm, patience=self._patience)

    def close(self) -> None:
        """Unmap the other ranks' memory, which lets those ranks free it."""
        self._peers.clear()

    # -- measuring

    def measure(self, other: Callable[[Tensor, Tensor, Tensor, float], object]) -> dict[int, dict[str, float]]:
        """Time both algorithms and `other`, which does the same as `all_reduce_add_norm`; then use the fastest.

        Return the times in us by rows (powers of two, and `max_tokens`) and algorithm, measured by rank 0 in CUDA
        graphs. All ranks use rank 0's times.
        """
        times: dict[int, dict[str, float]] = {}
        for rows in sorted({self.max_tokens, *(1 << i for i in range(self.max_tokens.bit_length()))}):
            x = torch.randn(rows, self.hidden, device=self.device).to(self.dtype)
            residual, weight = torch.zeros_like(x), torch.ones_like(x[0])
            norm = (residual, weight, 1e-6)
            algorithms: dict[str, Callable[[], object]] = {
                TWO_SHOTS: partial(self._run, x, True, norm),
                OTHER: partial(other, x, *norm),
            }
            if rows <= self.inbox.part_rows:
                algorithms[ONE_SHOT] = partial(self._run, x, False, norm)
            times[rows] = {name: graph_us(call, self.comm) for name, call in algorithms.items()}
        times = self.comm.all_gather_object(times)[0]
        self.choices = choices(times)
        return times


def _first_line(error: RuntimeError) -> str:
    return str(error).splitlines()[0]


def _handle(words: Tensor) -> tuple[Any, ...]:
    """Return a handle with which another process can map this memory."""
    storage: Any = words.untyped_storage()
    return tuple(storage._share_cuda_())


def _open(handle: tuple[Any, ...], device: torch.device) -> torch.UntypedStorage:
    """Map the memory behind another process's handle for `device`.

    The first item of a handle is its owner's device. The last item says whether to wait for an event of the owner's
    stream; this is not needed, because the owner synchronised before it sent the handle.
    """
    return torch.UntypedStorage._new_shared_cuda(device.index, *handle[1:-1], False)


def graph_us(call: Callable[[], object], comm: Communicator) -> float:
    """Return the median us of one `call`, captured several times in a CUDA graph that all ranks of `comm` replay."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.inference_mode(), torch.cuda.stream(stream):
        call()  # compiles
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Thread-local: NCCL's watchdog thread queries events, which a global capture forbids to all threads.
        graph.capture_begin(capture_error_mode="thread_local")
        for _ in range(TIMED_CALLS):
            call()
        graph.capture_end()
        graph.replay()
        stream.synchronize()
        times: list[float] = []
        for _ in range(TIMED_REPLAYS):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            comm.all_gather_int(0)  # wait for the other ranks
            graph.replay()  # the collectives align the GPUs more closely than the hosts are
            start.record()
            graph.replay()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / (2 * TIMED_CALLS))
    return statistics.median(times)


class PeerCommunicator(Communicator):
    """`comm` with all-reduces through peer memory, for sizes where that is faster."""

    def __init__(self, comm: Communicator, peers: PeerAllReduce) -> None:
        super().__init__(comm.info, comm.device)
        self.name = f"peers and {comm.name}"
        self._comm, self._peers = comm, peers

    def sum(self, x: Tensor) -> Tensor:
        return self._peers.all_reduce(x) if self._is_supported(x) else self._comm.sum(x)

    def sum_add_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, add_norm: AddNorm
    ) -> tuple[Tensor, Tensor]:
        if self._is_supported(x) and weight.dtype is x.dtype:
            return self._peers.all_reduce_add_norm(x, residual, weight, eps)
        return self._comm.sum_add_norm(x, residual, weight, eps, add_norm)

    def all_gather(self, x: Tensor) -> Tensor:
        return self._comm.all_gather(x)

    def close(self) -> None:
        self._peers.close()
        self._comm.close()

    def _is_supported(self, x: Tensor) -> bool:
        return x.shape[1:] == (self._peers.hidden,) and x.dtype is self._peers.dtype and self._peers.supports(len(x))


def with_peers(comm: Communicator, max_tokens: int, hidden: int, dtype: torch.dtype, ops: OpTable) -> Communicator:
    """Return `comm` with a `PeerAllReduce`, which is measured against it; `comm` itself if the GPUs do not allow it."""
    try:
        peers = PeerAllReduce(comm, min(max_tokens, MAX_TOKENS), hidden, dtype)
    except ConfigError as e:
        if comm.info.rank == 0:
            _log.info("all-reduces use %s only; %s", comm.name, e)
        return comm

    def other(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> object:
        return ops.add_rms_norm(comm.sum(x), residual, weight, eps)

    times = peers.measure(other)
    if comm.info.rank == 0:
        _log.debug("all-reduce + add + norm, us by rows: %s", times)
    return PeerCommunicator(comm, peers)
