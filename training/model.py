"""The training form of the model: the maths of Hugging Face's ``Qwen3ForCausalLM`` on packed documents.

Weights of the same kind are stacked over the layers, ``[L, out, in]``,
so that the optimizer works on a few batched matrices.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """Sizes of the model."""

    vocab: int = 4096
    hidden: int = 256
    intermediate: int = 768
    layers: int = 6
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 64
    context: int = 4096
    theta: float = 100_000.0
    eps: float = 1e-6


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x²) + eps) · weight`` over the last dimension, in fp32."""
    y = x.float()
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight.to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of ``x`` [T, H, D]; ``cos`` and ``sin`` are [T, D/2]."""
    a, b = x.chunk(2, dim=-1)
    c, s = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
    return torch.cat((a * c - b * s, b * c + a * s), dim=-1)


def attend(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int) -> Tensor:
    """Causal attention within documents: ``q`` [T, H, D]; ``k``, ``v`` [T, G, D]; ``starts`` [N + 1], padded with T."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    if q.is_cuda:
        from torch.nn.attention.varlen import varlen_attn

        return varlen_attn(q, k, v, starts, starts, longest, longest, window_size=(-1, 0))
    lengths = [n for n in starts.diff().tolist() if n]
    documents = zip(*(x.transpose(0, 1).split(lengths, 1) for x in (q, k, v)), strict=True)
    parts = [F.scaled_dot_product_attention(*(x[None] for x in d), is_causal=True)[0] for d in documents]
    return torch.cat(parts, 1).transpose(0, 1)


class Model(nn.Module):
    """Decoder with tied embeddings; ``forward`` gives the hidden states before the LM head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = s = shape
        n, d, wide, narrow = s.layers, s.hidden, s.heads * s.head_dim, s.kv_heads * s.head_dim

        def matrix(out: int, into: int, scale: float = 1.0) -> nn.Parameter:
            return nn.Parameter(torch.randn(n, out, into) * scale * into**-0.5)

        self.embed = nn.Parameter(torch.randn(s.vocab, d) * 0.02)
        self.q, self.k, self.v = matrix(wide, d), matrix(narrow, d), matrix(narrow, d)
        self.o, self.down = matrix(d, wide, 0.1), matrix(d, s.intermediate, 0.1)
        self.gate, self.up = matrix(s.intermediate, d), matrix(s.intermediate, d)
        self.attention_norm, self.mlp_norm = nn.Parameter(torch.ones(n, d)), nn.Parameter(torch.ones(n, d))
        self.q_norm, self.k_norm = nn.Parameter(torch.ones(n, s.head_dim)), nn.Parameter(torch.ones(n, s.head_dim))
        self.norm = nn.Parameter(torch.ones(d))
        angles = torch.arange(s.context)[:, None] * s.theta ** (-torch.arange(0, s.head_dim, 2) / s.head_dim)[None]
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, ids: Tensor, positions: Tensor, starts: Tensor) -> Tensor:
        """Hidden states [T, hidden] of packed ids [T] with positions [T] and document starts [N + 1] (int32)."""
        return rms_norm(self.outputs(ids, positions, starts)[-1], self.norm, self.shape.eps)

    def outputs(self, ids: Tensor, positions: Tensor, starts: Tensor) -> list[Tensor]:
        """Outputs [T, hidden] of all layers; arguments as of ``forward``."""
        s, dtype = self.shape, torch.bfloat16 if self.embed.is_cuda else torch.float32
        x, outputs = self.embed[ids].to(dtype), []
        cos, sin = self.cos[positions], self.sin[positions]  # type: ignore[index]
        sizes = (s.heads * s.head_dim, s.kv_heads * s.head_dim, s.kv_heads * s.head_dim)
        for i in range(s.layers):
            h = rms_norm(x, self.attention_norm[i], s.eps)
            joined = F.linear(h, torch.cat((self.q[i], self.k[i], self.v[i])).to(dtype))
            q, k, v = (part.unflatten(-1, (-1, s.head_dim)) for part in joined.split(sizes, dim=-1))
            q = rotate(rms_norm(q, self.q_norm[i], s.eps), cos, sin)
            k = rotate(rms_norm(k, self.k_norm[i], s.eps), cos, sin)
            x = x + F.linear(attend(q, k, v.contiguous(), starts, s.context).flatten(1), self.o[i].to(dtype))
            h = rms_norm(x, self.mlp_norm[i], s.eps)
            gate, up = F.linear(h, torch.cat((self.gate[i], self.up[i])).to(dtype)).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * up, self.down[i].to(dtype))
            outputs.append(x)
        return outputs

    def loss(self, ids: Tensor, positions: Tensor, starts: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy over the targets that are not negative."""
        hidden = self(ids, positions, starts)
        logits = F.linear(hidden, self.embed.to(hidden.dtype)).float()
        return F.cross_entropy(logits, targets, ignore_index=-100)

    def matrices(self) -> list[nn.Parameter]:
        """The stacked weight matrices (for Muon); everything else goes to AdamW."""
        return [self.q, self.k, self.v, self.o, self.gate, self.up, self.down]


class Muon(torch.optim.Optimizer):
    """Momentum with updates made nearly orthogonal by a Newton-Schulz iteration of degree five.

    Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024.
    """

    def __init__(
        self, params: list[nn.Parameter], lr: float, momentum: float = 0.95, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of every stack of matrices."""
        for group in self.param_groups:
            for p in group["params"]:
                average = self.state[p].setdefault("average", torch.zeros_like(p))
                average.lerp_(p.grad, 1 - group["momentum"])
                update = orthogonal(p.grad.lerp(average, group["momentum"]))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update.to(p.dtype), alpha=-group["lr"] * max(1.0, p.shape[-2] / p.shape[-1]) ** 0.5)


def orthogonal(g: Tensor, steps: int = 5) -> Tensor:
    """Each matrix of ``g`` [L, m, n] with its singular values moved close to one, in bf16."""
    x = g.bfloat16() if g.is_cuda else g.float()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.mT if tall else x
