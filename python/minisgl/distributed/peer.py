"""All-reduce among the GPUs of one host through each other's memory: set-up, and which way for which size.

Memory is shared by CUDA IPC handles, as torch shares tensors between processes. (Its symmetric memory, still alpha,
creates NVLink multicast objects unless told not to; nothing here needs them.)
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

from minisgl.distributed.communicator import AddNorm, Communicator
from minisgl.errors import ConfigError
from minisgl.triton.peer import DTYPES, MAX_RANKS, PATIENCE, Inbox, all_reduce

if TYPE_CHECKING:
    from minisgl.ops.table import OpTable

_log = logging.getLogger("minisgl.distributed")

MAX_TOKENS: Final = 2048  # beyond, NCCL is as fast or faster on 2 and 4 H200s
ONE_SHOT_ROWS: Final = 512  # that an inbox takes in one shot even where a smaller one would do for two shots
UNMEASURED_ONE_SHOT_ROWS: Final = 64
TIMED_CALLS: Final = 20  # in one graph
ONE_SHOT, TWO_SHOTS, OTHER = WAYS = ("one shot", "two shots", "other")


@dataclass(frozen=True, slots=True)
class Choice:
    """For messages of up to `rows` rows: the better of the own ways, and whether another one is better still."""

    rows: int
    two_shot: bool
    is_own: bool


def choices(times: Mapping[int, Mapping[str, float]]) -> tuple[Choice, ...]:
    """From us by rows and way (WAYS; one shot is not for all sizes) to what to do up to each size measured."""
    best = []
    for rows, by_way in sorted(times.items()):
        own = min((way for way in by_way if way != OTHER), key=by_way.__getitem__)
        best.append(Choice(rows, own == TWO_SHOTS, by_way[own] <= by_way[OTHER]))
    return tuple(best)


class PeerAllReduce:
    """Sums [tokens, hidden] over the ranks of `comm`, each on its own GPU of one host that reaches the others'.

    Everything but `takes` is collective: all ranks make the same calls in the same order, in one stream each. Calls can
    be captured in CUDA graphs. All ranks get bit-equal results, whichever way a message goes.
    Raises `ConfigError`, on all ranks alike, where this cannot work.
    """

    def __init__(
        self, comm: Communicator, max_tokens: int, hidden: int, dtype: torch.dtype, *, patience: int = PATIENCE
    ) -> None:
        self.comm, self.ranks, self.rank, device = comm, comm.info.size, comm.info.rank, comm.device
        self.max_tokens, self.hidden, self.dtype, self.device = max_tokens, hidden, dtype, device
        self._patience = patience
        one_shot_rows = max(-(-max_tokens // self.ranks), min(max_tokens, ONE_SHOT_ROWS))
        self._peers: list[torch.UntypedStorage] = []  # keeps the other ranks' inboxes mapped
        refusal = self._refusal()
        words, handles = torch.empty(0, dtype=torch.int32), []
        try:
            if refusal is None:
                words = Inbox.empty(self.ranks, one_shot_rows, max_tokens, hidden, device)
                torch.cuda.synchronize(device)
                # One for each reader: they are counted, and one that nobody opens would never be given back.
                handles = [() if rank == self.rank else _handle(words) for rank in range(self.ranks)]
        except RuntimeError as error:  # out of memory, or an allocator that cannot share
            refusal = _first_line(error)
        told = comm.all_gather_object((os.uname().nodename, refusal, handles))
        if len({host for host, _, _ in told}) > 1:
            raise ConfigError("peer-to-peer all-reduce: the ranks are on several hosts")
        self._agree([refusal for _, refusal, _ in told])
        try:
            for rank, (_, _, handles) in enumerate(told):
                self._peers.append(
                    words.untyped_storage() if rank == self.rank else _open(handles[self.rank], words.device)
                )
        except RuntimeError as error:
            refusal = f"cannot reach the memory of rank {len(self._peers)}: {_first_line(error)}"
        self._agree(comm.all_gather_object(refusal))
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
        return None if self.device.type == "cuda" else f"needs NVIDIA GPUs, not {self.device.type}"

    def _agree(self, refusals: list[str | None]) -> None:
        for rank, refusal in enumerate(refusals):
            if refusal is not None:
                raise ConfigError(f"peer-to-peer all-reduce: rank {rank} {refusal}")

    # -- use

    def takes(self, rows: int) -> bool:
        """Whether this is the way for `rows` rows: they fit, and no other way was measured to be faster."""
        return rows <= self.max_tokens and self._choice(rows).is_own

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x [T, hidden], T at most `max_tokens`; a new tensor."""
        return self._run(x, self._choice(len(x)).two_shot, None)

    def all_reduce_add_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """`reference.add_rms_norm` of the sum of all ranks' x [T, hidden], T at most `max_tokens`.

        `residual` [T, hidden], the same on all ranks, is overwritten and returned; weight [hidden].
        """
        return self._run(x, self._choice(len(x)).two_shot, (residual, weight, eps)), residual

    def _choice(self, rows: int) -> Choice:
        """That of the smallest size listed that has so many rows."""
        assert rows <= self.max_tokens, f"an all-reduce of {rows} rows, made for {self.max_tokens}"
        return self.choices[bisect_left(self.choices, rows, key=lambda choice: choice.rows)]

    def _run(self, x: Tensor, two_shot: bool, norm: tuple[Tensor, Tensor, float] | None) -> Tensor:
        return all_reduce(x.contiguous(), self.inbox, two_shot=two_shot, norm=norm, patience=self._patience)

    def close(self) -> None:
        """Let go of the other ranks' memory, which they can only free then."""
        self._peers.clear()

    # -- measuring

    def measure(self, other: Callable[[Tensor, Tensor, Tensor, float], object]) -> dict[int, dict[str, float]]:
        """Time both ways and `other`, which does the same as `all_reduce_add_norm`; keep and return what was found.

        us by rows (powers of two, and `max_tokens`) and way (WAYS), as rank 0 saw them, calls captured in graphs. All
        ranks follow rank 0.
        """
        times: dict[int, dict[str, float]] = {}
        for rows in sorted({self.max_tokens, *(1 << i for i in range(self.max_tokens.bit_length()))}):
            x = torch.randn(rows, self.hidden, device=self.device).to(self.dtype)
            residual, weight = torch.zeros_like(x), torch.ones_like(x[0])
            norm = (residual, weight, 1e-6)
            ways: dict[str, Callable[[], object]] = {
                TWO_SHOTS: partial(self._run, x, True, norm),
                OTHER: partial(other, x, *norm),
            }
            if rows <= self.inbox.part_rows:
                ways[ONE_SHOT] = partial(self._run, x, False, norm)
            times[rows] = {way: graph_us(call, self.comm) for way, call in ways.items()}
        times = self.comm.all_gather_object(times)[0]
        self.choices = choices(times)
        return times


def _first_line(error: RuntimeError) -> str:
    return str(error).splitlines()[0]


def _handle(words: Tensor) -> tuple[Any, ...]:
    """What another process needs to map this memory, in picklable form."""
    storage: Any = words.untyped_storage()
    return tuple(storage._share_cuda_())


def _open(handle: tuple[Any, ...], device: torch.device) -> torch.UntypedStorage:
    """The memory behind another process's handle, mapped for `device`.

    A handle begins with its owner's device and ends with whether to wait for an event of its owner's stream; here the
    owner has waited before it gave the handle away.
    """
    return torch.UntypedStorage._new_shared_cuda(device.index, *handle[1:-1], False)


def graph_us(call: Callable[[], object], comm: Communicator, calls: int = TIMED_CALLS, repeats: int = 5) -> float:
    """Median microseconds of `call` as one of `calls` in a CUDA graph, which all ranks of `comm` replay."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.inference_mode(), torch.cuda.stream(stream):
        call()  # compiles
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Thread-local: NCCL's watchdog asks for events meanwhile, which a global capture forbids to all threads.
        graph.capture_begin(capture_error_mode="thread_local")
        for _ in range(calls):
            call()
        graph.capture_end()
        graph.replay()
        stream.synchronize()
        times: list[float] = []
        for _ in range(repeats):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            comm.all_gather_int(0)  # wait for the others
            graph.replay()  # a call that waits for the others brings the GPUs closer together than the hosts are
            start.record()
            graph.replay()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / (2 * calls))
    return statistics.median(times)


class PeerCommunicator(Communicator):
    """`comm`, but with the ranks' own way through each other's memory for the sums that it is faster for."""

    def __init__(self, comm: Communicator, peers: PeerAllReduce) -> None:
        super().__init__(comm.info, comm.device)
        self.name = f"peers and {comm.name}"
        self._comm, self._peers = comm, peers

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._peers.all_reduce(x) if self._takes(x) else self._comm.all_reduce(x)

    def all_reduce_add_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, add_norm: AddNorm
    ) -> tuple[Tensor, Tensor]:
        if self._takes(x) and weight.dtype is x.dtype:
            return self._peers.all_reduce_add_norm(x, residual, weight, eps)
        return self._comm.all_reduce_add_norm(x, residual, weight, eps, add_norm)

    def all_gather(self, x: Tensor) -> Tensor:
        return self._comm.all_gather(x)

    def close(self) -> None:
        self._peers.close()
        self._comm.close()

    def _takes(self, x: Tensor) -> bool:
        return x.shape[1:] == (self._peers.hidden,) and x.dtype is self._peers.dtype and self._peers.takes(len(x))


def with_peers(comm: Communicator, max_tokens: int, hidden: int, dtype: torch.dtype, ops: OpTable) -> Communicator:
    """`comm` with a `PeerAllReduce` measured against it where the ranks' GPUs allow one, else `comm` itself."""
    try:
        peers = PeerAllReduce(comm, min(max_tokens, MAX_TOKENS), hidden, dtype)
    except ConfigError as e:
        if comm.info.rank == 0:
            _log.info("sums over ranks all go through %s; %s", comm.name, e)
        return comm

    def other(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> object:
        return ops.add_rms_norm(comm.all_reduce(x), residual, weight, eps)

    times = peers.measure(other)
    if comm.info.rank == 0:
        _log.debug("all-reduce + add + norm, us by rows: %s", times)
    return PeerCommunicator(comm, peers)
