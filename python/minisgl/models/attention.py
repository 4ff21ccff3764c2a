"""The attention block: projections around attention."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from minisgl.layers.builder import Shard
from minisgl.layers.linear import HeadsNorm, Linear, RMSNorm, Stream
from minisgl.layers.rotary import head_order
from minisgl.ops.deferred import Result, finished
from minisgl.ops.reference import OUTPUT_GATES, HeadTransform

if TYPE_CHECKING:
    from torch import Tensor

    from minisgl.core.plan import Context
    from minisgl.layers.builder import Builder, Rows
    from minisgl.layers.linear import Norm
    from minisgl.models.model_config import ModelConfig


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
            return Stream(self.attend(finished(qkv), ctx), total)
        normed, total = (finished(stream.x),) * 2 if norm is None else norm.sum_add(stream)
        gates = self._gate_function(finished(self.gate.forward(normed)).float())
        return Stream(self.attend(finished(self.qkv_proj.forward(normed)), ctx, gates), total)

    def attend(self, qkv: Tensor, ctx: Context, gates: Tensor | None = None) -> Result:
        """Return the block's output [T, H] for the projections [T, (Hq + 2 Hk) D], which may be overwritten.

        `gates` [T, Hq] or [T, Hq D] multiply attention's output.
        """
        if self.heads_norm is not None:
            self.heads_norm.sum_(qkv)
        out: Tensor = ctx.mixers[self.mixer].attend(qkv, self.heads, self.kv.pages)
        if gates is not None:
            out = out * gates.view(*out.shape[:2], -1).to(out.dtype)
        return self.o_proj.forward(out.view(-1, self.q_size))


def _halves(rows: Shard, dim: int, half: int) -> list[Shard]:
    """Return the parts of a projection in which q (half 0) and gate (1) of a head alternate, for `rows` of q."""
    is_own = [rows.start <= start < rows.stop for start in range(0, rows.size, dim)]
    return [Shard(dim, 0, dim * (own and part == half)) for own in is_own for part in range(2)]
