"""Ops in eager torch for a CPU: the reference's results in fewer calls, since a call costs about as much as its work.

Per-call figures that led here are in microseconds for T=16, H=256 float32, two threads (AMD EPYC, torch 2.13).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F


SKINNY_ROWS: Final = 16


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As `reference.linear`; few float32 rows go through the transposed product, for which MKL has better kernels.

    Milliseconds for all 25 projections of the demo model's shapes, read from memory: rows 1: 3.3 -> 1.0 (as two
    equal rows), 4: 4.7 -> 1.4, 16: 5.0 -> 3.4, 32: 7.1 -> 6.9. bfloat16 does not gain.
    """
    rows = len(x)
    if x.dtype is not torch.float32 or not 0 < rows <= SKINNY_ROWS:
        return F.linear(x, weight, bias)
    columns = (x if rows > 1 else x.repeat(2, 1)).t()
    out = torch.mm(weight, columns)[:, :rows].t().contiguous()
    return out if bias is None else out.add_(bias)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `reference.rms_norm`: 11 instead of 14."""
    if x.dtype is torch.float32:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    return F.rms_norm(x.float(), (x.shape[-1],), None, eps).to(x.dtype).mul_(weight)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As `reference.add_rms_norm`; overwrites `residual`."""
    residual.add_(x)
    return rms_norm(residual, weight, eps), residual


def silu_and_mul(x: Tensor) -> Tensor:
    """As `reference.silu_and_mul`, without a third buffer."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def norm_rope_store(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    cos_sin: Tensor,
    positions: Tensor,
    pages: Tensor,
    out_loc: Tensor,
) -> Tensor:
    """As `reference.norm_rope_store`: q and k are rotated in one pass, k and v stored in one copy by row number.

    Overwrites `qkv`.
    """
    num_kv_heads, page_size, head_dim = pages.shape[2:]
    num_tokens = len(qkv)
    heads = qkv.view(num_tokens, -1, head_dim)
    num_heads = heads.shape[1] - 2 * num_kv_heads
    if q_weight is not None and k_weight is not None:
        q, k = heads[:, :num_heads], heads[:, num_heads : num_heads + num_kv_heads]
        q.copy_(rms_norm(q, q_weight, eps))
        k.copy_(rms_norm(k, k_weight, eps))
    qk = heads[:, : num_heads + num_kv_heads].view(num_tokens, -1, 2, head_dim // 2)
    angles = cos_sin.index_select(0, positions).view(num_tokens, 1, 2, head_dim // 2)
    cos, sin = angles[:, :, 0], angles[:, :, 1]
    rotated = qk * cos.unsqueeze(2)  # float32, as the angles are
    rotated[:, :, 0].addcmul_(qk[:, :, 1], sin, value=-1)
    rotated[:, :, 1].addcmul_(qk[:, :, 0], sin)
    rotated = rotated.view(num_tokens, num_heads + num_kv_heads, head_dim)
    heads[:, num_heads : num_heads + num_kv_heads] = rotated[:, num_heads:]
    # Row number of head 0 of each token in pages seen as [P * 2 * Hk * page, D]; K/V heads lie a page apart.
    first = (out_loc // page_size) * (2 * num_kv_heads * page_size) + out_loc % page_size
    rows = first.unsqueeze(1) + torch.arange(0, 2 * num_kv_heads * page_size, page_size)
    pages.view(-1, head_dim).index_copy_(0, rows.view(-1), heads[:, num_heads:].reshape(-1, head_dim))
    q_rotated = rotated[:, :num_heads]
    return q_rotated if q_rotated.dtype is qkv.dtype else q_rotated.to(qkv.dtype)


OPS: Final[Mapping[str, Callable[..., Any]]] = {
    "linear": linear,
    "rms_norm": rms_norm,
    "add_rms_norm": add_rms_norm,
    "silu_and_mul": silu_and_mul,
    "norm_rope_store": norm_rope_store,
}
