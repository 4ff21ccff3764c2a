"""Self-attention: projections around the attention backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minisgl.attention.backend import HeadTransform
from minisgl.layers.linear import Linear, RMSNorm

if TYPE_CHECKING:
    from torch import Tensor

    from minisgl.attention.backend import Window
    from minisgl.core import Context
    from minisgl.layers.builder import Builder, Rows


class Attention:
    """Grouped-query attention of layer `index`, with optional biases and per-head norms of q and k.

    `name` is the checkpoint's module name; layers share `cos_sin` [max positions, head_dim] float32; `norm_offset` is
    that of the norms of q and k; `fused` means that q, k and v are one tensor of the checkpoint.
    """

    def __init__(
        self,
        builder: Builder,
        name: str,
        index: int,
        *,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        qkv_bias: bool,
        o_bias: bool,
        qk_norm: bool,
        eps: float,
        cos_sin: Tensor,
        window: Window,
        norm_offset: float = 0.0,
        fused: bool = False,
    ) -> None:
        self.index = index
        q = builder.shard(num_heads, "attention heads", unit=head_dim)
        kv = builder.shard_or_replicate(num_kv_heads, "KV heads", unit=head_dim)
        self.q_size = q.count
        qkv: dict[str, Rows] = {f"{name}.q_proj": q, f"{name}.k_proj": kv, f"{name}.v_proj": kv}
        if fused:
            qkv = {f"{name}.qkv_proj": (q, kv, kv)}
        self.qkv_proj = Linear(builder, qkv, hidden_size, bias=qkv_bias)
        self.o_proj = Linear(builder, {f"{name}.o_proj": hidden_size}, q, bias=o_bias)
        q_norm = RMSNorm(builder, f"{name}.q_norm", head_dim, eps, norm_offset).weight if qk_norm else None
        k_norm = RMSNorm(builder, f"{name}.k_norm", head_dim, eps, norm_offset).weight if qk_norm else None
        self.heads = HeadTransform(q_norm, k_norm, eps, cos_sin, window)

    def forward(self, x: Tensor, residual: Tensor | None, norm: RMSNorm, ctx: Context) -> tuple[Tensor, Tensor]:
        """Return (the block's output for the normalised x + residual, x + residual), each [T, H].

        This step's keys and values are stored at ctx.out_loc; `residual` may be overwritten.
        """
        qkv, total = self.qkv_proj.after_norm(x, residual, norm)
        out: Tensor = ctx.attention.attend(qkv, self.heads, ctx.kv_cache.layer(self.index), ctx)
        return self.o_proj.forward(out.view(-1, self.q_size)), total
