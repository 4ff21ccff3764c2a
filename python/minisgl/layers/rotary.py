"""The angles of rotary position embeddings, and their scalings to longer contexts."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from minisgl.layers.rope import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Return radians per position [n / 2] float32: theta^(-2i / n), then scaled, where n elements of a head rotate.

    - linear (position interpolation, arXiv:2306.15595) divides all frequencies by `factor`.
    - llama3 (Llama 3.1's model card) divides frequencies with wavelengths above original / low_freq_factor, keeps those
      below original / high_freq_factor, and blends in between.
    - yarn (arXiv:2309.00071) keeps frequencies with more than `beta_fast` rotations in the original context, divides
      those with fewer than `beta_slow`, and blends by index in between; `truncate` rounds the bounds to whole indices.
    - longrope (arXiv:2402.13753) divides frequency i by short_factors[i]; the context ends at the original length.
    - proportional (Gemma 4) divides by `factor`, and only a `part` of the frequencies, the highest, is not 0.
    - dynamic (NTK-aware) changes theta only beyond max_position_embeddings, where no sequence gets here.
    """
    head_dim = rope.dim or head_dim
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    powers = rope.theta**exponents
    inverse = 1.0 / powers
    if rope.type in ("default", "dynamic"):
        return inverse
    if rope.type == "proportional":
        inverse[int(rope.part * head_dim // 2) :] = 0.0
    if rope.type in ("linear", "proportional"):
        return inverse / rope.factor
    if rope.type == "longrope":
        return 1.0 / (torch.tensor(rope.short_factors) * powers)
    if rope.type == "yarn":
        low, high = _yarn_range(rope, head_dim)
        blend = 1 - ((torch.arange(head_dim // 2).float() - low) / (high - low)).clamp(0.0, 1.0)
        return (1 - blend) * (1.0 / (rope.factor * powers)) + blend * inverse  # rounded as transformers does
    assert rope.type == "llama3", f"unknown rope type {rope.type!r}"
    turns = rope.original_max_position_embeddings * inverse / (2 * math.pi)  # within the original context
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * inverse / rope.factor + blend * inverse


def _yarn_range(rope: RopeConfig, head_dim: int) -> tuple[float, float]:
    """Return the two different indices of frequencies between which yarn blends."""

    def index(turns: float) -> float:
        wavelength = rope.original_max_position_embeddings / turns
        return head_dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = index(rope.beta_fast), index(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    return low, high if high != low else high + 0.001


def cos_sin_table(rope: RopeConfig, head_dim: int, max_positions: int, device: torch.device) -> Tensor:
    """Return [max_positions, head_dim] float32: the cosines of the head_dim / 2 angles, then their sines.

    Those of rotated elements are multiplied by `attention_factor`, which applies yarn's softmax temperature at no cost
    per step. Elements that are not rotated have the angle 0; `head_order` says where they are.
    """
    table = torch.zeros(max_positions, 2, head_dim // 2)
    table[:, 0] = 1.0
    if rope.type != "none":
        angles = torch.outer(torch.arange(max_positions).float(), inverse_frequencies(rope, head_dim))
        table[:, :, : angles.shape[1]] = torch.stack([angles.cos(), angles.sin()], 1) * rope.attention_factor
    return table.flatten(1).to(device)


def query_scales(beta: float, original: int, max_positions: int, device: torch.device) -> Tensor:
    """Return the factors of queries by position, float32 [max_positions]: 1 + beta ln(1 + floor(position / original)).

    They keep attention sharp beyond the original context, as in Llama 4.
    """
    return (1 + beta * torch.log(1 + torch.arange(max_positions) // original)).float().to(device)


def head_order(head_dim: int, rotary_dim: int, *, is_interleaved: bool) -> list[int]:
    """Return the elements of a head in the order in which the halves [head_dim / 2] of all of it may rotate.

    Scores do not depend on the order of elements in q and k, so a checkpoint whose heads rotate a part, or adjacent
    elements (`is_interleaved`), is loaded in this order. Then one kernel does for all.
    """
    half, rest = rotary_dim // 2, range(rotary_dim, head_dim)
    step = 2 if is_interleaved else 1
    first, second = range(0, half * step, step), range(1 if is_interleaved else half, rotary_dim, step)
    kept = head_dim // 2 - half
    return [*first, *rest[:kept], *second, *rest[kept:]]
