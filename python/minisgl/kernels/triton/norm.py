"""Embedding, norms, and the transform between QKV projection and attention: one kernel each.

All arithmetic is in float32; values are rounded to the activations' dtype where `ops/reference.py` rounds them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor, empty, empty_like
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minisgl.kernels.triton.launch import MAX_CHAINED, pdl_options
from minisgl.kernels.triton.scores import columns
from minisgl.ops.quantized import Pages, QuantizedPages, data_and_scale, page_strides
from minisgl.ops.reference import HeadTransform


@triton.jit
def _embedding(ids_ptr, weight_ptr, out_ptr, n, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """out[t] = weight[ids[t]]; grid (T).

    It waits first, so that all later kernels may read what is written before it without waiting.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    row = tl.load(ids_ptr + token).to(tl.int64)
    tl.store(out_ptr + token * n + offs, tl.load(weight_ptr + row * n + offs, mask=offs < n), mask=offs < n)


def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """`reference.embedding`, as the first kernel of a one-row step."""
    tokens, n = len(ids), weight.shape[1]
    out = empty((tokens, n), dtype=weight.dtype, device=weight.device)
    options = pdl_options(weight.device, tokens == 1)
    _embedding[(tokens,)](ids, weight, out, n, BLOCK=triton.next_power_of_2(n), **options)
    return out


@triton.jit
def _rms_norm(
    x_ptr, residual_ptr, weight_ptr, scale_ptr, out_ptr, n, eps,
    ADDS_BEFORE: tl.constexpr, ADDS_AFTER: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out = x / sqrt(mean(x^2) + eps) * weight, one row a program. ADDS_BEFORE: residual += x first.

    ADDS_AFTER: out += residual. Last, out *= scale, unless it is None.
    """
    row = tl.program_id(0).to(tl.int64) * n
    offs = tl.arange(0, BLOCK)
    mask = offs < n
    if PDL and tl.num_programs(0) == 1:
        gdc_launch_dependents()
    w = tl.load(weight_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()  # of several rows only now: see `pdl_options`
    total = tl.load(x_ptr + row + offs, mask=mask, other=0.0)
    if ADDS_BEFORE:
        residual = tl.load(residual_ptr + row + offs, mask=mask, other=0.0)
        total = (total.to(tl.float32) + residual.to(tl.float32)).to(total.dtype)
        tl.store(residual_ptr + row + offs, total, mask=mask)
    x = total.to(tl.float32)
    x *= tl.rsqrt(tl.sum(x * x, 0) / n + eps)
    out = (x.to(weight_ptr.dtype.element_ty).to(tl.float32) * w).to(total.dtype)
    if ADDS_AFTER:
        residual = tl.load(residual_ptr + row + offs, mask=mask, other=0.0)
        out = (out.to(tl.float32) + residual.to(tl.float32)).to(total.dtype)
    if scale_ptr is not None:
        out = (out.to(tl.float32) * tl.load(scale_ptr).to(tl.float32)).to(total.dtype)
    tl.store(out_ptr + row + offs, out, mask=mask)


def _norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, adds_before: bool, scale: Tensor | None = None
) -> Tensor:
    """Launch with 8 elements (16 bytes) per thread and up to 8 warps: the fastest on an H200 at 1,024 and 4,096."""
    n = x.shape[-1]
    rows, block = x.numel() // n, triton.next_power_of_2(n)
    out = empty_like(x)
    _rms_norm[(rows,)](
        x, x if residual is None else residual, weight, scale, out, n, eps,
        ADDS_BEFORE=residual is not None and adds_before, ADDS_AFTER=residual is not None and not adds_before,
        BLOCK=block, num_warps=min(8, max(1, block // 256)), **pdl_options(x.device, rows <= MAX_CHAINED),
    )  # fmt: skip
    return out


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, scale: Tensor | None = None
) -> Tensor:
    """`reference.rms_norm`."""
    return _norm(x.contiguous(), residual, weight, eps, False, scale)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`reference.add_rms_norm`; overwrites `residual`."""
    return _norm(x, residual, weight, eps, True), residual


@triton.jit
def rotated(x1, x2, weight_ptr, cos, sin, eps, HEAD_DIM: tl.constexpr, HAS_NORM: tl.constexpr):
    """Apply RMS norm (or none) and RoPE to heads given as two halves [heads, D / 2]; cos and sin are [..., D / 2]."""
    offs_d, is_dim = columns(HEAD_DIM // 2, 1)
    f1, f2 = x1.to(tl.float32), x2.to(tl.float32)
    if HAS_NORM:
        w1 = tl.load(weight_ptr + offs_d, mask=is_dim, other=0.0)[None, :].to(tl.float32)
        w2 = tl.load(weight_ptr + HEAD_DIM // 2 + offs_d, mask=is_dim, other=0.0)[None, :].to(tl.float32)
        scale = tl.rsqrt(tl.sum(f1 * f1 + f2 * f2, 1) / HEAD_DIM + eps)[:, None]
        f1 = ((f1 * scale).to(weight_ptr.dtype.element_ty).to(tl.float32) * w1).to(x1.dtype).to(tl.float32)
        f2 = ((f2 * scale).to(weight_ptr.dtype.element_ty).to(tl.float32) * w2).to(x1.dtype).to(tl.float32)
    return (f1 * cos - f2 * sin).to(x1.dtype), (f2 * cos + f1 * sin).to(x1.dtype)


@triton.jit
def normalised(x1, x2, eps, HEAD_DIM: tl.constexpr):
    """Apply RMS norm without weights to heads given as two halves [heads, D / 2]."""
    f1, f2 = x1.to(tl.float32), x2.to(tl.float32)
    scale = tl.rsqrt(tl.sum(f1 * f1 + f2 * f2, 1) / HEAD_DIM + eps)[:, None]
    return (f1 * scale).to(x1.dtype), (f2 * scale).to(x1.dtype)


@triton.jit
def query_angles(cos, sin, q_scale_ptr, position):
    """Return the cosines and sines that also multiply a query by its scale, if there is one."""
    if q_scale_ptr is None:
        return cos, sin
    else:
        scale = tl.load(q_scale_ptr + position)
        return cos * scale, sin * scale


@triton.jit
def _rounded(x1, x2, scale_ptrs, mask):
    """Quantize heads given as two halves [heads, D / 2]: store their scales, return the halves as float8_e4m3fn."""
    f1, f2 = x1.to(tl.float32), x2.to(tl.float32)
    amax = tl.maximum(tl.max(tl.maximum(tl.abs(f1), tl.abs(f2)), 1), 1e-30)[:, None]
    tl.store(scale_ptrs, amax / 448.0, mask=mask)
    return (f1 * (448.0 / amax)).to(tl.float8e4nv), (f2 * (448.0 / amax)).to(tl.float8e4nv)


@triton.jit
def _norm_rope_store(
    qkv_ptr, q_weight_ptr, k_weight_ptr, cos_sin_ptr, q_scale_ptr, positions_ptr, pages_ptr, scale_ptr, out_loc_ptr,
    stride_page, stride_scale, eps,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    HAS_NORM: tl.constexpr, NORMS_V: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_KV_HEADS: tl.constexpr,
    IS_FP8: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (token, group of BLOCK_HEADS query heads or of BLOCK_KV_HEADS KV heads).

    q is rotated in place; rotated k and v are stored in the pages. The two halves of heads are separate tiles, so a
    thread has both elements of each pair that it rotates, and one cos and sin serve all heads.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    QUERY_GROUPS: tl.constexpr = (NUM_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    offs_d, is_dim = columns(HEAD_DIM // 2, 1)
    offs_d, is_dim = offs_d[None, :], is_dim[None, :]
    position = tl.load(positions_ptr + token).to(tl.int64)
    cos_ptrs = cos_sin_ptr + position * HEAD_DIM + offs_d
    row_ptr = qkv_ptr + token * ((NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM)
    if group < QUERY_GROUPS:
        head = group * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
        q_ptrs, q_mask = row_ptr + head * HEAD_DIM + offs_d, (head < NUM_HEADS) & is_dim
        x1 = tl.load(q_ptrs, mask=q_mask, other=0.0)
        x2 = tl.load(q_ptrs + HEAD_DIM // 2, mask=q_mask, other=0.0)
        cos = tl.load(cos_ptrs, mask=is_dim, other=0.0)
        sin = tl.load(cos_ptrs + HEAD_DIM // 2, mask=is_dim, other=0.0)
        cos, sin = query_angles(cos, sin, q_scale_ptr, position)
        x1, x2 = rotated(x1, x2, q_weight_ptr, cos, sin, eps, HEAD_DIM, HAS_NORM)
        tl.debug_barrier()  # all threads have read their part of q
        if IS_FP8 and q_ptrs.dtype.element_ty.primitive_bitwidth == 16:
            q_ptrs = q_ptrs.to(tl.pointer_type(tl.float16))
        tl.store(q_ptrs, x1.to(q_ptrs.dtype.element_ty), mask=q_mask)
        tl.store(q_ptrs + HEAD_DIM // 2, x2.to(q_ptrs.dtype.element_ty), mask=q_mask)
    else:
        slot = tl.load(out_loc_ptr + token)
        kv_head = (group - QUERY_GROUPS) * BLOCK_KV_HEADS + tl.arange(0, BLOCK_KV_HEADS)[:, None]
        k_ptrs, kv_mask = row_ptr + (NUM_HEADS + kv_head) * HEAD_DIM + offs_d, kv_head < NUM_KV_HEADS
        mask = kv_mask & is_dim
        k1 = tl.load(k_ptrs, mask=mask, other=0.0)
        k2 = tl.load(k_ptrs + HEAD_DIM // 2, mask=mask, other=0.0)
        v_ptrs = k_ptrs + NUM_KV_HEADS * HEAD_DIM
        v1 = tl.load(v_ptrs, mask=mask, other=0.0)
        v2 = tl.load(v_ptrs + HEAD_DIM // 2, mask=mask, other=0.0)
        index = kv_head * PAGE_SIZE + slot % PAGE_SIZE
        k_page_ptrs = pages_ptr + slot // PAGE_SIZE * stride_page + index * HEAD_DIM + offs_d
        v_page_ptrs = k_page_ptrs + NUM_KV_HEADS * PAGE_SIZE * HEAD_DIM
        scale_ptrs = scale_ptr + slot // PAGE_SIZE * stride_scale + index
        if NORMS_V:
            v1, v2 = normalised(v1, v2, eps, HEAD_DIM)
        if IS_FP8:
            v1, v2 = _rounded(v1, v2, scale_ptrs + NUM_KV_HEADS * PAGE_SIZE, kv_mask)
        tl.store(v_page_ptrs, v1, mask=mask)
        tl.store(v_page_ptrs + HEAD_DIM // 2, v2, mask=mask)
        cos = tl.load(cos_ptrs, mask=is_dim, other=0.0)
        sin = tl.load(cos_ptrs + HEAD_DIM // 2, mask=is_dim, other=0.0)
        k1, k2 = rotated(k1, k2, k_weight_ptr, cos, sin, eps, HEAD_DIM, HAS_NORM)
        if IS_FP8:
            k1, k2 = _rounded(k1, k2, scale_ptrs, kv_mask)
        tl.store(k_page_ptrs, k1, mask=mask)
        tl.store(k_page_ptrs + HEAD_DIM // 2, k2, mask=mask)


def norm_rope_store(qkv: Tensor, heads: HeadTransform, positions: Tensor, pages: Pages, out_loc: Tensor) -> Tensor:
    """`reference.norm_rope_store`; the returned queries are a view of `qkv`.

    With FP8 pages, 16-bit queries become float16, the dtype of attention's GEMMs in that case.

    Programs have 1,024 elements: with 16 query and 8 KV heads of 128, 1 / 64 / 256 / 8192 / 16384 tokens take 1.7 / 1.8
    / 2.2 / 38 / 75 us on an H200. Fewer warps or more heads per program change that by at most 2 us
    (`benchmark/kernels/ops.py small`).
    """
    tokens = len(qkv)
    num_kv_heads, page_size, dim = 0 if heads.reads else pages.shape[2], *pages.shape[3:]
    num_heads = qkv.shape[1] // dim - num_kv_heads * 2
    has_norm = heads.q_weight is not None
    data, scale = data_and_scale(pages)
    most = max(1, 1024 // triton.next_power_of_2(dim))
    block, kv_block = (min(triton.next_power_of_2(n), most) for n in (num_heads, max(num_kv_heads, 1)))
    _norm_rope_store[(tokens, triton.cdiv(num_heads, block) + triton.cdiv(num_kv_heads, kv_block))](
        qkv, heads.q_weight if has_norm else qkv, qkv if heads.k_weight is None else heads.k_weight, heads.cos_sin,
        heads.q_scale, positions, data, scale, out_loc, *page_strides(pages), heads.eps,
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=dim, PAGE_SIZE=page_size, HAS_NORM=has_norm,
        NORMS_V=heads.norms_v, BLOCK_HEADS=block, BLOCK_KV_HEADS=kv_block, IS_FP8=isinstance(pages, QuantizedPages),
        **pdl_options(qkv.device, tokens <= MAX_CHAINED),
    )  # fmt: skip
    q = qkv.view(tokens, num_heads + 2 * num_kv_heads, dim)[:, :num_heads]
    return q.view(torch.float16) if isinstance(pages, QuantizedPages) and q.element_size() == 2 else q
