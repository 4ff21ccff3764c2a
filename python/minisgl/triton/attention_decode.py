"""Decode attention over the paged cache: one query per sequence, split over the KV length (flash decoding).

The keys of all sequences are laid end to end and cut into equal shares, one for each program of a KV head, so that all
end together however long the sequences are (stream-K, arXiv:2301.03598; for attention arXiv:2405.10480). A program goes
through the parts of sequences that make up its share, and the last to finish a sequence of several parts merges them in
order. `attention_plan.py` finds the shares on the device. Nothing is read back and no size depends on lengths that the
host knows, so a step can be captured in a CUDA graph once per number of sequences. Layers that see a window only have a
plan of their own, in which a sequence is as long as what they see of it.

Letters in shapes: B sequences, T tokens, Hq/Hk query/KV heads, G = Hq / Hk, D head dimension, P pages.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minisgl.triton.attention_plan import BEGINS, PART, TILE_KEYS, load_part

NEGATIVE = tl.constexpr(-1e30)  # instead of -inf, whose differences are NaN


@triton.jit
def _norm_rope(x, weight, cos_sin, position, mask, eps, D: tl.constexpr, R: tl.constexpr, NORM: tl.constexpr):
    """RMS norm (or none) and RoPE of R adjacent heads at `x`, rounded as the reference rounds -> [R, D] float32."""
    dtype = x.dtype.element_ty
    r = tl.arange(0, R)
    d = tl.arange(0, D)
    pair = (d + D // 2) % D
    a = tl.load(x + r[:, None] * D + d[None, :], mask=mask[:, None], other=0.0).to(tl.float32)
    b = tl.load(x + r[:, None] * D + pair[None, :], mask=mask[:, None], other=0.0).to(tl.float32)
    if NORM:
        inverse = tl.rsqrt(tl.sum(a * a, 1) / D + eps)[:, None]
        wa = tl.load(weight + d).to(tl.float32)[None, :]
        wb = tl.load(weight + pair).to(tl.float32)[None, :]
        a = ((a * inverse).to(weight.dtype.element_ty).to(tl.float32) * wa).to(dtype).to(tl.float32)
        b = ((b * inverse).to(weight.dtype.element_ty).to(tl.float32) * wb).to(dtype).to(tl.float32)
    cos = tl.load(cos_sin + position * D + d % (D // 2))
    sin = tl.load(cos_sin + position * D + D // 2 + d % (D // 2))
    sin = tl.where(d < D // 2, -sin, sin)
    return (a * cos[None, :] + b * sin[None, :]).to(dtype).to(tl.float32)


@triton.jit
def _merge(
    part, lse, out, first, num_chunks, head, HK: tl.constexpr, G: tl.constexpr, R: tl.constexpr, D: tl.constexpr
):
    """Weigh the parts of one sequence and KV head by their exponential sums; `out` is its first query head.

    The largest is looked up first, so that the loads of the second loop do not wait for each other.
    """
    LANES: tl.constexpr = 4096 // (R * D) if R * D < 4096 else 1  # 64 registers a thread
    g = tl.arange(0, R)
    d = tl.arange(0, D)
    wide = tl.arange(0, 32)
    lane = tl.arange(0, LANES)
    row = (first * HK + head) * G + g  # of the first part; that of the next is HK * G further
    m = tl.full([R], NEGATIVE, tl.float32)
    for j in range(0, num_chunks, 32):
        c = j + wide[None, :]
        is_part = (c < num_chunks) & (g < G)[:, None]
        m = tl.maximum(m, tl.max(tl.load(lse + row[:, None] + c * (HK * G), mask=is_part, other=NEGATIVE), 1))
    total = tl.zeros([R, LANES], tl.float32)
    acc = tl.zeros([R, LANES, D], tl.float32)
    for j in range(0, num_chunks, LANES):
        c = j + lane[None, :]
        is_part = (c < num_chunks) & (g < G)[:, None]
        slot = row[:, None] + c * (HK * G)
        x = tl.load(part + slot[:, :, None].to(tl.int64) * D + d[None, None, :], mask=is_part[:, :, None], other=0.0)
        p = tl.exp2(tl.load(lse + slot, mask=is_part, other=NEGATIVE) - m[:, None])
        total += p
        acc += x * p[:, :, None]
    result = tl.sum(acc, 1) / tl.sum(total, 1)[:, None]
    tl.store(out + g[:, None] * D + d[None, :], result.to(out.dtype.element_ty), mask=g[:, None] < G)


@triton.jit(
    do_not_specialize=["stride_table"],
    do_not_specialize_on_alignment=["page_table", "out_loc"],
)
def decode_attention(
    q, pages, page_table, work, counters, part, lse, out,
    q_weight, k_weight, cos_sin, out_loc,
    scale, eps, stride_q, stride_table,
    HK: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr, R: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
    STAGES: tl.constexpr, SHARES: tl.constexpr,
    WINDOW: tl.constexpr, FUSED: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [B, Hq, D] = softmax(q K^T / sqrt(D)) V of each sequence; grid (SHARES * Hk).

    q [B, >= Hq, D] has token stride `stride_q`; pages [P, 2, Hk, PAGE, D]; `scale` includes log2(e). What share i makes
    of sequence j, if that has several parts, lies at j + i in part [B + SHARES, Hk, G, D] and lse [B + SHARES, Hk, G],
    float32. GROUP is the power of two at or above G, R at least what the matrix units take.

    FUSED: q is followed by the new keys and values, as the projection left them; each is the last of its sequence. Norm
    and RoPE are done here, and the program that has a sequence's last part stores its key and value at `out_loc`; the
    others need not see them.
    PDL: the start overlaps with the kernel before, so all that depends on that one comes after `gdc_wait`; the work
    list and the step's inputs must be older (an ordinary launch after `plan_decode` sees to it).
    """
    if PDL:
        gdc_launch_dependents()
    g = tl.arange(0, R)
    d = tl.arange(0, D)
    share = tl.program_id(0) // HK
    head = tl.program_id(0) % HK
    begins = work + BEGINS
    num_shares = tl.load(work)
    num_seqs = tl.load(work + 1)
    gap = tl.load(work + 2)
    by_ticket = num_shares > SHARES
    ticket = 0
    seq, row, lo, length, first_share, parts, left = load_part(begins + share * PART)
    left = tl.where(share < num_shares, left, 0)
    while left > 0:
        hi = tl.minimum(lo + left * TILE_KEYS, length)
        left -= tl.cdiv(hi - lo, TILE_KEYS) + gap
        left = tl.where(seq + 1 < num_seqs, left, 0)
        following = load_part(begins + (SHARES + tl.where(left > 0, seq + 1, seq)) * PART)
        if by_ticket:
            ticket = tl.atomic_add(work + 3, 1, sem="relaxed")
        table = page_table + row.to(tl.int64) * stride_table
        q_seq = q + seq.to(tl.int64) * stride_q
        out_seq = out + (seq.to(tl.int64) * HK + head) * G * D
        if FUSED:
            slot = tl.load(out_loc + seq)
        if PDL:
            gdc_wait()
        if FUSED:
            query = _norm_rope(q_seq + head * G * D, q_weight, cos_sin, length - 1, g < G, eps, D, R, NORM)
            query = query.to(q.dtype.element_ty)
            new = q_seq + (HK * G + head) * D
            one = tl.arange(0, 1)
            new_k = _norm_rope(new, k_weight, cos_sin, length - 1, one < 1, eps, D, 1, NORM)
            new_v = tl.load(new + HK * D + d)
            # The softmax begins with the new key in one program per sequence and head, with nothing in the others.
            is_last = hi == length
            hi = tl.minimum(hi, length - 1)
            kv_ptr = pages + ((slot // PAGE * 2 * HK + head) * PAGE + slot % PAGE) * D + d
            tl.store(kv_ptr, tl.reshape(new_k, [D]).to(pages.dtype.element_ty), mask=is_last & (d < D))
            tl.store(kv_ptr + HK * PAGE * D, new_v, mask=is_last & (d < D))
            m = tl.where(is_last, tl.sum(query.to(tl.float32) * new_k, 1) * scale, NEGATIVE)
            total = tl.where(is_last, tl.full([R], 1.0, tl.float32), 0.0)
            acc = tl.where(is_last, tl.broadcast_to(new_v.to(tl.float32)[None, :], [R, D]), 0.0)
        else:
            query = tl.load(q_seq + (head * G + g[:, None]) * D + d[None, :], mask=g[:, None] < G, other=0.0)
            m = tl.full([R], NEGATIVE, tl.float32)
            total = tl.zeros([R], tl.float32)
            acc = tl.zeros([R, D], tl.float32)
        for start in tl.range(lo, hi, TILE_KEYS, num_stages=STAGES):
            o = start + tl.arange(0, TILE_KEYS)
            is_key = o < hi
            if WINDOW > 0:
                is_key = is_key & (o >= length - WINDOW)
            if PAGE >= TILE_KEYS:
                page = tl.load(table + start // PAGE).to(tl.int64)
                offset = (page * 2 * HK + head) * PAGE * D + (start % PAGE + tl.arange(0, TILE_KEYS)) * D
            else:
                page = tl.load(table + o // PAGE, mask=is_key, other=0).to(tl.int64)
                offset = (page * 2 * HK + head) * PAGE * D + (o % PAGE) * D
            k_ptr = pages + offset[:, None] + d[None, :]
            # Masked loads, not masked products: beyond the last key there may be NaN.
            k = tl.load(k_ptr, mask=is_key[:, None], other=0.0)
            v = tl.load(k_ptr + HK * PAGE * D, mask=is_key[:, None], other=0.0)
            x = tl.dot(query, tl.trans(k), input_precision="ieee") * scale
            x = tl.where(is_key[None, :], x, NEGATIVE)
            new_m = tl.maximum(m, tl.max(x, 1))
            p = tl.exp2(x - new_m[:, None])
            correction = tl.exp2(m - new_m)
            total = total * correction + tl.sum(p, 1)
            acc = tl.dot(p.to(v.dtype), v, acc * correction[:, None], input_precision="ieee")
            m = new_m
        acc = acc / total[:, None]
        if parts == 1:
            tl.store(out_seq + g[:, None] * D + d[None, :], acc.to(out.dtype.element_ty), mask=g[:, None] < G)
        else:
            slots = ((seq + share) * HK + head) * G + g
            tl.store(part + slots[:, None].to(tl.int64) * D + d[None, :], acc, mask=g[:, None] < G)
            tl.store(lse + slots, m + tl.log2(total), mask=g < G)
            tl.debug_barrier()  # the whole program's parts, before one thread announces them
            done = tl.atomic_add(counters + seq * HK + head, 1, sem="acq_rel")
            if done == parts - 1:
                tl.store(counters + seq * HK + head, 0)
                _merge(part, lse, out_seq, seq + first_share, parts, head, HK, G, GROUP, D)
        seq, row, lo, length, first_share, parts, _ = following
        if by_ticket:  # as many are drawn in each layer as there are shares
            ticket = SHARES * HK + ticket % (num_shares * HK)
            share = ticket // HK
            head = ticket % HK
            place = begins + tl.minimum(share, num_shares - 1) * PART
            seq, row, lo, length, first_share, parts, left = load_part(place)
            left = tl.where(share < num_shares, left, 0)
