"""Every op in plain torch: the specification against which all other implementations are tested.

Letters in shapes: T tokens of the step, S sampled sequences, B sequences, H hidden size, I intermediate size,
V vocabulary, E experts, Hq/Hk query/KV heads, D head dimension, P pages. Activations are in the engine's dtype, unless
stated otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from minisgl.core.rounding import ceil_div
from minisgl.ops.quantized import Pages, Quantized, QuantizedPages

if TYPE_CHECKING:
    from minisgl.core.plan import SeqLayout


def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """Look up the rows of `weight` [V, H] for `ids` [T] int32 -> [T, H]."""
    return F.embedding(ids, weight)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, scale: Tensor | None = None
) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang, Sennrich 2019, arXiv:1910.07467).

    x [..., n], weight [n]. The result is computed in float32, rounded to the weight's dtype, multiplied by the weight,
    and rounded to x's dtype. So a weight in x's dtype is applied after rounding, as in Llama, and a float32 weight
    before, as in Gemma. A `residual` is added to the result; it may be overwritten. The sum is multiplied by `scale`
    [1], if given.
    """
    x32 = x.float()
    normed = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)
    normed = (weight * normed.to(weight.dtype)).to(x.dtype)
    total = normed if residual is None else residual + normed
    return total if scale is None else total * scale


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (rms_norm(x + residual), x + residual), each [T, H]. May overwrite `residual` with the sum."""
    total = x + residual
    return rms_norm(total, weight, eps), total


GATES: Final[Mapping[str, Callable[[Tensor], Tensor]]] = {
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),  # g / 2 (1 + tanh(sqrt(2 / pi) (g + 0.044715 g^3)))
}
"""The activations of gated MLPs: SwiGLU and GeGLU (arXiv:2002.05202), gelu by its approximation (arXiv:1606.08415)."""


ACTIVATIONS: Final[Mapping[str, Callable[[Tensor], Tensor]]] = {
    **GATES,
    "gelu": F.gelu,
    "relu2": lambda x: F.relu(x).square(),  # arXiv:2109.08668
}
"""The activations of MLPs without a gate."""


OUTPUT_GATES: Final[Mapping[str, Callable[[Tensor], Tensor]]] = {"sigmoid": torch.sigmoid, "softplus": F.softplus}
"""What is done to a projection before it multiplies attention's output."""


CLAMPED: Final = "clamped"
LIMIT: Final = 7.0
ALPHA: Final = 1.702


def gate_and_mul(x: Tensor, gate: str) -> Tensor:
    """Return f(g) * up [T, I], where x [T, 2I] is g and up side by side, and f is `GATES[gate]`.

    CLAMPED, of experts only, is g sigmoid(ALPHA g) (up + 1), where g is at most LIMIT and up at most LIMIT from 0
    (gpt-oss, arXiv:2508.10925).
    """
    g, up = x.chunk(2, dim=-1)
    if gate == CLAMPED:
        g = g.clamp(max=LIMIT)
        return g * torch.sigmoid(ALPHA * g) * (up.clamp(-LIMIT, LIMIT) + 1)
    return GATES[gate](g) * up


def linear(x: Tensor, weight: Tensor | Quantized, bias: Tensor | None = None, gate: str = "") -> Tensor:
    """Return x weight^T + bias: x [T, in], weight [out, in], bias [out] -> [T, out].

    With `gate`, `gate_and_mul` follows: weight [2I, in] is gate above up, and the result is [T, I].
    """
    out = F.linear(x, weight.dense(x.dtype) if isinstance(weight, Quantized) else weight, bias)
    return gate_and_mul(out, gate) if gate else out


def add_norm_linear(
    x: Tensor,
    residual: Tensor | None,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor | Quantized,
    bias: Tensor | None = None,
    gate: str = "",
    *,
    rms_norm: Callable[[Tensor, Tensor, float], Tensor] = rms_norm,
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]] = add_rms_norm,
    linear: Callable[..., Tensor] = linear,
) -> tuple[Tensor, Tensor]:
    """Return (linear(rms_norm(total)), total), where total is x + residual. Without a residual, total is x.

    x, residual [T, H]; norm_weight [H]; weight, bias and `gate` as in `linear` -> [T, N], [T, H]. This is one op, since
    for one row it is one kernel. May overwrite `residual`, but not `x`. A table passes its own ops by keyword.
    """
    if residual is None:
        return linear(rms_norm(x, norm_weight, eps), weight, bias, gate), x
    normed, total = add_rms_norm(x, residual, norm_weight, eps)
    return linear(normed, weight, bias, gate), total


class Experts(NamedTuple):
    """The experts of a layer, of which each token has `top_k`.

    gate_up [E, 2I, H] is gate above up, down [E, H, I]; their biases are [E, 2I] and [E, H]. `normalise` is as in
    `moe`, and `gate` as in `gate_and_mul`. `scale` [E] multiplies the experts' weights.
    """

    gate_up: Tensor | Quantized
    down: Tensor | Quantized
    top_k: int
    normalise: bool
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    gate: str = "silu"
    scale: Tensor | None = None


def moe(x: Tensor, router_logits: Tensor, experts: Experts, *, linear: Callable[..., Tensor] = linear) -> Tensor:
    """Mixture of experts (arXiv:2401.04088): the sum over a token's experts e of p_e down_e f(gate_e x, up_e x).

    x [T, H], router_logits [T, E] -> [T, H]. The experts are those with the highest logits. p is the softmax over all
    experts in float32; with `normalise`, the selected ones are divided by their sum. Among equal logits, the lowest
    expert is selected. The sum is in float32, the most probable expert first, so the rest of the batch affects a
    token's result only as the number of rows affects a GEMM. A table passes its own `linear`.
    """
    gate_up, down, top_k, normalise, *biases, gate, scale = experts
    chosen = router_logits.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = router_logits.softmax(-1, dtype=torch.float32).gather(-1, chosen)  # [T, top_k]
    if normalise:
        weights = weights / weights.sum(-1, keepdim=True)
    if scale is not None:
        weights = weights * scale[chosen]
    # Pair i is expert i % top_k of token i // top_k. Sorted by expert, the pairs of one expert are one GEMM.
    pairs = chosen.flatten()
    order = pairs.argsort(stable=True)
    rows = x[order // top_k]  # of the sorted pairs: first inputs, later outputs
    start = 0
    for e, count in enumerate(pairs.bincount(minlength=len(gate_up)).tolist()):
        if count:
            group = rows[start : start + count]
            gate_bias, bias = (None if b is None else b[e] for b in biases)
            group.copy_(linear(gate_and_mul(linear(group, gate_up[e], gate_bias), gate), down[e], bias))
            start += count
    index_of_pair = order.argsort()
    total = torch.zeros_like(x, dtype=torch.float32)
    for i in range(top_k):
        total.addcmul_(rows[index_of_pair[i::top_k]], weights[:, i : i + 1])
    return total.to(x.dtype)


def chosen_scores(
    logits: Tensor,
    bias: Tensor,
    scoring: str,
    top_k: int,
    groups: int = 1,
    top_groups: int = 1,
    group_best: int = 2,
) -> Tensor:
    """Return the scores of each token's `top_k` experts, and 0 for others, float32 [T, E] (arXiv:2412.19437).

    logits [T, E] are float32. Scores are their "softmax" or "sigmoid" (`scoring`). With `bias` [E] added, the highest
    are chosen, in the `top_groups` of `groups` equal groups of experts whose `group_best` best scores have the highest
    sums.
    """
    scores = logits.sigmoid() if scoring == "sigmoid" else logits.softmax(-1)
    ranks = scores + bias
    if groups > 1:
        grouped = ranks.view(-1, groups, ranks.shape[1] // groups)
        best = grouped.topk(min(group_best, grouped.shape[2])).values.sum(-1)
        others = best.topk(groups - top_groups, largest=False).indices
        ranks = grouped.scatter(1, others.unsqueeze(2).expand(-1, -1, grouped.shape[2]), float("-inf")).flatten(1)
    chosen = ranks.topk(top_k).indices
    return torch.zeros_like(scores).scatter_(1, chosen, scores.gather(1, chosen))


def rope(q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return q and k with rotary position embedding (RoFormer, arXiv:2104.09864) on halves ("neox" style).

    q [T, Hq, D], k [T, Hk, D], positions [T] int32, cos_sin [max position, D] float32: the cosines of the D/2
    frequencies, then their sines. With x = (x1, x2): (x1 cos - x2 sin, x2 cos + x1 sin), in float32.
    """
    cos, sin = cos_sin[positions.long()].unsqueeze(1).chunk(2, dim=-1)

    def rotate(x: Tensor) -> Tensor:
        x1, x2 = x.float().chunk(2, dim=-1)
        return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1).to(x.dtype)

    return rotate(q), rotate(k)


def store_kv(k: Tensor, v: Tensor, pages: Pages, out_loc: Tensor) -> None:
    """Write k, v [T, Hk, D] into `pages` [P, 2, Hk, page, D] at slots `out_loc` [T] int64 = page id * page + offset."""
    page_size = pages.shape[3]
    page, offset = out_loc // page_size, out_loc % page_size
    for which, x in enumerate((k, v)):
        if isinstance(pages, QuantizedPages):
            pages.store(x, which, page, offset)
        else:
            pages[page, which, :, offset] = x


@dataclass(frozen=True, slots=True)
class HeadTransform:
    """What a layer has for the heads of q and k: an optional norm with weights [D], then RoPE.

    Either both q and k have a norm or neither has. `cos_sin` is as in `rope`. After it, q is multiplied by `q_scale`
    [max position] float32 at its position. `sinks` [Hq] float32 are as in `paged_attention`. With `norms_v`, heads of v
    have a norm without weights. If it only `reads`, the layer has no k and v of its own.
    """

    q_weight: Tensor | None
    k_weight: Tensor | None
    eps: float
    cos_sin: Tensor
    q_scale: Tensor | None = None
    sinks: Tensor | None = None
    norms_v: bool = False
    reads: bool = False


def norm_rope_store(qkv: Tensor, heads: HeadTransform, positions: Tensor, pages: Pages, out_loc: Tensor) -> Tensor:
    """Do everything between the QKV projection and attention: per-head norm, rotary embedding, K/V storage.

    qkv [T, (Hq + 2 Hk) D] has q, k and v heads in this order, or q alone if the layer only reads. With weights, each
    head of q and k is normalised by `rms_norm` first. k and v are stored as in `store_kv`. Returns q [T, Hq, D], with
    `q_scale` in it. May overwrite `qkv`.
    """
    num_kv_heads, head_dim = 0 if heads.reads else pages.shape[2], pages.shape[4]
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    q, k, v = torch.split(qkv.view(len(qkv), -1, head_dim), [num_heads, num_kv_heads, num_kv_heads], dim=1)
    if heads.q_weight is not None:
        q = rms_norm(q, heads.q_weight, heads.eps)
    if heads.k_weight is not None:
        k = rms_norm(k, heads.k_weight, heads.eps)
    if heads.norms_v:
        v = F.rms_norm(v.float(), (head_dim,), None, heads.eps).to(v.dtype)
    q, k = rope(q, k, heads.cos_sin, positions)
    if not heads.reads:
        store_kv(k, v, pages, out_loc)
    return q if heads.q_scale is None else (q * heads.q_scale[positions.long(), None, None]).to(q.dtype)


@dataclass(frozen=True, slots=True)
class LatentTransform:
    """What a layer has for latents (multi-head latent attention, arXiv:2405.04434): `C` is their rank, `R` rotates.

    `norm_weight` [C] is that of a latent's norm. `cos_sin` [max position, R] and `q_scale` are as in `HeadTransform`.
    `kv_weight` [Hq, N + V, C] makes of a latent each head's key of N elements and value of V elements.
    """

    norm_weight: Tensor
    eps: float
    cos_sin: Tensor
    kv_weight: Tensor
    q_scale: Tensor | None = None


def store_latents(
    q: Tensor, latents: Tensor, heads: LatentTransform, positions: Tensor, pages: Pages, out_loc: Tensor
) -> None:
    """Do everything between the projections and attention to latents, in place.

    q [T, Hq, N + R] gets its last R elements rotated, and is multiplied by `q_scale`. latents [T, C + R] get their
    first C elements normalised and the others rotated, and are stored in `pages` [P, 1, page, C + R] at slots
    `out_loc`. Both may be columns of one projection's result.
    """
    rank, page_size = len(heads.norm_weight), pages.shape[2]
    rotated = q.shape[2] - (latents.shape[1] - rank)
    latent, k_rope = latents[:, :rank], latents[:, None, rank:]
    latent.copy_(rms_norm(latent, heads.norm_weight, heads.eps))
    new_q, new_k = rope(q[:, :, rotated:], k_rope, heads.cos_sin, positions)
    q[:, :, rotated:], k_rope[:] = new_q, new_k
    if heads.q_scale is not None:
        q.copy_(q * heads.q_scale[positions.long(), None, None])
    page, offset = out_loc // page_size, out_loc % page_size
    if isinstance(pages, QuantizedPages):
        QuantizedPages(pages.data.unsqueeze(1), pages.scale.unsqueeze(1)).store(latents[:, None], 0, page, offset)
    else:
        pages[page, 0, offset] = latents


def latent_attention(
    q: Tensor, q_rope: Tensor, pages: Pages, page_table: Tensor, layout: SeqLayout, scale: float
) -> Tensor:
    """Attend to latents: the mean of the latents [T, Hq, C] by softmax(scale (q c + q_rope r)), in float32.

    q [T, Hq, C] are queries times the parts of `kv_weight` that make keys, q_rope [T, Hq, R] their rotated parts. A
    latent in `pages` [P, 1, page, C + R] is c and r, and all heads read it. All else is as in `paged_attention`.
    """
    rank, page_size, start = q.shape[2], pages.shape[2], 0
    out = torch.empty_like(q)
    lengths = torch.stack([layout.rows, layout.cu_query_lens.diff(), layout.kv_lens], 1)
    for row, query_len, kv_len in lengths.tolist():
        ids = page_table[row, : ceil_div(kv_len, page_size)].long()
        latents = (pages.dense(ids) if isinstance(pages, QuantizedPages) else pages[ids].float()).flatten(0, 2)[:kv_len]
        queries = torch.cat([x[start : start + query_len].float() for x in (q, q_rope)], 2)
        scores = torch.einsum("qhd,kd->hqk", queries, latents) * scale
        positions = torch.arange(kv_len, device=q.device)
        hidden = positions[None, :] > positions[kv_len - query_len :, None]
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        out[start : start + query_len] = torch.einsum("hqk,kd->qhd", weights, latents[:, :rank]).to(q.dtype)
        start += query_len
    return out


def soft_cap(scores: Tensor, softcap: float) -> Tensor:
    """Return c tanh(scores / c) for the limit c, or the scores if it is 0 (Gemma 2, arXiv:2408.00118)."""
    return torch.tanh(scores / softcap) * softcap if softcap else scores


def softmax_with_sinks(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Return exp(scores) / (sum of exp(scores) + exp(sink)) over the last dimension, in float32.

    sinks are as scores without their last dimension, or can be broadcast to that; without them, this is the softmax.
    """
    if sinks is None:
        return scores.softmax(-1, dtype=torch.float32)
    column = sinks.expand(scores.shape[:-1]).unsqueeze(-1)
    return torch.cat([scores, column], -1).softmax(-1, dtype=torch.float32)[..., :-1]


def look_up(
    history: Tensor, rows: Tensor, lengths: Tensor, longest: int, window: int, matches: tuple[int, int], count: int
) -> tuple[Tensor, Tensor]:
    """Find an earlier occurrence of the newest tokens of `rows` [D] int64, and draft the tokens that followed it.

    history [R, W] int32 has the tokens of all rows; lengths [D] int32, at most `longest`, are their numbers. Only the
    newest `window` tokens are searched. `matches` are the least and the most tokens that must match. The longest match
    is used, and among equal ones the most recent. Returns drafts [D, count] and the numbers of valid ones [D], int32.
    Without a match, both are 0. Where the text after the match ends, it is continued by repetition.
    """
    width = min(longest, window)
    index = torch.arange(width, device=history.device)
    history, newest = history[rows], lengths.long().unsqueeze(1) - 1
    if longest > window:
        first = (newest + 1 - width).clamp(min=0)
        history, newest = history.gather(1, first + index), newest - first
    else:
        history = history[:, :width]
    # matched[i]: how many tokens up to index i equal the newest ones, in order.
    is_match = (history == history.gather(1, newest)) & (index < newest)
    matched = is_match.int()
    for n in range(1, min(matches[1], width)):
        token = history.gather(1, (newest - n).clamp(min=0))
        is_match[:, n:] &= history[:, :-n] == token
        is_match[:, :n] = False
        matched += is_match
    best = (matched * width + index).argmax(1, keepdim=True)
    is_found = matched.gather(1, best) >= matches[0]
    # Beyond the newest token, the drafts repeat the text after the match from its beginning.
    period = (newest - best).clamp(min=1)
    following = best + 1 + torch.arange(count, device=history.device) % period
    drafts = history.gather(1, following.clamp(max=width - 1)).clamp(min=0)
    return drafts * is_found, count * is_found.squeeze(1).int()


def paged_attention(
    q: Tensor,
    pages: Pages,
    page_table: Tensor,
    layout: SeqLayout,
    scale: float,
    window: int | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return softmax(scale q K^T) V of each sequence over its own pages, in float32 -> [T, Hq, D] in q's dtype.

    q [T, Hq, D] is grouped by sequence as in `layout`; pages [P, 2, Hk, page, D]; page_table [rows, W] int32. Query i
    of a sequence has position kv_len - query_len + i and attends to positions up to its own; with `window`, only to the
    last `window` of them (arXiv:2004.05150). Query head h reads KV head h // (Hq / Hk). `soft_cap` limits scores before
    they are masked; with `sinks` [Hq], the softmax is `softmax_with_sinks`. Slots from kv_len on, and pages that no
    query attends to, may have any values, NaN included.
    """
    num_kv_heads, page_size = pages.shape[2], pages.shape[3]
    group = q.shape[1] // num_kv_heads
    out = torch.empty_like(q)
    start = 0
    lengths = torch.stack([layout.rows, layout.cu_query_lens.diff(), layout.kv_lens], 1)
    for row, query_len, kv_len in lengths.tolist():
        first = 0 if window is None else max(0, kv_len - query_len + 1 - window) // page_size
        ids = page_table[row, first : ceil_div(kv_len, page_size)].long()
        gathered = pages.dense(ids) if isinstance(pages, QuantizedPages) else pages[ids].float()
        kv_len -= first * page_size
        kv = gathered.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :kv_len]  # [2, Hk, kv_len, D]
        k, v = kv.repeat_interleave(group, dim=1)
        scores = soft_cap(torch.einsum("qhd,hkd->hqk", q[start : start + query_len].float(), k) * scale, softcap)
        positions = torch.arange(kv_len, device=q.device)
        ahead = positions[None, :] - positions[kv_len - query_len :, None]
        hidden = ahead > 0 if window is None else (ahead > 0) | (ahead <= -window)
        weights = softmax_with_sinks(
            scores.masked_fill(hidden, float("-inf")), None if sinks is None else sinks[:, None]
        )
        out[start : start + query_len] = torch.einsum("hqk,hkd->qhd", weights, v).to(q.dtype)
        start += query_len
    return out


OPS: Final[Mapping[str, Callable[..., Any]]] = {}  # the entry of `table.OPS`: `OpTable` has these ops as defaults
