"""Projections, the norms before them, and the embedding.

A method of a layer communicates with the other ranks if and only if its name says `sum`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from minisgl.layers.builder import Init, Shard
from minisgl.ops.deferred import Result, finished

if TYPE_CHECKING:
    from minisgl.layers.builder import Builder, Rows, Size
    from minisgl.ops.quantized import Quantized


class Stream(NamedTuple):
    """The hidden states of T tokens: the sum of `x` [T, H] over the ranks, plus `residual` [T, H].

    Without a residual they are `x`, which is equal on all ranks.
    """

    x: Result
    residual: Result | None = None

    def each(self, change: Callable[[Tensor], Tensor]) -> Stream:
        """Return the stream of changed tensors."""
        return Stream(change(finished(self.x)), None if self.residual is None else change(finished(self.residual)))

    def at(self, tokens: Tensor) -> Stream:
        """Return the hidden states of some of the tokens, int64 [S]."""
        return self.each(lambda x: x.index_select(0, tokens))


class RMSNorm:
    """RMSNorm with weight [size]. `name` is the checkpoint's module name.

    An `offset` is added to the checkpoint's weight. Norms with an offset are computed in float32.
    """

    def __init__(self, builder: Builder, name: str, size: int, eps: float, offset: float = 0.0) -> None:
        dtype = torch.float32 if offset else builder.dtype
        self.weight = builder.parameter({f"{name}.weight": size}, init=Init.ONES, dtype=dtype, offset=offset)
        self.eps = eps
        self._rms_norm, self._add_rms_norm = builder.ops.rms_norm, builder.ops.add_rms_norm
        self._comm = builder.comm

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return norm(x) [..., size], plus the residual if there is one."""
        return self._rms_norm(x, self.weight, self.eps, residual)

    def sum_add(self, stream: Stream) -> tuple[Tensor, Tensor]:
        """Return (norm(total), total), each [T, size], for the hidden states `total`; may overwrite the stream."""
        x, residual = finished(stream.x), finished(stream.residual)
        if residual is None:
            return self.forward(x), x
        return self._comm.sum_add_norm(x, residual, self.weight, self.eps, self._add_rms_norm)


class Linear:
    """A projection x W^T + b, with weight [sum of parts, in_features] and bias [sum of parts] or None.

    `parts` maps the checkpoint's module names to output features: one for a plain projection; q, k, v; gate and up.
    If outputs are sharded, the result is a shard. If inputs are sharded, it is a partial sum, to which rank 0 adds the
    bias. `tied` is another layer's weight, used instead of an own one.
    """

    def __init__(
        self,
        builder: Builder,
        parts: Mapping[str, Rows],
        in_features: Size,
        *,
        bias: bool,
        tied: Tensor | Quantized | None = None,
    ) -> None:
        if tied is None:
            tied = builder.matrix({f"{name}.weight": rows for name, rows in parts.items()}, in_features)
        self.weight = tied
        self.bias = builder.parameter({f"{name}.bias": rows for name, rows in parts.items()}) if bias else None
        if isinstance(in_features, Shard) and builder.info.rank != 0:
            self.bias = None
        self._linear = builder.ops.linear
        self._add_norm_linear = builder.ops.add_norm_linear
        self._is_alone = builder.info.size == 1

    def forward(self, x: Result) -> Result:
        """Project x [T, in_features] -> [T, sum of parts]."""
        return self._linear(x, self.weight, self.bias)

    def after_sum_norm(self, stream: Stream, norm: RMSNorm, gate: str = "") -> tuple[Result, Result]:
        """Return (projection of norm(total), total) for the hidden states `total`; may overwrite the stream.

        With a `gate` of `reference.GATES`, the projection is gate and up, and the activation follows.
        """
        x, residual = stream
        if self._is_alone or residual is None:
            return self._add_norm_linear(x, residual, norm.weight, norm.eps, self.weight, self.bias, gate)
        normed, total = norm.sum_add(stream)  # one kernel can do all of it
        return self._linear(normed, self.weight, self.bias, gate), total


class Embedding:
    """Token embedding with weight [V, H], sharded by token ids.

    Rows are multiplied by `scale`, rounded to the model's dtype.
    """

    def __init__(self, builder: Builder, name: str, vocab_size: int, hidden_size: int, scale: float = 1.0) -> None:
        self.scale = float(torch.tensor(scale, dtype=builder.dtype))
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
