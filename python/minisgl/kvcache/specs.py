"""What a layer keeps of each token."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Paged:
    """State of each token, in pages that live as long as the text. `shape` is one token's on one rank.

    A page is [*shape[:-1], page size, shape[-1]]: what one head has of a page is contiguous.
    """

    name: str
    shape: tuple[int, ...]

    def page_shape(self, page_size: int) -> tuple[int, ...]:
        """Return the shape of a page."""
        return (*self.shape[:-1], page_size, self.shape[-1])

    def token_bytes(self, item: int, has_scales: bool) -> int:
        """Return the bytes of a token with elements of `item` bytes and, if it `has_scales`, one for each vector."""
        return math.prod(self.shape[:-1]) * (self.shape[-1] * item + 4 * has_scales)
