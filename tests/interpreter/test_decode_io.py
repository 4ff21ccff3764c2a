"""The ends of a captured step: what is read from the ring and what arrives in it."""

from __future__ import annotations

import numpy as np
import torch

from minisgl.core import Batch, Sampling, SeqLayout, StepShape
from minisgl.layout import FULL, NO_SLOTS, WINDOW
from minisgl.triton import decode_io

CAPACITY, PAGE, ROWS, WIDTH = 6, 4, 7, 5
FLAGS, PLACES = [2, 70, 6], [8, 0, 0]


def test_begin_derives_what_a_step_needs_and_pads_with_the_idle_row():
    table = torch.arange(2 * ROWS * WIDTH, dtype=torch.int32).view(2, ROWS, WIDTH) + 100
    expected_table = table.clone()
    last_token = torch.arange(ROWS, dtype=torch.int32) * 11
    turn = torch.tensor([5], dtype=torch.int32)  # slot 1 of the ring
    ring = decode_io.input_ring(CAPACITY, 40, pin=False)
    rows, stops = [3, 0, 5], [9, 1, 17]
    writes = [(FULL, 3, 2, 901), (FULL, 5, 4, 902), *((FULL, 0, i % WIDTH, 903) for i in range(1, 4))]
    writes += [(WINDOW, 5, 4, 55), *((FULL, 2, 0, 904) for _ in range(20)), (WINDOW, 0, 1, 56)]
    slot = ring[1].numpy()
    slot[:2] = len(rows), len(writes)
    slot[2 : 2 + 3], slot[2 + CAPACITY : 5 + CAPACITY] = rows, stops
    slot[2 + 2 * CAPACITY : 2 + 3 * CAPACITY] = [*FLAGS, 9, 9, 9]  # behind those in use stands what was there before
    slot[2 + 3 * CAPACITY : 5 + 3 * CAPACITY] = PLACES
    slot[2 + 4 * CAPACITY : 2 + 4 * CAPACITY + 4 * len(writes)] = np.array(writes).reshape(-1)
    for group, row, index, page in writes:
        expected_table[group, row, index] = page
    size = 5
    out_rows, *out_locs = torch.full((3, size), -7)
    out_loc = torch.stack(out_locs)
    ints = [torch.full((size,), -7, dtype=torch.int32) for _ in range(6)]
    rows32, kv_lens, positions, ids, flags, places = ints
    batch = Batch(
        shape=StepShape(size, 1),
        slots=NO_SLOTS,
        layout=SeqLayout(rows32, kv_lens, torch.arange(size + 1)),
        input_ids=ids,
        positions=positions,
        token_rows=rows32,
        logit_tokens=torch.arange(size),
        sampling=Sampling(out_rows, kv_lens, flags, places, flags=0),
        page_writes=rows32[:0],
        row_states=rows32[:0],
    )
    decode_io.begin_decode(ring, turn, table, last_token, batch, out_loc, PAGE, CAPACITY)
    idle = ROWS - 1
    assert out_rows.tolist() == rows32.tolist() == [*rows, idle, idle]
    assert kv_lens.tolist() == [*stops, 1, 1]
    assert positions.tolist() == [8, 0, 16, 0, 0]
    assert ids.tolist() == [33, 0, 55, 66, 66]
    assert flags.tolist() == [*FLAGS, 0, 0] and places.tolist()[: len(rows)] == PLACES
    assert torch.equal(table, expected_table)
    full, window = (found[[3, 0, 5, idle, idle], [2, 0, 4, 0, 0]] * PAGE for found in table.long())
    assert full[0] == 901 * PAGE and window[2] == 55 * PAGE
    assert torch.equal(out_loc, torch.stack([full, window]))
    assert turn.item() == 6


def test_publish_fills_the_slot_of_the_step_that_began_last():
    ring, turn = decode_io.output_ring(CAPACITY, pin=False), torch.tensor([6], dtype=torch.int32)
    for lines in (2, ring.shape[1]):
        out = torch.randint(1, 99, (lines, 3), dtype=torch.int32)
        decode_io.publish(out, ring, turn, CAPACITY)
        assert torch.equal(ring[1, :lines, :3], out) and not ring[1, lines:].any()
    assert not ring[[0, 2, 3]].any() and not ring[1, :, 3:].any()
