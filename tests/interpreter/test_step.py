"""The ends of a captured step: what is read from the ring and what arrives in it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from minisgl.core.layout import FULL, NEWEST, NOT_DRAFTED, ROW, WINDOW, words
from minisgl.kernels.triton import step
from minisgl.kernels.triton.step import DRAFT_INDEX, END, HEAD, ID, INPUTS, POSITION, RING

PAGE, ROWS, WIDTH, DRAFTS = 4, 7, 5, 4


@pytest.mark.parametrize("counts", [(2, 3, 5), (700, 3, 900)], ids=["one block", "two blocks"])
def test_inputs_have_what_only_the_device_knows(counts: tuple[int, int, int]):
    rng = np.random.default_rng(0)
    parts, room = step.Counts(*counts), step.Counts(*(count + 4 for count in counts))
    ring = torch.full((RING, parts.words + 400), 99, dtype=torch.int32)  # from an earlier step
    tables = torch.arange(2 * ROWS * WIDTH, dtype=torch.int32).view(2, ROWS, WIDTH) + 100
    table = torch.zeros(ROWS, words(ROW), dtype=torch.int32)
    last_token, lengths = torch.arange(ROWS, dtype=torch.int32) * 11, torch.arange(ROWS, dtype=torch.int32) + 9
    drafts = torch.arange(ROWS * DRAFTS, dtype=torch.int32).view(ROWS, DRAFTS) + 1000

    slot = ring[1].numpy()
    writes = [(FULL, 3, 2, 901), (FULL, 5, 4, 902), *((FULL, 0, i % WIDTH, 903) for i in range(1, 4))]
    writes += [(WINDOW, 5, 4, 55), *((FULL, 2, 0, 904) for _ in range(20)), (WINDOW, 0, 1, 56)]
    states = np.array([(2, *range(40, 40 + words(ROW))), (6, *range(50, 50 + words(ROW)))], np.int32)
    records = np.concatenate([np.array(writes).ravel(), states.ravel()])
    slot[:2] = len(writes), states.size
    slot[parts.words : parts.words + len(records)] = records
    expected_tables, expected_table = tables.clone(), table.clone()
    for group, row, index, page in writes:
        expected_tables[group, row, index] = page
    for row, *values in states.tolist():
        expected_table[row] = torch.tensor(values)

    first_token = counts[0] + counts[1]
    at = np.cumsum([0, *room])[:3]
    used = np.concatenate([start + np.arange(count) for start, count in zip(at, counts, strict=True)])
    rows, positions = rng.integers(0, ROWS, len(used)), rng.integers(0, PAGE * WIDTH - 1, len(used))
    index = rng.integers(NOT_DRAFTED, DRAFTS + 1, len(used))
    ids = np.where(index >= 0, NEWEST, rng.integers(NEWEST, 50, len(used)))
    more = rng.integers(0, 50, (3, first_token))
    slot[HEAD : parts.words] = np.concatenate([rows, ids, index, positions, more.ravel()])
    out_loc, sample_rows = torch.full((2, room.tokens), -7), torch.full((room.samples,), -7)
    inputs, turn = torch.full((INPUTS, sum(room)), -7, dtype=torch.int32), torch.tensor([5], dtype=torch.int32)
    step.prepare_inputs(
        ring, turn, tables, table, last_token, lengths, drafts, inputs, sample_rows, out_loc, parts, room, PAGE
    )  # fmt: skip

    true = np.where(index >= 0, lengths.numpy()[rows] - 1 + index, positions)
    tokens = np.where(ids >= 0, ids, last_token.numpy()[rows])
    tokens = np.where(index > 0, drafts.numpy()[rows, index - 1], tokens)
    got = inputs.numpy()
    for column, values in ((0, rows), (ID, tokens), (DRAFT_INDEX, index), (POSITION, true), (END, true + 1)):
        assert np.array_equal(got[column, used], values)
    samples, count = counts[0], counts[2]
    assert np.array_equal(got[4:7, used[:first_token]], more) and (got[4:7, used[first_token:]] == -7).all()
    assert (np.delete(got, used, axis=1) == -7).all()
    assert sample_rows.tolist() == [*rows[:samples], -7, -7, -7, -7]
    assert torch.equal(tables, expected_tables) and torch.equal(table, expected_table) and turn.item() == 6
    rows, true = rows[-count:], true[-count:]
    pages = expected_tables.numpy()[:, rows, true // PAGE].astype(np.int64)
    assert np.array_equal(out_loc[:, :count], pages * PAGE + true % PAGE) and (out_loc[:, count:] == -7).all()


def test_publish_fills_the_slot_of_the_step_that_began_last():
    turn = torch.tensor([6], dtype=torch.int32)
    ring = torch.zeros(RING, 9, 6, dtype=torch.int32)
    for lines in (2, ring.shape[1]):
        out = torch.randint(1, 99, (lines, 3), dtype=torch.int32)
        step.publish(out, ring, turn)
        assert torch.equal(ring[1, :lines, :3], out) and not ring[1, lines:].any()
    assert not ring[[0, 2, 3]].any() and not ring[1, :, 3:].any()
