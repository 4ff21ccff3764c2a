"""What each rank does in `tests/gpu/test_peer_gpu.py`; here, because spawned processes import it."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor
from torch.distributed import FileStore

from minisgl.core.errors import ConfigError
from minisgl.distributed.communicator import Communicator, NcclCommunicator
from minisgl.distributed.info import DistributedInfo
from minisgl.distributed.peer import PeerAllReduce
from minisgl.kernels.triton.all_reduce import EMPTY, all_reduce
from minisgl.ops import reference

PATIENCE = 1 << 24  # polls, some ten seconds (estimated)
BF16 = torch.bfloat16


@cache
def comm() -> Communicator:
    """Of this process, which `join` has told its rank."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["RANKS"])
    store = FileStore(f"{os.environ['FOLDER']}/store", ranks)
    return NcclCommunicator(DistributedInfo(rank, ranks, ranks), torch.device("cuda", rank), store, "127.0.0.1")


def join(rank: int, ranks: int, folder: str, work: Callable[[int, int], None]) -> None:
    os.environ.update(RANK=str(rank), RANKS=str(ranks), FOLDER=folder)
    torch.cuda.set_device(rank)
    work(rank, ranks)
    torch.cuda.synchronize()
    comm().all_gather_int(0)


def peers(max_tokens: int, hidden: int, dtype: torch.dtype = BF16) -> PeerAllReduce:
    return PeerAllReduce(comm(), max_tokens, hidden, dtype, patience=PATIENCE)


def summed(parts: list[Tensor]) -> Tensor:
    """In float32, rank 0 first, rounded once."""
    total = torch.zeros_like(parts[0], dtype=torch.float32)
    for part in parts:
        total += part
    return total.to(parts[0].dtype)


def same_on_all_ranks(*tensors: Tensor) -> None:
    digest = hashlib.sha256(b"".join(t.view(torch.uint8).cpu().numpy().tobytes() for t in tensors)).digest()
    assert len(set(comm().all_gather_object(digest))) == 1, "ranks disagree"


def check_sizes(rank: int, ranks: int) -> None:
    for hidden, dtype in ((1024, torch.float16), (5120, BF16), (8192, BF16)):
        peer = peers(8192, hidden, dtype)
        torch.manual_seed(0)
        weight = torch.rand(hidden, device="cuda").to(dtype)
        for rows in (1, 2, 3, 16, 61, 300, 2048, 2049, 8192):
            parts = [torch.randn(rows, hidden, device="cuda").to(dtype) for _ in range(ranks)]
            start, total = torch.randn(rows, hidden, device="cuda").to(dtype), summed(parts)
            normed, new = reference.add_rms_norm(total, start, weight, 1e-6)
            for two_shot in (False, True):
                if not two_shot and rows > peer.inbox.part_rows:
                    continue
                got = all_reduce(parts[rank], peer.inbox, two_shot=two_shot, patience=PATIENCE)
                assert torch.equal(got, total), (hidden, rows, two_shot)
                residual = start.clone()
                norm = (residual, weight, 1e-6)
                got = all_reduce(parts[rank], peer.inbox, two_shot=two_shot, norm=norm, patience=PATIENCE)
                assert torch.equal(residual, new), (hidden, rows, two_shot)
                torch.testing.assert_close(got.float(), normed.float(), rtol=2e-2, atol=2e-2)
                same_on_all_ranks(got, residual)
        torch.cuda.synchronize()
        comm().all_gather_int(0)
        assert (peer.inbox.words == EMPTY).all()


def check_replays(rank: int, ranks: int) -> None:
    """Graphs of calls of both ways, replayed with new numbers while each rank dawdles as it likes."""
    hidden, most, replays = 1024, 96, 3000
    peer = peers(most, hidden)
    shared, own = random.Random(0), random.Random(rank + 1)
    sources = [torch.Generator("cuda").manual_seed(r) for r in range(ranks)]
    parts = [torch.empty(most, hidden, device="cuda", dtype=BF16) for _ in range(ranks)]
    weight, wrong = torch.ones(hidden, device="cuda", dtype=BF16), torch.zeros((), dtype=torch.int64, device="cuda")

    def step(calls: list[tuple[int, bool, bool]]) -> None:
        for rows, two_shot, is_normed in calls:
            expected = summed([part[:rows] for part in parts])
            torch.cuda._sleep(own.choice([1, 1, 20_000]))
            residual = torch.zeros_like(expected)
            norm = (residual, weight, 1e-6) if is_normed else None
            got = all_reduce(parts[rank][:rows], peer.inbox, two_shot=two_shot, norm=norm, patience=PATIENCE)
            wrong.add_(((residual if is_normed else got) != expected).sum())

    graphs = []
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for count in (3, 4):  # an odd number of calls too: the slot that a replay begins with changes
            calls = [
                (shared.choice([1, 1, 2, 7, most]), shared.random() < 0.5, shared.random() < 0.5) for _ in range(count)
            ]
            for part, source in zip(parts, sources, strict=True):
                part.normal_(generator=source)
            step(calls)
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(capture_error_mode="thread_local")
            step(calls)
            graph.capture_end()
            graphs.append(graph)
        for _ in range(replays):
            for part, source in zip(parts, sources, strict=True):
                part.normal_(generator=source)
            torch.cuda._sleep(own.choice([1, 1, 1, 100_000, 400_000]))
            shared.choice(graphs).replay()
        stream.synchronize()
    assert wrong.item() == 0, f"{wrong.item()} numbers are wrong"


def check_measuring(rank: int, ranks: int) -> None:
    """All follow rank 0's clock; then the graph of a call that was chosen so is right."""
    peer = peers(64, 1024)

    def slow(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
        torch.cuda._sleep(1_000_000)

    times = peer.measure(slow)
    assert sorted(times) == [1, 2, 4, 8, 16, 32, 64] and all(peer.supports(rows) for rows in times)
    assert len({str(choices) for choices in comm().all_gather_object([str(c) for c in peer.choices])}) == 1
    peer.measure(lambda x, residual, weight, eps: x.add_(0) if rank == 0 else torch.cuda._sleep(1_000_000))
    assert not peer.supports(64)
    x = torch.full((5, 1024), rank + 1.0, device="cuda", dtype=BF16)
    assert (peer.all_reduce(x) == ranks * (ranks + 1) / 2).all()
    normed, residual = peer.all_reduce_add_norm(x, torch.zeros_like(x), torch.ones_like(x[0]), 0.0)
    assert (residual == ranks * (ranks + 1) / 2).all() and (normed == 1).all()


def check_refusals(rank: int, ranks: int) -> None:
    for dtype, hidden in ((torch.float32, 1024), (BF16, 1020)):
        with pytest.raises(ConfigError, match="rank 0 needs"):
            peers(8, hidden, dtype)
