"""Ranks as threads of one process, with real gloo between them: enough for what is not about processes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch.distributed import HashStore

from minisgl.distributed.communicator import Communicator, GlooCommunicator
from minisgl.distributed.info import DistributedInfo

T = TypeVar("T")


def run_ranks(size: int, work: Callable[[Communicator], T]) -> list[T]:
    """What `work` returns on each rank. A rank that fails closes its group, which ends the others."""
    store = HashStore()

    def run(rank: int) -> T:
        info = DistributedInfo(rank, size, size)
        comm = GlooCommunicator(info, torch.device("cpu"), store, "127.0.0.1")
        try:
            return work(comm)
        finally:
            comm.close()

    with ThreadPoolExecutor(size) as pool:
        return [future.result() for future in [pool.submit(run, rank) for rank in range(size)]]
