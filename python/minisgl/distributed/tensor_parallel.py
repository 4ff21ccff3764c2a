"""Tensor parallelism: all-reduces in the model's ops, and sampling from the logits of a sharded vocabulary."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from minisgl.distributed.communicator import Communicator
    from minisgl.ops.table import OpTable


def parallel_ops(ops: OpTable, comm: Communicator, has_post_norms: bool) -> OpTable:
    """Return `ops` for the layers of one rank, with all-reduces that complete partial sums.

    A block (attention, MLP) returns this rank's partial sum. Without post-norms, each partial sum x [T, H] goes into
    one of two ops that add x to the residual and normalise the total. The all-reduce is in these ops: one kernel can do
    all three steps, and only tokens that are still needed are summed. Without a residual, x is the output of the
    embedding, which is complete. A model with post-norms calls `all_reduce` before the norm.
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

    return replace(ops, all_reduce=comm.all_reduce, add_rms_norm=add_rms_norm, add_norm_linear=add_norm_linear)


class VocabParallel:
    """Sampling across ranks. `shard` is the range of token ids whose logits this rank computes."""

    def __init__(self, comm: Communicator, vocab_size: int) -> None:
        info = comm.info
        self._comm = comm
        self.shard = info.balanced_shard(vocab_size)
        self._sizes = [len(info.balanced_shard(vocab_size, rank)) for rank in range(info.size)]

    @property
    def is_whole(self) -> bool:
        """Whether this rank computes all logits."""
        return len(self._sizes) == 1

    def gather(self, logits: Tensor) -> Tensor:
        """Gather logits [S, shard] to [S, V], equal on all ranks."""
        if self.is_whole:
            return logits
        widest = max(self._sizes)
        if len(self.shard) < widest:
            logits = torch.nn.functional.pad(logits, (0, widest - len(self.shard)))
        parts = self._comm.all_gather(logits)
        return torch.cat([part[:, :size] for part, size in zip(parts, self._sizes, strict=True)], dim=1)

    def best(self, candidates: Tensor) -> Tensor:
        """Return the `winners` among all ranks' candidates, given this rank's [2, S]."""
        return winners(self._comm.all_gather(candidates))


def winners(candidates: Tensor) -> Tensor:
    """Return the best candidate of each sequence, from `ops/sampling.py: candidates` of all ranks [ranks, 2, S] int32.

    The result [2, S] int32 is as from `sample_rows`: token ids, and 1 if the logits are finite. Among equal scores, the
    lowest token id wins.
    """
    tokens, bits = candidates.unbind(1)
    scores = bits.contiguous().view(torch.float32)
    best = scores.amax(0)
    sampled = tokens.masked_fill(scores != best, torch.iinfo(torch.int32).max).amin(0)
    is_finite = best.isfinite()
    return torch.stack([sampled.where(is_finite, 0), is_finite.int()])
