"""How a choice of backend is read, and what a refusal says."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from minisgl.attention.backend import MixerSpec
from minisgl.attention.selection import Requirements, resolve_attention
from minisgl.core.errors import ConfigError
from minisgl.core.layout import SEQUENCE, Flag
from minisgl.core.plan import StepShape
from minisgl.core.specs import GroupedQuery
from minisgl.engine.batch import step_shape
from minisgl.ops.table import resolve_ops


def resolve(choice: str) -> str:
    spec = MixerSpec("cpu", torch.float32, GroupedQuery(4, 2, 8, 1.0), 4)
    return resolve_attention(choice, [spec], resolve_ops("cpu"))[0].name


def test_choices():
    assert [resolve(c) for c in ("auto", "cpu", "reference", "auto,cpu", "reference,cpu")] == [
        "cpu",
        "cpu",
        "reference",
        "cpu",
        "reference,cpu",
    ]


@pytest.mark.parametrize(
    ("choice", "word"), [("fancy", "cpu, triton, fi, fa3, reference"), ("cpu,cpu,cpu", "3 backends"), ("", "unknown")]
)
def test_bad_choices(choice: str, word: str):
    with pytest.raises(ConfigError, match=word):
        resolve(choice)


def test_refusal_names_the_unmet_requirement():
    spec = MixerSpec("cpu", torch.float32, GroupedQuery(4, 2, 80, 1.0), 16)
    assert Requirements().refusal(spec) is None
    assert Requirements(head_dims=(64, 128)).refusal(spec) == "head dimension 80 is not one of 64, 128"
    assert "page size 16" in str(Requirements(page_sizes=(128,)).refusal(spec))


@pytest.mark.parametrize(
    ("sequences", "shape"),
    [
        ([(4, 8, 9, Flag.FROM_DEVICE), (0, 0, 5, 0), (2, 5, 7, 0)], StepShape(1, 1, 2, 7, 7)),
        ([(1, 2, 3, 0)], StepShape(1, 1)),
        ([(1, 2, 5, Flag.FROM_DEVICE), (3, 6, 7, 0), (0, 0, 9, 0)], StepShape(2, 3, 1, 9, 9)),
        ([(0, 0, 9, 0), (1, 0, 1, 0)], StepShape(0, 1, 2, 10, 9)),
    ],
)
def test_sequences_with_one_token_decode_if_no_chunk_is_before_them(sequences: list[tuple[int, ...]], shape: StepShape):
    assert step_shape(np.array(sequences, SEQUENCE)) == shape
