"""Ops in eager torch for a CPU: the reference in fewer calls, since a call costs about as much as its arithmetic.

Figures are microseconds per call for T=16, H=256, float32, two threads (AMD EPYC, torch 2.13).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F

from minisgl.ops import reference
from minisgl.ops.quantized import Pages, QuantizedPages

SKINNY_ROWS: Final = 16


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, gate: str = "") -> Tensor:
    """As `reference.linear`; few float32 rows take the transposed GEMM, for which MKL has better kernels.

    Milliseconds for all 25 projections of the demo model's shapes, read from memory: rows 1: 3.3 -> 1.0 (as two
    equal rows), 4: 4.7 -> 1.4, 16: 5.0 -> 3.4, 32: 7.1 -> 6.9. bfloat16 does not gain.
    """
    if gate:
        g, up = linear(x, weight, bias).chunk(2, dim=-1)
        return reference.GATES[gate](g).mul_(up)  # without a third buffer
    rows = len(x)
    if x.dtype is not torch.float32 or not 0 < rows <= SKINNY_ROWS:
        return F.linear(x, weight, bias)
    columns = (x if rows > 1 else torch.cat([x, x])).t()
    out = torch.mm(weight, columns)[:, :rows].t().contiguous()
    return out if bias is None else out.add_(bias)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, scale: Tensor | None = None
) -> Tensor:
    """As `reference.rms_norm`: 11 instead of 14. Overwrites the residual."""
    if scale is not None:
        return rms_norm(x, weight, eps, residual).mul_(scale)
    if residual is not None:
        return residual.add_(rms_norm(x, weight, eps))
    if x.dtype is torch.float32:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    return F.rms_norm(x.float(), (x.shape[-1],), None, eps).to(weight.dtype).mul_(weight).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As `reference.add_rms_norm`; overwrites `residual`."""
    residual.add_(x)
    return rms_norm(residual, weight, eps), residual


# Composed of the ops above.
add_norm_linear = partial(reference.add_norm_linear, rms_norm=rms_norm, add_rms_norm=add_rms_norm, linear=linear)
moe = partial(reference.moe, linear=linear)  # most experts have few rows


def norm_rope_store(
    qkv: Tensor, heads: reference.HeadTransform, positions: Tensor, pages: Pages, out_loc: Tensor
) -> Tensor:
    """As `reference.norm_rope_store`: q and k are rotated in one pass, k and v stored in one copy.

    Overwrites `qkv`.
    """
    if heads.reads:
        return reference.norm_rope_store(qkv, heads, positions, pages, out_loc)
    num_kv_heads, page_size, head_dim = pages.shape[2:]
    num_tokens = len(qkv)
    qkv_heads = qkv.view(num_tokens, qkv.shape[1] // head_dim, head_dim)
    num_heads = qkv_heads.shape[1] - 2 * num_kv_heads
    qk = qkv_heads[:, :-num_kv_heads]
    if heads.q_weight is not None and heads.k_weight is not None:
        qk = F.rms_norm(qk.float(), (head_dim,), None, heads.eps).to(heads.q_weight.dtype)
        qk[:, :num_heads].mul_(heads.q_weight)
        qk[:, num_heads:].mul_(heads.k_weight)
        qk = qk.to(qkv.dtype)
    if heads.norms_v:
        v = qkv_heads[:, -num_kv_heads:]
        v.copy_(F.rms_norm(v.float(), (head_dim,), None, heads.eps))
    halves = qk.view(num_tokens, -1, 2, head_dim // 2)
    angles = heads.cos_sin.index_select(0, positions).view(num_tokens, 1, 2, head_dim // 2)
    cos, sin = angles[:, :, 0], angles[:, :, 1]
    rotated = halves * cos.unsqueeze(2)  # float32, as the angles are, whatever qkv is
    rotated[:, :, 0].addcmul_(halves[:, :, 1], sin, value=-1)
    rotated[:, :, 1].addcmul_(halves[:, :, 0], sin)
    rotated = rotated.view(num_tokens, -1, head_dim)
    qkv_heads[:, num_heads:-num_kv_heads] = rotated[:, num_heads:]
    kv = qkv_heads[:, num_heads:].view(num_tokens, 2, num_kv_heads, head_dim)
    if isinstance(pages, QuantizedPages):
        reference.store_kv(kv[:, 0], kv[:, 1], pages, out_loc)
    else:
        slots = pages.permute(0, 3, 1, 2, 4)  # [P, page, 2, Hk, D]
        slots.index_put_((out_loc // page_size, out_loc % page_size), kv)
    q = rotated[:, :num_heads]
    if heads.q_scale is not None:
        q *= heads.q_scale.index_select(0, positions).view(-1, 1, 1)
    return q if q.dtype is qkv.dtype else q.to(qkv.dtype)


OPS: Final[Mapping[str, Callable[..., Any]]] = {
    "linear": linear,
    "rms_norm": rms_norm,
    "add_rms_norm": add_rms_norm,
    "add_norm_linear": add_norm_linear,
    "moe": moe,
    "norm_rope_store": norm_rope_store,
}
