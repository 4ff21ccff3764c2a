"""The attention block: projections around attention."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

import torch

from minisgl.layers.builder import Shard
from minisgl.layers.linear import HeadsNorm, Linear, RMSNorm, Stream
from minisgl.layers.rotary import head_order
from minisgl.ops.deferred import Result, finished
from minisgl.ops.reference import OUTPUT_GATES, HeadTransform, LatentTransform

LATENT_EPS: Final = 1e-6  # of the norms within the block, whatever config.json says

if TYPE_CHECKING:
    from torch import Tensor

    from minisgl.core.plan import Context
    from minisgl.layers.builder import Builder, Rows
    from minisgl.layers.linear import Norm
    from minisgl.models.layer_sizes import LatentSizes
    from minisgl.models.model_config import ModelConfig
    from minisgl.ops.adapters import TokenSlots


class Attention:
    """Grouped-query attention of layer `index`, with optional biases and norms of q and k.

    Layers share `cos_sin` [max positions, head_dim] and `q_scale` [max positions], float32. `in_features` of the qkv
    projection is the hidden size by default. With a `source`, it reads that layer's keys and values instead of having
    its own.
    """

    def __init__(
        self,
        builder: Builder,
        config: ModelConfig,
        index: int,
        cos_sin: Tensor,
        in_features: int | None = None,
        q_scale: Tensor | None = None,
        source: Attention | None = None,
    ) -> None:
        c, name = config, f"model.layers.{index}.self_attn"
        family, sizes, hidden_size = c.family, c.layers[index], in_features or c.hidden_size
        dim = sizes.head_dim
        q = builder.shard(sizes.heads, "attention heads", unit=dim)
        k = builder.shard_or_replicate(sizes.kv_heads, "KV heads", unit=dim)
        self.q_size, kv_size = q.count, 0 if source is not None else k.count
        qkv: dict[str, Rows] = {f"{name}.q_proj": _halves(q, dim, 0) if family.has_gates_in_q else q}
        if "qkv" in family.fused:
            qkv = {f"{name}.qkv_proj": (q, k, k)}
        elif source is None and sizes.is_v_k:
            qkv[f"{name}.k_proj"] = replace(k, copies=2)
        elif source is None:
            qkv |= {f"{name}.k_proj": k, f"{name}.v_proj": k}
        head = head_order(dim, c.ropes[index].dim or dim, is_interleaved=c.is_interleaved)
        is_ordered = head == [*range(dim)]
        rotated = [start + i for start in range(0, q.count + kv_size, dim) for i in head]
        rows = None if is_ordered else [*rotated, *range(len(rotated), len(rotated) + kv_size)]
        self.qkv_proj = Linear(builder, qkv, hidden_size, bias=c.qkv_bias, order=rows)
        o_proj = f"{name}.{family.names.get('o_proj', 'o_proj')}"
        self.o_proj = Linear(builder, {o_proj: c.hidden_size}, q, bias=c.o_bias)
        norms, eps = (f"{name}.q_norm", f"{name}.k_norm"), c.rms_norm_eps
        self.heads_norm = HeadsNorm(builder, norms, q, k, eps, rotated) if c.qk_norm == "all" else None
        q_norm = k_norm = None
        if c.qk_norm == "head":
            order = None if is_ordered else head
            norm = partial(RMSNorm, builder, size=dim, eps=eps, offset=family.norm_offset, order=order)
            q_norm = norm(norms[0]).weight
            k_norm = norm(norms[1]).weight if source is None else None
        heads = builder.shard(sizes.heads, "attention heads")
        sinks = builder.parameter({f"{name}.sinks": heads}, dtype=torch.float32) if family.has_sinks else None
        self.gate = None
        if c.output_gate:
            gates = heads if c.output_gate == "head" else q
            parts: dict[str, Rows] = {f"{name}.{family.names.get('g_proj', 'g_proj')}": gates}
            if family.has_gates_in_q:
                parts = {f"{name}.q_proj": _halves(q, dim, 1)}
            self.gate = Linear(builder, parts, hidden_size, bias=False)
            self._gate_function = OUTPUT_GATES[family.output_gate]
        mixer = c.mixer(index, builder.info)
        self.mixer = builder.mixer(mixer)
        if source is None:
            self.kv = builder.state(*mixer.states)
        else:
            self.kv = source.kv
        self.heads = HeadTransform(
            q_norm, k_norm, eps, cos_sin, q_scale, sinks, norms_v=family.norms_v, reads=source is not None
        )

    def forward(self, stream: Stream, norm: Norm | None, ctx: Context) -> Stream:
        """Return the stream [T, H] with this rank's part of the block's output, for the normalised `stream`.

        This step's keys and values are stored; `stream` may be overwritten.
        """
        if self.gate is None:
            qkv, total = self.qkv_proj.after_sum_norm(stream, norm)
            return stream.of(self.attend(finished(qkv), ctx, stream.adapters), total)
        normed, total = (finished(stream.x),) * 2 if norm is None else norm.sum_add(stream)
        projected, gates = (finished(p.forward(normed, "", stream.adapters)) for p in (self.qkv_proj, self.gate))
        return stream.of(self.attend(projected, ctx, stream.adapters, self._gate_function(gates.float())), total)

    def attend(
        self, qkv: Tensor, ctx: Context, adapters: TokenSlots | None = None, gates: Tensor | None = None
    ) -> Result:
        """Return the block's output [T, H] for the projections [T, (Hq + 2 Hk) D], which may be overwritten.

        `adapters` are as in `Stream`. `gates` [T, Hq] or [T, Hq D] multiply attention's output.
        """
        if self.heads_norm is not None:
            self.heads_norm.sum_(qkv)
        out: Tensor = ctx.mixers[self.mixer].attend(qkv, self.heads, self.kv.pages)
        if gates is not None:
            out = out * gates.view(*out.shape[:2], -1).to(out.dtype)
        return self.o_proj.forward(out.view(-1, self.q_size), "", adapters)


def _halves(rows: Shard, dim: int, half: int) -> list[Shard]:
    """Return the parts of a projection in which q (half 0) and gate (1) of a head alternate, for `rows` of q."""
    is_own = [rows.start <= start < rows.stop for start in range(0, rows.size, dim)]
    return [Shard(dim, 0, dim * (own and part == half)) for own in is_own for part in range(2)]


class LatentAttention:
    """Multi-head latent attention of layer `index` (arXiv:2405.04434). Every rank has all of each latent.

    Layers share `cos_sin` [max positions, rope_dim] and `q_scale`, as in `Attention`. `kv_b_proj`, which makes keys and
    values of latents, is in the model's dtype: decode steps multiply queries and results by parts of it instead.
    """

    def __init__(
        self,
        builder: Builder,
        config: ModelConfig,
        sizes: LatentSizes,
        index: int,
        cos_sin: Tensor,
        q_scale: Tensor | None,
    ) -> None:
        c, name = config, f"model.layers.{index}.self_attn"
        heads = builder.shard(c.num_heads, "attention heads")
        q = builder.shard(c.num_heads, "attention heads", unit=sizes.qk_dim)
        rotary = head_order(sizes.rope_dim, sizes.rope_dim, is_interleaved=c.is_interleaved)
        head = [*range(sizes.nope_dim), *(sizes.nope_dim + i for i in rotary)]
        q_order = [start + i for start in range(0, q.count, sizes.qk_dim) for i in head]
        first: dict[str, Rows] = {f"{name}.q_proj": q}
        order, self._q_norm, self._q_b_proj = q_order, None, None
        if sizes.q_rank:
            first, order = {f"{name}.q_a_proj": sizes.q_rank}, [*range(sizes.q_rank)]
            self._q_norm = RMSNorm(builder, f"{name}.q_a_layernorm", sizes.q_rank, LATENT_EPS)
            self._q_b_proj = Linear(builder, {f"{name}.q_b_proj": q}, sizes.q_rank, bias=False, order=q_order)
        order = order + [len(order) + i for i in (*range(sizes.rank), *(sizes.rank + i for i in rotary))]
        self._ends = len(order) - sizes.rank - sizes.rope_dim
        first[f"{name}.kv_a_proj_with_mqa"] = sizes.rank + sizes.rope_dim
        self._a_proj = Linear(builder, first, c.hidden_size, bias=c.qkv_bias, order=order)
        norm = RMSNorm(builder, f"{name}.kv_a_layernorm", sizes.rank, LATENT_EPS)
        kv = builder.shard(c.num_heads, "attention heads", unit=sizes.nope_dim + sizes.v_dim)
        kv_weight = builder.parameter({f"{name}.kv_b_proj.weight": kv}, sizes.rank).view(heads.count, -1, sizes.rank)
        self.heads = LatentTransform(norm.weight, norm.eps, cos_sin, kv_weight, q_scale)
        o = builder.shard(c.num_heads, "attention heads", unit=sizes.v_dim)
        self.o_proj = Linear(builder, {f"{name}.o_proj": c.hidden_size}, o, bias=c.o_bias)
        mixer = c.mixer(index, builder.info)
        self.mixer = builder.mixer(mixer)
        self.kv = builder.state(*mixer.states)
        self._shape = heads.count, sizes.qk_dim

    def forward(self, stream: Stream, norm: Norm | None, ctx: Context) -> Stream:
        """Return what `Attention.forward` does."""
        projected, total = self._a_proj.after_sum_norm(stream, norm)
        q, latents = finished(projected).tensor_split([self._ends], 1)
        if self._q_b_proj is not None:
            q = finished(self._q_b_proj.after_sum_norm(stream.of(q.contiguous()), self._q_norm)[0])
        out: Tensor = ctx.mixers[self.mixer].attend(q.view(len(q), *self._shape), latents, self.heads, self.kv.pages)
        return stream.of(self.o_proj.forward(out.flatten(1), "", stream.adapters), total)
