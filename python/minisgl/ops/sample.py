"""Choosing tokens: the sampler's specification in torch, and the noise it is built on.

A sampled token is argmax(logits / temperature + Gumbel noise) over the tokens that top-k and top-p leave, which has
exactly the softmax distribution (Gumbel 1954; Maddison et al. 2014, arXiv:1411.0030). The noise is a function of (key,
position, token) alone, and every step below works on each row by itself, so a result depends on nothing else in the
batch. Elementwise float ops are the same whatever the shape; the sums are sequential (`cumsum`).
"""

from __future__ import annotations

from typing import Final, Protocol

import torch
from torch import Tensor

MASK32: Final = 0xFFFFFFFF
CHUNK: Final = 1 << 17  # logits per pass: the int64 noise of one pass stays in the second-level cache
MIN_TEMPERATURE: Final = 1e-30  # keeps the scores of ranks finite
FIRST_CANDIDATES: Final = 128  # tokens that top-p looks at before it sorts the whole vocabulary


class SamplingState(Protocol):
    """What sampling reads, and writes, per row [rows]; `engine.state.RowState` is one.

    last_token int32; temperature, top_p, min_p float32; top_k int32; noise_key int64.
    """

    last_token: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    noise_key: Tensor


def sample_rows(logits: Tensor, rows: Tensor, positions: Tensor, state: SamplingState, is_filtered: bool) -> Tensor:
    """Choose a token for each of `rows` [S] int64 by its own parameters in `state`, and make it the row's last token.

    logits [S, V] of any float dtype; positions [S] int32, those of the new tokens. `is_filtered` is False when no row
    asks for top-k, top-p or min-p. Returns [2, S] int32: tokens, and 1 where the logits were sound (see `sample`).
    """
    tokens, ok = sample(
        logits.float(),
        state.temperature[rows],
        state.top_k[rows],
        state.top_p[rows],
        state.min_p[rows],
        state.noise_key[rows],
        positions,
    )
    state.last_token[rows] = tokens
    return torch.stack([tokens, ok.int()])


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    keys: Tensor,
    positions: Tensor,
) -> tuple[Tensor, Tensor]:
    """One token per row.

    logits [S, V] float32, temperature [S] float32 (0 = greedy; the lowest index wins ties), top_k [S] int32 (0 = off),
    top_p [S] float32 (1 = off; applied to what top-k left), min_p [S] float32 (0 = off; tokens less likely than min_p
    times the likeliest one are out, before top-k and top-p; arXiv:2407.01082), keys [S] int64, positions [S] int32 (of
    the new token) -> tokens [S] int32, ok [S] bool. A row with NaN, +Inf or nothing but -Inf is not ok; its token is 0.
    """
    peak, tokens = logits.amax(-1), logits.argmax(-1)
    ok = peak.isfinite()
    drawn = ((temperature > 0) & ok).nonzero().squeeze(1)
    rows_per_pass = max(1, CHUNK // logits.shape[1])
    for first in range(0, len(drawn), rows_per_pass):
        rows = drawn[first : first + rows_per_pass]
        z = (logits[rows] - peak[rows, None]) / temperature[rows, None]
        z.masked_fill_(z < min_p[rows, None].log(), float("-inf"))  # min-p, since the likeliest has z = 0
        mask_top_k_top_p(z, top_k[rows], top_p[rows])
        tokens[rows] = z.add_(gumbel_noise(keys[rows], positions[rows], z.shape[1])).argmax(-1)
    return tokens.where(ok, 0).int(), ok


def candidates(logits: Tensor, rows: Tensor, positions: Tensor, state: SamplingState, first: int) -> Tensor:
    """The best token of a part of the vocabulary, for the exchange between ranks; rows without filters only.

    logits [S, part] of the tokens from `first` on; the rest as in `sample_rows` -> [2, S] int32: the token with the
    highest score, which is its logit where the row is greedy and else logit / temperature + noise, and that score's
    float32 bits. A part with NaN or +Inf has the score +Inf, one with nothing but -Inf has -Inf.
    """
    logits, temperature = logits.float(), state.temperature[rows]
    peak, tokens = logits.amax(-1), logits.argmax(-1)
    scores = peak.clone()
    drawn = ((temperature > 0) & peak.isfinite()).nonzero().squeeze(1)
    rows_per_pass = max(1, CHUNK // logits.shape[1])
    for start in range(0, len(drawn), rows_per_pass):
        part = drawn[start : start + rows_per_pass]
        z = logits[part] / temperature[part, None].clamp(min=MIN_TEMPERATURE)
        z.add_(gumbel_noise(state.noise_key[rows[part]], positions[part], z.shape[1], first))
        tokens[part] = best = z.argmax(-1)
        scores[part] = z.gather(1, best.unsqueeze(1)).squeeze(1)
    scores.nan_to_num_(nan=float("inf"), posinf=float("inf"), neginf=float("-inf"))
    return torch.stack([tokens.int() + first, scores.view(torch.int32)])


def mix32(x: Tensor) -> Tensor:
    """A bijection of 32-bit integers, held in int64, that changes each output bit with probability near 1/2.

    lowbias32 with the constants found by hash-prospector (C. Wellons and T. Ettinger, "Prospecting for hash functions",
    github.com/skeeto/hash-prospector).
    """
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & MASK32
    x = ((x ^ (x >> 15)) * 0x735A2D97) & MASK32
    return x ^ (x >> 15)


def row_words(keys: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Two 32-bit words (in int64) [S] each from the 64-bit keys [S] and positions [S].

    Positions of one key never share their first word, since each step of it is a bijection.
    """
    low, high, position = keys & MASK32, (keys >> 32) & MASK32, positions.long() & MASK32
    first = mix32(mix32((low + position * 0x9E3779B9) & MASK32) ^ high)
    second = mix32(mix32((high + position * 0x85EBCA6B) & MASK32) ^ low ^ 0x6A09E667)
    return first, second


def noise_bits(keys: Tensor, positions: Tensor, vocab_size: int, first: int = 0) -> Tensor:
    """32 random bits, in int64, for each (row, token): [S, V], the tokens from `first` on.

    With the row's words (a, b): mix32 of token ^ a, where b is added between its two multiplications, so that rows
    whose first words are close still have unrelated noise. All of it is exact modulo 2^32.
    """
    a, b = row_words(keys, positions)
    x = torch.arange(first, first + vocab_size, device=keys.device).unsqueeze(0) ^ a.unsqueeze(1)
    x.bitwise_xor_(x >> 16).mul_(0x21F0AAAD).bitwise_and_(MASK32)
    x.bitwise_xor_(x >> 15).add_(b.unsqueeze(1)).mul_(0x735A2D97).bitwise_and_(MASK32)
    return x.bitwise_xor_(x >> 15)


def gumbel_noise(keys: Tensor, positions: Tensor, vocab_size: int, first: int = 0) -> Tensor:
    """Standard Gumbel noise [S, V] float32 of the tokens from `first` on.

    It is -log(-log(1 - x)) with x = (bits + 0.5) / 2^32 in (0, 1); 1 - x is the usual uniform u. Written with log1p
    because large noise, which is what wins, comes from u near 1, where float32 is coarse and x near 0 is fine. The
    clamp keeps the noise finite when x rounds to 1.
    """
    x = noise_bits(keys, positions, vocab_size, first).float().add_(0.5).mul_(2.0**-32).clamp_(max=1.0 - 2.0**-24)
    return x.neg_().log1p_().neg_().log_().neg_()


def mask_top_k_top_p(z: Tensor, top_k: Tensor, top_p: Tensor) -> None:
    """Set the tokens that top-k and then top-p exclude to -inf, in place.

    z [N, V] float32, tempered logits whose row maximum is 0. Top-k keeps the k largest, the lowest index first among
    equals. Top-p keeps the shortest prefix of the descending rest whose share of the rest's mass reaches p: a token
    stays while the mass before it is below p, so at least one does. No sort where a few candidates settle it.
    """
    vocab_size = z.shape[1]
    k = top_k.long().where((top_k > 0) & (top_k < vocab_size), vocab_size)
    rows = ((k < vocab_size) | (top_p < 1)).nonzero().squeeze(1)
    if not len(rows):
        return
    limit = max(FIRST_CANDIDATES, int(k.where(k < vocab_size, 0).max()))
    for candidates in (limit, vocab_size):
        if candidates == limit and limit > vocab_size // 4:
            continue  # sorting at once is cheaper
        rows = _mask_rows(z, rows, k[rows], top_p[rows], candidates)
        if not len(rows):
            return


def _mask_rows(z: Tensor, rows: Tensor, k: Tensor, p: Tensor, candidates: int) -> Tensor:
    """Mask those of `rows` [N] that their largest `candidates` logits settle; returns the rows left to do.

    Only values enter, never the order in which equal ones were found, so `candidates` does not change the result.
    """
    x = z[rows]
    vocab_size = x.shape[1]
    if candidates < vocab_size:
        top = x.topk(candidates, dim=-1).values
    else:
        top = x.sort(dim=-1, descending=True).values
    mass = top.exp().double()
    upto = mass.cumsum(-1)
    total = x.exp().cumsum(-1, dtype=torch.float64)[:, -1]
    rest = upto.gather(1, (k - 1).clamp(max=candidates - 1).unsqueeze(1)).squeeze(1).where(k < vocab_size, total)
    rank = torch.arange(candidates, device=z.device)
    stays = (upto - mass < (p.double() * rest).unsqueeze(1)) & (rank < k.unsqueeze(1))
    count = stays.sum(-1).clamp(min=1).where(p < 1, k)
    settled = (count < candidates) | (count == k)
    left, rows = rows[~settled], rows[settled]
    x, count, top = x[settled], count[settled], top[settled]
    cut = top.gather(1, (count - 1).unsqueeze(1))
    keep = x >= cut
    if bool((keep.sum(-1) != count).any()):  # equals across the cut: those of lowest index stay
        equal = x == cut
        free = count - (x > cut).sum(-1)
        keep &= ~equal | (equal.cumsum(-1) <= free.unsqueeze(1))
    z[rows] = x.masked_fill(~keep, float("-inf"))
    return left
