"""Embedding, norms, activation, and the transform between QKV projection and attention: one kernel each.

All arithmetic is in float32; values are rounded to the activations' dtype where `ops/reference.py` rounds them.
"""

from __future__ import annotations

from functools import partial

import triton
import triton.language as tl
from torch import Tensor, empty, empty_like
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minisgl.triton.launch import chained


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
    tl.store(out + row + k, (v.to(weight.dtype.element_ty).to(tl.float32) * w).to(total.dtype), mask=here)


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
def gated(gate, up, GATE: tl.constexpr):
    """One of `reference.GATES`, in float32; g / 2 (1 + tanh(z)) is g / (1 + exp(-2 z))."""
    z = gate
    if GATE == "gelu_tanh":
        z = 1.5957691216057308 * gate * (1 + 0.044715 * gate * gate)  # 2 sqrt(2 / pi)
        z = tl.maximum(z, -80.0)  # exp(80) is large enough, and finite
    return gate / (1 + tl.exp(-z)) * up


@triton.jit
def _gate_and_mul(x, out, n, GATE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(x + row * 2 * n + k, mask=k < n, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * n + n + k, mask=k < n, other=0.0).to(tl.float32)
    tl.store(out + row * n + k, gated(gate, up, GATE).to(out.dtype.element_ty), mask=k < n)


def gate_and_mul(x: Tensor, gate: str) -> Tensor:
    """As `reference.GATES[gate]`, rounded once."""
    rows, n = x.shape[0], x.shape[1] // 2
    out = empty((rows, n), dtype=x.dtype, device=x.device)
    block = min(1024, triton.next_power_of_2(n))
    _gate_and_mul[(rows, triton.cdiv(n, block))](x, out, n, GATE=gate, BLOCK=block)
    return out


silu_and_mul = partial(gate_and_mul, gate="silu")
gelu_and_mul = partial(gate_and_mul, gate="gelu_tanh")


@triton.jit
def _turned(x1, x2, weight, cos, sin, eps, DIM: tl.constexpr, NORM: tl.constexpr):
    """Normalise heads, given as halves [heads, D / 2], and turn the pairs (x1, x2)."""
    d = tl.arange(0, DIM // 2)
    f1, f2 = x1.to(tl.float32), x2.to(tl.float32)
    if NORM:
        w1 = tl.load(weight + d)[None, :].to(tl.float32)
        w2 = tl.load(weight + DIM // 2 + d)[None, :].to(tl.float32)
        scale = tl.rsqrt(tl.sum(f1 * f1 + f2 * f2, 1) / DIM + eps)[:, None]
        f1 = ((f1 * scale).to(weight.dtype.element_ty).to(tl.float32) * w1).to(x1.dtype).to(tl.float32)
        f2 = ((f2 * scale).to(weight.dtype.element_ty).to(tl.float32) * w2).to(x1.dtype).to(tl.float32)
    return (f1 * cos - f2 * sin).to(x1.dtype), (f2 * cos + f1 * sin).to(x1.dtype)


@triton.jit
def _norm_rope_store(
    qkv, q_weight, k_weight, cos_sin, positions, pages, out_loc, page_stride, kv_stride, head_stride, slot_stride, eps,
    Q: tl.constexpr, KV: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, NORM: tl.constexpr,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
):  # fmt: skip
    """Program (token, group of HEADS query heads or of KV_HEADS KV heads). q is rotated in place, rotated k and v go to
    the pages.

    The halves of the heads are separate tiles, so each thread turns its pairs by itself, all of them by the same cos
    and sin.
    """
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    QUERY_GROUPS: tl.constexpr = (Q + HEADS - 1) // HEADS
    d = tl.arange(0, DIM // 2)[None, :]
    table = cos_sin + tl.load(positions + token).to(tl.int64) * DIM + d
    row = qkv + token * ((Q + 2 * KV) * DIM)
    if group < QUERY_GROUPS:
        head = group * HEADS + tl.arange(0, HEADS)[:, None]
        at, here = row + head * DIM + d, head < Q
        x1 = tl.load(at, mask=here, other=0.0)
        x2 = tl.load(at + DIM // 2, mask=here, other=0.0)
        x1, x2 = _turned(x1, x2, q_weight, tl.load(table), tl.load(table + DIM // 2), eps, DIM, NORM)
        tl.debug_barrier()  # all have read their part of q
        tl.store(at, x1, mask=here)
        tl.store(at + DIM // 2, x2, mask=here)
    else:
        slot = tl.load(out_loc + token)
        kv = (group - QUERY_GROUPS) * KV_HEADS + tl.arange(0, KV_HEADS)[:, None]
        source, is_kv = row + (Q + kv) * DIM + d, kv < KV
        k1 = tl.load(source, mask=is_kv, other=0.0)
        k2 = tl.load(source + DIM // 2, mask=is_kv, other=0.0)
        v1 = tl.load(source + KV * DIM, mask=is_kv, other=0.0)
        v2 = tl.load(source + KV * DIM + DIM // 2, mask=is_kv, other=0.0)
        to = pages + (slot // PAGE) * page_stride + (slot % PAGE) * slot_stride + kv * head_stride + d
        tl.store(to + kv_stride, v1, mask=is_kv)
        tl.store(to + kv_stride + DIM // 2, v2, mask=is_kv)
        k1, k2 = _turned(k1, k2, k_weight, tl.load(table), tl.load(table + DIM // 2), eps, DIM, NORM)
        tl.store(to, k1, mask=is_kv)
        tl.store(to + DIM // 2, k2, mask=is_kv)


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
    """As `reference.norm_rope_store`; the queries returned are a view of `qkv`. D is a power of two.

    Programs of 1,024 elements: with 16 query and 8 KV heads of 128, 1 / 64 / 256 / 8192 / 16384 tokens take 1.7 / 1.8 /
    2.2 / 38 / 75 us on an H200; fewer warps and more heads a program are within 2 us of that (`benchmark/kernels/ops.py
    small`).
    """
    tokens, kv_heads, page, dim = len(qkv), *pages.shape[2:]
    heads = qkv.shape[1] // dim - kv_heads * 2
    has_norm = q_weight is not None and k_weight is not None
    group, kv_group = (min(triton.next_power_of_2(count), max(1, 1024 // dim)) for count in (heads, kv_heads))
    _norm_rope_store[(tokens, triton.cdiv(heads, group) + triton.cdiv(kv_heads, kv_group))](
        qkv, q_weight if has_norm else qkv, k_weight if has_norm else qkv, cos_sin, positions, pages, out_loc,
        *pages.stride()[:4], eps,
        Q=heads, KV=kv_heads, DIM=dim, PAGE=page, NORM=has_norm, HEADS=group, KV_HEADS=kv_group,
    )  # fmt: skip
    return qkv.view(tokens, heads + 2 * kv_heads, dim)[:, :heads]
