"""Gated DeltaNet's kernels against their specification."""

from __future__ import annotations

import pytest
import torch

from minisgl.ops.table import load_ops
from support.delta import Sequence, Sizes, compare, compare_folds

OPS = load_ops("triton")
SMALL = Sizes(2, 4, 16, 16)
F16, F32 = torch.float16, torch.float32
ERROR = {F32: 2e-5, F16: 6e-3}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize(
    ("sizes", "dtype", "delta", "tokens"),
    [(SMALL, F32, F32, 1), (SMALL, F32, F32, 3), (Sizes(1, 2, 32, 16, 44, 2), F16, F16, 1), (SMALL, F16, F32, 9)],
)
def test_decoding(sizes: Sizes, dtype: torch.dtype, delta: torch.dtype, tokens: int):
    """Rows without, with some and with as many tokens since S as fit; one is padding."""
    many = sizes.entries - tokens
    rows = [Sequence(0, 37, tokens, 37), Sequence(3, 46, tokens, 41), Sequence(1, 9, 0, 9)]
    rows.append(Sequence(2, 100 + many, tokens - (tokens > 1), 100))
    assert compare(OPS, sizes, rows, dtype, delta, "cpu") < ERROR[dtype]


@pytest.mark.parametrize(
    ("sizes", "dtype", "sequences"),
    [
        (SMALL, F32, [Sequence(0, 0, 1), Sequence(1, 1, 5, captures=[(6, 3), (2, 4)]), Sequence(2, 30, 0)]),
        (SMALL, F32, [Sequence(0, 64, 64, captures=[(128, 2), (65, 3)]), Sequence(1, 0, 2, captures=[(1, 4)])]),
        (
            Sizes(1, 3, 16, 32, 2, 3),
            F16,
            [Sequence(0, 70, 130, captures=[(170, 1), (169, 2), (134, 4), (134, 5)]), Sequence(3, 0, 66)],
        ),
        (SMALL, F32, [Sequence(0, 5, 3, 2), Sequence(2, 7, 1, 7), Sequence(1, 33, 70, captures=[(50, 3)])]),
    ],
)
def test_chunks(sizes: Sizes, dtype: torch.dtype, sequences: list[Sequence]):
    """From the begin of a text or later, with captures anywhere, beside rows that decode."""
    assert compare(OPS, sizes, sequences, dtype, F32, "cpu") < ERROR[dtype]


@pytest.mark.parametrize(("dtype", "layers"), [(F32, 3), (F16, 1)])
def test_folds(dtype: torch.dtype, layers: int):
    folds = [(2, 15, 35), (0, 40, 41), (1, 7, 7)]
    assert compare_folds(OPS, SMALL, folds, layers, dtype, dtype, "cpu") < ERROR[dtype]
