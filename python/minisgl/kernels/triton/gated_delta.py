"""Gated DeltaNet: `ops/gated_delta.py`, which has the formulas and the letters in shapes, for a GPU.

Decoding only reads S, in three kernels: `_prepare_decode`, then `_decode_one`, which has parts of S on their way while
the first runs, or `_decode_several` for drafts, and `_finish`. Chunks of prompts take four. After the
convolution, `_prepare` does what needs no S, for each block of BLOCK tokens at once. With G the sums of g since the
block began, T = (I + A)^-1 and A[i, j] = beta[i] k[i].k[j] exp(G[i] - G[j]) for j < i (section 3.3 of the paper):

    W = T (beta exp(G) k);   U = T (beta v);   P[i, j] = q[i].k[j] exp(G[i] - G[j]) for j <= i

`_scan` takes S through the blocks of a sequence, for a value head and a part of its columns; `_finish` normalises:

    u = U - W S;   out = exp(G) q S + P u;   S = exp(G[last]) S + k^T (exp(G[last] - G) u)

Blocks are counted from a sequence's first token in the step. The last one may have fewer tokens, and then zeros as
inputs, beta and g. GEMMs have inputs in the model's dtype, or in float32 where errors of bfloat16 would accumulate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minisgl.kernels.triton.launch import MAX_CHAINED, pdl_options
from minisgl.ops import gated_delta as specification
from minisgl.ops.gated_delta import DeltaState, DeltaStep, DeltaWeights

BLOCK = tl.constexpr(specification.BLOCK)
NORM_EPS = tl.constexpr(specification.NORM_EPS)
TILE = tl.constexpr(16)  # the smallest side of a GEMM
LAST = tl.constexpr(2**31 - 1)
MIN_SEQUENCES: Final = 128  # below it, kernels are not compiled again for another number of chunks
CONVOLVED: Final = 32  # tokens of a program
SMS: Final = 132
_POINTERS: Final = ["slots_ptr", "state_lens_ptr", "rows_ptr", "cu_query_lens_ptr", "captures_ptr"]


@triton.jit
def _inputs(x_ptr, stride_x, ring_ptr, start, token, mask, channel, RING: tl.constexpr, CHANNELS: tl.constexpr):
    """Return inputs of the convolution of the masked tokens [M, 1] and channels [1, N]; zeros before the text.

    Tokens are counted from the sequence's first in this step, at position `start`; those before it are in the ring.
    """
    x_ptrs = x_ptr + token.to(tl.int64) * stride_x + channel
    x = tl.load(x_ptrs, mask=mask & (token >= 0), other=0.0)
    is_before = mask & (token < 0) & (start + token >= 0)
    return x + tl.load(ring_ptr + (start + token) % RING * CHANNELS + channel, mask=is_before, other=0.0)


@triton.jit
def _convolved(
    x_ptr, stride_x, ring_ptr, weight_ptr, start, token, mask, channel,
    RING: tl.constexpr, CHANNELS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Return SiLU of the convolution as float32, rounded to the model's dtype."""
    acc = 0.0
    for tap in tl.static_range(WIDTH):
        x = _inputs(x_ptr, stride_x, ring_ptr, start, token + (tap + 1 - WIDTH), mask, channel, RING, CHANNELS)
        acc = acc + x.to(tl.float32) * tl.load(weight_ptr + channel * WIDTH + tap).to(tl.float32)
    return (acc * tl.sigmoid(acc)).to(x_ptr.dtype.element_ty).to(tl.float32)


@triton.jit
def _keep_inputs(
    x_ptr, stride_x, ring_ptr, target_ptr, start, token, mask, key, value, has_key,
    SIZE: tl.constexpr, RING: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Store inputs of tokens in the ring at `target_ptr`: of channels `value`, and of `key` of q and k if `has_key`.

    Each channel has one program, which also reads it from the ring, so that no other reads what this overwrites.
    """
    mask = mask & (start + token >= 0)
    target_ptrs = target_ptr + (start + token) % RING * CHANNELS
    x = _inputs(x_ptr, stride_x, ring_ptr, start, token, mask, value, RING, CHANNELS)
    tl.store(target_ptrs + value, x, mask=mask)
    for part in tl.static_range(2):
        channel = part * SIZE + key
        of_key = _inputs(x_ptr, stride_x, ring_ptr, start, token, mask & has_key, channel, RING, CHANNELS)
        tl.store(target_ptrs + channel, of_key, mask=mask & has_key)


@triton.jit
def _unit(x):
    return x * tl.rsqrt(tl.sum(x * x, 1)[:, None] + NORM_EPS)


@triton.jit
def _beta_and_decay(ba_ptr, stride_ba, a_log_ptr, dt_bias_ptr, token, mask, head, HV: tl.constexpr):
    """Return beta and g of tokens, zeros where masked."""
    ptrs = ba_ptr + token.to(tl.int64) * stride_ba + head
    b = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(ptrs + HV, mask=mask, other=0.0).to(tl.float32) + tl.load(dt_bias_ptr + head)
    e = tl.exp(tl.minimum(x, 20.0))
    softplus = tl.where(e < 0.01, e * (1 - e * (0.5 - e / 3)), tl.log(1 + e))  # small ones would be lost in 1 + e
    g = -tl.exp(tl.load(a_log_ptr + head)) * tl.where(x > 20, x, softplus)
    return tl.where(mask, tl.sigmoid(b), 0.0), tl.where(mask, g, 0.0)


@triton.jit
def _gated(x, z, weight_ptrs, eps, DV: tl.constexpr):
    """Return the norm of the rows of x [M, DV] times SiLU of z, float32."""
    weight = tl.load(weight_ptrs)
    x = (x * tl.rsqrt(tl.sum(x * x, 1)[:, None] / DV + eps)).to(z.dtype).to(tl.float32) * weight.to(tl.float32)
    if weight.dtype == z.dtype:
        x = x.to(z.dtype).to(tl.float32)
    z = z.to(tl.float32)
    return x * z * tl.sigmoid(z)


@triton.jit
def _recent(
    recent_ptr, decay_ptr, head, start, stop, offs_v,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, R: tl.constexpr, N: tl.constexpr = TILE,
):  # fmt: skip
    """Load k and u of the last N tokens of a slot before position `stop`, zeros before position `start`.

    Also return for each the sum of g after it, and the sum of all.
    """
    position = tl.maximum(stop - N, start) + tl.arange(0, N)
    mask, entry = position < stop, position % R
    ptrs = recent_ptr + (entry * (HK * DK + HV * DV))[:, None]
    keys = ptrs + (head // (HV // HK) * DK + tl.arange(0, DK))[None, :]
    us = ptrs + (HK * DK + head * DV + offs_v)[None, :]
    g = tl.load(decay_ptr + entry * HV + head, mask=mask, other=0.0)
    k = tl.load(keys, mask=mask[:, None], other=0.0)
    u = tl.load(us, mask=mask[:, None], other=0.0)
    total = tl.sum(g, 0)
    return k, u, total - tl.cumsum(g, 0), total


@triton.jit
def _within(total):
    """Return exp(total[i] - total[j]) for j <= i and zeros elsewhere, and whether j < i."""
    i, j = tl.arange(0, total.shape[0])[:, None], tl.arange(0, total.shape[0])[None, :]
    return tl.exp(tl.where(j <= i, total[:, None] - total[None, :], -float("inf"))), j < i


@triton.jit
def _inverse(a, PRECISION: tl.constexpr):
    """Return (I + a)^-1 for a strictly lower triangular a [N, N] float32.

    Blocks of TILE on the diagonal are solved row by row, and then merged two by two. The series I - a + a^2 ... is
    shorter, but its terms grow beyond any precision where keys repeat.
    """
    N: tl.constexpr = a.shape[0]
    PARTS: tl.constexpr = N // TILE
    i, j = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    is_diagonal = i // TILE == j // TILE
    diagonal = tl.sum(tl.reshape(tl.where(is_diagonal, a, 0.0), [PARTS, TILE, PARTS, TILE]), 2)
    row, column = tl.arange(0, TILE)[None, :, None], tl.arange(0, TILE)[None, None, :]
    x = tl.where(row == column, 1.0, tl.zeros([PARTS, TILE, TILE], tl.float32))
    for k in range(TILE - 1):
        below = tl.sum(tl.where(column == k, diagonal, 0.0), 2)
        x -= below[:, :, None] * tl.sum(tl.where(row == k, x, 0.0), 1)[:, None, :]
    x = tl.broadcast_to(x[:, :, None, :], [PARTS, TILE, PARTS, TILE])
    x = tl.where(is_diagonal, tl.reshape(x, [N, N]), 0.0)
    for level in tl.static_range(2 if N == 64 else 0):
        i_part, j_part = i // (TILE << level), j // (TILE << level)
        left = tl.where((i_part % 2 == 1) & (j_part + 1 == i_part), a, 0.0)
        left = tl.dot(x, left, input_precision=PRECISION)
        x -= tl.dot(left, x, input_precision=PRECISION)
    return x


@triton.jit(do_not_specialize_on_alignment=_POINTERS)
def _prepare_decode(
    x_ptr, ba_ptr, conv_ptr, a_log_ptr, dt_bias_ptr, recent_ptr, decay_ptr, ring_ptr, slots_ptr, state_lens_ptr,
    cu_query_lens_ptr, positions_ptr, inputs_ptr, products_ptr,
    stride_x, stride_ba, stride_recent, stride_decay, stride_ring,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, R: tl.constexpr, WIDTH: tl.constexpr,
    TOKENS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A head of q, k or v of up to TOKENS tokens of a sequence; grid (2 Hk + Hv, sequences).

    Writes q, k, v and beta [TOKENS, C + Hv] with zeros after the tokens, and all of the state but u. One token's q and
    k also get their products [2 Hk, N] with k of the tokens since S, of `_recent`.
    """
    if PDL:
        gdc_wait()  # first, so that `_decode_one` may read all that this kernel does not write before it waits
        gdc_launch_dependents()
    RING: tl.constexpr = R + WIDTH - 1
    CHANNELS: tl.constexpr = 2 * HK * DK + HV * DV
    N: tl.constexpr = triton.next_power_of_2(R)
    head, seq = tl.program_id(0), tl.program_id(1)
    first = tl.load(cu_query_lens_ptr + seq).to(tl.int64)
    count = (tl.load(cu_query_lens_ptr + seq + 1) - first).to(tl.int32)
    slot = tl.load(slots_ptr + seq).to(tl.int64)
    state_len = tl.load(state_lens_ptr + seq)
    if count == 0:
        return
    start = tl.load(positions_ptr + first)
    x_ptr += first * stride_x
    ring_ptr += slot * stride_ring
    recent_ptr += slot * stride_recent
    decay_ptr += slot * stride_decay
    tokens = tl.arange(0, TOKENS)
    token, mask, rows = tokens[:, None], (tokens < count)[:, None], (seq * TOKENS + tokens) * (CHANNELS + HV)
    if head < 2 * HK:
        channel = head * DK + tl.arange(0, DK)[None, :]
        if TOKENS == 1:
            keys, _us, _after, _total = _recent(
                recent_ptr, decay_ptr, head % HK * (HV // HK), state_len, start, tl.arange(0, DV), HK, HV, DK, DV, R, N
            )
        x = _convolved(x_ptr, stride_x, ring_ptr, conv_ptr, start, token, mask, channel, RING, CHANNELS, WIDTH)
        x = _unit(x) * tl.where(head < HK, DK**-0.5, 1.0)
        if TOKENS == 1:
            products = tl.sum(keys.to(tl.float32) * x, 1)
            tl.store(products_ptr + (seq * (2 * HK) + head) * N + tl.arange(0, N), products)
        recent_ptrs = recent_ptr + (start + token) % R * (HK * DK + HV * DV) + channel - HK * DK
        tl.store(recent_ptrs, x.to(recent_ptr.dtype.element_ty), mask=mask & (head >= HK))
        tl.store(inputs_ptr + rows[:, None] + channel, x)
        x = tl.load(x_ptr + token * stride_x + channel, mask=mask)
        tl.store(ring_ptr + (start + token) % RING * CHANNELS + channel, x, mask=mask)
    else:
        head -= 2 * HK
        of_v = 2 * HK * DK + head * DV + tl.arange(0, DV)[None, :]
        v = _convolved(x_ptr, stride_x, ring_ptr, conv_ptr, start, token, mask, of_v, RING, CHANNELS, WIDTH)
        beta, g = _beta_and_decay(ba_ptr, stride_ba, a_log_ptr, dt_bias_ptr, first + tokens, tokens < count, head, HV)
        tl.store(decay_ptr + (start + tokens) % R * HV + head, g, mask=tokens < count)
        tl.store(inputs_ptr + rows + CHANNELS + head, beta)
        tl.store(inputs_ptr + rows[:, None] + of_v, v)
        own = tl.load(x_ptr + token * stride_x + of_v, mask=mask)
        tl.store(ring_ptr + (start + token) % RING * CHANNELS + of_v, own, mask=mask)


@triton.jit(do_not_specialize_on_alignment=_POINTERS)
def _decode_one(
    delta_ptr, recent_ptr, decay_ptr, slots_ptr, state_lens_ptr, cu_query_lens_ptr, positions_ptr, inputs_ptr,
    products_ptr, out_ptr, stride_delta, stride_recent, stride_decay,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, R: tl.constexpr,
    BLOCK_V: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """u and out of one token, BLOCK_V columns of a value head; grid (Hv * Dv / BLOCK_V, sequences)."""
    if PDL:
        gdc_launch_dependents()
    CHANNELS: tl.constexpr = 2 * HK * DK + HV * DV
    N: tl.constexpr = triton.next_power_of_2(R)
    dtype = out_ptr.dtype.element_ty
    head, seq = tl.program_id(0) // (DV // BLOCK_V), tl.program_id(1)
    key_head = head // (HV // HK)
    offs_k, offs_v = tl.arange(0, DK), tl.program_id(0) % (DV // BLOCK_V) * BLOCK_V + tl.arange(0, BLOCK_V)
    first = tl.load(cu_query_lens_ptr + seq).to(tl.int64)
    end = tl.load(cu_query_lens_ptr + seq + 1)
    slot = tl.load(slots_ptr + seq).to(tl.int64)
    state_len = tl.load(state_lens_ptr + seq)
    if first == end:  # if all are so, the first kernel has not written anything to wait for
        return
    s_ptr = delta_ptr + slot * stride_delta + head * DK * DV
    s = tl.load(s_ptr + offs_k[:, None] * DV + offs_v[None, :])
    start = tl.load(positions_ptr + first)
    recent_ptr += slot * stride_recent
    decay_ptr += slot * stride_decay
    _keys, us, after, total = _recent(recent_ptr, decay_ptr, head, state_len, start, offs_v, HK, HV, DK, DV, R, N)
    if PDL:
        gdc_wait()
    inputs_ptr += seq * (CHANNELS + HV)
    q_ptr = inputs_ptr + key_head * DK + offs_k
    products_ptr += (seq * (2 * HK) + key_head) * N + tl.arange(0, N)
    q, k = tl.load(q_ptr), tl.load(q_ptr + HK * DK)
    v, beta = tl.load(inputs_ptr + 2 * HK * DK + head * DV + offs_v), tl.load(inputs_ptr + CHANNELS + head)
    of_q, of_k = tl.load(products_ptr), tl.load(products_ptr + HK * N)
    g = tl.load(decay_ptr + start % R * HV + head)
    s, us, after, total = s.to(tl.float32), us.to(tl.float32), tl.exp(after + g), tl.exp(total + g)
    read, out = tl.sum(us * (of_k * after)[:, None], 0), tl.sum(us * (of_q * after)[:, None], 0)
    u = beta * (v - read - tl.sum(s * k[:, None], 0) * total)
    out += tl.sum(s * q[:, None], 0) * total + tl.sum(q * k, 0) * u
    column = head * DV + offs_v
    tl.store(recent_ptr + start % R * (HK * DK + HV * DV) + HK * DK + column, u.to(dtype))
    tl.store(out_ptr + first * (HV * DV) + column, out.to(dtype))


@triton.jit(do_not_specialize_on_alignment=_POINTERS)
def _decode_several(
    delta_ptr, recent_ptr, decay_ptr, slots_ptr, state_lens_ptr, cu_query_lens_ptr, positions_ptr, inputs_ptr,
    products_ptr, out_ptr, stride_delta, stride_recent, stride_decay,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, R: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """u and out of up to TILE tokens of a sequence and a value head; grid (Hv, sequences)."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    CHANNELS: tl.constexpr = 2 * HK * DK + HV * DV
    dtype = out_ptr.dtype.element_ty
    head, seq = tl.program_id(0), tl.program_id(1)
    first = tl.load(cu_query_lens_ptr + seq).to(tl.int64)
    count = (tl.load(cu_query_lens_ptr + seq + 1) - first).to(tl.int32)
    slot = tl.load(slots_ptr + seq).to(tl.int64)
    state_len = tl.load(state_lens_ptr + seq)
    if count == 0:
        return
    start = tl.load(positions_ptr + first)
    recent_ptr += slot * stride_recent
    decay_ptr += slot * stride_decay
    offs_k, offs_v, tokens = tl.arange(0, DK), tl.arange(0, DV), tl.arange(0, TILE)
    token, mask, entry = tokens[:, None], (tokens < count)[:, None], (start + tokens) % R
    rows = inputs_ptr + (seq * TILE + tokens) * (CHANNELS + HV)
    q_ptrs = rows[:, None] + (head // (HV // HK) * DK + offs_k)[None, :]
    q, k = tl.load(q_ptrs), tl.load(q_ptrs + HK * DK)
    v = tl.load(rows[:, None] + (2 * HK * DK + head * DV + offs_v)[None, :])
    beta = tl.load(rows + CHANNELS + head)
    g = tl.load(decay_ptr + entry * HV + head, mask=tokens < count, other=0.0)
    own = tl.cumsum(g, 0)
    k16, q16 = k.to(dtype), q.to(dtype)
    read, out = tl.zeros([TILE, DV], tl.float32), tl.zeros([TILE, DV], tl.float32)
    total = 0.0
    for back in range(0, start - state_len, TILE):
        keys, us, after, in_tile = _recent(
            recent_ptr, decay_ptr, head, state_len, start - back, offs_v, HK, HV, DK, DV, R
        )
        since = tl.exp(own[:, None] + (after + total)[None, :])
        of_k = (tl.dot(k16, tl.trans(keys), input_precision=PRECISION) * since).to(dtype)
        of_q = (tl.dot(q16, tl.trans(keys), input_precision=PRECISION) * since).to(dtype)
        read = tl.dot(of_k, us, read, input_precision=PRECISION)
        out = tl.dot(of_q, us, out, input_precision=PRECISION)
        total += in_tile
    decay = tl.exp(own + total)[:, None]
    s_ptr = delta_ptr + slot * stride_delta + head * DK * DV
    s = tl.load(s_ptr + offs_k[:, None] * DV + offs_v[None, :]).to(
        tl.float32
    )  # only here, because it takes half of all registers
    read += tl.dot(k, s, input_precision=PRECISION) * decay
    out += tl.dot(q, s, input_precision=PRECISION) * decay
    within, is_before = _within(own)
    products = tl.dot(k16, tl.trans(k16), input_precision=PRECISION) * within
    inverse = _inverse(tl.where(is_before, beta[:, None] * products, 0.0), PRECISION)
    u = tl.dot(inverse, beta[:, None] * (v - read), input_precision=PRECISION)
    products = (tl.dot(q16, tl.trans(k16), input_precision=PRECISION) * within).to(dtype)
    out = tl.dot(products, u.to(dtype), out, input_precision=PRECISION)
    column = (head * DV + offs_v)[None, :]
    u_ptrs = recent_ptr + entry[:, None] * (HK * DK + HV * DV) + HK * DK + column
    tl.store(u_ptrs, u.to(dtype), mask=mask)
    tl.store(out_ptr + (first + token) * (HV * DV) + column, out.to(dtype), mask=mask)


@triton.jit
def _block_counts(cu_query_lens_ptr, num_seqs, SEQUENCES: tl.constexpr):
    """Return the number of blocks of each sequence."""
    seqs = tl.arange(0, SEQUENCES)
    first = tl.load(cu_query_lens_ptr + seqs, mask=seqs < num_seqs, other=0)
    end = tl.load(cu_query_lens_ptr + seqs + 1, mask=seqs < num_seqs, other=0)
    return tl.cdiv(end - first, BLOCK)


@triton.jit
def _find(block, cu_query_lens_ptr, num_seqs, SEQUENCES: tl.constexpr):
    """Return the sequence of a block (at least `num_seqs` if there is none), its first token, and that of the block.

    The latter is counted from the former. Also return the number of the sequence's tokens.
    """
    ends = tl.cumsum(_block_counts(cu_query_lens_ptr, num_seqs, SEQUENCES), 0)
    seq = tl.sum((ends <= block).to(tl.int32), 0)
    begin = (block - tl.max(tl.where(ends <= block, ends, 0), 0)) * BLOCK
    first = tl.load(cu_query_lens_ptr + tl.minimum(seq, num_seqs))
    end = tl.load(cu_query_lens_ptr + tl.minimum(seq + 1, num_seqs))
    return seq, first.to(tl.int64), begin, end - first


@triton.jit(do_not_specialize=["num_seqs"], do_not_specialize_on_alignment=_POINTERS)
def _convolve(
    x_ptr, conv_ptr, ring_ptr, slots_ptr, cu_query_lens_ptr, positions_ptr, qk_ptr, v_ptr, stride_x, stride_ring,
    num_seqs,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, R: tl.constexpr, WIDTH: tl.constexpr,
    SEQUENCES: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """A head of q, k or v of TOKENS tokens of a block; grid (2 Hk + Hv, parts of at least the number of blocks)."""
    RING: tl.constexpr = R + WIDTH - 1
    CHANNELS: tl.constexpr = 2 * HK * DK + HV * DV
    dtype = x_ptr.dtype.element_ty
    head, block = tl.program_id(0), tl.program_id(1) // (BLOCK // TOKENS)
    seq, first, begin, count = _find(block, cu_query_lens_ptr, num_seqs, SEQUENCES)
    if seq >= num_seqs:
        return
    start = tl.load(positions_ptr + first)
    x_ptr += first * stride_x
    ring_ptr += tl.load(slots_ptr + seq).to(tl.int64) * stride_ring
    in_block = (tl.program_id(1) % (BLOCK // TOKENS) * TOKENS + tl.arange(0, TOKENS))[:, None]
    token = begin + in_block
    mask = token < count
    if head < 2 * HK:
        offs_k = tl.arange(0, DK)[None, :]
        key = head * DK + offs_k
        qk = _convolved(x_ptr, stride_x, ring_ptr, conv_ptr, start, token, mask, key, RING, CHANNELS, WIDTH)
        qk = _unit(qk) * tl.where(head < HK, DK**-0.5, 1.0)
        qk_ptrs = qk_ptr + ((block.to(tl.int64) * (2 * HK) + head) * BLOCK + in_block) * DK + offs_k
        tl.store(qk_ptrs, qk.to(dtype))
    else:
        offs_v = (head - 2 * HK) * DV + tl.arange(0, DV)[None, :]
        value = 2 * HK * DK + offs_v
        v = _convolved(x_ptr, stride_x, ring_ptr, conv_ptr, start, token, mask, value, RING, CHANNELS, WIDTH)
        tl.store(v_ptr + (first + token) * (HV * DV) + offs_v, v.to(dtype), mask=mask)


@triton.jit(do_not_specialize=["num_seqs"], do_not_specialize_on_alignment=_POINTERS)
def _prepare(
    ba_ptr, a_log_ptr, dt_bias_ptr, cu_query_lens_ptr, qk_ptr, w_ptr, p_ptr, total_ptr, u_ptr, stride_ba, num_seqs,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    SEQUENCES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """W, P, G and, in place of v, U of a block and a value head; grid (Hv, at least the number of blocks)."""
    dtype = u_ptr.dtype.element_ty
    head, block = tl.program_id(0), tl.program_id(1)
    seq, first, begin, count = _find(block, cu_query_lens_ptr, num_seqs, SEQUENCES)
    if seq >= num_seqs:
        return
    block = block.to(tl.int64)
    offs_t = tl.arange(0, BLOCK)
    is_token = begin + offs_t < count
    beta, g = _beta_and_decay(ba_ptr, stride_ba, a_log_ptr, dt_bias_ptr, first + begin + offs_t, is_token, head, HV)
    total = tl.cumsum(g, 0)
    tl.store(total_ptr + (block * HV + head) * BLOCK + offs_t, total)
    within, is_before = _within(total)

    offs_key = offs_t[:, None] * DK + tl.arange(0, DK)[None, :]
    q_ptr = qk_ptr + (block * (2 * HK) + head // (HV // HK)) * (BLOCK * DK)
    k = tl.load(q_ptr + HK * BLOCK * DK + offs_key)
    p = tl.dot(tl.load(q_ptr + offs_key), tl.trans(k), input_precision=PRECISION) * within
    p_ptr += (block * HV + head) * (BLOCK * BLOCK)
    tl.store(p_ptr + offs_t[:, None] * BLOCK + offs_t[None, :], p.to(dtype))
    products = tl.dot(k, tl.trans(k), input_precision=PRECISION) * within
    inverse = _inverse(tl.where(is_before, beta[:, None] * products, 0.0), PRECISION).to(dtype)
    w = tl.dot(inverse, (k * (beta * tl.exp(total))[:, None]).to(dtype), input_precision=PRECISION)
    tl.store(w_ptr + (block * HV + head) * (BLOCK * DK) + offs_key, w.to(dtype))

    u_ptr += (first + begin) * (HV * DV) + head * DV
    u_ptrs = u_ptr + offs_t[:, None].to(tl.int64) * (HV * DV) + tl.arange(0, DV)[None, :]
    v = tl.load(u_ptrs, mask=is_token[:, None], other=0.0)
    u = tl.dot(inverse, (v * beta[:, None]).to(dtype), input_precision=PRECISION)
    tl.store(u_ptrs, u.to(dtype), mask=is_token[:, None])


@triton.jit
def _advance(
    s, k_ptr, w_ptr, total_ptr, u_ptr, count, offs_v,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """Return u, G and S after `count` tokens of a block; the pointers are of its first token."""
    DK: tl.constexpr = s.shape[0]
    offs_t = tl.arange(0, BLOCK)
    offs_key = offs_t[:, None] * DK + tl.arange(0, DK)[None, :]
    mask = offs_t < count
    w = tl.load(w_ptr + offs_key).to(DTYPE)
    total = tl.load(total_ptr + offs_t)
    u = tl.load(u_ptr + offs_t[:, None].to(tl.int64) * STRIDE + offs_v[None, :], mask=mask[:, None], other=0.0)
    k = tl.load(k_ptr + offs_key).to(DTYPE)
    u = tl.where(mask[:, None], u.to(tl.float32) - tl.dot(w, s.to(DTYPE), input_precision=PRECISION), 0.0)
    end = tl.min(tl.where(mask, total, 0.0), 0)  # G never grows
    decayed = (u * tl.exp(tl.where(mask, end - total, 0.0))[:, None]).to(DTYPE)
    return u, total, tl.dot(tl.trans(k), decayed, s * tl.exp(end), input_precision=PRECISION)


@triton.jit(do_not_specialize=["num_seqs", "num_captures"], do_not_specialize_on_alignment=_POINTERS)
def _scan(
    x_ptr, qk_ptr, w_ptr, p_ptr, total_ptr, out_ptr, delta_ptr, ring_ptr, slots_ptr, rows_ptr, cu_query_lens_ptr,
    positions_ptr, captures_ptr, stride_x, stride_delta, stride_ring, num_seqs, num_captures,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, R: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_V: tl.constexpr, SEQUENCES: tl.constexpr, CAPTURES: tl.constexpr, PRECISION: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """S and outputs of a sequence, for BLOCK_V columns of a value head; grid (Hv Dv / BLOCK_V, sequences).

    `out` has U, which the outputs overwrite. Before the block in which a capture lies, S is taken up to it and stored.
    """
    RING: tl.constexpr = R + WIDTH - 1
    CHANNELS: tl.constexpr = 2 * HK * DK + HV * DV
    PARTS: tl.constexpr = DV // BLOCK_V
    dtype = x_ptr.dtype.element_ty
    head, part, seq = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS, tl.program_id(1)
    first = tl.load(cu_query_lens_ptr + seq).to(tl.int64)
    count = (tl.load(cu_query_lens_ptr + seq + 1) - first).to(tl.int32)
    if count == 0:
        return
    counts = _block_counts(cu_query_lens_ptr, num_seqs, SEQUENCES)
    first_block = tl.sum(tl.where(tl.arange(0, SEQUENCES) < seq, counts, 0), 0).to(tl.int64)
    start = tl.load(positions_ptr + first)
    slot = tl.load(slots_ptr + seq).to(tl.int64)
    offs_k, offs_v, offs_t = tl.arange(0, DK), part * BLOCK_V + tl.arange(0, BLOCK_V), tl.arange(0, BLOCK)
    offs_key = offs_t[:, None] * DK + offs_k[None, :]
    offs_p = offs_t[:, None] * BLOCK + offs_t[None, :]
    s_ptrs = delta_ptr + head * DK * DV + offs_k[:, None] * DV + offs_v[None, :]
    s = tl.load(s_ptrs + slot * stride_delta, mask=start > 0, other=0.0).to(tl.float32)
    x_ptr += first * stride_x
    own_ring_ptr = ring_ptr + slot * stride_ring
    out_ptr += first * (HV * DV) + head * DV
    q_ptr = qk_ptr + (first_block * (2 * HK) + head // (HV // HK)) * (BLOCK * DK)
    k_ptr = q_ptr + HK * BLOCK * DK
    w_ptr += (first_block * HV + head) * (BLOCK * DK)
    p_ptr += (first_block * HV + head) * (BLOCK * BLOCK)
    total_ptr += (first_block * HV + head) * BLOCK
    before = (tl.arange(0, triton.next_power_of_2(WIDTH - 1)) - (WIDTH - 1))[:, None]
    key = (head // (HV // HK) * DK + offs_k)[None, :]
    value = (2 * HK * DK + head * DV + offs_v)[None, :]
    has_key = (part == 0) & (head % (HV // HK) == 0)

    # Captures in the order of their positions; `remaining` are numbers of tokens, and indices for distinct numbers.
    index = tl.arange(0, CAPTURES)
    row = tl.load(captures_ptr + index * 3, mask=index < num_captures, other=-1)
    length = tl.load(captures_ptr + index * 3 + 1, mask=index < num_captures, other=0) - start
    is_own = (row == tl.load(rows_ptr + seq)) & (length > 0) & (length <= count)
    remaining = tl.where(is_own, length * CAPTURES + index, LAST)
    lo = 0
    captures = tl.sum(is_own.to(tl.int32), 0)
    for number in range(captures + 1):
        capture = tl.min(remaining, 0)
        tokens = capture // CAPTURES
        hi = tl.minimum((tokens - 1) // BLOCK, tl.cdiv(count, BLOCK))
        for block in tl.range(lo, hi, num_stages=NUM_STAGES):
            in_block = tl.minimum(count - block * BLOCK, BLOCK)
            offs_block = tl.cast(block, tl.int64) * BLOCK
            block_out_ptr = out_ptr + offs_block * (HV * DV)
            q = tl.load(q_ptr + offs_block * (2 * HK * DK) + offs_key)
            p = tl.load(p_ptr + offs_block * (HV * BLOCK) + offs_p)
            out = tl.dot(q, s.to(dtype), input_precision=PRECISION)
            u, total, s = _advance(
                s, k_ptr + offs_block * (2 * HK * DK), w_ptr + offs_block * (HV * DK), total_ptr + offs_block * HV,
                block_out_ptr, in_block, offs_v, dtype, PRECISION, HV * DV,
            )  # fmt: skip
            out = tl.dot(p, u.to(dtype), out * tl.exp(total)[:, None], input_precision=PRECISION)
            out_ptrs = block_out_ptr + offs_t[:, None].to(tl.int64) * (HV * DV) + offs_v[None, :]
            tl.store(out_ptrs, out.to(dtype), mask=(offs_t < in_block)[:, None])
        if number < captures:
            # In float32: GEMMs of bfloat16 with 32 columns and one stage were wrong on an H200 (Triton 3.6).
            offs_block = hi.to(tl.int64) * BLOCK
            _u, _total, captured = _advance(
                s, k_ptr + offs_block * (2 * HK * DK), w_ptr + offs_block * (HV * DK), total_ptr + offs_block * HV,
                out_ptr + offs_block * (HV * DV), tokens - hi * BLOCK, offs_v, tl.float32, "tf32x3", HV * DV,
            )  # fmt: skip
            target = tl.load(captures_ptr + capture % CAPTURES * 3 + 2).to(tl.int64)
            tl.store(s_ptrs + target * stride_delta, captured.to(delta_ptr.dtype.element_ty))
            _keep_inputs(
                x_ptr, stride_x, own_ring_ptr, ring_ptr + target * stride_ring, start, tokens + before, before < 0,
                key, value, has_key, HK * DK, RING, CHANNELS,
            )  # fmt: skip
        remaining = tl.where(remaining == capture, LAST, remaining)
        lo = hi
    tl.store(s_ptrs + slot * stride_delta, s.to(delta_ptr.dtype.element_ty))
    tl.debug_barrier()  # captures have read the ring
    _keep_inputs(
        x_ptr, stride_x, own_ring_ptr, own_ring_ptr, start, count + before, (before < 0) & (count + before >= 0), key,
        value, has_key, HK * DK, RING, CHANNELS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens"])
def _finish(
    out_ptr, x_ptr, norm_ptr, stride_x, num_tokens, eps,
    HV: tl.constexpr, DV: tl.constexpr, CHANNELS: tl.constexpr, TOKENS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Normalise and gate the outputs of TOKENS tokens and a value head in place; grid (Hv, parts of T)."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    head = tl.program_id(0)
    token = tl.program_id(1).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    mask = (token < num_tokens)[:, None]
    offs_v = tl.arange(0, DV)[None, :]
    ptrs = out_ptr + token[:, None] * (HV * DV) + head * DV + offs_v
    z = tl.load(x_ptr + token[:, None] * stride_x + CHANNELS + head * DV + offs_v, mask=mask, other=0.0)
    out = _gated(tl.load(ptrs, mask=mask, other=0.0).to(tl.float32), z, norm_ptr + offs_v, eps, DV)
    tl.store(ptrs, out.to(out_ptr.dtype.element_ty), mask=mask)


def gated_delta(qkvz: Tensor, ba: Tensor, weights: DeltaWeights, state: DeltaState, step: DeltaStep) -> Tensor:
    """`specification.gated_delta`; outputs of tokens of no sequence are undefined."""
    _, heads, dk, dv = state.delta.shape
    entries, size = state.recent.shape[1:]
    out = qkvz.new_empty(len(qkvz), heads * dv)
    sizes: dict[str, Any] = {"HK": (size - heads * dv) // dk, "HV": heads, "DK": dk, "DV": dv, "R": entries}
    sizes |= {"WIDTH": weights.conv.shape[2], "PRECISION": _precision(qkvz.dtype)}
    if step.decodes:
        channels, block_v = weights.conv.shape[0], min(dv, 32)
        tokens = 1 if step.shape.queries == 1 else TILE.value
        assert step.shape.queries <= tokens, "more tokens than a tile has"
        inputs = ba.new_empty(step.decodes * tokens, channels + heads, dtype=torch.float32)
        products = ba.new_empty(step.decodes, 2 * sizes["HK"], triton.next_power_of_2(entries), dtype=torch.float32)
        where = step.slots, step.state_lens, step.cu_query_lens, step.positions, inputs, products
        _prepare_decode[(2 * sizes["HK"] + heads, step.decodes)](
            qkvz, ba, weights.conv, weights.a_log, weights.dt_bias, *state[1:], *where,
            qkvz.stride(0), ba.stride(0), *(x.stride(0) for x in state[1:]), **_without(sizes, "PRECISION"),
            TOKENS=tokens, **pdl_options(qkvz.device, step.decodes <= MAX_CHAINED),
        )  # fmt: skip
        arguments = *state[:3], *where, out, *(x.stride(0) for x in state[:3])
        if tokens == 1:
            _decode_one[(heads * dv // block_v, step.decodes)](
                *arguments, **_without(sizes, "PRECISION", "WIDTH"), BLOCK_V=block_v,
                num_warps=max(1, dk * block_v // 1024), maxnreg=80, **pdl_options(qkvz.device),
            )  # fmt: skip
        else:
            # If each program has an SM, it need not spill registers.
            limit = {"maxnreg": 128} if step.decodes * heads > SMS else {}
            _decode_several[(heads, step.decodes)](
                *arguments, **_without(sizes, "WIDTH"), num_warps=max(1, min(16, dk * dv // 2048)), **limit,
                **pdl_options(qkvz.device),
            )  # fmt: skip
    if step.decodes < len(step.slots):
        _chunks(qkvz, ba, weights, state, step, out, sizes)
    tokens = 16
    _finish[(heads, triton.cdiv(len(qkvz), tokens))](
        out, qkvz, weights.norm, qkvz.stride(0), len(qkvz), weights.eps, HV=heads, DV=dv,
        CHANNELS=weights.conv.shape[0], TOKENS=tokens, **pdl_options(qkvz.device),
    )  # fmt: skip
    return out


def _chunks(
    qkvz: Tensor,
    ba: Tensor,
    weights: DeltaWeights,
    state: DeltaState,
    step: DeltaStep,
    out: Tensor,
    sizes: dict[str, Any],
) -> None:
    """Launch the kernels for all sequences that do not decode."""
    _, heads, dk, dv = state.delta.shape
    slots, rows, cu_query_lens = (x[step.decodes :] for x in (step.slots, step.rows, step.cu_query_lens))
    num_seqs, num_captures = len(slots), len(step.captures)
    blocks, is_wide = len(qkvz) // BLOCK.value + num_seqs, qkvz.element_size() == 4
    qk, w, p = (
        qkvz.new_empty(blocks, number, BLOCK.value, size)
        for number, size in ((2 * sizes["HK"], dk), (heads, dk), (heads, BLOCK.value))
    )
    total = qkvz.new_empty(blocks, heads, BLOCK.value, dtype=torch.float32)
    sequences = max(MIN_SEQUENCES, triton.next_power_of_2(num_seqs))
    _convolve[(2 * sizes["HK"] + heads, blocks * (BLOCK.value // CONVOLVED))](
        qkvz, weights.conv, state.conv, slots, cu_query_lens, step.positions, qk, out,
        qkvz.stride(0), state.conv.stride(0), num_seqs, **_without(sizes, "PRECISION"), SEQUENCES=sequences,
        TOKENS=CONVOLVED, num_warps=8,
    )  # fmt: skip
    _prepare[(heads, blocks)](
        ba, weights.a_log, weights.dt_bias, cu_query_lens, qk, w, p, total, out, ba.stride(0), num_seqs,
        **_without(sizes, "R", "WIDTH"), SEQUENCES=sequences,
        # The latter lets three run on an SM. With less than 64, Triton 3.6 makes accesses out of bounds of it.
        **({"num_warps": 8} if is_wide or not 64 <= dk <= 128 else {"maxnreg": 168}),
    )  # fmt: skip
    # Wide parts if they fill the GPU; two on an SM then hide each other's loads, else the next block's loads are early.
    are_many = num_seqs * heads * dv >= 2 * SMS * 64 and not is_wide
    block_v = min(dv, 64 if are_many else 32)
    _scan[(heads * dv // block_v, num_seqs)](
        qkvz, qk, w, p, total, out, state.delta, state.conv, slots, rows, cu_query_lens, step.positions,
        step.captures, qkvz.stride(0), state.delta.stride(0), state.conv.stride(0), num_seqs, num_captures, **sizes,
        BLOCK_V=block_v, SEQUENCES=sequences, CAPTURES=triton.next_power_of_2(max(1, num_captures)),
        NUM_STAGES=1 if are_many or is_wide else 2, num_warps=4,
    )  # fmt: skip


@triton.jit
def _fold(
    delta_ptr, recent_ptr, decay_ptr, folds_ptr, stride_delta, stride_recent, stride_decay,
    layer_delta, layer_recent, layer_decay,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, R: tl.constexpr,
    BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """S of a value head of a layer, BLOCK_V of its columns; grid (Dv / BLOCK_V, layers * Hv, N)."""
    part, layer, head = tl.program_id(0), tl.program_id(1) // HV, tl.program_id(1) % HV
    fold_ptr = folds_ptr + tl.program_id(2) * 3
    slot, start, stop = tl.load(fold_ptr).to(tl.int64), tl.load(fold_ptr + 1), tl.load(fold_ptr + 2)
    if start >= stop:
        return
    layer = layer.to(tl.int64)
    offs_v = part * BLOCK_V + tl.arange(0, BLOCK_V)
    s_ptrs = delta_ptr + layer * layer_delta + slot * stride_delta + head * DK * DV
    s_ptrs = s_ptrs + tl.arange(0, DK)[:, None] * DV + offs_v[None, :]
    s = tl.load(s_ptrs).to(tl.float32)
    recent_ptr += layer * layer_recent + slot * stride_recent
    decay_ptr += layer * layer_decay + slot * stride_decay
    new, total = tl.zeros([DK, BLOCK_V], tl.float32), 0.0
    for back in range(0, stop - start, TILE):
        k, u, after, in_tile = _recent(recent_ptr, decay_ptr, head, start, stop - back, offs_v, HK, HV, DK, DV, R)
        k = tl.trans(k.to(tl.float32) * tl.exp(after + total)[:, None])
        new = tl.dot(k, u.to(tl.float32), new, input_precision=PRECISION)
        total += in_tile
    s = s * tl.exp(total) + new
    tl.store(s_ptrs, s.to(delta_ptr.dtype.element_ty))


def fold(states: Sequence[DeltaState], folds: Tensor) -> None:
    """`specification.fold` in one launch. A fold whose stop is its start changes nothing."""
    delta, recent, decay, _ = states[0]
    distances = []
    for i, of_first in enumerate(states[0][:3]):
        distance = (states[1][i].data_ptr() - of_first.data_ptr()) // of_first.element_size() if len(states) > 1 else 0
        last = of_first.data_ptr() + (len(states) - 1) * distance * of_first.element_size()
        assert last == states[-1][i].data_ptr(), "states must be at equal distances"
        distances.append(distance)
    _, heads, dk, dv = delta.shape
    entries, size = recent.shape[1:]
    block_v = min(dv, 64)
    _fold[(dv // block_v, len(states) * heads, len(folds))](
        delta, recent, decay, folds, delta.stride(0), recent.stride(0), decay.stride(0), *distances,
        HK=(size - heads * dv) // dk, HV=heads, DK=dk, DV=dv, R=entries, BLOCK_V=block_v,
        PRECISION=_precision(recent.dtype), num_warps=8 if dk * block_v > 4096 else 4,
    )  # fmt: skip


def _without(sizes: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in sizes.items() if name not in names}


def _precision(dtype: torch.dtype) -> str:
    """How GEMMs of float32 numbers are computed, in a model of this dtype."""
    return "tf32x3" if dtype is torch.float32 else "tf32"
