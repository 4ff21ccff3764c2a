"""Causal attention of prompt chunks over the paged cache (FlashAttention-2, arXiv:2307.08691).

A tile is BLOCK_Q consecutive queries of one sequence with all G query heads of one KV head: BLOCK_M = BLOCK_Q * G rows
(or a few less, for odd G) that share the keys they read. `plan_prefill` lists the tiles on the device, longest first.
If there are too few tiles to fill the GPU (a short chunk after a long context), the keys of every tile are split into
equal parts, and the last program to finish a tile merges its parts in index order. Layers with a sliding window have
their own list, which splits less.

Letters in shapes: T tokens, B sequences, Hq/Hk query/KV heads, G = Hq / Hk, D head dimension, P pages.
"""

from __future__ import annotations

import triton
import triton.language as tl

from minisgl.kernels.triton.scores import NEGATIVE, columns, soft_capped, with_sinks

# The `work` buffer, int32: [0] number of items, [1] parts per tile; from COUNTERS on a merge counter per tile and KV
# head (used only if tiles are split), then the items, which are parts of tiles: row of the page table, first position,
# first token, number of queries.
COUNTERS = tl.constexpr(2)
TILE = tl.constexpr(4)  # integers per item
MIN_PART = tl.constexpr(256)  # keys per part


@triton.jit(
    do_not_specialize=["first_seq", "num_seqs", "num_programs"],
    do_not_specialize_on_alignment=["rows_ptr", "kv_lens_ptr", "cu_query_lens_ptr", "work_ptr"],
)
def plan_prefill(
    rows_ptr, kv_lens_ptr, cu_query_lens_ptr, work_ptr, first_seq, num_seqs, num_programs,
    NUM_KV_HEADS: tl.constexpr, BLOCK_Q: tl.constexpr, MAX_PARTS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """List the items of sequences from `first_seq` on, for layers with this window (0: none); grid (num_seqs).

    A tile's rank is the number of tiles that begin at a later position, which can be counted per sequence without
    looking at every tile. MAX_PARTS is at least `num_programs`, a bound of tiles * Hk * parts if parts > 1.
    """
    BLOCK: tl.constexpr = 64
    TILES: tl.constexpr = 32
    seq = tl.program_id(0)
    rows_ptr += first_seq
    kv_lens_ptr += first_seq
    cu_query_lens_ptr += first_seq
    offs_b = tl.arange(0, BLOCK)
    tile_counts = tl.zeros([BLOCK], tl.int32)
    longest = tl.zeros([BLOCK], tl.int32)
    for block in range(0, num_seqs, BLOCK):
        length, queries = _load_lengths(kv_lens_ptr, cu_query_lens_ptr, block + offs_b, num_seqs)
        tile_counts += (queries + BLOCK_Q - 1) // BLOCK_Q
        longest = tl.maximum(longest, length)
    all_tiles = tl.sum(tile_counts, 0)
    max_keys = tl.max(longest, 0)
    if WINDOW > 0:
        max_keys = tl.minimum(max_keys, WINDOW + BLOCK_Q)
    parts = tl.minimum(num_programs // (all_tiles * NUM_KV_HEADS), max_keys // MIN_PART)
    parts = tl.maximum(parts, 1)
    if seq == 0:
        tl.store(work_ptr, all_tiles * parts)
        tl.store(work_ptr + 1, parts)
        tl.store(work_ptr + COUNTERS + tl.arange(0, MAX_PARTS), tl.zeros([MAX_PARTS], tl.int32))

    row = tl.load(rows_ptr + seq)
    token = tl.load(cu_query_lens_ptr + seq)
    num_queries = tl.load(cu_query_lens_ptr + seq + 1) - token
    begin = tl.load(kv_lens_ptr + seq) - num_queries
    for start in range(0, tl.cdiv(num_queries, BLOCK_Q), TILES):
        i = start + tl.arange(0, TILES)
        position = begin + i * BLOCK_Q
        rank = tl.zeros([TILES], tl.int32)
        for block in range(0, num_seqs, BLOCK):
            length, queries = _load_lengths(kv_lens_ptr, cu_query_lens_ptr, block + offs_b, num_seqs)
            tiles = ((queries + BLOCK_Q - 1) // BLOCK_Q)[None, :]
            distance = position[:, None] - (length - queries)[None, :]
            not_later = tl.where(distance >= 0, tl.minimum(distance // BLOCK_Q + 1, tiles), 0)
            is_equal = (distance >= 0) & (distance % BLOCK_Q == 0) & (distance // BLOCK_Q < tiles)
            is_equal = is_equal & ((block + offs_b)[None, :] < seq)
            rank += tl.sum(tiles - not_later + is_equal.to(tl.int32), 1)
        is_tile = i * BLOCK_Q < num_queries
        for part in range(parts):
            item_ptrs = work_ptr + COUNTERS + MAX_PARTS + (rank * parts + part) * TILE
            tl.store(item_ptrs, tl.zeros([TILES], tl.int32) + row, mask=is_tile)
            tl.store(item_ptrs + 1, position, mask=is_tile)
            tl.store(item_ptrs + 2, token + i * BLOCK_Q, mask=is_tile)
            tl.store(item_ptrs + 3, tl.minimum(num_queries - i * BLOCK_Q, BLOCK_Q), mask=is_tile)


@triton.jit
def _load_lengths(kv_lens_ptr, cu_query_lens_ptr, seqs, num_seqs):
    """Load KV and query lengths, 0 beyond the last sequence."""
    mask = seqs < num_seqs
    begin = tl.load(cu_query_lens_ptr + seqs, mask=mask, other=0)
    end = tl.load(cu_query_lens_ptr + seqs + 1, mask=mask, other=0)
    return tl.load(kv_lens_ptr + seqs, mask=mask, other=0), end - begin


@triton.jit
def _scaled(x, scale):
    """Dequantize keys or values x [N, D] float8_e4m3fn with scales [N] to 16 times their value in float16 (<= 4,088).

    The factor 16 keeps the scales of small values precise in float16. Scaling the scores instead would take 200 more
    instructions per tile, since each thread has 16 keys of a score tile.
    """
    return x.to(tl.float16) * tl.minimum(scale * 16.0, 146.0).to(tl.float16)[:, None]


@triton.jit
def _add_keys(
    acc, m, total, query, position, pages_ptr, kv_scale_ptr, table_ptr, stride_page, stride_scale, head, lo, hi, low,
    scale,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    IS_FP8: tl.constexpr, NUM_STAGES: tl.constexpr, WINDOW: tl.constexpr, MASKED: tl.constexpr,
    SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Add keys [lo, hi) to the online softmax; without MASKED, these are whole tiles that every query sees.

    Pages before `low` may be another sequence's.

    A query that has seen no key yet accumulates the values of masked keys. Their weight becomes 0 with the first key
    that it sees, here or when parts are merged.
    """
    offs_d, is_dim = columns(HEAD_DIM, 2)
    for start in tl.range(lo, hi, BLOCK_N, num_stages=NUM_STAGES):
        offs_n = start + tl.arange(0, BLOCK_N)
        if PAGE_SIZE >= BLOCK_N:
            page = tl.load(table_ptr + start // PAGE_SIZE).to(tl.int64)
            index = head * PAGE_SIZE + start % PAGE_SIZE + tl.arange(0, BLOCK_N)
        else:
            page = tl.load(table_ptr + offs_n // PAGE_SIZE, mask=offs_n < hi, other=0).to(tl.int64)
            index = head * PAGE_SIZE + offs_n % PAGE_SIZE
        k_ptrs = pages_ptr + (page * stride_page + index * HEAD_DIM)[:, None] + offs_d[None, :]
        v_ptrs = k_ptrs + NUM_KV_HEADS * PAGE_SIZE * HEAD_DIM
        is_key = offs_n < hi
        if WINDOW > 0:
            is_key = is_key & (offs_n >= low)
        if MASKED:  # loads, too: masking the scores does not remove a NaN of another sequence
            k = tl.load(k_ptrs, mask=is_key[:, None] & is_dim[None, :], other=0.0)
            v = tl.load(v_ptrs, mask=is_key[:, None] & is_dim[None, :], other=0.0)
        else:
            k = tl.load(k_ptrs, mask=is_dim[None, :], other=0.0)
            v = tl.load(v_ptrs, mask=is_dim[None, :], other=0.0)
        if IS_FP8:
            scale_ptrs = kv_scale_ptr + page * stride_scale + index
            k = _scaled(k, tl.load(scale_ptrs, mask=is_key, other=0.0))
            v = _scaled(v, tl.load(scale_ptrs + NUM_KV_HEADS * PAGE_SIZE, mask=is_key, other=0.0))
        x = tl.dot(query, tl.trans(k), input_precision="ieee")
        if MASKED:
            is_seen = offs_n[None, :] <= position[:, None]
            if WINDOW > 0:
                is_seen = is_seen & (offs_n[None, :] > position[:, None] - WINDOW)
            # Scale before masking: an FMA of NEGATIVE * scale with the subtraction below would leave a large remainder.
            x = tl.where(is_seen, soft_capped(x * scale, SOFTCAP), NEGATIVE)
            new_m = tl.maximum(m, tl.max(x, 1))
            p = tl.exp2(x - new_m[:, None])
        elif SOFTCAP > 0:
            x = soft_capped(x * scale, SOFTCAP)
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
    do_not_specialize_on_alignment=["page_table_ptr", "work_ptr"],
)
def prefill_attention(
    q_ptr, pages_ptr, kv_scale_ptr, page_table_ptr, work_ptr, part_ptr, lse_ptr, out_ptr, sinks_ptr,
    scale, stride_q, stride_table, stride_page, stride_scale,
    NUM_KV_HEADS: tl.constexpr, GROUP_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr, MAX_PARTS: tl.constexpr,
    WINDOW: tl.constexpr, IS_FP8: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """out [T, Hq, D] = softmax(scale q K^T) V of the listed tiles, causal; grid (at least items * Hk).

    q [T, >= Hq, D] has token stride `stride_q`; `scale` and SOFTCAP (0: none) include log2(e), sinks [Hq] or None do
    not; part [MAX_PARTS * BLOCK_M, D] and lse [MAX_PARTS * BLOCK_M] float32. Pages, their strides and IS_FP8 are those
    of `decode_attention`. With IS_FP8, q should be float16: a converted q would take 32 registers per thread, since
    Triton keeps only loaded operands in shared memory.
    """
    head = tl.program_id(0) % NUM_KV_HEADS
    index = tl.program_id(0) // NUM_KV_HEADS
    num_items = tl.load(work_ptr)
    parts = tl.load(work_ptr + 1)
    item_ptr = work_ptr + COUNTERS + MAX_PARTS + index * TILE
    is_item = index < num_items
    row = tl.load(item_ptr, mask=is_item, other=0)
    first_position = tl.load(item_ptr + 1, mask=is_item, other=0)
    token = tl.load(item_ptr + 2, mask=is_item, other=0)
    num_queries = tl.load(item_ptr + 3, mask=is_item, other=0)
    if index >= num_items:
        return
    table_ptr = page_table_ptr + row.to(tl.int64) * stride_table
    offs_m = tl.arange(0, BLOCK_M)
    offs_d, is_dim = columns(HEAD_DIM, 2)
    offs_q = offs_m // GROUP_SIZE
    is_row = offs_q < num_queries
    position = first_position + offs_q
    q_ptrs = q_ptr + (token + offs_q).to(tl.int64)[:, None] * stride_q
    q_ptrs = q_ptrs + (head * GROUP_SIZE + offs_m % GROUP_SIZE)[:, None] * HEAD_DIM + offs_d[None, :]
    mask = is_row[:, None] & is_dim[None, :]
    query = tl.load(q_ptrs, mask=mask, other=0.0)
    if IS_FP8:
        query = query.to(tl.float16)
        scale *= 0.0625  # keys are multiplied by 16, see `_scaled`

    end = first_position + num_queries
    low = 0
    if WINDOW > 0:
        low = tl.maximum(first_position + 1 - WINDOW, 0)
    first_key = low // BLOCK_N * BLOCK_N
    span = tl.cdiv(tl.cdiv(end - first_key, parts), BLOCK_N) * BLOCK_N
    lo = tl.minimum(first_key + index % parts * span, end)  # `span` is rounded up, so the last parts may have no keys
    hi = tl.minimum(lo + span, end)
    unmasked_end = tl.maximum(tl.minimum((first_position + 1) // BLOCK_N * BLOCK_N, hi), lo)
    m = tl.full([BLOCK_M], NEGATIVE, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, offs_d.shape[0]], tl.float32)
    if WINDOW > 0:
        # Keys that have left the window of the tile's last query.
        left_window = tl.minimum(tl.maximum(tl.cdiv(end - WINDOW, BLOCK_N) * BLOCK_N, lo), hi)
        acc, m, total = _add_keys(
            acc, m, total, query, position, pages_ptr, kv_scale_ptr, table_ptr, stride_page, stride_scale, head, lo,
            left_window, low, scale,
            NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE, BLOCK_N, IS_FP8, 2, WINDOW, True, SOFTCAP,
        )  # fmt: skip
        lo = left_window
        unmasked_end = tl.maximum(unmasked_end, lo)
    acc, m, total = _add_keys(
        acc, m, total, query, position, pages_ptr, kv_scale_ptr, table_ptr, stride_page, stride_scale, head, lo,
        unmasked_end, low, scale,
        NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE, BLOCK_N, IS_FP8, NUM_STAGES, WINDOW, False, SOFTCAP,
    )  # fmt: skip
    acc, m, total = _add_keys(
        acc, m, total, query, position, pages_ptr, kv_scale_ptr, table_ptr, stride_page, stride_scale, head,
        unmasked_end, hi, low, scale,
        NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE, BLOCK_N, IS_FP8, 2, WINDOW, True, SOFTCAP,
    )  # fmt: skip

    if sinks_ptr is not None:
        sink_ptrs = sinks_ptr + head * GROUP_SIZE + offs_m % GROUP_SIZE
        m, total, correction = with_sinks(m, total, sink_ptrs, is_row & (index % parts == 0))
        acc *= correction[:, None]
    if IS_FP8:
        acc *= 0.0625
    out_ptrs = out_ptr + ((token + offs_q).to(tl.int64) * NUM_KV_HEADS + head)[:, None] * (GROUP_SIZE * HEAD_DIM)
    out_ptrs = out_ptrs + (offs_m % GROUP_SIZE)[:, None] * HEAD_DIM + offs_d[None, :]
    if parts == 1:
        tl.store(out_ptrs, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=mask)
    else:
        # A part without keys gets weight 0 in the merge.
        offs_part = tl.program_id(0) * BLOCK_M + offs_m
        has_keys = total > 0
        total = tl.where(has_keys, total, 1.0)
        tl.store(part_ptr + offs_part[:, None] * HEAD_DIM + offs_d[None, :], acc / total[:, None], mask=is_dim[None, :])
        tl.store(lse_ptr + offs_part, tl.where(has_keys, m + tl.log2(total), NEGATIVE))
        tl.debug_barrier()  # all threads store their part before one announces it
        tile = index // parts
        done = tl.atomic_add(work_ptr + COUNTERS + tile * NUM_KV_HEADS + head, 1, sem="acq_rel")
        if done == parts - 1:
            tl.store(work_ptr + COUNTERS + tile * NUM_KV_HEADS + head, 0)  # for the next layer
            m = tl.full([BLOCK_M], NEGATIVE, tl.float32)
            total = tl.zeros([BLOCK_M], tl.float32)
            acc = tl.zeros([BLOCK_M, offs_d.shape[0]], tl.float32)
            for j in range(parts):
                offs_part = ((tile * parts + j) * NUM_KV_HEADS + head) * BLOCK_M + offs_m
                lse = tl.load(lse_ptr + offs_part)
                x = tl.load(part_ptr + offs_part[:, None] * HEAD_DIM + offs_d[None, :], mask=is_dim[None, :], other=0.0)
                new_m = tl.maximum(m, lse)
                correction = tl.exp2(m - new_m)
                p = tl.exp2(lse - new_m)
                total = total * correction + p
                acc = acc * correction[:, None] + x * p[:, None]
                m = new_m
            tl.store(out_ptrs, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=mask)
