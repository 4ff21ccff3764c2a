"""What the layers of a model declare: how they attend, and what they keep of each token. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from minisgl.core.layout import FULL, STATE


@dataclass(frozen=True, slots=True)
class Paged:
    """State of each token, in pages of a `group` of `layout`. `shape` is one token's on one rank.

    A page is [*shape[:-1], page size, shape[-1]]: what one head has of a page is contiguous.
    """

    name: str
    shape: tuple[int, ...]
    group: int = FULL

    def page_shape(self, page_size: int) -> tuple[int, ...]:
        """Return the shape of a page."""
        return (*self.shape[:-1], page_size, self.shape[-1])

    def page_bytes(self, page_size: int, item: int, has_scales: bool) -> int:
        """Return the bytes of a page with elements of `item` bytes and, if it `has_scales`, one for each vector."""
        return math.prod(self.page_shape(page_size)[:-1]) * (self.shape[-1] * item + 4 * has_scales)


@dataclass(frozen=True, slots=True)
class PerRow:
    """State of a whole text, such as a recurrent one, float32: a slot of STATE has `shape` on one rank.

    Its layer starts a text from zeros, stores its state after the last token of each step, and copies it where the
    plan's `captures` say so.
    """

    name: str
    shape: tuple[int, ...]
    group: ClassVar[int] = STATE

    def page_shape(self, page_size: int) -> tuple[int, ...]:
        """Return the shape of a slot."""
        return self.shape

    def page_bytes(self, page_size: int, item: int, has_scales: bool) -> int:
        """Return the bytes of a slot."""
        return 4 * math.prod(self.shape)


State = Paged | PerRow


class Mixer(Protocol):
    """How a layer mixes tokens. Layers with equal ones share what is prepared once a step."""

    @property
    def states(self) -> Sequence[State]:
        """What a layer keeps."""


@dataclass(frozen=True, slots=True)
class GroupedQuery:
    """Causal attention in which several query heads read one KV head (arXiv:2305.13245). Counts are one rank's.

    Scores are multiplied by `scale`. A `softcap` limits them to c tanh(score / c) (arXiv:2408.00118); 0 means no limit.
    A query attends to `window` positions, its own included; None means all. With `has_sinks`, each query head has a
    learned logit that takes part in the softmax and has no value (arXiv:2508.10925). K and V are in pages of `group`.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    group: int = FULL
    softcap: float = 0.0
    has_sinks: bool = False

    @property
    def states(self) -> tuple[Paged]:
        """K and V of each token."""
        return (Paged("kv", (2, self.kv_heads, self.head_dim), self.group),)


@dataclass(frozen=True, slots=True)
class Latent:
    """Causal attention to one latent of each token (multi-head latent attention, arXiv:2405.04434).

    `heads` counts one rank's. A latent has `rank` elements, of which each head makes its key of `nope_dim` elements and
    its value of `v_dim`, and `rope_dim` rotated ones, the rest of all heads' keys. Scores are multiplied by `scale`.
    """

    heads: int
    rank: int
    rope_dim: int
    nope_dim: int
    v_dim: int
    scale: float

    @property
    def states(self) -> tuple[Paged]:
        """The latent of each token, equal on all ranks."""
        return (Paged("latent", (1, self.rank + self.rope_dim)),)
