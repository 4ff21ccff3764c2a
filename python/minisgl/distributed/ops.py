"""The one place where sums over ranks enter a model."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from minisgl.distributed.communicator import Communicator
    from minisgl.ops.table import OpTable


def parallel_ops(ops: OpTable, comm: Communicator, has_post_norms: bool) -> OpTable:
    """`ops` for the layers of one rank.

    What a block (attention, MLP) computes is one rank's part of a sum. Where it goes straight into the residual stream,
    every such `x` [T, H] is taken up by one of three ops, which add it to the residual and normalise the total; so the
    sum is taken there, where one kernel can do all of it (summing over ranks, add and RMSNorm), and only over the
    tokens that are still needed. Without a residual `x` is the embedding's, which is summed already. A model that
    `has_post_norms` sums there, with `all_reduce`.
    """
    if comm.info.size == 1:
        return ops
    if has_post_norms:
        return replace(ops, all_reduce=comm.all_reduce)

    def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return comm.all_reduce_add_norm(x, residual, weight, eps, ops.add_rms_norm)

    def add_norm_linear(
        x: Tensor, residual: Tensor | None, norm_weight: Tensor, eps: float, *linear: Any
    ) -> tuple[Tensor, Tensor]:
        if residual is None:
            return ops.add_norm_linear(x, None, norm_weight, eps, *linear)
        normed, total = add_rms_norm(x, residual, norm_weight, eps)
        return ops.linear(normed, *linear), total

    def add_norm_gated(
        x: Tensor, residual: Tensor, norm_weight: Tensor, eps: float, *linear: Any
    ) -> tuple[Tensor, Tensor]:
        normed, total = add_rms_norm(x, residual, norm_weight, eps)
        return ops.gated_linear(normed, *linear), total

    return replace(
        ops,
        all_reduce=comm.all_reduce,
        add_rms_norm=add_rms_norm,
        add_norm_linear=add_norm_linear,
        add_norm_gated=add_norm_gated,
    )
