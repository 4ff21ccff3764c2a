"""Limits the tokens of a model's reasoning: where the limit is reached, only the end marker's tokens may follow."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from minisgl.core.rounding import round_up
from minisgl.tokenizer.thinking import ThinkingCounter

if TYPE_CHECKING:
    from collections.abc import Callable

    from minisgl.core.errors import RequestError
    from minisgl.core.params import Thinking
    from minisgl.core.plan import Ints

    Encode = Callable[[bytes], list[int]]

NEVER: Final = 1 << 30  # tokens: more than any text has
AT_ONCE: Final = 512  # tokens that are looked at in one step, which takes about a millisecond


class Anything:
    """Matches any text, with the interface of a `TokenMatcher`."""

    is_stale = is_complete = False
    error: RequestError | None = None

    def __init__(self, vocab_size: int) -> None:
        bits = np.arange(round_up(vocab_size, 32)) < vocab_size
        self.mask: Ints = np.packbits(bits, bitorder="little").view(np.int32)

    def advance(self, token: int) -> None:
        pass

    def forced(self) -> Ints:
        return np.empty(0, np.int32)

    def count_allowed(self, tokens: Ints) -> int:
        return len(tokens)

    def along(self, drafts: Ints) -> list[Ints]:
        return [self.mask] * len(drafts)


class ThinkingMatcher:
    """The matcher `inner` of a whole answer, with a limit of its reasoning.

    Once `budget` tokens are between the markers, the end marker is forced. So that reasoning which may repeat does not
    begin again, the token with which its opening marker differs from `lead` is then not allowed. A token that `inner`
    refuses is not forced: within a character, a grammar allows no marker.
    """

    def __init__(self, thinking: Thinking, bytes_of: Sequence[bytes], encode: Encode, inner: Any) -> None:
        """`inner` is a `TokenMatcher` or `Anything`."""
        assert thinking.budget is not None, "the reasoning has no limit"
        self._counter = ThinkingCounter(thinking, bytes_of)
        self._budget = thinking.budget
        opening, closing, lead = (encode(text.encode()) for text in (thinking.open, thinking.close, thinking.lead))
        self._markers = tuple(opening), tuple(closing)
        self._shared = (*(a == b for a, b in zip(opening, lead, strict=False)), False).index(False)
        self._inner = inner
        self.num_seen = 0  # tokens of the answer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    @property
    def free(self) -> int:
        """How many tokens may come next, whatever they are, before the limit must be looked at."""
        return NEVER if self._counter.is_over else min(max(0, self._budget - self._counter.count), AT_ONCE)

    @property
    def mask(self) -> Ints:
        """As of the inner matcher."""
        return self._limited(self._inner.mask, self._counter)

    def advance(self, token: int) -> None:
        """Append a sampled token."""
        self.num_seen += 1
        self._counter.feed(token)
        self._inner.advance(token)

    def forced(self) -> Ints:
        """Return tokens that must come next; maybe none."""
        marker = self._marker(self._counter)
        forced: Ints = np.array(marker, np.int32) if self._counter.is_inside and marker else self._inner.forced()
        return forced

    def along(self, drafts: Ints) -> list[Ints]:
        """Return the mask after each of `drafts`; after a draft that is not allowed, any mask."""
        probe, masks = copy(self._counter), []
        for token, mask in zip(drafts.tolist(), self._inner.along(drafts), strict=True):
            probe.feed(token)
            masks.append(self._limited(mask, probe))
        return masks

    def _marker(self, counter: ThinkingCounter) -> tuple[int, ...]:
        """Return the rest of the end marker if it is forced, or of an opening marker that may not go on; or nothing."""
        if counter.is_over or counter.count < self._budget or not (counter.is_inside or counter.has_closed):
            return ()
        marker = self._markers[counter.is_inside]
        begun = max((n for n in range(1, len(marker)) if counter.tail[-n:] == marker[:n]), default=0)
        return marker[begun:] if counter.is_inside or begun == self._shared else ()

    def _limited(self, mask: Ints, counter: ThinkingCounter) -> Ints:
        marker = self._marker(counter)
        if not marker:
            return mask
        bit = np.zeros(len(mask), np.uint32)
        bit[marker[0] // 32] = np.uint32(1 << marker[0] % 32)
        limited: Ints = (mask.view(np.uint32) & (bit if counter.is_inside else ~bit)).view(np.int32)
        return limited if limited.any() else mask
