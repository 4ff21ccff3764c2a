"""How a choice of backend is read, and what a refusal says."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from minisgl.attention.backend import AttentionSpec, build_layout
from minisgl.attention.selection import Requirements, resolve_attention
from minisgl.errors import ConfigError
from minisgl.ops.table import resolve_ops


def resolve(choice: str) -> str:
    return resolve_attention(choice, AttentionSpec("cpu", torch.float32, 4, 2, 8, 4), resolve_ops("cpu")).name


def test_choices():
    assert [resolve(c) for c in ("auto", "cpu", "reference", "auto,cpu", "reference,cpu")] == [
        "cpu",
        "cpu",
        "reference",
        "cpu",
        "hybrid",
    ]


@pytest.mark.parametrize(
    ("choice", "word"), [("fancy", "cpu, triton, fi, fa3, reference"), ("cpu,cpu,cpu", "3 backends"), ("", "unknown")]
)
def test_bad_choices(choice: str, word: str):
    with pytest.raises(ConfigError, match=word):
        resolve(choice)


def test_refusal_names_the_unmet_requirement():
    spec = AttentionSpec("cpu", torch.float32, 4, 2, 80, 16)
    assert Requirements().refusal(spec) is None
    assert Requirements(head_dims=(64, 128)).refusal(spec) == "head dimension 80 is not one of 64, 128"
    assert "page size 16" in str(Requirements(page_sizes=(128,)).refusal(spec))
    assert spec.scale == pytest.approx(80**-0.5)


def upload(*arrays: np.ndarray) -> list[torch.Tensor]:
    return [torch.tensor(a) for a in arrays]


def test_layout_offsets():
    layout = build_layout(np.array([4, 0, 2]), np.array([1, 5, 2]), np.array([9, 5, 7]), upload)
    assert layout.cu_query_lens.tolist() == [0, 1, 6, 8] and layout.cu_query_lens.dtype is torch.int32
    assert layout.kv_lens_host.dtype == np.int32 and not layout.is_decode and len(layout.rows_host) == 3
    assert build_layout(np.array([1]), np.array([1]), np.array([3]), upload).is_decode
