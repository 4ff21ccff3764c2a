"""Attention to latents in pages (multi-head latent attention, arXiv:2405.04434), which all heads of a query read once.

The plan of `attention_decode.py` cuts the latents of all sequences into splits. A sequence may be one that decodes,
with or without drafts, or a few consecutive queries of a prompt's chunk. Its queries, each with all heads, or with one
of HEAD_BLOCKS blocks of them, are the columns of a tile: scores are [keys, columns] and results [latent, columns],
since the tensor cores of Hopper multiply at least 64 rows. `merge_latents` merges sequences that have several parts.

Letters in shapes: B sequences, T tokens, Hq query heads, C the latent's rank, R its rotated elements, P pages.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton import next_power_of_2

from minisgl.kernels.triton.attention_decode import BEGINS, PART, _load_part
from minisgl.kernels.triton.norm import rotated
from minisgl.kernels.triton.scores import NEGATIVE, add_parts, columns, merge_lanes
from minisgl.ops.quantized import Pages, QuantizedPages, data_and_scale, page_strides
from minisgl.ops.reference import LatentTransform


@triton.jit
def _store_latents(
    q_ptr, latents_ptr, weight_ptr, cos_sin_ptr, q_scale_ptr, positions_ptr, pages_ptr, scale_ptr, out_loc_ptr,
    eps, stride_q, stride_latents, stride_page, stride_scale,
    NUM_HEADS: tl.constexpr, NOPE_DIM: tl.constexpr, ROPE_DIM: tl.constexpr, RANK: tl.constexpr,
    PAGE_SIZE: tl.constexpr, BLOCK_H: tl.constexpr, IS_FP8: tl.constexpr,
):  # fmt: skip
    """Grid: (token, one of groups of BLOCK_H heads of q, or the last: the latent)."""
    HALF: tl.constexpr = ROPE_DIM // 2
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(positions_ptr + token).to(tl.int64)
    half, is_half = columns(HALF, 1)
    cos = tl.load(cos_sin_ptr + position * ROPE_DIM + half, mask=is_half, other=0.0)
    sin = tl.load(cos_sin_ptr + position * ROPE_DIM + HALF + half, mask=is_half, other=0.0)
    if group < tl.num_programs(1) - 1:
        head = group * BLOCK_H + tl.arange(0, BLOCK_H)
        head_ptrs = q_ptr + token * stride_q + head[:, None] * (NOPE_DIM + ROPE_DIM)
        q_ptrs = head_ptrs + NOPE_DIM + half[None, :]
        mask = (head < NUM_HEADS)[:, None] & is_half[None, :]
        x1 = tl.load(q_ptrs, mask=mask, other=0.0)
        x2 = tl.load(q_ptrs + HALF, mask=mask, other=0.0)
        y1, y2 = rotated(x1, x2, q_ptr, cos, sin, eps, ROPE_DIM, False)
        if q_scale_ptr is not None:
            q_scale = tl.load(q_scale_ptr + position)
            y1, y2 = (y1.to(tl.float32) * q_scale).to(x1.dtype), (y2.to(tl.float32) * q_scale).to(x1.dtype)
            offs_d, is_dim = columns(NOPE_DIM, 1)
            mask_nope = (head < NUM_HEADS)[:, None] & is_dim[None, :]
            x = tl.load(head_ptrs + offs_d[None, :], mask=mask_nope, other=0.0)
            tl.store(head_ptrs + offs_d[None, :], (x.to(tl.float32) * q_scale).to(x.dtype), mask=mask_nope)
        tl.debug_barrier()  # all threads have read their part of q
        tl.store(q_ptrs, y1, mask=mask)
        tl.store(q_ptrs + HALF, y2, mask=mask)
    else:
        slot = tl.load(out_loc_ptr + token)
        offs_c, is_c = columns(RANK, 1)
        c_ptrs = latents_ptr + token * stride_latents + offs_c
        k_ptrs = latents_ptr + token * stride_latents + RANK + half
        c = tl.load(c_ptrs, mask=is_c, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + offs_c, mask=is_c, other=0.0)
        c *= tl.rsqrt(tl.sum(c * c, 0) / RANK + eps)
        c = (c.to(weight.dtype).to(tl.float32) * weight.to(tl.float32)).to(latents_ptr.dtype.element_ty)
        k1 = tl.load(k_ptrs, mask=is_half, other=0.0)
        k2 = tl.load(k_ptrs + HALF, mask=is_half, other=0.0)
        new_k1, new_k2 = rotated(k1, k2, weight_ptr, cos, sin, eps, ROPE_DIM, False)
        tl.debug_barrier()  # all threads have read their part of the latent
        tl.store(c_ptrs, c, mask=is_c)
        tl.store(k_ptrs, new_k1, mask=is_half)
        tl.store(k_ptrs + HALF, new_k2, mask=is_half)
        page_ptr = pages_ptr + slot // PAGE_SIZE * stride_page + slot % PAGE_SIZE * (RANK + ROPE_DIM)
        if IS_FP8:
            c, new_k1, new_k2 = c.to(tl.float32), new_k1.to(tl.float32), new_k2.to(tl.float32)
            largest = tl.maximum(tl.max(tl.abs(c), 0), tl.maximum(tl.max(tl.abs(new_k1), 0), tl.max(tl.abs(new_k2), 0)))
            largest = tl.maximum(largest, 1e-30)
            tl.store(scale_ptr + slot // PAGE_SIZE * stride_scale + slot % PAGE_SIZE, largest / 448.0)
            c, new_k1, new_k2 = c * (448.0 / largest), new_k1 * (448.0 / largest), new_k2 * (448.0 / largest)
        tl.store(page_ptr + offs_c, c.to(pages_ptr.dtype.element_ty), mask=is_c)
        tl.store(page_ptr + RANK + half, new_k1.to(pages_ptr.dtype.element_ty), mask=is_half)
        tl.store(page_ptr + RANK + HALF + half, new_k2.to(pages_ptr.dtype.element_ty), mask=is_half)


def store_latents(
    q: Tensor, latents: Tensor, heads: LatentTransform, positions: Tensor, pages: Pages, out_loc: Tensor
) -> None:
    """`reference.store_latents`."""
    tokens, num_heads, rank = *q.shape[:2], len(heads.norm_weight)
    rope_dim = latents.shape[1] - rank
    data, scale = data_and_scale(pages)
    block = min(16, next_power_of_2(num_heads))
    _store_latents[(tokens, triton.cdiv(num_heads, block) + 1)](
        q, latents, heads.norm_weight, heads.cos_sin, heads.q_scale, positions, data, scale, out_loc, heads.eps,
        q.stride(0), latents.stride(0), *page_strides(pages), NUM_HEADS=num_heads, NOPE_DIM=q.shape[2] - rope_dim,
        ROPE_DIM=rope_dim, RANK=rank, PAGE_SIZE=pages.shape[2], BLOCK_H=block,
        IS_FP8=isinstance(pages, QuantizedPages), num_warps=2,
    )  # fmt: skip


@triton.jit
def _sequence(seq, starts_ptr, ends_ptr):
    """Return a sequence's first token and its number of queries."""
    if starts_ptr is None:
        return seq, 1
    else:
        token = tl.load(starts_ptr + seq)
        return token, tl.load(ends_ptr + seq) - token


@triton.jit(
    do_not_specialize=["stride_table"],
    do_not_specialize_on_alignment=["page_table_ptr", "starts_ptr", "ends_ptr"],
)
def attend_latents(
    q_ptr, q_rope_ptr, pages_ptr, key_scale_ptr, page_table_ptr, starts_ptr, ends_ptr, work_ptr, part_ptr, lse_ptr,
    out_ptr, scale, stride_rope, stride_rope_head, stride_table, stride_page, stride_scale,
    HEAD_BLOCKS: tl.constexpr, GROUP_SIZE: tl.constexpr, MAX_QUERIES: tl.constexpr, RANK: tl.constexpr,
    ROPE_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, TILE_KEYS: tl.constexpr,
    NUM_STAGES: tl.constexpr, NUM_SPLITS: tl.constexpr, IS_FP8: tl.constexpr,
):  # fmt: skip
    """out [T, Hq, C] = softmax(scale (q c + q_rope r)) c over a sequence's latents, causal; grid (NUM_SPLITS * blocks).

    q [T, Hq, C]; q_rope has `stride_rope` from token to token, and `stride_rope_head` from head to head; pages
    [P, 1, page, C + R], `stride_page` apart; `scale` includes log2(e). Sequence j has the tokens from starts[j] to
    ends[j], its last ones, of which at most MAX_QUERIES get output; without `starts` it is token j. A block has
    GROUP_SIZE heads. A part of a sequence that has several is at 2 * split + 1 if it is the first, else at 2 * split,
    of part [2 * NUM_SPLITS, HEAD_BLOCKS, BLOCK_M, C] and lse [2 * NUM_SPLITS, HEAD_BLOCKS, BLOCK_M], float32.

    IS_FP8: pages are float8_e4m3fn with a scale [P, 1, page] for each latent, and GEMMs are in float16.
    """
    dtype = tl.float16 if IS_FP8 else q_ptr.dtype.element_ty
    split, block = tl.program_id(0) // HEAD_BLOCKS, tl.program_id(0) % HEAD_BLOCKS
    offs_m, offs_n = tl.arange(0, BLOCK_M), tl.arange(0, TILE_KEYS)
    offs_c, is_c = columns(RANK, 1)
    offs_r, is_r = columns(ROPE_DIM, 1)
    query, head = offs_m // GROUP_SIZE, block * GROUP_SIZE + offs_m % GROUP_SIZE
    NUM_HEADS: tl.constexpr = HEAD_BLOCKS * GROUP_SIZE
    parts_ptr = work_ptr + BEGINS
    num_splits = tl.load(work_ptr)
    num_seqs = tl.load(work_ptr + 1)
    gap = tl.load(work_ptr + 2)
    by_ticket = num_splits > NUM_SPLITS
    seq, row, start_key, length, first_split, num_parts, remaining = _load_part(parts_ptr + split * PART)
    remaining = tl.where(split < num_splits, remaining, 0)
    while remaining > 0:
        stop = tl.minimum(start_key + remaining * TILE_KEYS, length)
        remaining -= tl.cdiv(stop - start_key, TILE_KEYS) + gap
        remaining = tl.where(seq + 1 < num_seqs, remaining, 0)
        token, num_queries = _sequence(seq, starts_ptr, ends_ptr)
        position = length - num_queries + query
        is_row = query < tl.minimum(num_queries, MAX_QUERIES)
        tokens = (token + query).to(tl.int64)[:, None]
        q_ptrs = q_ptr + (tokens * NUM_HEADS + head[:, None]) * RANK + offs_c[None, :]
        q = tl.load(q_ptrs, mask=is_row[:, None] & is_c[None, :], other=0.0).to(dtype)
        rope_ptrs = q_rope_ptr + tokens * stride_rope + head[:, None] * stride_rope_head + offs_r[None, :]
        q_rope = tl.load(rope_ptrs, mask=is_row[:, None] & is_r[None, :], other=0.0).to(dtype)
        table_ptr = page_table_ptr + row.to(tl.int64) * stride_table
        m = tl.full([BLOCK_M], NEGATIVE, tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([offs_c.shape[0], BLOCK_M], tl.float32)
        for start in tl.range(start_key, stop, TILE_KEYS, num_stages=NUM_STAGES):
            is_key = start + offs_n < stop
            if PAGE_SIZE >= TILE_KEYS:  # rows are a constant apart, which saves registers for their addresses
                page = tl.load(table_ptr + start // PAGE_SIZE).to(tl.int64)
                offset = start % PAGE_SIZE + offs_n
                first_ptr = pages_ptr + page * stride_page + start % PAGE_SIZE * (RANK + ROPE_DIM)
                key_ptrs = first_ptr + (offs_n * (RANK + ROPE_DIM))[:, None]
            else:
                page = tl.load(table_ptr + (start + offs_n) // PAGE_SIZE, mask=is_key, other=0).to(tl.int64)
                offset = (start + offs_n) % PAGE_SIZE
                key_ptrs = (pages_ptr + page * stride_page + offset * (RANK + ROPE_DIM))[:, None]
            # Loads are masked, too: masking the scores does not remove a NaN beyond the last key.
            c = tl.load(key_ptrs + offs_c[None, :], mask=is_key[:, None] & is_c[None, :], other=0.0).to(dtype)
            r = tl.load(key_ptrs + RANK + offs_r[None, :], mask=is_key[:, None] & is_r[None, :], other=0.0).to(dtype)
            x = tl.dot(r, tl.trans(q_rope), tl.dot(c, tl.trans(q))) * scale
            if IS_FP8:
                key_scale = tl.load(key_scale_ptr + page * stride_scale + offset, mask=is_key, other=0.0)
                x *= key_scale[:, None]
            is_seen = is_key[:, None] & (start + offs_n[:, None] <= position[None, :])
            x = tl.where(is_seen, x, NEGATIVE)
            new_m = tl.maximum(m, tl.max(x, 0))
            p = tl.exp2(x - new_m[None, :])
            correction = tl.exp2(m - new_m)
            total = total * correction + tl.sum(p, 0)
            if IS_FP8:
                p *= (key_scale * 256.0)[:, None]  # else many small terms would underflow
            acc = tl.dot(tl.trans(c), p.to(dtype), acc * correction[None, :])
            m = new_m
        if IS_FP8:
            acc *= 0.00390625
        result = tl.trans(acc / total[None, :])
        if num_parts == 1:
            out_ptrs = out_ptr + (tokens * NUM_HEADS + head[:, None]) * RANK + offs_c[None, :]
            tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_c[None, :])
        else:
            slot = 2 * split + (split == first_split).to(tl.int32)
            offs_part = (slot * HEAD_BLOCKS + block) * BLOCK_M + offs_m
            part_ptrs = part_ptr + offs_part[:, None].to(tl.int64) * RANK + offs_c[None, :]
            tl.store(part_ptrs, result, mask=is_row[:, None] & is_c[None, :])
            tl.store(lse_ptr + offs_part, m + tl.log2(total), mask=is_row)
        next_split, next_block = NUM_SPLITS + seq + 1, block  # the first part of the next sequence
        if by_ticket:  # every layer draws one ticket per split and block
            ticket = tl.atomic_add(work_ptr + 3, 1, sem="relaxed") % (num_splits * HEAD_BLOCKS)
            next_split, next_block = NUM_SPLITS + ticket // HEAD_BLOCKS, ticket % HEAD_BLOCKS
        has_next = (remaining > 0) | (next_split < num_splits)
        following = _load_part(parts_ptr + tl.where(has_next, next_split, split) * PART)
        seq, row, start_key, length, first_split, num_parts, whole = following
        if by_ticket:
            split, block, remaining = next_split, next_block, tl.where(has_next, whole, 0)
            head = block * GROUP_SIZE + offs_m % GROUP_SIZE


@triton.jit(do_not_specialize_on_alignment=["kv_lens_ptr", "starts_ptr", "ends_ptr"])
def merge_latents(
    part_ptr, lse_ptr, work_ptr, kv_lens_ptr, starts_ptr, ends_ptr, out_ptr,
    HEAD_BLOCKS: tl.constexpr, GROUP_SIZE: tl.constexpr, MAX_QUERIES: tl.constexpr, RANK: tl.constexpr,
    BLOCK_M: tl.constexpr, NUM_SPLITS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write the output of sequences that have several parts, weighted by their exponential sums.

    Grid (B, cdiv(MAX_QUERIES * GROUP_SIZE, ROWS), HEAD_BLOCKS); buffers are those of `attend_latents`.
    """
    seq, block = tl.program_id(0), tl.program_id(2)
    if tl.load(work_ptr) > NUM_SPLITS or tl.load(kv_lens_ptr + seq) == 0:
        return  # sequences are whole, or this one pads a step
    first_split = tl.load(work_ptr + BEGINS + (NUM_SPLITS + seq) * PART + 4)
    num_parts = tl.load(work_ptr + BEGINS + (NUM_SPLITS + seq) * PART + 5)
    token, num_queries = _sequence(seq, starts_ptr, ends_ptr)
    offs_m = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    is_row = offs_m < tl.minimum(num_queries, MAX_QUERIES) * GROUP_SIZE
    if num_parts == 1:
        return
    LANES: tl.constexpr = 4
    offs_c, is_c = columns(RANK, 1)
    m = tl.full([ROWS, LANES], NEGATIVE, tl.float32)
    total = tl.zeros([ROWS, LANES], tl.float32)
    acc = tl.zeros([ROWS, LANES, offs_c.shape[0]], tl.float32)
    for first in range(0, num_parts, LANES):
        part = first + tl.arange(0, LANES)
        slot = 2 * (first_split + part) + (part == 0).to(tl.int32)
        offs_part = (slot[None, :] * HEAD_BLOCKS + block) * BLOCK_M + offs_m[:, None]
        is_part = (part < num_parts)[None, :] & is_row[:, None]
        lse = tl.load(lse_ptr + offs_part, mask=is_part, other=NEGATIVE)
        part_ptrs = part_ptr + offs_part[:, :, None].to(tl.int64) * RANK + offs_c[None, None, :]
        x = tl.load(part_ptrs, mask=is_part[:, :, None] & is_c[None, None, :], other=0.0)
        m, total, acc = add_parts(m, total, acc, lse, x)
    result = merge_lanes(m, total, acc)
    head = block * GROUP_SIZE + offs_m % GROUP_SIZE
    index = (token + offs_m // GROUP_SIZE).to(tl.int64) * (HEAD_BLOCKS * GROUP_SIZE) + head
    out_ptrs = out_ptr + index[:, None] * RANK + offs_c[None, :]
    tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_c[None, :])
