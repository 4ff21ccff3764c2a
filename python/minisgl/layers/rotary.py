"""The angles of rotary position embeddings, and the ways in which checkpoints stretch them to longer contexts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

ROPE_TYPES: Final = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """How position p turns frequency i; `type` is one of ROPE_TYPES, each of which reads the fields it needs."""

    theta: float = 10000.0
    type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Radians per position [head_dim / 2] float32: theta^(-2i / head_dim), then scaled.

    linear (position interpolation, arXiv:2306.15595) divides all by `factor`. llama3 (Llama 3.1's model card) divides
    only wavelengths above original / low_freq_factor, leaves those below original / high_freq_factor, and blends
    between the two.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    inverse = 1.0 / (rope.theta**exponents)
    if rope.type == "default":
        return inverse
    if rope.type == "linear":
        return inverse / rope.factor
    assert rope.type == "llama3", f"unknown rope type {rope.type!r}"
    turns = rope.original_max_position_embeddings * inverse / (2 * math.pi)  # within the original context
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * inverse / rope.factor + blend * inverse


def cos_sin_table(rope: RopeConfig, head_dim: int, max_positions: int, device: torch.device) -> Tensor:
    """[max_positions, head_dim] float32: cosines of the head_dim / 2 angles, then their sines."""
    angles = torch.outer(torch.arange(max_positions).float(), inverse_frequencies(rope, head_dim))
    return torch.cat([angles.cos(), angles.sin()], dim=-1).to(device)
