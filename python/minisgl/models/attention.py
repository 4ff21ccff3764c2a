"""The attention block: projections around attention."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from minisgl.layers.linear import Linear, RMSNorm, Stream
from minisgl.ops.deferred import Result, finished
from minisgl.ops.reference import HeadTransform

if TYPE_CHECKING:
    from torch import Tensor

    from minisgl.core.plan import Context
    from minisgl.layers.builder import Builder, Rows
    from minisgl.models.model_config import ModelConfig


class Attention:
    """Grouped-query attention of layer `index`, with optional biases and per-head norms of q and k.

    Layers share `cos_sin` [max positions, head_dim] float32. `norm_offset` is added to the weights of the norms of q
    and k. `in_features` of the qkv projection is the hidden size by default.
    """

    def __init__(
        self,
        builder: Builder,
        config: ModelConfig,
        index: int,
        cos_sin: Tensor,
        norm_offset: float = 0.0,
        in_features: int | None = None,
    ) -> None:
        c, name = config, f"model.layers.{index}.self_attn"
        q = builder.shard(c.num_heads, "attention heads", unit=c.head_dim)
        kv = builder.shard_or_replicate(c.num_kv_heads, "KV heads", unit=c.head_dim)
        self.q_size = q.count
        qkv: dict[str, Rows] = {f"{name}.q_proj": q, f"{name}.k_proj": kv, f"{name}.v_proj": kv}
        if c.fused_projections:
            qkv = {f"{name}.qkv_proj": (q, kv, kv)}
        self.qkv_proj = Linear(builder, qkv, in_features or c.hidden_size, bias=c.qkv_bias)
        self.o_proj = Linear(builder, {f"{name}.o_proj": c.hidden_size}, q, bias=c.o_bias)
        norm = partial(RMSNorm, builder, size=c.head_dim, eps=c.rms_norm_eps, offset=norm_offset)
        q_norm = norm(f"{name}.q_norm").weight if c.qk_norm else None
        k_norm = norm(f"{name}.k_norm").weight if c.qk_norm else None
        mixer = c.mixer(index, builder.info)
        self.kv, self.mixer = builder.state(*mixer.states), builder.mixer(mixer)
        self.heads = HeadTransform(q_norm, k_norm, c.rms_norm_eps, cos_sin)

    def forward(self, stream: Stream, norm: RMSNorm, ctx: Context) -> Stream:
        """Return the stream [T, H] with this rank's part of the block's output, for the normalised `stream`.

        This step's keys and values are stored; `stream` may be overwritten.
        """
        qkv, total = self.qkv_proj.after_sum_norm(stream, norm)
        return Stream(self.attend(finished(qkv), ctx), total)

    def attend(self, qkv: Tensor, ctx: Context) -> Result:
        """Return the block's output [T, H] for the projections [T, (Hq + 2 Hk) D], which may be overwritten."""
        out: Tensor = ctx.mixers[self.mixer].attend(qkv, self.heads, self.kv.pages)
        return self.o_proj.forward(out.view(-1, self.q_size))
