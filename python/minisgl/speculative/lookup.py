"""N-gram lookup on the host: finds an earlier occurrence of the last few tokens. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from minisgl.core.layout import NO_INTS
from minisgl.settings.options import MAX_DRAFTS

if TYPE_CHECKING:
    from minisgl.core.layout import Ints

MIN_MATCH: Final = 2  # tokens that must match
MAX_MATCH: Final = 4  # tokens beyond which a longer match is no better than a more recent one
WINDOW: Final = 32768  # only the newest tokens are searched


def look_up(ids: Ints, min_match: int = MIN_MATCH) -> Ints:
    """Return what followed the longest earlier match of the last tokens of `ids`; empty if shorter than `min_match`.

    Of equally long matches the most recent one counts.
    """
    ids = ids[-WINDOW:]
    matches = (ids[:-1] == ids[-1]).nonzero()[0]
    size = 1
    while size < MAX_MATCH:
        longer = matches[matches >= size]
        if not len(longer) or not len(longer := longer[ids[longer - size] == ids[-1 - size]]):
            break
        matches, size = longer, size + 1
    if not len(matches) or size < min_match:
        return NO_INTS
    period = len(ids) - 1 - matches[-1]
    drafts: Ints = np.maximum(ids[matches[-1] + 1 + np.arange(MAX_DRAFTS) % period], 0)
    return drafts
