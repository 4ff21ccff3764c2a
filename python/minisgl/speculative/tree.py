"""The drafter for continuations from the radix tree, which the host proposes (`scheduler/drafts.py`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from minisgl.settings.options import MAX_DRAFTS

if TYPE_CHECKING:
    from torch import Tensor

    from minisgl.ops.table import OpTable


class TreeDrafter:
    """Drafts nothing on the device."""

    def __init__(self, ops: OpTable) -> None:
        pass

    def propose(self, history: Tensor, rows: Tensor, lengths: Tensor, longest: int) -> tuple[Tensor, Tensor]:
        count = torch.zeros_like(lengths)
        return count.unsqueeze(1).expand(-1, MAX_DRAFTS), count
