"""Causal attention of prompt chunks over the paged cache (FlashAttention-2, arXiv:2307.08691).

A tile is TQ consecutive queries of one sequence with all G query heads of one KV head: BM = TQ * G rows (or a few
less, for odd G) that share every key they read. `plan_prefill` lists the tiles on the device, longest first. When
there are too few to fill the GPU (a short chunk after a long context), the keys of every tile are split into equal
parts, and the last to finish a tile merges its parts in index order. Layers that see a window only have a list of
their own, since that splits less.

Letters in shapes: T tokens, B sequences, Hq/Hk query/KV heads, G = Hq / Hk, D head dimension, P pages.
"""

from __future__ import annotations

import triton
import triton.language as tl

# The `work` buffer, int32: [0] number of items, [1] parts per tile, then a merge counter per tile and KV head (used
# only where tiles are split), then the items, which are parts of tiles: row of the page table, first position, first
# token, number of queries.
COUNTERS = tl.constexpr(2)
TILE = tl.constexpr(4)  # numbers per item
MIN_PART = tl.constexpr(256)  # keys
NEGATIVE = tl.constexpr(-1e30)  # instead of -inf, whose differences are NaN


@triton.jit(
    do_not_specialize=["first", "num_seqs"],
    do_not_specialize_on_alignment=["rows", "kv_lens", "cu_query_lens", "work"],
)
def plan_prefill(
    rows, kv_lens, cu_query_lens, work, first, num_seqs,
    HK: tl.constexpr, TQ: tl.constexpr, PROGRAMS: tl.constexpr, MAX_PARTS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """The items of sequences first .. first + num_seqs, for layers with this window (0: without); grid (num_seqs).

    A tile's place is the number of tiles that begin at a later position, which can be counted per sequence without
    looking at the tiles one by one. MAX_PARTS is at least PROGRAMS, a bound of tiles * Hk * parts if parts > 1.
    """
    BLOCK: tl.constexpr = 64
    TILES: tl.constexpr = 32
    s = tl.program_id(0)
    rows += first
    kv_lens += first
    cu_query_lens += first
    b = tl.arange(0, BLOCK)
    tile_counts = tl.zeros([BLOCK], tl.int32)
    longest = tl.zeros([BLOCK], tl.int32)
    for block in range(0, num_seqs, BLOCK):
        length, queries = _load_lengths(kv_lens, cu_query_lens, block + b, num_seqs)
        tile_counts += (queries + TQ - 1) // TQ
        longest = tl.maximum(longest, length)
    all_tiles = tl.sum(tile_counts, 0)
    most_keys = tl.max(longest, 0)
    if WINDOW > 0:
        most_keys = tl.minimum(most_keys, WINDOW + TQ)
    parts = tl.minimum(PROGRAMS // (all_tiles * HK), most_keys // MIN_PART)
    parts = tl.maximum(parts, 1)
    if s == 0:
        tl.store(work, all_tiles * parts)
        tl.store(work + 1, parts)
        tl.store(work + COUNTERS + tl.arange(0, MAX_PARTS), tl.zeros([MAX_PARTS], tl.int32))

    row = tl.load(rows + s)
    token = tl.load(cu_query_lens + s)
    num_queries = tl.load(cu_query_lens + s + 1) - token
    begin = tl.load(kv_lens + s) - num_queries
    for start in range(0, tl.cdiv(num_queries, TQ), TILES):
        i = start + tl.arange(0, TILES)
        position = begin + i * TQ
        rank = tl.zeros([TILES], tl.int32)
        for block in range(0, num_seqs, BLOCK):
            length, queries = _load_lengths(kv_lens, cu_query_lens, block + b, num_seqs)
            tiles = ((queries + TQ - 1) // TQ)[None, :]
            distance = position[:, None] - (length - queries)[None, :]
            not_later = tl.where(distance >= 0, tl.minimum(distance // TQ + 1, tiles), 0)
            is_equal = (distance >= 0) & (distance % TQ == 0) & (distance // TQ < tiles)
            is_equal = is_equal & ((block + b)[None, :] < s)
            rank += tl.sum(tiles - not_later + is_equal.to(tl.int32), 1)
        is_tile = i * TQ < num_queries
        for part in range(parts):
            item = work + COUNTERS + MAX_PARTS + (rank * parts + part) * TILE
            tl.store(item, tl.zeros([TILES], tl.int32) + row, mask=is_tile)
            tl.store(item + 1, position, mask=is_tile)
            tl.store(item + 2, token + i * TQ, mask=is_tile)
            tl.store(item + 3, tl.minimum(num_queries - i * TQ, TQ), mask=is_tile)


@triton.jit
def _load_lengths(kv_lens, cu_query_lens, seqs, num_seqs):
    """KV and query lengths, 0 beyond the last sequence."""
    mask = seqs < num_seqs
    begin = tl.load(cu_query_lens + seqs, mask=mask, other=0)
    end = tl.load(cu_query_lens + seqs + 1, mask=mask, other=0)
    return tl.load(kv_lens + seqs, mask=mask, other=0), end - begin


@triton.jit
def _add_keys(
    acc, m, total, query, position, pages, table, head, lo, hi, scale,
    HK: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
    WINDOW: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Online softmax over keys [lo, hi); not MASKED: whole tiles of keys that every query sees.

    A query that has seen none yet sums up the values of those it must not see; the first that it does see, here or when
    parts are merged, weighs infinitely more.
    """
    d = tl.arange(0, D)
    for start in tl.range(lo, hi, BN, num_stages=STAGES):
        o = start + tl.arange(0, BN)
        if PAGE >= BN:
            page = tl.load(table + start // PAGE).to(tl.int64)
            offset = (page * 2 * HK + head) * PAGE * D + (start % PAGE + tl.arange(0, BN)) * D
        else:
            page = tl.load(table + o // PAGE, mask=o < hi, other=0).to(tl.int64)
            offset = (page * 2 * HK + head) * PAGE * D + (o % PAGE) * D
        k_ptr = pages + offset[:, None] + d[None, :]
        v_ptr = k_ptr + HK * PAGE * D
        if MASKED:  # by masked loads, not products: beyond the last key there may be NaN
            k = tl.load(k_ptr, mask=o[:, None] < hi, other=0.0)
            v = tl.load(v_ptr, mask=o[:, None] < hi, other=0.0)
        else:
            k = tl.load(k_ptr)
            v = tl.load(v_ptr)
        x = tl.dot(query, tl.trans(k), input_precision="ieee")
        if MASKED:
            is_seen = o[None, :] <= position[:, None]
            if WINDOW > 0:
                is_seen = is_seen & (o[None, :] > position[:, None] - WINDOW)
            # Scaled first: fused with the subtraction below, the product of NEGATIVE would leave a remainder, and
            # that may be large.
            x = tl.where(is_seen, x * scale, NEGATIVE)
            new_m = tl.maximum(m, tl.max(x, 1))
            p = tl.exp2(x - new_m[:, None])
        else:
            new_m = tl.maximum(m, tl.max(x, 1) * scale)
            p = tl.exp2(x * scale - new_m[:, None])
        correction = tl.exp2(m - new_m)
        total = total * correction + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * correction[:, None], input_precision="ieee")
        m = new_m
    return acc, m, total


@triton.jit(
    do_not_specialize=["stride_table"],
    do_not_specialize_on_alignment=["page_table", "work"],
)
def prefill_attention(
    q, pages, page_table, work, part, lse, out, scale, stride_q, stride_table,
    HK: tl.constexpr, G: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr, MAX_PARTS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """out [T, Hq, D] = causal attention of the listed tiles; grid (at least items * Hk).

    q [T, >= Hq, D] has token stride `stride_q`; pages [P, 2, Hk, PAGE, D]; `scale` includes log2(e); part [MAX_PARTS *
    BM, D] and lse [MAX_PARTS * BM] float32.
    """
    head = tl.program_id(0) % HK
    index = tl.program_id(0) // HK
    num_items = tl.load(work)
    parts = tl.load(work + 1)
    item = work + COUNTERS + MAX_PARTS + index * TILE
    is_item = index < num_items
    row = tl.load(item, mask=is_item, other=0)
    lowest = tl.load(item + 1, mask=is_item, other=0)
    token = tl.load(item + 2, mask=is_item, other=0)
    num_queries = tl.load(item + 3, mask=is_item, other=0)
    if index >= num_items:
        return
    table = page_table + row.to(tl.int64) * stride_table
    r = tl.arange(0, BM)
    d = tl.arange(0, D)
    t = r // G
    is_row = t < num_queries
    position = lowest + t
    q_ptr = q + (token + t).to(tl.int64)[:, None] * stride_q + (head * G + r % G)[:, None] * D + d[None, :]
    query = tl.load(q_ptr, mask=is_row[:, None], other=0.0)

    end = lowest + num_queries
    first_key = 0
    if WINDOW > 0:
        first_key = tl.maximum(lowest + 1 - WINDOW, 0) // BN * BN
    span = tl.cdiv(tl.cdiv(end - first_key, parts), BN) * BN
    lo = tl.minimum(first_key + index % parts * span, end)  # a part may have no keys: rounding leaves fewer to the last
    hi = tl.minimum(lo + span, end)
    seen_by_all = tl.maximum(tl.minimum((lowest + 1) // BN * BN, hi), lo)
    m = tl.full([BM], NEGATIVE, tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, D], tl.float32)
    if WINDOW > 0:
        # Keys that the tile's last query does not see any more.
        passed = tl.minimum(tl.maximum(tl.cdiv(end - WINDOW, BN) * BN, lo), hi)
        acc, m, total = _add_keys(
            acc, m, total, query, position, pages, table, head, lo, passed, scale, HK, D, PAGE, BN, 2, WINDOW, True
        )  # fmt: skip
        lo = passed
        seen_by_all = tl.maximum(seen_by_all, lo)
    acc, m, total = _add_keys(
        acc, m, total, query, position, pages, table, head, lo, seen_by_all, scale, HK, D, PAGE, BN, STAGES, WINDOW,
        False,
    )  # fmt: skip
    acc, m, total = _add_keys(
        acc, m, total, query, position, pages, table, head, seen_by_all, hi, scale, HK, D, PAGE, BN, 2, WINDOW, True
    )  # fmt: skip

    out_ptr = out + ((token + t).to(tl.int64) * HK + head)[:, None] * (G * D) + (r % G)[:, None] * D + d[None, :]
    if parts == 1:
        tl.store(out_ptr, (acc / total[:, None]).to(out.dtype.element_ty), mask=is_row[:, None])
    else:
        # A part without keys counts nothing in the merge.
        lines = tl.program_id(0) * BM + r
        has_keys = total > 0
        total = tl.where(has_keys, total, 1.0)
        tl.store(part + lines[:, None] * D + d[None, :], acc / total[:, None])
        tl.store(lse + lines, tl.where(has_keys, m + tl.log2(total), NEGATIVE))
        tl.debug_barrier()  # the whole program's part, before one thread announces it
        tile = index // parts
        done = tl.atomic_add(work + COUNTERS + tile * HK + head, 1, sem="acq_rel")
        if done == parts - 1:
            tl.store(work + COUNTERS + tile * HK + head, 0)  # the next layer counts again
            m = tl.full([BM], NEGATIVE, tl.float32)
            total = tl.zeros([BM], tl.float32)
            acc = tl.zeros([BM, D], tl.float32)
            for j in range(parts):
                lines = ((tile * parts + j) * HK + head) * BM + r
                e = tl.load(lse + lines)
                x = tl.load(part + lines[:, None] * D + d[None, :])
                new_m = tl.maximum(m, e)
                correction = tl.exp2(m - new_m)
                p = tl.exp2(e - new_m)
                total = total * correction + p
                acc = acc * correction[:, None] + x * p[:, None]
                m = new_m
            tl.store(out_ptr, (acc / total[:, None]).to(out.dtype.element_ty), mask=is_row[:, None])
