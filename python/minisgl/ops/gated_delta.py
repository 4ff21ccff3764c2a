"""Gated DeltaNet (arXiv:2412.06464) in plain torch: the specification of its kernels.

A value head keeps a matrix S [Dk, Dv]. A token multiplies it by exp(g), replaces what its key k reads by a part beta of
its value v, and reads it with its query q:

    S = exp(g) S;   u = beta (v - S^T k);   S = S + k u^T;   out = S^T q

So S is exp(sum of g) times an earlier S, plus the k u^T of the tokens since, each times exp(sum of g after it). A slot
therefore has S as of `state_len` tokens and (k, u, g) of each token since. A decoding token only reads S and adds its
own triple. A draft that is rejected is overwritten; it never enters S. `fold` moves S on once tokens are confirmed.

q, k and v are the outputs of a causal convolution over the last few inputs, with SiLU; q and k are normalised. The
result is normalised for each head and multiplied by SiLU of a gate z.

Letters in shapes: T tokens, Hk/Hv key/value heads, Dk/Dv their dimensions, C = 2 Hk Dk + Hv Dv channels of the
convolution, W its width, R tokens that a slot keeps besides S.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from collections.abc import Sequence

    from minisgl.core.plan import StepShape

BLOCK: Final = 64  # tokens of a prompt that are computed at once
NORM_EPS: Final = 1e-6  # of q and k


class DeltaState(NamedTuple):
    """What a layer keeps, by slot. The token at position p has index p % R, its input p % (R + W - 1)."""

    delta: Tensor  # [slots, Hv, Dk, Dv], S
    recent: Tensor  # [slots, R, Hk Dk + Hv Dv] in the model's dtype: k of all heads, then u
    decay: Tensor  # [slots, R, Hv] float32: g
    conv: Tensor  # [slots, R + W - 1, C] in the model's dtype: inputs of the convolution


class DeltaWeights(NamedTuple):
    """The weights of a layer besides its projections."""

    conv: Tensor  # [C, 1, W]; channels are those of q, k, v
    a_log: Tensor  # [Hv] float32
    dt_bias: Tensor  # [Hv] float32
    norm: Tensor  # [Dv]
    eps: float
    key_heads: int  # each for Hv / Hk adjacent value heads

    @property
    def key_size(self) -> int:
        """Hk Dk."""
        return (self.conv.shape[0] - len(self.a_log) * len(self.norm)) // 2


@dataclass(frozen=True, slots=True)
class DeltaStep:
    """What the layers of a step share: B sequences, of which the first `decodes` go on from `state_lens`.

    The others are chunks of prompts. S is as of their first token (zeros at position 0) and then as of their end. The
    captures of a chunk copy what its text needs after `position` tokens to another slot.
    """

    decodes: int
    shape: StepShape  # upper bounds; its `decodes` may include chunks of one token
    slots: Tensor  # [B] int32
    state_lens: Tensor  # [B] int32
    rows: Tensor  # [B] int32
    cu_query_lens: Tensor  # [B + 1] int32
    positions: Tensor  # [T] int32
    captures: Tensor  # [N, 3] int32: row, position, target slot; unused ones have row -1


def gated_delta(qkvz: Tensor, ba: Tensor, weights: DeltaWeights, state: DeltaState, step: DeltaStep) -> Tensor:
    """Mix the tokens of a step -> [T, Hv Dv] in the dtype of qkvz.

    qkvz [T, C + Hv Dv] has inputs of the convolution and gates z, ba [T, 2 Hv] the logits of beta, then those of g.
    Both may be views with larger strides. Writes the state.
    """
    channels, heads = weights.conv.shape[0], len(weights.a_log)
    beta, g = beta_and_decay(ba, weights)
    out = torch.zeros(len(qkvz), heads, len(weights.norm), device=qkvz.device)
    captures, ends = step.captures.tolist(), step.cu_query_lens.tolist()
    slots, state_lens, rows = step.slots.tolist(), step.state_lens.tolist(), step.rows.tolist()
    for i, (first, end) in enumerate(pairwise(ends)):
        if first == end:
            continue
        at, start, slot = slice(first, end), int(step.positions[first]), slots[i]
        stop, inputs = start + end - first, qkvz[first:end, :channels]
        inputs = torch.cat([_before(state.conv[slot], start, weights.conv.shape[2] - 1), inputs])
        tokens = *_convolved(inputs, weights), beta[at], g[at]
        if i < step.decodes:
            out[at] = _decode(tokens, state, slot, state_lens[i], start)
            state.conv[slot, _index(state.conv, start, stop)] = qkvz[first:end, :channels]
            continue
        targets = {stop: [slot]}
        for row, position, target in captures:
            if row == rows[i] and start < position <= stop:
                targets.setdefault(position, []).append(target)
        s = state.delta[slot].float() if start else torch.zeros_like(state.delta[slot], dtype=torch.float32)
        before = 0
        for position in sorted(targets):
            part = slice(before, before := position - start)
            out[first + part.start : first + part.stop], s = _advance([x[part] for x in tokens], s)
            for target in targets[position]:
                state.delta[target] = s
                index = _index(state.conv, position - weights.conv.shape[2] + 1, position)
                state.conv[target, index] = inputs[part.stop : part.stop + len(index)]
    return gated_norm(out, qkvz[:, channels:], weights)


def beta_and_decay(ba: Tensor, weights: DeltaWeights) -> tuple[Tensor, Tensor]:
    """Return beta and g, each [T, Hv] float32."""
    b, a = ba.float().chunk(2, dim=1)
    return b.sigmoid(), -weights.a_log.exp() * F.softplus(a + weights.dt_bias)


def gated_norm(x: Tensor, z: Tensor, weights: DeltaWeights) -> Tensor:
    """Return the norm of each head of x [T, Hv, Dv] times SiLU of z [T, Hv Dv] -> [T, Hv Dv] in the dtype of z."""
    normed = F.rms_norm(x, x.shape[-1:], None, weights.eps).to(z.dtype) * weights.norm
    return (normed.flatten(1).float() * F.silu(z.float())).to(z.dtype)


def fold(states: Sequence[DeltaState], folds: Tensor) -> None:
    """Move S of all layers from `start` to `stop` tokens, whose triples they have.

    folds [N, 3] int32 has slot, start and stop of each move. `states` are those of layers with equal shapes, at equal
    distances in memory.
    """
    for slot, start, stop in folds.tolist():
        for state in states:
            k, u, g = _recent(state, slot, start, stop)
            after = g.flip(0).cumsum(0).flip(0)  # from each token on, its own included
            new = torch.einsum("nhk,nhv->hkv", k * (after - g).exp()[:, :, None], u)
            state.delta[slot] = state.delta[slot].float() * after[0].exp()[:, None, None] + new


def _index(ring: Tensor, start: int, stop: int) -> Tensor:
    """Return the entries of a ring [slots, n, ...] for positions [start, stop)."""
    return torch.arange(start, stop, device=ring.device) % ring.shape[1]


def _before(ring: Tensor, position: int, count: int) -> Tensor:
    """Return the `count` inputs before a position of a ring [n, C]; those before the text are zeros."""
    found = ring[_index(ring[None], position - count, position)]
    return torch.cat([torch.zeros_like(found[: max(0, count - position)]), found[max(0, count - position) :]])


def _convolved(inputs: Tensor, weights: DeltaWeights) -> tuple[Tensor, Tensor, Tensor]:
    """Return q and k [n, Hv, Dk] and v [n, Hv, Dv] float32, for the inputs [W - 1 + n, C] of the tokens and before."""
    heads, size = len(weights.a_log), weights.key_size
    x = F.silu(F.conv1d(inputs.t().float(), weights.conv.float(), groups=inputs.shape[1])).to(inputs.dtype).t().float()
    q, k, v = torch.split(x, [size, size, x.shape[1] - 2 * size], 1)
    q, k = (torch.unflatten(x, 1, (weights.key_heads, -1)) for x in (q, k))
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS) for x in (q, k))
    q, k = (x.repeat_interleave(heads // weights.key_heads, 1) for x in (q * q.shape[-1] ** -0.5, k))
    return q, k, torch.unflatten(v, 1, (heads, -1))


def _recent(state: DeltaState, slot: int, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return k [n, Hv, Dk], u [n, Hv, Dv] and g [n, Hv] of positions [start, stop), float32."""
    _, heads, dk, dv = state.delta.shape
    index = _index(state.recent, start, stop)
    recent = state.recent[slot, index].float()
    k, u = torch.split(recent, [recent.shape[1] - heads * dv, heads * dv], 1)
    k = torch.unflatten(k, 1, (-1, dk))
    return k.repeat_interleave(heads // k.shape[1], 1), torch.unflatten(u, 1, (heads, dv)), state.decay[slot, index]


def _decode(tokens: Sequence[Tensor], state: DeltaState, slot: int, state_len: int, start: int) -> Tensor:
    """Return the outputs [n, Hv, Dv] of the tokens (q, k, v, beta, g) from position `start` on; store their triples."""
    s, heads = state.delta[slot].float(), state.delta.shape[1]
    first_heads = slice(None, None, heads * state.delta.shape[2] // (state.recent.shape[2] - tokens[2][0].numel()))
    out = torch.empty_like(tokens[2])
    for i, (q, k, v, beta, g) in enumerate(zip(*tokens, strict=True)):
        position = start + i
        keys, us, decays = _recent(state, slot, state_len, position)
        decays = torch.cat([decays, g[None]])
        after = decays.flip(0).cumsum(0).flip(0).exp()  # of S, then of each token before this one
        read = after[0][:, None] * torch.einsum("hkv,hk->hv", s, k)
        read += torch.einsum("nhv,nh,nhk,hk->hv", us, after[1:], keys, k)
        u = beta[:, None] * (v - read)
        at = position % state.recent.shape[1]
        state.recent[slot, at] = torch.cat([k[first_heads].flatten(), u.flatten()])
        state.decay[slot, at] = g
        keys, us, _ = _recent(state, slot, state_len, position + 1)
        own = after[0][:, None] * torch.einsum("hkv,hk->hv", s, q)
        out[i] = own + torch.einsum("nhv,nh,nhk,hk->hv", us, torch.cat([after[1:], torch.ones_like(g[None])]), keys, q)
    return out


def _advance(tokens: Sequence[Tensor], s: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs [n, Hv, Dv] of the tokens (q, k, v, beta, g) of a chunk, and S [Hv, Dk, Dv] after them.

    The u of a block solve a triangular system (section 3.3 of the paper).
    """
    outputs = []
    for q, k, v, beta, g in zip(*(torch.split(x, BLOCK) for x in tokens), strict=True):
        total = g.cumsum(0).t()  # [Hv, n]
        q, k, v, beta = (x.transpose(0, 1) for x in (q, k, v, beta))
        decays = (total[:, :, None] - total[:, None]).tril().exp().tril()
        system = (beta[..., None] * (k @ k.mT) * decays).tril(-1)
        read = total.exp()[..., None] * (k @ s)
        u = torch.linalg.solve_triangular(system, beta[..., None] * (v - read), upper=False, unitriangular=True)
        outputs.append((total.exp()[..., None] * (q @ s) + (q @ k.mT * decays) @ u).transpose(0, 1))
        s = total[:, -1:, None].exp() * s + (k * (total[:, -1:] - total).exp()[..., None]).mT @ u
    return torch.cat(outputs), s
