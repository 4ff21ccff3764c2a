"""Sampling in torch, the specification of all samplers: penalties and masks, the sampled token, log-probabilities.

A sampled token is argmax(logits / temperature + Gumbel noise) over the tokens that min-p, top-k and top-p keep. It has
exactly the softmax distribution (Gumbel 1954; Maddison et al. 2014, arXiv:1411.0030). The noise is a function of only
(key, position, token), and every step below treats each row separately, so a result does not depend on the batch.
Elementwise float ops are the same for every shape; sums are sequential (`cumsum`).
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from minisgl.core.layout import MAX_DRAFT_MASKS, ROW, Flag, fields, words
from minisgl.core.plan import StepResult
from minisgl.core.rounding import ceil_div

MASK32: Final = 0xFFFFFFFF
NOISE_CHUNK: Final = 1 << 17  # logits per pass: the int64 noise of one pass stays in L2
LOGPROBS_CHUNK: Final = 1 << 24  # logits per pass: 64 MiB in float32, for any number of rows and tokens
MIN_TEMPERATURE: Final = 1e-30  # keeps the scores of candidates finite
FIRST_CANDIDATES: Final = 128  # tokens that top-p examines before it sorts the whole vocabulary
TOP: Final = StepResult.TOP
_DTYPES: Final = {"<i4": torch.int32, "<i8": torch.int64, "<f4": torch.float32}


# -- penalties, biases and masks


class PenaltyTables:
    """Penalties, logit biases and forbidden ends of the rows, and the masks of a step.

    The tables never grow, so captured steps may read them. A row's result does not depend on the other rows.

    seen         [rows, V] int32, 2 x the number of times a token was generated, + 1 if it is in the prompt
    penalties    [rows, 3] float32: presence, frequency, repetition
    first_end    [rows] int32, first position at which the request may end
    num_biases   [rows] int32, the number of the following that a row has
    bias_ids     [rows, N] int32, distinct tokens; ~token for one that ends the request
    biases       [rows, N] float32
    masks        [rows + MAX_DRAFT_MASKS, ceil(V / 32)] int32 in the order of the tokens that MASKED sequences sample:
                 bit i of word w is token 32 w + i, 1 = allowed
    """

    def __init__(self, rows: int, vocab_size: int, max_biases: int, device: torch.device) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        # A row is cleared when it is filled. On a CPU, memory that was never written takes no space.
        self.seen = torch.empty(rows, vocab_size, dtype=torch.int32, device=device)
        self.penalties = zeros(rows, 3, dtype=torch.float32)
        self.first_end = zeros(rows)
        self.num_biases = zeros(rows)
        self.bias_ids = zeros(rows, max_biases)
        self.biases = zeros(rows, max_biases, dtype=torch.float32)
        self.masks = zeros(rows + MAX_DRAFT_MASKS, ceil_div(vocab_size, 32))


def apply_penalties(
    logits: Tensor,
    flags: Tensor,
    mask_index: Tensor,
    rows: Tensor,
    positions: Tensor,
    tables: PenaltyTables,
    drafted: Tensor | None = None,
    inputs: Tensor | None = None,
) -> Tensor:
    """Return float32 logits [S, V] with the penalties and masks that the flags of each sequence ask for.

    logits [S, V] are of any float dtype; flags [S] int32 are of `layout.Flag`; rows [S] int64 and positions [S] int32
    (of the new tokens) are those of the sequences. PENALIZED means, in this order: logit bias, forbidden end tokens,
    repetition penalty (Keskar et al. 2019, arXiv:1909.05858: divide positive logits, multiply negative ones), frequency
    and presence penalty (as OpenAI's API defines them). A sequence that follows `drafted` [S] int32 drafts of its row
    counts these, too: the token before it is `inputs` [S] int32 at its own index, the token before that is at the
    index before, and so on. MASKED means -inf for all tokens that mask `mask_index` [S] int32 of `tables.masks` does
    not allow.
    """
    logits = logits.to(torch.float32, copy=True)
    seqs = _flagged(flags, Flag.PENALIZED)
    if len(seqs):
        seen = tables.seen[rows[seqs]]
        if drafted is not None and inputs is not None:
            for i in range(int(drafted.max())):
                index = (drafted[seqs] > i).nonzero().squeeze(1)
                seen[index, inputs[seqs[index] - i].long()] += 2
        logits[seqs] = _penalized(logits[seqs], seen, rows[seqs], positions[seqs], tables)
    seqs = _flagged(flags, Flag.MASKED)
    if len(seqs):
        masks = tables.masks[mask_index[seqs].long()]
        bits = masks.unsqueeze(2) >> torch.arange(32, dtype=torch.int32, device=masks.device)
        is_allowed = (bits & 1).bool().flatten(1)[:, : logits.shape[1]]
        logits[seqs] = logits[seqs].masked_fill(~is_allowed, float("-inf"))
    return logits


def count_tokens(tokens: Tensor, flags: Tensor, rows: Tensor, tables: PenaltyTables) -> None:
    """Count the sampled tokens [S] int32 of the PENALIZED sequences."""
    seqs = _flagged(flags, Flag.PENALIZED)
    twos = torch.full_like(tokens[seqs], 2)
    tables.seen.index_put_((rows[seqs], tokens[seqs].long()), twos, accumulate=True)


def _flagged(flags: Tensor, flag: int) -> Tensor:
    """Return the indices of the sequences whose flags have `flag`."""
    return (flags & flag).nonzero().squeeze(1)


def _penalized(x: Tensor, seen: Tensor, rows: Tensor, positions: Tensor, tables: PenaltyTables) -> Tensor:
    """Return x [A, V] float32 with penalties, for sequences that are all PENALIZED."""
    num_biases = tables.num_biases[rows]
    width = int(num_biases.max())
    is_used = torch.arange(width, device=x.device) < num_biases.unsqueeze(1)
    ids, biases = (table[rows, :width].masked_fill(~is_used, 0) for table in (tables.bias_ids, tables.biases))
    tokens = torch.where(ids < 0, ~ids, ids).long()
    x.scatter_add_(1, tokens, biases)
    # Write only forbidden tokens: unused entries would race with them for token 0.
    row, entry = ((ids < 0) & (positions < tables.first_end[rows]).unsqueeze(1)).nonzero(as_tuple=True)
    x[row, tokens[row, entry]] = float("-inf")
    counts = seen >> 1
    presence, frequency, repetition = tables.penalties[rows].unsqueeze(2).unbind(1)
    x = torch.where(seen > 0, torch.where(x > 0, x / repetition, x * repetition), x)
    x -= frequency * counts + presence * (counts > 0)
    return x


# -- the sampled token


class SamplingState:
    """What sampling knows of each row.

    last_token   [rows] int32, the newest sampled token
    table        [rows, words] int32, a record `layout.ROW` per row; its fields are views [rows]
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    noise_key: Tensor
    adapter: Tensor

    def __init__(self, rows: int, device: torch.device) -> None:
        self.last_token = torch.zeros(rows, dtype=torch.int32, device=device)
        self.table = torch.zeros(rows, words(ROW), dtype=torch.int32, device=device)
        for name, (dtype, offset, *_) in fields(ROW).items():
            setattr(self, name, self.table.view(_DTYPES[dtype.str])[:, offset // dtype.itemsize])


def sample_rows(logits: Tensor, rows: Tensor, positions: Tensor, state: SamplingState, is_filtered: bool) -> Tensor:
    """Sample a token for each of `rows` [S] int64 with its parameters in `state`, and store it as the row's last token.

    logits [S, V] are of any float dtype; positions [S] int32 are those of the new tokens. `is_filtered` is False if no
    row uses top-k, top-p or min-p. Returns [2, S] int32: tokens, and 1 if the logits were finite (see `sample`).
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
    """Sample one token per row.

    logits [S, V] float32, temperature [S] float32 (0 = greedy; the lowest index wins ties), top_k [S] int32 (0 = off),
    top_p [S] float32 (1 = off; applied after top-k), min_p [S] float32 (0 = off; drops tokens less likely than min_p
    times the most likely one, before top-k and top-p; arXiv:2407.01082), keys [S] int64, positions [S] int32 (of the
    new token) -> tokens [S] int32, ok [S] bool. A row with NaN, +Inf or only -Inf is not ok; its token is 0.
    """
    peak, tokens = logits.amax(-1), logits.argmax(-1)
    ok = peak.isfinite()
    random = ((temperature > 0) & ok).nonzero().squeeze(1)
    rows_per_pass = max(1, NOISE_CHUNK // logits.shape[1])
    for first in range(0, len(random), rows_per_pass):
        rows = random[first : first + rows_per_pass]
        z = (logits[rows] - peak[rows, None]) / temperature[rows, None]
        z.masked_fill_(z < min_p[rows, None].log(), float("-inf"))  # min-p: the most likely token has z = 0
        mask_top_k_top_p(z, top_k[rows], top_p[rows])
        tokens[rows] = z.add_(gumbel_noise(keys[rows], positions[rows], z.shape[1])).argmax(-1)
    return tokens.where(ok, 0).int(), ok


def candidates(logits: Tensor, rows: Tensor, positions: Tensor, state: SamplingState, first: int) -> Tensor:
    """Return the best token of a vocabulary shard, to compare with other ranks. Only for rows without filters.

    logits [S, V / ranks] are of the tokens from `first` on; the rest is as in `sample_rows` -> [2, S] int32: the token
    with the highest score, and that score's float32 bits. The score of a token is its logit if the row is greedy, else
    logit / temperature + noise. A shard with NaN or +Inf has the score +Inf, one with only -Inf has -Inf.
    """
    logits, temperature = logits.float(), state.temperature[rows]
    peak, tokens = logits.amax(-1), logits.argmax(-1)
    scores = peak.clone()
    random = ((temperature > 0) & peak.isfinite()).nonzero().squeeze(1)
    rows_per_pass = max(1, NOISE_CHUNK // logits.shape[1])
    for start in range(0, len(random), rows_per_pass):
        part = random[start : start + rows_per_pass]
        z = logits[part] / temperature[part, None].clamp(min=MIN_TEMPERATURE)
        z.add_(gumbel_noise(state.noise_key[rows[part]], positions[part], z.shape[1], first))
        tokens[part] = best = z.argmax(-1)
        scores[part] = z.gather(1, best.unsqueeze(1)).squeeze(1)
    scores.nan_to_num_(nan=float("inf"), posinf=float("inf"), neginf=float("-inf"))
    return torch.stack([tokens.int() + first, scores.view(torch.int32)])


def mix32(x: Tensor) -> Tensor:
    """Apply a bijection of 32-bit integers (in int64) in which each input bit flips each output bit half of the time.

    lowbias32 with the constants found by hash-prospector (C. Wellons and T. Ettinger, "Prospecting for hash functions",
    github.com/skeeto/hash-prospector).
    """
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & MASK32
    x = ((x ^ (x >> 15)) * 0x735A2D97) & MASK32
    return x ^ (x >> 15)


def row_words(keys: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return two 32-bit words (in int64) [S] for the 64-bit keys [S] and positions [S].

    Positions of one key never share the first word, since each step that computes it is a bijection.
    """
    low, high = keys & MASK32, (keys >> 32) & MASK32
    position = positions.long() & MASK32
    first = mix32(mix32((low + position * 0x9E3779B9) & MASK32) ^ high)
    second = mix32(mix32((high + position * 0x85EBCA6B) & MASK32) ^ low ^ 0x6A09E667)
    return first, second


def noise_bits(keys: Tensor, positions: Tensor, vocab_size: int, first: int = 0) -> Tensor:
    """Return 32 random bits (in int64) for each (row, token): [S, V], with the tokens from `first` on.

    With the row's words (a, b): mix32 of token ^ a, with b added between the two multiplications, so that rows whose
    first words are close have unrelated noise. Exact modulo 2^32.
    """
    a, b = row_words(keys, positions)
    x = torch.arange(first, first + vocab_size, device=keys.device).unsqueeze(0) ^ a.unsqueeze(1)
    x.bitwise_xor_(x >> 16).mul_(0x21F0AAAD).bitwise_and_(MASK32)
    x.bitwise_xor_(x >> 15).add_(b.unsqueeze(1)).mul_(0x735A2D97).bitwise_and_(MASK32)
    return x.bitwise_xor_(x >> 15)


def gumbel_noise(keys: Tensor, positions: Tensor, vocab_size: int, first: int = 0) -> Tensor:
    """Return standard Gumbel noise [S, V] float32 of the tokens from `first` on.

    It is -log(-log(1 - x)) with x = (bits + 0.5) / 2^32 in (0, 1); 1 - x is the usual uniform u. It is computed with
    log1p, because the large noise that wins comes from u near 1, where float32 is coarse, while x near 0 is fine. The
    clamp keeps the noise finite if x rounds to 1.
    """
    x = noise_bits(keys, positions, vocab_size, first).float().add_(0.5).mul_(2.0**-32).clamp_(max=1.0 - 2.0**-24)
    return x.neg_().log1p_().neg_().log_().neg_()


def mask_top_k_top_p(z: Tensor, top_k: Tensor, top_p: Tensor) -> None:
    """Set the tokens that top-k and then top-p exclude to -inf, in place.

    z [N, V] float32 are logits divided by the temperature, with row maximum 0. Top-k keeps the k largest, and among
    equal ones those with the lowest index. Top-p sorts the tokens that top-k keeps, and keeps the shortest prefix whose
    fraction of their mass reaches p: a token is kept if the mass before it is below p, so at least one is. Nothing is
    sorted if a few candidates determine the cut.
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
    """Mask those of `rows` [N] whose cut their `candidates` largest logits determine; return the other rows.

    The result depends only on values, never on the order of equal ones, so `candidates` does not change it.
    """
    x = z[rows]
    vocab_size = x.shape[1]
    if candidates < vocab_size:
        top = x.topk(candidates, dim=-1).values
    else:
        top = x.sort(dim=-1, descending=True).values
    mass = top.exp().double()
    cumulative = mass.cumsum(-1)
    total = x.exp().cumsum(-1, dtype=torch.float64)[:, -1]
    kept_mass = (
        cumulative.gather(1, (k - 1).clamp(max=candidates - 1).unsqueeze(1)).squeeze(1).where(k < vocab_size, total)
    )
    rank = torch.arange(candidates, device=z.device)
    is_kept = (cumulative - mass < (p.double() * kept_mass).unsqueeze(1)) & (rank < k.unsqueeze(1))
    count = is_kept.sum(-1).clamp(min=1).where(p < 1, k)
    settled = (count < candidates) | (count == k)
    remaining, rows = rows[~settled], rows[settled]
    x, count, top = x[settled], count[settled], top[settled]
    cut = top.gather(1, (count - 1).unsqueeze(1))
    keep = x >= cut
    if bool((keep.sum(-1) != count).any()):  # equal values at the cut: keep those with the lowest index
        equal = x == cut
        num_equal = count - (x > cut).sum(-1)
        keep &= ~equal | (equal.cumsum(-1) <= num_equal.unsqueeze(1))
    z[rows] = x.masked_fill(~keep, float("-inf"))
    return remaining


# -- log-probabilities


def rows_per_pass(vocab_size: int) -> int:
    """Return the number of rows of logits per pass of `token_logprobs`."""
    return max(1, LOGPROBS_CHUNK // vocab_size)


def token_logprobs(logits: Tensor, tokens: Tensor, flags: Tensor) -> Tensor:
    """Return the log-probabilities of tokens [N] int as in `core.StepResult.logprobs`, int32 [StepResult.WIDTH, N].

    logits [N, V] are of any float dtype; flags [N] int32 are of `layout.Flag`. A column with LOGPROBS has log
    softmax(logits)[token] as float32 bits, the ids of the most likely tokens, and their log-probabilities as float32
    bits. Other columns, and entries beyond a vocabulary smaller than TOP, are zero.
    """
    count, vocab_size = logits.shape
    step, width = rows_per_pass(vocab_size), min(TOP, vocab_size)
    scores = torch.zeros(count, StepResult.WIDTH, dtype=torch.int32, device=logits.device)
    wanted = (flags & Flag.LOGPROBS).nonzero().squeeze(1)
    for start in range(0, len(wanted), step):
        seqs = wanted[start : start + step]
        logprobs = torch.log_softmax(logits[seqs].float(), -1)
        sampled = logprobs.gather(1, tokens[seqs].long().unsqueeze(1))
        values, ids = logprobs.topk(width, dim=-1)
        top = torch.zeros(len(seqs), 2, TOP, dtype=torch.int32, device=logits.device)
        top[:, 0, :width], top[:, 1, :width] = ids.int(), values.view(torch.int32)
        scores[seqs] = torch.cat([sampled.view(torch.int32), top.flatten(1)], 1)
    return scores.t()
