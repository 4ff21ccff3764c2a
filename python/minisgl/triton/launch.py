"""What all launchers share: whether kernels run for real, programmatic dependent launch, counters."""

from __future__ import annotations

import os
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

INTERPRETED: Final = os.environ.get("TRITON_INTERPRET") == "1"  # Triton reads it when it is first imported
COUNTERS: Final = 1 << 14

_PLAIN: Final[dict[str, Any]] = {"PDL": False}
_CHAINED: Final[dict[str, Any]] = {"PDL": True, "launch_pdl": True}
_counters: dict[tuple[torch.device, int, int], Tensor] = {}


@cache
def has_pdl(device: torch.device) -> bool:
    """Whether a kernel may start before its predecessor in the stream has ended (sm_90 and later)."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


def chained(device: torch.device) -> dict[str, Any]:
    """Launch options of a kernel in the chain of a one-row step, or of one op; it takes `PDL: tl.constexpr`.

    With PDL such a kernel first calls `gdc_launch_dependents`, may then read what no kernel of the step writes
    (weights), and calls `gdc_wait` before anything else. All of them must wait: a kernel's end stands for the end of
    all before it only when it has itself waited for its predecessor.
    """
    return _CHAINED if has_pdl(device) else _PLAIN


def counters(device: torch.device, idle: int = 0, stride: int = 1) -> Tensor:
    """COUNTERS int32, every `stride`-th of them in use, that hold `idle` between kernels.

    For kernels whose last program to arrive does the rest; it restores them. All such kernels share them, which is
    sound in one stream.
    """
    found = _counters.get((device, idle, stride))
    if found is None:
        # Made during a capture, they would be filled at replay only and live in the graph's memory.
        assert device.type != "cuda" or not torch.cuda.is_current_stream_capturing(), "run once before capturing"
        found = torch.full((COUNTERS * stride,), idle, dtype=torch.int32, device=device)
        _counters[device, idle, stride] = found
    return found
