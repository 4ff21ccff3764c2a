"""Slots and seeds as host integers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from minisgl.core import BatchPlan, SeqSlot

if TYPE_CHECKING:
    from minisgl.core import Ints


def noise_key(seed: int | None, base_seed: int, uid: int) -> int:
    """The 64-bit key of a request's sampling noise: a function of its own seed if it has one, else of (base_seed, uid).

    splitmix64's finalizer (Steele, Lea & Flood, OOPSLA 2014) spreads neighbouring seeds.
    """
    mask = 2**64 - 1

    def mix(x: int) -> int:
        x = (x + 0x9E3779B97F4A7C15) & mask
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    key = mix(seed & mask) if seed is not None else mix(mix(base_seed & mask) ^ (uid & mask))
    return key - 2**64 if key >= 2**63 else key


def make_plan(step: int, slots: list[SeqSlot], page_writes: Ints, row_writes: Ints) -> BatchPlan:
    """The slots as host integers."""
    flags = [BatchPlan.SAMPLES * s.samples + BatchPlan.FROM_DEVICE * s.from_device for s in slots]
    table = np.array([(s.row, s.start, s.stop, f) for s, f in zip(slots, flags, strict=True)], np.int32)
    tokens = [s.req.host_ids[s.start : s.stop] for s in slots if not s.from_device]
    return BatchPlan(step, table, np.concatenate(tokens) if tokens else np.empty(0, np.int32), page_writes, row_writes)
