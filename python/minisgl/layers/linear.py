"""Projections, the norms before them, and the embedding.

A method of a layer communicates with the other ranks if and only if its name says `sum`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from minisgl.layers.builder import Shard
from minisgl.layers.parameter import Init
from minisgl.ops.deferred import Result, finished

if TYPE_CHECKING:
    from minisgl.layers.builder import Builder, Rows, Size
    from minisgl.ops.adapters import TokenSlots
    from minisgl.ops.quantized import Quantized


class Stream(NamedTuple):
    """The hidden states of T tokens: the sum of `x` [T, H] over the ranks, plus `residual` [T, H].

    Without a residual they are `x`, which is equal on all ranks. `adapters` are None if no token has one.
    """

    x: Result
    residual: Result | None = None
    adapters: TokenSlots | None = None

    def each(self, change: Callable[[Tensor], Tensor]) -> Stream:
        """Return the stream of changed tensors."""
        residual = None if self.residual is None else change(finished(self.residual))
        return Stream(change(finished(self.x)), residual, self.adapters)

    def at(self, tokens: Tensor) -> Stream:
        """Return the hidden states of some of the tokens, int64 [S]."""
        kept = self.each(lambda x: x.index_select(0, tokens))
        return kept if self.adapters is None else kept._replace(adapters=self.adapters.at(tokens))

    def of(self, x: Result, residual: Result | None = None) -> Stream:
        """Return the stream of other hidden states of the same tokens."""
        return Stream(x, residual, self.adapters)


class RMSNorm:
    """RMSNorm with weight [size]. `name` is the checkpoint's module name.

    An `offset` is added to the checkpoint's weight, and a `scale` multiplies it; with either, the norm is computed in
    float32. `order` is as in `Parameter`.
    """

    def __init__(
        self,
        builder: Builder,
        name: str,
        size: int,
        eps: float,
        offset: float = 0.0,
        scale: float = 1.0,
        order: Sequence[int] | None = None,
    ) -> None:
        self.weight = builder.parameter(
            {f"{name}.weight": size},
            init=Init.ONES,
            dtype=torch.float32 if offset or scale != 1.0 else builder.dtype,
            offset=offset,
            scale=scale,
            order=order,
        )
        self.eps = eps
        self._rms_norm, self._add_rms_norm = builder.ops.rms_norm, builder.ops.add_rms_norm
        self._comm = builder.comm

    def forward(self, x: Tensor, residual: Tensor | None = None, scale: Tensor | None = None) -> Tensor:
        """Return norm(x) [..., size], plus the residual if there is one; all of it times `scale` [1], if given."""
        return self._rms_norm(x, self.weight, self.eps, residual, scale)

    def sum_add(self, stream: Stream) -> tuple[Tensor, Tensor]:
        """Return (norm(total), total), each [T, size], for the hidden states `total`; may overwrite the stream."""
        x, residual = finished(stream.x), finished(stream.residual)
        if residual is None:
            return self.forward(x), x
        return self._comm.sum_add_norm(x, residual, self.weight, self.eps, self._add_rms_norm)


class LayerNorm:
    """LayerNorm (arXiv:1607.06450) with weight [size] and, if it `has_bias`, bias [size]; else as `RMSNorm`."""

    def __init__(
        self,
        builder: Builder,
        name: str,
        size: int,
        eps: float,
        offset: float = 0.0,
        scale: float = 1.0,
        *,
        has_bias: bool,
    ) -> None:
        weight, bias = f"{name}.weight", f"{name}.bias"
        self.weight = builder.parameter({weight: size}, init=Init.ONES, offset=offset, scale=scale)
        self.bias = builder.parameter({bias: size}, scale=scale) if has_bias else None
        self.eps = eps
        self._sum = builder.comm.sum

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return norm(x) [..., size], plus the residual if there is one."""
        normed = F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)
        return normed if residual is None else residual + normed

    def sum_add(self, stream: Stream) -> tuple[Tensor, Tensor]:
        """Return what `RMSNorm.sum_add` does."""
        x, residual = finished(stream.x), finished(stream.residual)
        total = x if residual is None else residual.add_(self._sum(x))
        return self.forward(total), total


Norm = RMSNorm | LayerNorm


class HeadsNorm:
    """RMSNorm of q and of k over all heads of all ranks, with weights of this rank's heads.

    `modules` are the checkpoint's names, `q` and `kv` this rank's elements of both.
    """

    def __init__(
        self, builder: Builder, modules: tuple[str, str], q: Shard, kv: Shard, eps: float, order: Sequence[int]
    ) -> None:
        self._ends, self._eps, self._sum = (q.count, q.count + kv.count), eps, builder.comm.sum
        parts = {f"{modules[0]}.weight": q, f"{modules[1]}.weight": kv}
        self.weight = builder.parameter(parts, init=Init.ONES, dtype=torch.float32, order=order)
        self._is_alone = builder.info.size == 1
        # Ranks that have the same KV heads count them once.
        shares = 1.0, kv.size / (kv.count * builder.info.size)
        self._factors = torch.tensor([s / d.size for s, d in zip(shares, (q, kv), strict=True)], device=builder.device)

    def sum_(self, qkv: Tensor) -> None:
        """Normalise q and k within qkv [T, (Hq + 2 Hk) D]."""
        q, k, _ = qkv.tensor_split(self._ends, dim=1)
        squares = torch.stack([q.float().square().sum(1), k.float().square().sum(1)], 1) * self._factors
        means = squares if self._is_alone else self._sum(squares)
        scales = torch.rsqrt(means + self._eps)
        first = self._ends[0]
        q.copy_(q.float() * scales[:, :1] * self.weight[:first])
        k.copy_(k.float() * scales[:, 1:] * self.weight[first:])


class Linear:
    """A projection x W^T + b, with weight [sum of parts, in_features] and bias [sum of parts] or None.

    `parts` maps the checkpoint's module names to output features: one for a plain projection; q, k, v; gate and up.
    If outputs are sharded, the result is a shard. If inputs are sharded, it is a partial sum, to which rank 0 adds the
    bias. `tied` is another layer's weight, used instead of an own one. `order` is as in `Parameter`. Where the builder
    has room for adapters, they may change it, unless it `is_fixed`.
    """

    def __init__(
        self,
        builder: Builder,
        parts: Mapping[str, Rows],
        in_features: Size,
        *,
        bias: bool,
        tied: Tensor | Quantized | None = None,
        order: Sequence[int] | None = None,
        is_fixed: bool = False,
    ) -> None:
        if tied is None:
            tied = builder.matrix({f"{name}.weight": rows for name, rows in parts.items()}, in_features, order)
        self.weight = tied
        biases = {f"{name}.bias": rows for name, rows in parts.items()}
        self.bias = builder.parameter(biases, order=order) if bias else None
        if isinstance(in_features, Shard) and builder.info.rank != 0:
            self.bias = None
        self.adapted = None if is_fixed else builder.adapt(parts, in_features, order)
        self._adapted_linear = builder.ops.adapted_linear
        self._linear = builder.ops.linear
        self._add_norm_linear = builder.ops.add_norm_linear
        self._is_alone = builder.info.size == 1

    def forward(self, x: Result, gate: str = "", adapters: TokenSlots | None = None) -> Result:
        """Project x [T, in_features] -> [T, sum of parts]; `gate` is as in `after_sum_norm`, `adapters` in `Stream`."""
        if adapters is None or self.adapted is None:
            return self._linear(x, self.weight, self.bias, gate)
        return self._adapted_linear(self._linear, x, self.weight, self.bias, gate, adapters, self.adapted.weights)

    def after_sum_norm(self, stream: Stream, norm: Norm | None, gate: str = "") -> tuple[Result, Result]:
        """Return (projection of norm(total), total) for the hidden states `total`; may overwrite the stream.

        With a `gate` of `reference.GATES`, the projection is gate and up, and the activation follows. Without a norm,
        the stream has no residual.
        """
        x, residual, adapters = stream
        if norm is None:
            return self.forward(x, gate, adapters), x
        if isinstance(norm, RMSNorm) and (self._is_alone or residual is None) and adapters is None:
            return self._add_norm_linear(x, residual, norm.weight, norm.eps, self.weight, self.bias, gate)
        normed, total = norm.sum_add(stream)  # one kernel can do all of it
        return self.forward(normed, gate, adapters), total


class Embedding:
    """Token embedding with weight [V, H], sharded by token ids.

    Rows are multiplied by `scale`.
    """

    def __init__(self, builder: Builder, name: str, vocab_size: int, hidden_size: int, scale: float = 1.0) -> None:
        self.scale = scale
        self._shard = builder.balanced_shard(vocab_size)
        self.weight = builder.parameter({f"{name}.weight": self._shard}, hidden_size)
        self._sum, self._embedding = builder.comm.sum, builder.ops.embedding

    def summed(self, ids: Tensor) -> Tensor:
        """Look up ids [T] int32 -> [T, H], all of it on every rank."""
        shard = self._shard
        if shard.count == shard.size:
            x = self._embedding(ids, self.weight)
        else:
            is_own = (ids >= shard.start) & (ids < shard.stop)
            x = self._embedding((ids - shard.start).clamp(0, shard.count - 1), self.weight)
            x = self._sum(x.masked_fill_(~is_own.unsqueeze(1), 0.0))
        return x if self.scale == 1.0 else x.mul_(self.scale)
