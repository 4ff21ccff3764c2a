"""Gated DeltaNet in place of attention: layers of Qwen3-Next and Qwen3.5."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from minisgl.layers.linear import Linear, Stream
from minisgl.layers.parameter import Init
from minisgl.ops.deferred import finished
from minisgl.ops.gated_delta import DeltaState, DeltaWeights

if TYPE_CHECKING:
    from minisgl.core.plan import Context
    from minisgl.layers.builder import Builder, Rows
    from minisgl.layers.linear import Norm
    from minisgl.models.model_config import ModelConfig


class GatedDeltaNet:
    """The block of layer `index`: projections around `ops/gated_delta.py`.

    The checkpoint has one projection for q, k, v and one for z, or one with those of each key head in turn; then b and
    a are in one, too. Where a GPU multiplies all in 16 bits, they are one matrix.
    """

    def __init__(self, builder: Builder, config: ModelConfig, index: int) -> None:
        c, name = config, f"model.layers.{index}.linear_attn"
        sizes = c.linear
        assert sizes is not None, "the model has no such layers"
        heads = builder.shard(sizes.value_heads, "value heads of linear attention")
        key_heads = builder.shard(sizes.key_heads, "key heads of linear attention")
        key, value = key_heads.times(sizes.key_dim), heads.times(sizes.value_dim)
        qkvz: dict[str, Rows] = {f"{name}.in_proj_qkv": (key, key, value), f"{name}.in_proj_z": value}
        ba: dict[str, Rows] = {f"{name}.in_proj_b": heads, f"{name}.in_proj_a": heads}
        orders: list[list[int]] = [[*range(2 * key.count + 2 * value.count)], [*range(2 * heads.count)]]
        if "qkvz" in c.family.fused:
            each = heads.count // key_heads.count
            values = each * sizes.value_dim
            widths = [sizes.key_dim, sizes.key_dim, values, values], [each, each]
            qkvz = {f"{name}.in_proj_qkvz": key_heads.times(sum(widths[0]))}
            ba = {f"{name}.in_proj_ba": key_heads.times(sum(widths[1]))}
            orders = [_parts_first(parts, key_heads.count) for parts in widths]
        groups = [(qkvz, orders[0]), (ba, orders[1])]
        if builder.ops.name == "triton" and all(builder.format_of(f"{part}.weight") is None for part in qkvz | ba):
            groups = [(qkvz | ba, [*orders[0], *(len(orders[0]) + i for i in orders[1])])]
        self.projections = [Linear(builder, parts, c.hidden_size, bias=False, order=rows) for parts, rows in groups]
        self._sizes = [len(rows) for rows in orders]
        self.out_proj = Linear(builder, {f"{name}.out_proj": c.hidden_size}, value, bias=False)
        self.weights = DeltaWeights(
            builder.parameter({f"{name}.conv1d.weight": (key, key, value)}, 1, sizes.width),
            builder.parameter({f"{name}.A_log": heads}, dtype=torch.float32),
            builder.parameter({f"{name}.dt_bias": heads}, dtype=torch.float32),
            builder.parameter({f"{name}.norm.weight": sizes.value_dim}, init=Init.ONES),
            c.rms_norm_eps,
            key_heads.count,
        )
        mixer = c.mixer(index, builder.info)
        self.mixer = builder.mixer(mixer)
        self._states = [builder.state(spec) for spec in mixer.states]
        builder.recurrences.setdefault(self.mixer, []).append(self)

    @property
    def state(self) -> DeltaState:
        """What the layer keeps; the store may allocate it anew."""
        return DeltaState(*(state.pages for state in self._states))  # type: ignore[arg-type]

    def forward(self, stream: Stream, norm: Norm | None, ctx: Context) -> Stream:
        """Return what `Attention.forward` does."""
        if len(self.projections) == 1:
            projected, total = self.projections[0].after_sum_norm(stream, norm)
            qkvz, ba = torch.split(finished(projected), self._sizes, 1)
        else:
            normed, total = (finished(stream.x),) * 2 if norm is None else norm.sum_add(stream)
            qkvz, ba = (finished(p.forward(normed, "", stream.adapters)) for p in self.projections)
        mixed = ctx.mixers[self.mixer].mix(qkvz, ba, self.weights, self.state)
        return stream.of(self.out_proj.forward(mixed, "", stream.adapters), total)


def _parts_first(widths: list[int], count: int) -> list[int]:
    """Return the order of rows that brings together the parts of all of `count` heads, each with these `widths`."""
    whole = sum(widths)
    starts = [sum(widths[:i]) for i in range(len(widths))]
    return [
        h * whole + at + i for at, width in zip(starts, widths, strict=True) for h in range(count) for i in range(width)
    ]
