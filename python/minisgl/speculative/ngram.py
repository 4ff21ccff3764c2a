"""N-gram lookup in prompt and output on the device (prompt lookup decoding, github.com/apoorvumang)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minisgl.settings.options import MAX_DRAFTS
from minisgl.speculative import lookup
from minisgl.speculative.lookup import MAX_MATCH, MIN_MATCH

if TYPE_CHECKING:
    from torch import Tensor

    from minisgl.ops.table import OpTable


class NGramDrafter:
    """Drafts what followed the longest earlier match of the last tokens; of equally long ones, the most recent."""

    def __init__(self, ops: OpTable) -> None:
        self._ops = ops

    def propose(self, history: Tensor, rows: Tensor, lengths: Tensor, longest: int) -> tuple[Tensor, Tensor]:
        matches = (MIN_MATCH, MAX_MATCH)
        return self._ops.look_up(history, rows, lengths, longest, lookup.WINDOW, matches, MAX_DRAFTS)
