"""Embedding, norms, activation, and the transform between QKV projection and attention: one kernel each.

All arithmetic is in float32; values are rounded to the activations' dtype where `kernel/reference.py` rounds them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor, empty, empty_like
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minisgl.kernel.triton.launch import chained


@triton.jit
def _embedding(ids, weight, out, n, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    row = tl.load(ids + token).to(tl.int64)
    tl.store(out + token * n + k, tl.load(weight + row * n + k, mask=k < n), mask=k < n)


def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """As `reference.embedding`; the first kernel of a one-row step."""
    tokens, n = len(ids), weight.shape[1]
    out = empty((tokens, n), dtype=weight.dtype, device=weight.device)
    options = chained(weight.device) if tokens == 1 else {"PDL": False}
    _embedding[(tokens,)](ids, weight, out, n, BLOCK=triton.next_power_of_2(n), **options)
    return out


@triton.jit
def _rms_norm(x, residual, weight, out, n, eps, ADD: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """One row a program. ADD: residual += x first."""
    row = tl.program_id(0).to(tl.int64) * n
    k = tl.arange(0, BLOCK)
    here = k < n
    if PDL:
        gdc_launch_dependents()
    w = tl.load(weight + k, mask=here, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    total = tl.load(x + row + k, mask=here, other=0.0)
    if ADD:
        r = tl.load(residual + row + k, mask=here, other=0.0)
        total = (total.to(tl.float32) + r.to(tl.float32)).to(total.dtype)
        tl.store(residual + row + k, total, mask=here)
    v = total.to(tl.float32)
    v *= tl.rsqrt(tl.sum(v * v, 0) / n + eps)
    tl.store(out + row + k, (v.to(total.dtype).to(tl.float32) * w).to(total.dtype), mask=here)


def _norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """8 elements a thread (16 bytes), up to 8 warps: 4 at 1,024 and 8 at 4,096 were fastest on an H200."""
    n = x.shape[-1]
    rows, block = x.numel() // n, triton.next_power_of_2(n)
    out = empty_like(x)
    options = chained(x.device) if rows == 1 else {"PDL": False}
    _rms_norm[(rows,)](
        x, x if residual is None else residual, weight, out, n, eps,
        ADD=residual is not None, BLOCK=block, num_warps=min(8, max(1, block // 256)), **options,
    )  # fmt: skip
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `reference.rms_norm`."""
    return _norm(x.contiguous(), None, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As `reference.add_rms_norm`; overwrites `residual`."""
    return _norm(x, residual, weight, eps), residual


@triton.jit
def _silu_and_mul(x, out, n, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(x + row * 2 * n + k, mask=k < n, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * n + n + k, mask=k < n, other=0.0).to(tl.float32)
    tl.store(out + row * n + k, (gate / (1 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=k < n)


def silu_and_mul(x: Tensor) -> Tensor:
    """As `reference.silu_and_mul`, rounded once."""
    rows, n = x.shape[0], x.shape[1] // 2
    out = empty((rows, n), dtype=x.dtype, device=x.device)
    block = min(1024, triton.next_power_of_2(n))
    _silu_and_mul[(rows, triton.cdiv(n, block))](x, out, n, BLOCK=block)
    return out


@triton.jit
def _norm_rope_store(
    qkv, q_weight, k_weight, cos_sin, positions, pages, out_loc, page_stride, kv_stride, head_stride, slot_stride, eps,
    Q: tl.constexpr, KV: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, HEADS: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Program (token, group of HEADS heads). q is rotated in place, rotated k and v go to the pages.

    The halves (x1, x2) of the heads are separate tiles, so each thread turns its pairs by itself.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    d = tl.arange(0, DIM // 2)
    at = qkv + token * (Q + 2 * KV) * DIM + head[:, None] * DIM + d[None, :]
    here = (head < Q + 2 * KV)[:, None]
    is_q, is_v = (head < Q)[:, None], (head >= Q + KV)[:, None]
    x1 = tl.load(at, mask=here, other=0.0)
    x2 = tl.load(at + DIM // 2, mask=here, other=0.0)
    position = tl.load(positions + token).to(tl.int64)
    cos = tl.load(cos_sin + position * DIM + d)[None, :]
    sin = tl.load(cos_sin + position * DIM + DIM // 2 + d)[None, :]
    slot = tl.load(out_loc + token)
    f1, f2 = x1.to(tl.float32), x2.to(tl.float32)
    if NORM:
        scale = tl.rsqrt((tl.sum(f1 * f1, 1) + tl.sum(f2 * f2, 1)) / DIM + eps)[:, None]
        w1 = tl.where(is_q, tl.load(q_weight + d)[None, :], tl.load(k_weight + d)[None, :])
        w2 = tl.where(is_q, tl.load(q_weight + DIM // 2 + d)[None, :], tl.load(k_weight + DIM // 2 + d)[None, :])
        f1 = ((f1 * scale).to(x1.dtype).to(tl.float32) * w1.to(tl.float32)).to(x1.dtype).to(tl.float32)
        f2 = ((f2 * scale).to(x1.dtype).to(tl.float32) * w2.to(tl.float32)).to(x1.dtype).to(tl.float32)
    y1 = (f1 * cos - f2 * sin).to(x1.dtype)
    y2 = (f2 * cos + f1 * sin).to(x1.dtype)
    tl.debug_barrier()  # all have read their part of qkv
    tl.store(at, y1, mask=is_q)
    tl.store(at + DIM // 2, y2, mask=is_q)
    kv_head = tl.where(is_v, head[:, None] - Q - KV, head[:, None] - Q)
    target = pages + (slot // PAGE) * page_stride + (slot % PAGE) * slot_stride + kv_head * head_stride + d[None, :]
    target += tl.where(is_v, kv_stride, 0)
    is_kv = here & (head >= Q)[:, None]
    tl.store(target, tl.where(is_v, x1, y1), mask=is_kv)
    tl.store(target + DIM // 2, tl.where(is_v, x2, y2), mask=is_kv)


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
    """As `reference.norm_rope_store`; the queries returned are a view of `qkv`. D is a power of two."""
    tokens, kv_heads, page, dim = len(qkv), *pages.shape[2:]
    heads = qkv.shape[1] // dim
    has_norm = q_weight is not None and k_weight is not None
    group = min(triton.next_power_of_2(heads), max(1, (1024 if tokens <= 64 else 2048) // dim))
    _norm_rope_store[(tokens, triton.cdiv(heads, group))](
        qkv, q_weight if has_norm else qkv, k_weight if has_norm else qkv, cos_sin, positions, pages, out_loc,
        *pages.stride()[:4], eps,
        Q=heads - 2 * kv_heads, KV=kv_heads, DIM=dim, PAGE=page, HEADS=group, NORM=has_norm,
    )  # fmt: skip
    return qkv.view(tokens, heads, dim)[:, : heads - 2 * kv_heads]
