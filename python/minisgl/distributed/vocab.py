"""Choosing tokens when each rank has the logits of its part of the vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from minisgl.distributed.communicator import Communicator


class VocabParallel:
    """The exchange between ranks of which each has a run of token ids, `part`, in the order of the ranks."""

    def __init__(self, comm: Communicator, vocab_size: int) -> None:
        info = comm.info
        self._comm = comm
        self.part = info.balanced_shard(vocab_size)
        self._sizes = [len(info.balanced_shard(vocab_size, rank)) for rank in range(info.size)]

    @property
    def is_whole(self) -> bool:
        """This rank has all logits."""
        return len(self._sizes) == 1

    def gather(self, logits: Tensor) -> Tensor:
        """[S, part] -> [S, V], the same on every rank."""
        if self.is_whole:
            return logits
        widest = max(self._sizes)
        if len(self.part) < widest:
            logits = torch.nn.functional.pad(logits, (0, widest - len(self.part)))
        parts = self._comm.all_gather(logits)
        return torch.cat([part[:, :size] for part, size in zip(parts, self._sizes, strict=True)], dim=1)

    def best(self, candidates: Tensor) -> Tensor:
        """`winners` among the ranks' candidates, of which [2, S] are this rank's."""
        return winners(self._comm.all_gather(candidates))


def winners(candidates: Tensor) -> Tensor:
    """For each sequence the best of the candidates [ranks, 2, S] int32, see `ops/sample.py: candidates`.

    -> [2, S] int32 as from `sample_rows`: tokens, and 1 where the logits were sound. Of equal scores the lowest token
    wins.
    """
    tokens, bits = candidates.unbind(1)
    scores = bits.contiguous().view(torch.float32)
    best = scores.amax(0)
    chosen = tokens.masked_fill(scores != best, torch.iinfo(torch.int32).max).amin(0)
    is_sound = best.isfinite()
    return torch.stack([chosen.where(is_sound, 0), is_sound.int()])
