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

    def page_bytes(self, page_size: int, item: int, is_fp8: bool) -> int:
        """Return the bytes of a page of `item` bytes an element; `is_fp8`: one, and a scale for each vector."""
        vector = self.shape[-1] + 4 if is_fp8 else self.shape[-1] * item
        return math.prod(self.page_shape(page_size)[:-1]) * vector


@dataclass(frozen=True, slots=True)
class PerRow:
    """State of a whole text, such as a recurrent one: a slot of STATE has `shape` on one rank.

    It is in float32, or if not `is_wide` in the model's dtype. A layer starts a text from zeros and stores the state
    after the last token of each chunk of a prompt, and where the plan's `captures` say so. What later tokens add is
    apart (`recent_tokens`) until the plan's `folds`.
    """

    name: str
    shape: tuple[int, ...]
    is_wide: bool = True
    group: ClassVar[int] = STATE

    def page_shape(self, page_size: int) -> tuple[int, ...]:
        """Return the shape of a slot."""
        return self.shape

    def page_bytes(self, page_size: int, item: int, is_fp8: bool) -> int:
        """Return the bytes of a slot; `item` is that of the model's dtype."""
        return (4 if self.is_wide else item) * math.prod(self.shape)


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
class GatedDelta:
    """Gated DeltaNet (`ops/gated_delta.py`), with a convolution over `width` inputs. Counts are one rank's.

    A slot has what the last `recent` tokens add, besides the state, which is in float32 unless it `is_narrow`.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    width: int
    recent: int = 20
    is_narrow: bool = False

    @property
    def states(self) -> tuple[PerRow, ...]:
        """The fields of `DeltaState`."""
        keys, values = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        return (
            PerRow("delta", (self.value_heads, self.key_dim, self.value_dim), not self.is_narrow),
            PerRow("recent", (self.recent, keys + values), is_wide=False),
            PerRow("decay", (self.recent, self.value_heads)),
            PerRow("conv", (self.recent + self.width - 1, 2 * keys + values), is_wide=False),
        )


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
