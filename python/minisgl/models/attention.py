"""The attention block: projections around attention."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from minisgl.layers.linear import HeadsNorm, Linear, RMSNorm, Stream
from minisgl.layers.rotary import head_order
from minisgl.ops.deferred import Result, finished
from minisgl.ops.reference import HeadTransform

if TYPE_CHECKING:
    from torch import Tensor

    from minisgl.core.plan import Context
    from minisgl.layers.builder import Builder, Rows
    from minisgl.layers.linear import Norm
    from minisgl.models.model_config import ModelConfig


class Attention:
    """Grouped-query attention of layer `index`, with optional biases and norms of q and k.

    Layers share `cos_sin` [max positions, head_dim] and `q_scale` [max positions], float32. `in_features` of the qkv
    projection is the hidden size by default.
    """

    def __init__(
        self,
        builder: Builder,
        config: ModelConfig,
        index: int,
        cos_sin: Tensor,
        in_features: int | None = None,
        q_scale: Tensor | None = None,
    ) -> None:
        c, name = config, f"model.layers.{index}.self_attn"
        family = c.family
        q = builder.shard(c.num_heads, "attention heads", unit=c.head_dim)
        kv = builder.shard_or_replicate(c.num_kv_heads, "KV heads", unit=c.head_dim)
        self.q_size = q.count
        qkv: dict[str, Rows] = {f"{name}.q_proj": q, f"{name}.k_proj": kv, f"{name}.v_proj": kv}
        if "qkv" in family.fused:
            qkv = {f"{name}.qkv_proj": (q, kv, kv)}
        head = head_order(c.head_dim, c.rope.dim or c.head_dim, is_interleaved=family.is_interleaved)
        is_ordered = head == [*range(c.head_dim)]
        rotated = [start + i for start in range(0, q.count + kv.count, c.head_dim) for i in head]
        rows = None if is_ordered else [*rotated, *range(q.count + kv.count, q.count + 2 * kv.count)]
        self.qkv_proj = Linear(builder, qkv, in_features or c.hidden_size, bias=c.qkv_bias, order=rows)
        o_proj = f"{name}.{family.names.get('o_proj', 'o_proj')}"
        self.o_proj = Linear(builder, {o_proj: c.hidden_size}, q, bias=c.o_bias)
        norms, eps = (f"{name}.q_norm", f"{name}.k_norm"), c.rms_norm_eps
        self._norm = HeadsNorm(builder, norms, q, kv, eps, rotated) if c.qk_norm == "all" else None
        q_norm = k_norm = None
        if c.qk_norm == "head":
            order = None if is_ordered else head
            norm = partial(RMSNorm, builder, size=c.head_dim, eps=eps, offset=family.norm_offset, order=order)
            q_norm, k_norm = (norm(module).weight for module in norms)
        heads = builder.shard(c.num_heads, "attention heads")
        sinks = builder.parameter({f"{name}.sinks": heads}, dtype=torch.float32) if family.has_sinks else None
        mixer = c.mixer(index, builder.info)
        self.kv, self.mixer = builder.state(*mixer.states), builder.mixer(mixer)
        self.heads = HeadTransform(q_norm, k_norm, c.rms_norm_eps, cos_sin, q_scale, sinks)

    def forward(self, stream: Stream, norm: Norm | None, ctx: Context) -> Stream:
        """Return the stream [T, H] with this rank's part of the block's output, for the normalised `stream`.

        This step's keys and values are stored; `stream` may be overwritten.
        """
        qkv, total = self.qkv_proj.after_sum_norm(stream, norm)
        return Stream(self.attend(finished(qkv), ctx), total)

    def attend(self, qkv: Tensor, ctx: Context) -> Result:
        """Return the block's output [T, H] for the projections [T, (Hq + 2 Hk) D], which may be overwritten."""
        if self._norm is not None:
            self._norm.sum_(qkv)
        out: Tensor = ctx.mixers[self.mixer].attend(qkv, self.heads, self.kv.pages)
        return self.o_proj.forward(out.view(-1, self.q_size))
