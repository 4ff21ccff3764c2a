"""Decode attention over the paged cache: few queries per sequence, split over the KV length (flash decoding).

The keys of all sequences are laid end to end and cut into equal splits, one per program of a KV head, so that all
programs end together whatever the lengths (stream-K, arXiv:2301.03598; for attention arXiv:2405.10480). A program
computes the parts of sequences in its split. The last program to finish a sequence of several parts merges them in
order. `plan_decode` computes the splits on the device. The host reads nothing and no size depends on sequence lengths,
so one CUDA graph serves all steps with the same number of sequences. Layers with a sliding window have their own plan,
in which a sequence has the length of its last position's window.

A sequence with draft tokens has several queries. These queries, each with the query heads of a KV head, form the rows
of one tile, so keys are read once.

Letters in shapes: B sequences, T tokens, Hq/Hk query/KV heads, G = Hq / Hk, D head dimension, P pages.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minisgl.kernels.triton.launch import INTERPRETED
from minisgl.kernels.triton.norm import normalised, query_angles, rotated
from minisgl.kernels.triton.scores import NEGATIVE, add_parts, columns, merge_lanes, soft_capped, with_sinks

IS_COMPILED = tl.constexpr(not INTERPRETED)  # the interpreter has no PTX

# The `work` buffer, int32: [0] number of splits, [1] number of sequences if splits may have parts of several, else 0,
# [2] gap: the cost of beginning a sequence, in tiles, [3] tickets drawn; from BEGINS on, the first part of each
# split, then the first part of each sequence. A part is: sequence, row of the page table, first key, length of the
# sequence, its first split, its number of parts, tiles that remain to the split (if the split begins here). If there
# are more than NUM_SPLITS splits, each is a whole sequence, and their parts also fill the entries of the sequences.
BEGINS = tl.constexpr(8)
PART = tl.constexpr(8)  # integers per part, one of them unused
MIN_KEYS = tl.constexpr(64)  # per split
GAP = tl.constexpr(1)  # cost of beginning a sequence, in tiles
PLAN_ROWS = tl.constexpr(8)  # sequences per program of `plan_decode`


@triton.jit
def _first_key(length, TILE_KEYS: tl.constexpr, WINDOW: tl.constexpr):
    """Return the first key of the first tile, at or before the first key that the last position sees."""
    if WINDOW == 0:
        return tl.zeros_like(length)
    return tl.maximum(length - WINDOW, 0) // TILE_KEYS * TILE_KEYS


@triton.jit
def _tiles(kv_lens_ptr, seqs, num_seqs, TILE_KEYS: tl.constexpr, WINDOW: tl.constexpr):
    """Return the number of tiles of each sequence, 0 beyond the last sequence."""
    length = tl.load(kv_lens_ptr + seqs, mask=seqs < num_seqs, other=0)
    return tl.cdiv(length - _first_key(length, TILE_KEYS, WINDOW), TILE_KEYS)


@triton.jit
def _store_part(part_ptr, seq, row, lo, length, first_split, parts, remaining, mask):
    tl.store(part_ptr, seq, mask=mask)
    tl.store(part_ptr + 1, row, mask=mask)
    tl.store(part_ptr + 2, lo, mask=mask)
    tl.store(part_ptr + 3, length, mask=mask)
    tl.store(part_ptr + 4, first_split, mask=mask)
    tl.store(part_ptr + 5, parts, mask=mask)
    tl.store(part_ptr + 6, remaining, mask=mask)


@triton.jit
def _load_part(part_ptr):
    """Load a part: sequence, row, first key, length, first split, number of parts, remaining tiles."""
    seq = tl.load(part_ptr)
    row = tl.load(part_ptr + 1)
    lo = tl.load(part_ptr + 2)
    length = tl.load(part_ptr + 3)
    first_split = tl.load(part_ptr + 4)
    parts = tl.load(part_ptr + 5)
    remaining = tl.load(part_ptr + 6)
    return seq, row, lo, length, first_split, parts, remaining


@triton.jit(do_not_specialize=["num_seqs"], do_not_specialize_on_alignment=["rows_ptr", "kv_lens_ptr"])
def plan_decode(
    rows_ptr, kv_lens_ptr, work_ptr, counters_ptr, num_seqs,
    NUM_SPLITS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, TILE_KEYS: tl.constexpr, WINDOW: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """Plan a step for layers with this window (0: none) into `work`; grid (B / PLAN_ROWS).

    NUM_SPLITS is the number of programs per KV head that run at the same time. `decode_attention` reads TILE_KEYS keys
    at once, aligned to TILE_KEYS. The tiles of all sequences are laid end to end and cut into as many equal splits,
    except in two cases, found by timing whole steps on an H200:
    - Many sequences, none longer than an equal split: each sequence is a split, and programs draw tickets, the longest
      first. This is as balanced, and there is nothing to merge.
    - Few sequences, so that splits are short and beginning a second sequence is expensive: a split has one sequence,
      unless it would grow by more than half. EVEN: beginning one is cheap, so this case and the gaps do not exist.
    Padding sequences of a graph, which have no keys, come last. The merge counters [B, Hk] are set to zero.
    """
    BLOCK: tl.constexpr = 256
    LANES: tl.constexpr = 16
    seqs = tl.program_id(0) * PLAN_ROWS + tl.arange(0, PLAN_ROWS)
    is_seq = seqs < num_seqs
    length = tl.load(kv_lens_ptr + seqs, mask=is_seq, other=0)
    row = tl.load(rows_ptr + seqs, mask=is_seq, other=0)
    begin = _first_key(length, TILE_KEYS, WINDOW)
    tiles = tl.cdiv(length - begin, TILE_KEYS)
    MIN_TILES: tl.constexpr = MIN_KEYS // TILE_KEYS
    offs_b = tl.arange(0, BLOCK)
    lane_tiles = tl.zeros([BLOCK], tl.int32)
    lane_seqs = tl.zeros([BLOCK], tl.int32)
    lane_longest = tl.zeros([BLOCK], tl.int32)
    for start in range(0, num_seqs, BLOCK):
        block_tiles = _tiles(kv_lens_ptr, start + offs_b, num_seqs, TILE_KEYS, WINDOW)
        lane_tiles += block_tiles
        lane_seqs += (block_tiles > 0).to(tl.int32)
        lane_longest = tl.maximum(lane_longest, block_tiles)
    total_tiles = tl.sum(lane_tiles, 0)
    total_seqs = tl.sum(lane_seqs, 0)
    longest = tl.max(lane_longest, 0)
    fair_size = tl.maximum(tl.cdiv(total_tiles, NUM_SPLITS), MIN_TILES)
    are_many = (2 * total_seqs >= 5 * NUM_SPLITS) & (longest <= fair_size)
    split_size = tl.where(are_many, longest, fair_size)
    are_whole = are_many
    if (num_seqs <= BLOCK) & (not are_many) & (not EVEN):
        while (2 * split_size <= 3 * fair_size) & (tl.sum(tl.cdiv(lane_tiles, split_size), 0) > NUM_SPLITS):
            split_size += 1 + split_size // 16
        are_whole = 2 * split_size <= 3 * fair_size
    gap = tl.where(are_whole | EVEN, 0, GAP)
    if not are_whole:
        split_size = tl.maximum(tl.cdiv(total_tiles + total_seqs * gap, NUM_SPLITS), MIN_TILES)

    # A sequence begins where the preceding ones end: laid end to end with gaps, or each rounded up to whole splits.
    before = tl.zeros([PLAN_ROWS], tl.int32)
    total = tl.zeros([BLOCK], tl.int32)
    for start in range(0, num_seqs, BLOCK):
        block_tiles = _tiles(kv_lens_ptr, start + offs_b, num_seqs, TILE_KEYS, WINDOW)
        rounded = tl.cdiv(block_tiles, split_size) * split_size
        taken = tl.where(are_whole, rounded, block_tiles + tl.where(block_tiles > 0, gap, 0))
        total += taken
        is_before = (start + offs_b)[None, :] < seqs[:, None]
        if are_many:
            is_equal = block_tiles[None, :] == tiles[:, None]
            is_before = (block_tiles[None, :] > tiles[:, None]) | (is_equal & is_before)
        before += tl.sum(tl.where(is_before, taken[None, :], 0), 1)
    begin_tile = before + gap
    first_split = begin_tile // split_size
    parts = tl.where(tiles > 0, (begin_tile + tiles - 1) // split_size - first_split + 1, 0)
    parts_ptr = work_ptr + BEGINS
    if not are_many:
        part_ptr = parts_ptr + (NUM_SPLITS + seqs) * PART
        _store_part(part_ptr, seqs, row, begin, length, first_split, parts, split_size, tiles > 0)
    for start in range(0, tl.max(parts, 0), LANES):
        i = start + tl.arange(0, LANES)[None, :]
        split = first_split[:, None] + i
        tile = split * split_size - begin_tile[:, None]  # within the sequence; negative in the gap before it
        is_begun = (i < parts[:, None]) & (split * split_size >= before[:, None])
        remaining = split_size + tl.minimum(tile, 0)
        lo = begin[:, None] + tl.maximum(tile, 0) * TILE_KEYS
        _store_part(
            parts_ptr + split * PART,
            seqs[:, None], row[:, None], lo, length[:, None], first_split[:, None], parts[:, None], remaining, is_begun,
        )  # fmt: skip
    for head in range(NUM_KV_HEADS):
        tl.store(counters_ptr + seqs * NUM_KV_HEADS + head, 0, mask=is_seq)
    if tl.program_id(0) == 0:
        tl.store(work_ptr, tl.cdiv(tl.sum(total, 0), split_size))
        tl.store(work_ptr + 1, tl.where(are_whole, 0, total_seqs))
        tl.store(work_ptr + 2, gap)
        tl.store(work_ptr + 3, 0)


@triton.jit
def _load_halves(ptr, offs_m, mask, HEAD_DIM: tl.constexpr):
    """Load the first and second halves of the heads that begin at `offs_m`: two tiles [BLOCK_M, D / 2]."""
    offs_d, is_dim = columns(HEAD_DIM // 2, 1)
    ptrs, mask = ptr + offs_m[:, None] + offs_d[None, :], mask[:, None] & is_dim[None, :]
    low = tl.load(ptrs, mask=mask, other=0.0)
    return low, tl.load(ptrs + HEAD_DIM // 2, mask=mask, other=0.0)


@triton.jit
def _whole(low, high):
    """Join two halves of heads [BLOCK_M, D / 2] to [BLOCK_M, D]."""
    return tl.reshape(tl.permute(tl.join(low, high), (0, 2, 1)), [low.shape[0], 2 * low.shape[1]])


@triton.jit
def _prefetch(ptr, SIZE: tl.constexpr, LINE: tl.constexpr):
    """Prefetch SIZE elements to L2, in cache lines of LINE elements."""
    LINES: tl.constexpr = (SIZE + LINE - 1) // LINE
    if IS_COMPILED:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; // $0",
            "=r,l",
            [ptr + tl.arange(0, triton.next_power_of_2(LINES)) % LINES * LINE],
            tl.int32,
            False,
            1,
        )


@triton.jit
def _round(low, high):
    """Quantize float32 halves of rows -> float8_e4m3fn halves, scales [N], dequantized halves (`norm.py: _rounded`)."""
    amax = tl.maximum(tl.max(tl.maximum(tl.abs(low), tl.abs(high)), 1), 1e-30)
    low, rounded_low = _round_half(low * (448.0 / amax)[:, None])
    high, rounded_high = _round_half(high * (448.0 / amax)[:, None])
    scale = amax / 448.0
    return low, high, scale, rounded_low * scale[:, None], rounded_high * scale[:, None]


@triton.jit
def _round_half(x):
    """Return x as float8_e4m3fn, and the result in float32.

    The float32 result has its own conversion, with the two values of a pair swapped: ptxas 12.8 reads a register before
    it is written if a packed pair is both stored as part of 32 bits and unpacked again (seen with D = 256).
    """
    if IS_COMPILED:
        rounded = tl.inline_asm_elementwise(
            """{ .reg .b16 pair; .reg .b32 t; cvt.rn.satfinite.e4m3x2.f32 pair, $1, $2;
            cvt.rn.f16x2.e4m3x2 t, pair; prmt.b32 $0, t, t, 0x1032; }""",
            "=r,r,r", [x], tl.float16, True, 2,
        )  # fmt: skip
    else:
        rounded = x.to(tl.float8e4nv)
    return x.to(tl.float8e4nv), rounded.to(tl.float32)


@triton.jit
def _widen(pairs):
    """Convert the low and high float8_e4m3fn bytes of uint16 to float16: four bytes in three instructions."""
    if IS_COMPILED:
        low, high = tl.inline_asm_elementwise(
            """{ .reg .b32 t; .reg .b16 low, high; prmt.b32 t, $2, $2, 0x3120; mov.b32 {low, high}, t;
            cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }""",
            "=r,=r,r", [pairs], (tl.float16, tl.float16), True, 2,
        )  # fmt: skip
    else:
        low = (pairs & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
        high = (pairs >> 8).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    return low, high


@triton.jit
def _head(offs_g, NUM_KV_HEADS: tl.constexpr, GROUP_SIZE: tl.constexpr, MAX_QUERIES: tl.constexpr):
    """Return the query head of each row of a tile: first all heads of query 0, then those of query 1, ..."""
    if MAX_QUERIES == 1:
        return offs_g
    return offs_g // GROUP_SIZE * (NUM_KV_HEADS * GROUP_SIZE) + offs_g % GROUP_SIZE


@triton.jit
def _load_query(
    q_ptr, stride_q, token, head, is_wanted, GROUP_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr
):
    """Load one token's query heads of a KV head."""
    offs_g = tl.arange(0, BLOCK_M)[:, None]
    offs_d, is_dim = columns(HEAD_DIM, 2)
    q_ptrs = q_ptr + token.to(tl.int64) * stride_q + (head * GROUP_SIZE + offs_g) * HEAD_DIM
    return tl.load(q_ptrs + offs_d[None, :], mask=is_wanted & (offs_g < GROUP_SIZE) & is_dim[None, :], other=0.0)


@triton.jit
def _merge(
    part_ptr, lse_ptr, out_ptr, first_slot, num_parts, head, num_rows, FIRST: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, GROUP_SIZE: tl.constexpr, MAX_QUERIES: tl.constexpr, BLOCK_G: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Merge the parts of one sequence and KV head, weighted by their exponential sums; `out` is its first query head.

    The tile's rows are the BLOCK_G from FIRST on. Each lane keeps its own maximum, so that no load waits for another.
    """
    BLOCK_D: tl.constexpr = triton.next_power_of_2(HEAD_DIM)
    LANES: tl.constexpr = 4096 // (BLOCK_G * BLOCK_D) if BLOCK_G * BLOCK_D < 4096 else 1  # 64 registers per thread
    offs_g = FIRST + tl.arange(0, BLOCK_G)
    offs_d, is_dim = columns(HEAD_DIM, 2)
    lane = tl.arange(0, LANES)
    ROWS: tl.constexpr = MAX_QUERIES * GROUP_SIZE
    row = (first_slot * NUM_KV_HEADS + head) * ROWS + offs_g  # of the first part; parts are stride_part apart
    stride_part = NUM_KV_HEADS * ROWS
    m = tl.full([BLOCK_G, LANES], NEGATIVE, tl.float32)
    total = tl.zeros([BLOCK_G, LANES], tl.float32)
    acc = tl.zeros([BLOCK_G, LANES, BLOCK_D], tl.float32)
    for j in range(0, num_parts, LANES):
        offs_p = j + lane[None, :]
        is_part = (offs_p < num_parts) & (offs_g < num_rows)[:, None]
        slot = row[:, None] + offs_p * stride_part
        part_ptrs = part_ptr + slot[:, :, None].to(tl.int64) * HEAD_DIM + offs_d[None, None, :]
        lse = tl.load(lse_ptr + slot, mask=is_part, other=NEGATIVE)
        x = tl.load(part_ptrs, mask=is_part[:, :, None] & is_dim[None, None, :], other=0.0)
        m, total, acc = add_parts(m, total, acc, lse, x)
    result = merge_lanes(m, total, acc)
    out_ptrs = out_ptr + _head(offs_g, NUM_KV_HEADS, GROUP_SIZE, MAX_QUERIES)[:, None] * HEAD_DIM + offs_d[None, :]
    tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=(offs_g[:, None] < num_rows) & is_dim[None, :])


@triton.jit
def _dims(x, IS_FP8: tl.constexpr):
    """Return a tile [N, D] as it is multiplied: whole, or with IS_FP8 its even and odd dimensions."""
    if IS_FP8:
        even, odd = tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
        return tl.tuple([even, odd])
    else:
        return tl.tuple([x])


@triton.jit
def _begin_with_new_key(
    qkv_ptr, q_weight_ptr, k_weight_ptr, cos_sin_ptr, q_scale_ptr, position, pages_ptr, kv_scale_ptr, stride_page,
    stride_scale, head, slot, is_last, scale, eps,
    NUM_KV_HEADS: tl.constexpr, GROUP_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr, HAS_NORM: tl.constexpr, NORMS_V: tl.constexpr, IS_FP8: tl.constexpr,
    SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Apply norm and RoPE to a token's heads, and store its key and value in `slot` if the part `is_last`.

    Returns the query, and the softmax's maximum, sum and output with the new key if `is_last`, else without keys.
    `cos_sin_ptr` is of the token's position.
    """
    offs_g = tl.arange(0, BLOCK_M)
    half, is_dim = columns(HEAD_DIM // 2, 1)
    is_head = offs_g < GROUP_SIZE
    # Every row loads the new key and value, so that no row waits for another, and all loads come first.
    new_ptr = qkv_ptr + (NUM_KV_HEADS * GROUP_SIZE + head) * HEAD_DIM
    q_low, q_high = _load_halves(qkv_ptr, (head * GROUP_SIZE + offs_g) * HEAD_DIM, is_head, HEAD_DIM)
    k_low, k_high = _load_halves(new_ptr, offs_g * 0, is_head, HEAD_DIM)
    v_low, v_high = _load_halves(new_ptr + NUM_KV_HEADS * HEAD_DIM, offs_g * 0, is_head, HEAD_DIM)
    cos = tl.load(cos_sin_ptr + half, mask=is_dim, other=0.0)[None, :]
    sin = tl.load(cos_sin_ptr + HEAD_DIM // 2 + half, mask=is_dim, other=0.0)[None, :]
    q_cos, q_sin = query_angles(cos, sin, q_scale_ptr, position)
    q_low, q_high = rotated(q_low, q_high, q_weight_ptr, q_cos, q_sin, eps, HEAD_DIM, HAS_NORM)
    k_low, k_high = rotated(k_low, k_high, k_weight_ptr, cos, sin, eps, HEAD_DIM, HAS_NORM)
    if NORMS_V:
        v_low, v_high = normalised(v_low, v_high, eps, HEAD_DIM)
    q_low, q_high = q_low.to(tl.float32), q_high.to(tl.float32)
    k_low, k_high = k_low.to(tl.float32), k_high.to(tl.float32)
    index = head * PAGE_SIZE + slot % PAGE_SIZE
    k_ptrs = pages_ptr + slot // PAGE_SIZE * stride_page + index * HEAD_DIM + half[None, :] + offs_g[:, None] * 0
    stride_kv = NUM_KV_HEADS * PAGE_SIZE * HEAD_DIM
    is_stored = is_last & (offs_g == 0)
    stored = is_stored[:, None] & is_dim[None, :]
    if IS_FP8:
        k8_low, k8_high, new_k_scale, k_low, k_high = _round(k_low, k_high)
        v8_low, v8_high, new_v_scale, v_low, v_high = _round(v_low.to(tl.float32), v_high.to(tl.float32))
        scale_ptrs = kv_scale_ptr + slot // PAGE_SIZE * stride_scale + index + offs_g * 0
        tl.store(scale_ptrs, new_k_scale, mask=is_stored)
        tl.store(scale_ptrs + NUM_KV_HEADS * PAGE_SIZE, new_v_scale, mask=is_stored)
    else:
        k8_low, k8_high, v8_low, v8_high = k_low, k_high, v_low, v_high
    dtype = pages_ptr.dtype.element_ty
    tl.store(k_ptrs, k8_low.to(dtype), mask=stored)
    tl.store(k_ptrs + HEAD_DIM // 2, k8_high.to(dtype), mask=stored)
    tl.store(k_ptrs + stride_kv, v8_low.to(dtype), mask=stored)
    tl.store(k_ptrs + stride_kv + HEAD_DIM // 2, v8_high.to(dtype), mask=stored)
    m = soft_capped(tl.sum(q_low * k_low + q_high * k_high, 1) * scale, SOFTCAP)
    m = tl.where(is_last, m, NEGATIVE)
    total = tl.where(is_last, tl.full([BLOCK_M], 1.0, tl.float32), 0.0)
    acc = tl.where(is_last, _whole(v_low.to(tl.float32), v_high.to(tl.float32)), 0.0)
    return _whole(q_low, q_high).to(qkv_ptr.dtype.element_ty), m, total, acc


@triton.jit
def _load_tile(
    pages_ptr, kv_scale_ptr, table_ptr, stride_page, stride_scale, start, head, is_key,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, TILE_KEYS: tl.constexpr,
    IS_FP8: tl.constexpr,
):  # fmt: skip
    """Load the keys and values of a tile, in the pairs of bytes of 8-bit pages, and their scales.

    Loads are masked, too: masking the scores does not remove a NaN beyond the last key.
    """
    stride_kv = NUM_KV_HEADS * PAGE_SIZE * HEAD_DIM
    offs_n = start + tl.arange(0, TILE_KEYS)
    if PAGE_SIZE >= TILE_KEYS:
        page = tl.load(table_ptr + start // PAGE_SIZE).to(tl.int64)
        offset = head * PAGE_SIZE + start % PAGE_SIZE + tl.arange(0, TILE_KEYS)
    else:
        page = tl.load(table_ptr + offs_n // PAGE_SIZE, mask=is_key, other=0).to(tl.int64)
        offset = head * PAGE_SIZE + offs_n % PAGE_SIZE
    if IS_FP8:
        first = page * (stride_page // 2) + offset * (HEAD_DIM // 2)
        offs_d, is_dim = columns(HEAD_DIM // 2, 2)
        k_ptrs = pages_ptr.to(tl.pointer_type(tl.uint16)) + first[:, None] + offs_d[None, :]
        k = tl.load(k_ptrs, mask=is_key[:, None] & is_dim[None, :], other=0)
        v = tl.load(k_ptrs + stride_kv // 2, mask=is_key[:, None] & is_dim[None, :], other=0)
        scale_ptrs = kv_scale_ptr + page * stride_scale + offset
        k_scale = tl.load(scale_ptrs, mask=is_key, other=0.0)
        v_scale = tl.load(scale_ptrs + NUM_KV_HEADS * PAGE_SIZE, mask=is_key, other=0.0)
        return k, v, k_scale, v_scale
    else:
        offs_d, is_dim = columns(HEAD_DIM, 2)
        k_ptrs = pages_ptr + (page * stride_page + offset * HEAD_DIM)[:, None] + offs_d[None, :]
        k = tl.load(k_ptrs, mask=is_key[:, None] & is_dim[None, :], other=0.0)
        v = tl.load(k_ptrs + stride_kv, mask=is_key[:, None] & is_dim[None, :], other=0.0)
        return k, v, is_key, is_key


@triton.jit
def _scores(query, k, k_scale, scale, IS_FP8: tl.constexpr, SOFTCAP: tl.constexpr):
    """Return the scores [BLOCK_M, TILE_KEYS] of a tile's keys."""
    if IS_FP8:
        k_even, k_odd = _widen(k)
        x = tl.dot(query[1], tl.trans(k_odd), tl.dot(query[0], tl.trans(k_even)))
        return soft_capped(x * (k_scale * scale)[None, :], SOFTCAP)
    else:
        return soft_capped(tl.dot(query[0], tl.trans(k), input_precision="ieee") * scale, SOFTCAP)


@triton.jit
def _add_tile(m, total, acc, x, v, v_scale, IS_FP8: tl.constexpr):
    """Add a tile with the scores x to the softmax: return its new maximum, sum and output."""
    new_m = tl.maximum(m, tl.max(x, 1))
    p = tl.exp2(x - new_m[:, None])
    correction = tl.exp2(m - new_m)
    total = total * correction + tl.sum(p, 1)
    if IS_FP8:
        p = (p * (v_scale * 256.0)[None, :]).to(tl.float16)  # else many small terms would underflow
        v_even, v_odd = _widen(v)
        even = tl.dot(p, v_even, acc[0] * correction[:, None])
        acc = tl.tuple([even, tl.dot(p, v_odd, acc[1] * correction[:, None])])
    else:
        acc = tl.tuple([tl.dot(p.to(v.dtype), v, acc[0] * correction[:, None], input_precision="ieee")])
    return new_m, total, acc


@triton.jit(
    do_not_specialize=["stride_table"],
    do_not_specialize_on_alignment=["page_table_ptr", "out_loc_ptr", "cu_query_lens_ptr"],
)
def decode_attention(
    q_ptr, pages_ptr, kv_scale_ptr, page_table_ptr, cu_query_lens_ptr, work_ptr, counters_ptr, part_ptr, lse_ptr,
    out_ptr, sinks_ptr, q_weight_ptr, k_weight_ptr, cos_sin_ptr, q_scale_ptr, out_loc_ptr,
    scale, eps, stride_q, stride_table, stride_page, stride_scale,
    NUM_KV_HEADS: tl.constexpr, GROUP_SIZE: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_M: tl.constexpr,
    HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, TILE_KEYS: tl.constexpr, NUM_STAGES: tl.constexpr,
    NUM_SPLITS: tl.constexpr, WINDOW: tl.constexpr, FUSED: tl.constexpr, HAS_NORM: tl.constexpr,
    NORMS_V: tl.constexpr, IS_FP8: tl.constexpr, PDL: tl.constexpr, MAX_QUERIES: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """out [T, Hq, D] = softmax(q K^T / sqrt(D)) V of each sequence, causal; grid (NUM_SPLITS * Hk).

    q [T, >= Hq, D] has token stride `stride_q`; pages [P, 2, Hk, page, D], each contiguous and `stride_page` elements
    from the next; `scale` and SOFTCAP (0: none) include log2(e), sinks [Hq] or None do not. The part of sequence j in
    split i, if j has several parts, is at index j + i of part [B + NUM_SPLITS, Hk, MAX_QUERIES * G, D] and
    lse [B + NUM_SPLITS, Hk, MAX_QUERIES * G], float32. The first part of a sequence has the sinks in its sum.
    BLOCK_M is the smallest power of two >= MAX_QUERIES * G, and at least the smallest tile of the tensor cores; BLOCK_G
    of its rows are merged at once.

    MAX_QUERIES: if 1, sequence j is token j. Otherwise its tokens are those between entries j and j + 1 of
    `cu_query_lens`. Tokens beyond MAX_QUERIES, which pad a step, get no output.

    IS_FP8: pages are float8_e4m3fn with a scale [P, 2, Hk, page] for each token and head, `stride_scale` elements from
    page to page. GEMMs are in float16, which represents these values exactly. The tensor cores need two adjacent keys
    of one dimension of V in a register, but only 16-bit elements can be transposed between shared memory and registers.
    So two dimensions of V are read as one 16-bit element, and even and odd dimensions are accumulated separately. K is
    split likewise, so that the query needs no shuffles.

    FUSED: q is followed by the new keys and values, straight from the projection; each is the last of its sequence.
    This kernel applies norm and RoPE, and the program with a sequence's last part stores its key and value at
    `out_loc`; no other program needs them. This happens in the first iteration of the loop over keys, whose prefetch
    has begun by then.

    PDL: the start overlaps with the preceding kernel, so all reads of its results follow `gdc_wait`. The work list, the
    step's inputs and the keys of earlier steps must be older: an ordinary launch between `plan_decode` and this kernel
    ensures that.
    """
    if PDL:
        gdc_launch_dependents()
        if not FUSED:
            gdc_wait()
    offs_g = tl.arange(0, BLOCK_M)
    offs_d, is_dim = columns(HEAD_DIM, 2)
    split = tl.program_id(0) // NUM_KV_HEADS
    head = tl.program_id(0) % NUM_KV_HEADS
    parts_ptr = work_ptr + BEGINS
    num_splits = tl.load(work_ptr)
    num_seqs = tl.load(work_ptr + 1)
    gap = tl.load(work_ptr + 2)
    by_ticket = num_splits > NUM_SPLITS
    seq, row, start_key, length, first_split, num_parts, remaining = _load_part(parts_ptr + split * PART)
    remaining = tl.where(split < num_splits, remaining, 0)
    LOADS_AHEAD: tl.constexpr = MAX_QUERIES == 1 and not FUSED
    if LOADS_AHEAD:
        next_query = _load_query(q_ptr, stride_q, seq, head, remaining > 0, GROUP_SIZE, HEAD_DIM, BLOCK_M)
    while remaining > 0:
        stop = tl.minimum(start_key + remaining * TILE_KEYS, length)
        remaining -= tl.cdiv(stop - start_key, TILE_KEYS) + gap
        remaining = tl.where(seq + 1 < num_seqs, remaining, 0)
        next_split, next_head = NUM_SPLITS + seq + 1, head  # the first part of the next sequence
        if by_ticket:  # every layer draws one ticket per split and KV head
            ticket = tl.atomic_add(work_ptr + 3, 1, sem="relaxed") % (num_splits * NUM_KV_HEADS)
            next_split, next_head = NUM_SPLITS + ticket // NUM_KV_HEADS, ticket % NUM_KV_HEADS
        has_next = (remaining > 0) | (next_split < num_splits)
        following = _load_part(parts_ptr + tl.where(has_next, next_split, split) * PART)
        if LOADS_AHEAD:
            query = next_query
        table_ptr = page_table_ptr + row.to(tl.int64) * stride_table
        token = seq
        num_queries = 1
        num_rows = GROUP_SIZE
        if MAX_QUERIES > 1:
            token = tl.load(cu_query_lens_ptr + seq)
            num_queries = tl.load(cu_query_lens_ptr + seq + 1) - token
            num_rows = tl.minimum(num_queries, MAX_QUERIES) * GROUP_SIZE
            position = length - num_queries + offs_g // GROUP_SIZE
        q_seq_ptr = q_ptr + token.to(tl.int64) * stride_q
        out_seq_ptr = out_ptr + (token.to(tl.int64) * NUM_KV_HEADS + head) * GROUP_SIZE * HEAD_DIM
        m = tl.full([BLOCK_M], NEGATIVE, tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        end_key = stop
        if FUSED:
            query = tl.zeros([BLOCK_M, offs_d.shape[0]], q_ptr.dtype.element_ty)
            is_last, stop = stop == length, tl.minimum(stop, length - 1)
            end_key = tl.maximum(stop, start_key + 1)  # at least one part, perhaps without keys
            slot = tl.load(out_loc_ptr + seq)
            new_cos_sin_ptr = cos_sin_ptr + (length - 1) * HEAD_DIM
            _prefetch(new_cos_sin_ptr, HEAD_DIM, 32)
            if HAS_NORM:
                _prefetch(q_weight_ptr, HEAD_DIM, 64)
                _prefetch(k_weight_ptr, HEAD_DIM, 64)
        elif MAX_QUERIES > 1:
            q_ptrs = q_seq_ptr + (offs_g // GROUP_SIZE)[:, None].to(tl.int64) * stride_q + offs_d[None, :]
            q_ptrs += (head * GROUP_SIZE + offs_g % GROUP_SIZE)[:, None] * HEAD_DIM
            query = tl.load(q_ptrs, mask=(offs_g[:, None] < num_rows) & is_dim[None, :], other=0.0)
        queries = _dims(query.to(tl.float16) if IS_FP8 else query, IS_FP8)
        acc = _dims(tl.zeros([BLOCK_M, offs_d.shape[0]], tl.float32), IS_FP8)
        for start in tl.range(start_key, end_key, TILE_KEYS, num_stages=NUM_STAGES):
            if LOADS_AHEAD and start == start_key:  # the first keys are being loaded
                next_query = _load_query(
                    q_ptr, stride_q, following[0], next_head, has_next, GROUP_SIZE, HEAD_DIM, BLOCK_M
                )
            if FUSED and start == start_key:
                if PDL:
                    gdc_wait()
                query, m, total, first = _begin_with_new_key(
                    q_seq_ptr, q_weight_ptr, k_weight_ptr, new_cos_sin_ptr, q_scale_ptr, length - 1, pages_ptr,
                    kv_scale_ptr, stride_page, stride_scale, head, slot, is_last, scale, eps, NUM_KV_HEADS, GROUP_SIZE,
                    BLOCK_M, HEAD_DIM, PAGE_SIZE, HAS_NORM, NORMS_V, IS_FP8, SOFTCAP,
                )  # fmt: skip
                queries = _dims(query.to(tl.float16) if IS_FP8 else query, IS_FP8)
                acc = _dims(first * 256.0 if IS_FP8 else first, IS_FP8)
            offs_n = start + tl.arange(0, TILE_KEYS)
            is_key = offs_n < stop
            if WINDOW > 0:
                is_key = is_key & (offs_n > length - num_queries - WINDOW)
            k, v, k_scale, v_scale = _load_tile(
                pages_ptr, kv_scale_ptr, table_ptr, stride_page, stride_scale, start, head, is_key, NUM_KV_HEADS,
                HEAD_DIM, PAGE_SIZE, TILE_KEYS, IS_FP8,
            )  # fmt: skip
            x = _scores(queries, k, k_scale, scale, IS_FP8, SOFTCAP)
            is_seen = is_key[None, :]
            if MAX_QUERIES > 1:
                is_seen = is_seen & (offs_n[None, :] <= position[:, None])
                if WINDOW > 0:
                    is_seen = is_seen & (offs_n[None, :] > position[:, None] - WINDOW)
            m, total, acc = _add_tile(m, total, acc, tl.where(is_seen, x, NEGATIVE), v, v_scale, IS_FP8)
        result = acc[0]
        if IS_FP8:
            result = tl.reshape(tl.join(acc[0], acc[1]), [BLOCK_M, offs_d.shape[0]]) * 0.00390625
        if sinks_ptr is not None:
            sink_ptrs = sinks_ptr + head * GROUP_SIZE + offs_g % GROUP_SIZE
            m, total, correction = with_sinks(m, total, sink_ptrs, (offs_g < num_rows) & (split == first_split))
            result *= correction[:, None]
        result = result / total[:, None]
        if num_parts == 1:
            offs_head = _head(offs_g, NUM_KV_HEADS, GROUP_SIZE, MAX_QUERIES)
            out_ptrs = out_seq_ptr + offs_head[:, None] * HEAD_DIM + offs_d[None, :]
            tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=(offs_g[:, None] < num_rows) & is_dim[None, :])
        else:
            offs_part = ((seq + split) * NUM_KV_HEADS + head) * (MAX_QUERIES * GROUP_SIZE) + offs_g
            part_ptrs = part_ptr + offs_part[:, None].to(tl.int64) * HEAD_DIM + offs_d[None, :]
            tl.store(part_ptrs, result, mask=(offs_g[:, None] < num_rows) & is_dim[None, :])
            tl.store(lse_ptr + offs_part, m + tl.log2(total), mask=offs_g < num_rows)
            tl.debug_barrier()  # all threads store their parts before one announces them
            done = tl.atomic_add(counters_ptr + seq * NUM_KV_HEADS + head, 1, sem="acq_rel")
            if done == num_parts - 1:
                tl.store(counters_ptr + seq * NUM_KV_HEADS + head, 0)
                for first in tl.static_range(0, MAX_QUERIES * GROUP_SIZE, BLOCK_G):
                    _merge(
                        part_ptr, lse_ptr, out_seq_ptr, seq + first_split, num_parts, head, num_rows, first,
                        NUM_KV_HEADS, GROUP_SIZE, MAX_QUERIES, BLOCK_G, HEAD_DIM,
                    )  # fmt: skip
        seq, row, start_key, length, first_split, num_parts, whole = following
        if by_ticket:
            split, head, remaining = next_split, next_head, tl.where(has_next, whole, 0)
