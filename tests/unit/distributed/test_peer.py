"""The choice of a way for each size, and who is refused. The kernels: tests/interpreter, tests/gpu."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from minisgl.core.errors import ConfigError
from minisgl.distributed.communicator import SoloCommunicator
from minisgl.distributed.info import ALONE
from minisgl.distributed.peer import Choice, PeerAllReduce, choices


def test_fastest_algorithm_is_chosen_for_each_size():
    found = choices(
        {
            64: {"one shot": 9.0, "two shots": 8.0, "other": 8.0},
            1: {"one shot": 4.0, "two shots": 6.0, "other": 12.0},
            8: {"two shots": 6.0, "other": 5.0},
        }
    )
    assert found == (
        Choice(1, two_shot=False, is_own=True),
        Choice(8, two_shot=True, is_own=False),
        Choice(64, two_shot=True, is_own=True),
    )


def test_peer_all_reduce_refuses_unsupported_ranks():
    comm = SoloCommunicator(ALONE, torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"rank 0 needs 2 to 8 ranks, not 1$"):
        PeerAllReduce(comm, 8, 1024, torch.bfloat16)
