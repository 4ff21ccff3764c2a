"""The requirements of the Triton backend."""

from __future__ import annotations

import torch

from minisgl.attention.backend import MixerSpec
from minisgl.attention.selection import ATTENTION
from minisgl.core.specs import GroupedQuery


def spec(device: str = "cuda", dtype: torch.dtype = torch.bfloat16, head_dim: int = 128) -> MixerSpec[GroupedQuery]:
    return MixerSpec(device, dtype, GroupedQuery(16, 8, head_dim, 1.0), 64)


def test_auto_selects_triton_for_supported_head_dims():
    assert ATTENTION.choose("auto", spec()) == "triton"
    for head_dim in (64, 80, 96, 192, 256, 512):
        assert ATTENTION.choose("auto", spec(head_dim=head_dim)) == "triton"
    assert ATTENTION.choose("auto", spec(head_dim=72)) == "reference"
    assert ATTENTION.choose("auto", spec("cpu")) == "cpu"
