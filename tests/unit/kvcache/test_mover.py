"""Copies between the pool and a tier run as early or as late as they may, and end as if each had waited its turn."""

from __future__ import annotations

import random
from collections import deque
from functools import partial

import numpy as np
import pytest
import torch

from minisgl.core.layout import FULL, LOAD, MOVE, STORE
from minisgl.device.device import Pending
from minisgl.kvcache.storage import HostStore, Mover
from minisgl.kvcache.store import LayerState
from minisgl.ops.quantized import data_and_scale
from support.late_device import LateDevice
from support.store import kv_store

NUM_PAGES, NUM_SLOTS = 12, 9


def step(states: list[LayerState], read: list[int], written: list[int], number: int) -> torch.Tensor:
    first, last = (data_and_scale(state.pages)[0] for state in states)
    found = last[read, 1, 0, 3, 7].float().int()
    for data in (first, last):
        data[written] = torch.tensor(number).to(data.dtype)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("seed", range(6))
def test_moves_of_a_page_or_slot_keep_their_order(seed: int, dtype: torch.dtype) -> None:
    """Each step reads the pages that are loaded for it, then writes a number into others. One step is in flight."""
    rng, device = random.Random(seed), LateDevice(1)
    pool, states = kv_store(2, NUM_PAGES, 1, 4, 8, dtype)
    mover = Mover(pool, [HostStore(pool, NUM_SLOTS * pool.strides[FULL])], device)
    pages: dict[int, int] = {}  # the number in each, once all is done
    slots: dict[int, int] = {}
    steps: deque[tuple[Pending, list[int]]] = deque()
    busy: list[int] = []  # pages of the step in flight: no page of its is moved
    num_loads = 0
    for number in range(300):
        moves, read = [], []
        for page in rng.choices([page for page in range(NUM_PAGES) if page not in busy], k=rng.randrange(12)):
            slot = rng.randrange(NUM_SLOTS)
            if slot in slots and rng.random() < 0.5:
                moves.append((page, 0, slot, LOAD, 0))
                pages[page] = slots[slot]
                read.append(page)
            elif page in pages:
                moves.append((page, 0, slot, STORE, 0))
                slots[slot] = pages[page]
        written = rng.sample(range(NUM_PAGES), rng.randrange(4))
        others = mover.launch(np.array(moves, MOVE), np.array(written, np.int32))
        work = partial(step, states, read, written, number % 16)  # which 8 bits hold
        steps.append((device.submit(work, 0.0), [pages[page] for page in read]))
        mover.start(others)
        pages |= dict.fromkeys(written, number % 16)
        busy, num_loads = [*read, *written], num_loads + len(read)
        if len(steps) > 1:
            wait, numbers = steps.popleft()
            assert wait().tolist() == numbers
    assert num_loads > 300
