"""Rounds weights to 4 bits in one pass: PyTorch's ops read and write a matrix a hundred times."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.core.rounding import ceil_div
from minisgl.ops import quantized
from minisgl.ops.quantized import SHRINK, SHRINKS, Format

BLOCK_GROUPS: Final = 16


@triton.jit
def _nearest(w, scale):
    """Round w / scale to even, and clamp it to [-8, 7]. A float32 of 1.5 * 2^23 has no bits for fractions."""
    q = tl.div_rn(w, tl.broadcast_to(scale[:, None], w.shape)) + 12582912.0 - 12582912.0
    return tl.minimum(tl.maximum(q, -8.0), 7.0)


@triton.jit
def _round_int4(
    w_ptr, q_ptr, scale_ptr, num_groups,
    GROUP: tl.constexpr, SHRINKS: tl.constexpr, SHRINK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`ops.quantized.round_int4`, BLOCK groups per program."""
    offs_g = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask_g = offs_g < num_groups
    offs, mask = offs_g[:, None] * GROUP + tl.arange(0, GROUP)[None, :], mask_g[:, None]
    w = tl.load(w_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    amax = tl.max(tl.abs(w), 1) / 7
    best, least_error = amax, tl.full([BLOCK], float("inf"), tl.float32)
    for i in tl.static_range(SHRINKS):
        scale = (amax * (1.0 - SHRINK * i)).to(scale_ptr.dtype.element_ty).to(tl.float32)
        scale = tl.where(scale > 0, scale, 1.0)
        error = _nearest(w, scale) * scale[:, None] - w
        error = tl.sum(error * error, 1)
        best, least_error = tl.where(error < least_error, scale, best), tl.minimum(error, least_error)
    tl.store(q_ptr + offs, (_nearest(w, best) + 8).to(tl.uint8), mask=mask)
    tl.store(scale_ptr + offs_g, best.to(scale_ptr.dtype.element_ty), mask=mask_g)


def rounded(weight: Tensor, kind: Format) -> tuple[Tensor, Tensor]:
    """`ops.quantized.rounded`."""
    if kind.name != "int4":
        return quantized.rounded(weight, kind)
    rows, columns = weight.shape
    q = torch.empty(rows, columns, dtype=torch.uint8, device=weight.device)
    scale = torch.empty(rows, columns // kind.group, dtype=kind.scale_dtype, device=weight.device)
    _round_int4[(ceil_div(scale.numel(), BLOCK_GROUPS),)](
        weight.contiguous(), q, scale, scale.numel(),
        GROUP=kind.group, SHRINKS=SHRINKS, SHRINK=SHRINK, BLOCK=BLOCK_GROUPS,
    )  # fmt: skip
    return q, scale
