"""How likely tokens are: log-probabilities of chosen tokens and of the likeliest ones, in torch."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from minisgl.core import StepResult
from minisgl.layout import Flag

TOP: Final = StepResult.TOP
PASS_LOGITS: Final = 1 << 24  # worked on at once: 64 MiB in float32, however many rows and tokens there are


def rows_per_pass(vocab_size: int) -> int:
    """Rows of logits to work on at once."""
    return max(1, PASS_LOGITS // vocab_size)


def token_logprobs(logits: Tensor, tokens: Tensor, flags: Tensor) -> Tensor:
    """logits [N, V] of any float dtype, tokens [N] int, flags [N] int32 -> int32 [StepResult.WIDTH, N].

    Down each column whose flags (`BatchPlan`) have LOGPROBS, as `core.StepResult.logprobs` says: log
    softmax(logits)[token] as float32 bits, the ids of the likeliest tokens, their log-probabilities as float32 bits. A
    vocabulary smaller than TOP leaves zeros, as do the other columns.
    """
    count, vocab_size = logits.shape
    step, most = rows_per_pass(vocab_size), min(TOP, vocab_size)
    scores = torch.zeros(count, StepResult.WIDTH, dtype=torch.int32, device=logits.device)
    wanted = (flags & Flag.LOGPROBS).nonzero().squeeze(1)
    for start in range(0, len(wanted), step):
        at = wanted[start : start + step]
        logprobs = torch.log_softmax(logits[at].float(), -1)
        chosen = logprobs.gather(1, tokens[at].long().unsqueeze(1))
        values, ids = logprobs.topk(most, dim=-1)
        top = torch.zeros(len(at), 2, TOP, dtype=torch.int32, device=logits.device)
        top[:, 0, :most], top[:, 1, :most] = ids.int(), values.view(torch.int32)
        scores[at] = torch.cat([chosen.view(torch.int32), top.flatten(1)], 1)
    return scores.t()
