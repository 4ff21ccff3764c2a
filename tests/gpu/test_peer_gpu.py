"""The peer-to-peer all-reduce between GPUs of this host, each driven by a process."""

from __future__ import annotations

import multiprocessing as mp
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from support import peer_ranks

# Last passed: two NVIDIA H200s, torch 2.11.0+cu130, 2026-11-28.
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]


@pytest.mark.parametrize(
    "work", [peer_ranks.check_sizes, peer_ranks.check_replays, peer_ranks.check_measuring, peer_ranks.check_refusals]
)
def test_ranks(work: Callable[[int, int], None], tmp_path: Path):
    ranks, context = min(8, torch.cuda.device_count()), mp.get_context("spawn")
    workers = [context.Process(target=peer_ranks.join, args=(r, ranks, str(tmp_path), work)) for r in range(ranks)]
    try:
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(180)
        assert [worker.exitcode for worker in workers] == [0] * ranks
    finally:
        for worker in workers:
            worker.kill()
