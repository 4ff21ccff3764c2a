"""The lookup of drafts against the reference."""

from __future__ import annotations

import pytest
import torch

from minisgl.kernels.triton import drafts
from minisgl.ops import reference


@pytest.mark.parametrize(("symbols", "window"), [(2, 64), (4, 5000), (9, 300), (40, 5000)])
def test_look_up(symbols: int, window: int):
    """Rows of any length, some tokens of which are not known; some have no match, or a history beyond the window."""
    g = torch.Generator().manual_seed(symbols)
    history = torch.randint(-1, symbols, (12, 2600), generator=g, dtype=torch.int32)
    rows = torch.randperm(12, generator=g)[:9]
    lengths = torch.tensor([1, 2, 3, 9, 63, 64, 65, 700, 2500], dtype=torch.int32)
    want, counts = reference.look_up(history, rows, lengths, 2500, window, (2, 4), 8)
    got, found = drafts.look_up(history, rows, lengths, 2600, window, (2, 4), 8)
    assert torch.equal(found, counts) and int((counts > 0).sum()) > 0
    assert torch.equal(got, want) and not got[counts == 0].any()


def test_a_row_that_is_not_in_use_has_no_drafts():
    got, found = drafts.look_up(
        torch.ones(2, 9, dtype=torch.int32), torch.tensor([0]), torch.zeros(1).int(), 9, 64, (2, 4), 8
    )
    assert not found.any() and not got.any()
