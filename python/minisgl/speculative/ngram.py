"""What followed the last few tokens before, in prompt or output (prompt lookup, github.com/apoorvumang)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from torch import Tensor

from minisgl.layout import NO_INTS
from minisgl.settings.options import MAX_DRAFTS

if TYPE_CHECKING:
    from minisgl.layout import Ints

MIN_MATCH: Final = 2  # tokens that must have occurred before
MAX_MATCH: Final = 4  # beyond which a longer match is no better than a more recent one
WINDOW: Final = 32768  # the newest tokens, which are searched


class NGramDrafter:
    """Drafts what followed the longest match of the newest tokens, and among equally long ones the most recent."""

    def propose(self, history: Tensor, lengths: Tensor, longest: int) -> tuple[Tensor, Tensor]:
        width, device = min(longest, WINDOW), history.device
        index = torch.arange(width, device=device)
        if longest > WINDOW:
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
        ids = ids[-WINDOW:]
        matches = (ids[:-1] == ids[-1]).nonzero()[0]
        size = 1
        while size < MAX_MATCH:
            longer = matches[matches >= size]
            if not len(longer) or not len(longer := longer[ids[longer - size] == ids[-1 - size]]):
                break
            matches, size = longer, size + 1
        if not len(matches) or size < MIN_MATCH:
            return NO_INTS
        period = len(ids) - 1 - matches[-1]
        drafts: Ints = ids[matches[-1] + 1 + np.arange(MAX_DRAFTS) % period].clip(0)
        return drafts
