"""What followed the last few tokens before, in prompt or output (prompt lookup, github.com/apoorvumang)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minisgl.settings.options import MAX_DRAFTS
from minisgl.speculative import lookup
from minisgl.speculative.lookup import MAX_MATCH, MIN_MATCH, look_up

if TYPE_CHECKING:
    from minisgl.layout import Ints


class NGramDrafter:
    """Drafts what followed the longest match of the newest tokens, and among equally long ones the most recent."""

    def propose(self, history: Tensor, lengths: Tensor, longest: int) -> tuple[Tensor, Tensor]:
        width, device = min(longest, lookup.WINDOW), history.device
        index = torch.arange(width, device=device)
        if longest > lookup.WINDOW:
            first = (lengths.long() - width).clamp(min=0).unsqueeze(1)
            history, newest = history.gather(1, first + index), lengths.long().unsqueeze(1) - 1 - first
        else:
            history, newest = history[:, :width], lengths.long().unsqueeze(1) - 1
        # matched[i]: how many tokens up to index i equal the newest ones, in order.
        is_match = (history == history.gather(1, newest)) & (index < newest)
        matched = is_match.int()
        for n in range(1, min(MAX_MATCH, width)):
            token = history.gather(1, (newest - n).clamp(min=0))
            is_match[:, n:] &= history[:, :-n] == token
            is_match[:, :n] = False
            matched += is_match
        best = (matched * width + index).argmax(1, keepdim=True)
        count = torch.where(matched.gather(1, best) >= MIN_MATCH, MAX_DRAFTS, 0).squeeze(1)
        # Behind the newest token the match goes on as it does before, from its beginning.
        period = (newest - best).clamp(min=1)
        following = best + 1 + torch.arange(MAX_DRAFTS, device=device) % period
        drafts = history.gather(1, following.clamp(max=width - 1))
        return drafts.clamp(min=0), count.int()

    def look_up(self, ids: Ints) -> Ints:
        """As `propose`, for one row."""
        return look_up(ids)
