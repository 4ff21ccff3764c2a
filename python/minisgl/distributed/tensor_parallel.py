"""Sampling from the logits of a vocabulary that is sharded over the ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from minisgl.distributed.communicator import Communicator


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
