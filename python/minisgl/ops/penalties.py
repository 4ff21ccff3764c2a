"""Penalties, biases, forbidden endings and masks: what changes logits before a token is chosen, in torch."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from minisgl.layout import Flag


class PenaltyTables(Protocol):
    """What changes the logits of each row; `engine.penalty_tables.LogitPenalties` is one and says what each holds."""

    seen: Tensor
    penalties: Tensor
    first_end: Tensor
    num_biases: Tensor
    bias_ids: Tensor
    biases: Tensor
    masks: Tensor


def apply_penalties(
    logits: Tensor, flags: Tensor, mask_index: Tensor, rows: Tensor, positions: Tensor, tables: PenaltyTables
) -> Tensor:
    """logits [S, V] of any float dtype -> new ones in float32, changed where the flags of a sequence say so.

    flags [S] int32 are those of `BatchPlan`; rows [S] int64 and positions [S] int32 (of the new tokens) belong to the
    sequences. ADJUSTED, in this order: bias, forbidden endings, repetition penalty (Keskar et al. 2019,
    arXiv:1909.05858: divide what is positive, multiply what is negative), frequency and presence penalty (as OpenAI's
    API defines them). MASKED: -inf for all tokens that mask `mask_index` [S] int32 of `tables.masks` does not allow.
    """
    logits = logits.to(torch.float32, copy=True)
    at = _places(flags, Flag.PENALIZED)
    if len(at):
        logits[at] = _penalized(logits[at], rows[at], positions[at], tables)
    at = _places(flags, Flag.MASKED)
    if len(at):
        masks = tables.masks[mask_index[at].long()]
        bits = masks.unsqueeze(2) >> torch.arange(32, dtype=torch.int32, device=masks.device)
        is_allowed = (bits & 1).bool().flatten(1)[:, : logits.shape[1]]
        logits[at] = logits[at].masked_fill(~is_allowed, float("-inf"))
    return logits


def count_tokens(tokens: Tensor, flags: Tensor, rows: Tensor, tables: PenaltyTables) -> None:
    """Remember the tokens [S] int32 that were chosen for the ADJUSTED sequences."""
    at = _places(flags, Flag.PENALIZED)
    tables.seen[rows[at], tokens[at].long()] += 2


def _places(flags: Tensor, flag: int) -> Tensor:
    return (flags & flag).nonzero().squeeze(1)


def _penalized(x: Tensor, rows: Tensor, positions: Tensor, tables: PenaltyTables) -> Tensor:
    """x [A, V] float32 -> the same, for sequences that are all ADJUSTED."""
    num_biases = tables.num_biases[rows]
    width = int(num_biases.max())
    is_used = torch.arange(width, device=x.device) < num_biases.unsqueeze(1)
    ids, biases = (table[rows, :width].masked_fill(~is_used, 0) for table in (tables.bias_ids, tables.biases))
    tokens = torch.where(ids < 0, ~ids, ids).long()
    x.scatter_add_(1, tokens, biases)
    # Places that forbid nothing must not write: they would race with those that do for the same token.
    row, place = ((ids < 0) & (positions < tables.first_end[rows]).unsqueeze(1)).nonzero(as_tuple=True)
    x[row, tokens[row, place]] = float("-inf")
    seen = tables.seen[rows]
    counts = seen >> 1
    presence, frequency, repetition = tables.penalties[rows].unsqueeze(2).unbind(1)
    x = torch.where(seen > 0, torch.where(x > 0, x / repetition, x * repetition), x)
    x -= frequency * counts + presence * (counts > 0)
    return x
