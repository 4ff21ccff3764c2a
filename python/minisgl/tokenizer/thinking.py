"""Which tokens of an answer are reasoning. The detokenizer counts them, and the scheduler limits them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minisgl.core.params import Thinking


class ThinkingCounter:
    """Follows the tokens of one answer.

    Markers are found in the bytes of tokens, since those that are no special tokens may be written with any.

    count       tokens between the markers so far; those that begin in a marker do not count
    is_inside   the next token is reasoning
    is_over     no reasoning can follow
    has_closed  some reasoning has ended
    tail        the last tokens, in which a marker may have begun
    """

    def __init__(self, thinking: Thinking, bytes_of: Mapping[int, bytes] | Sequence[bytes]) -> None:
        self._markers = thinking.open.encode(), thinking.close.encode()
        self._repeats = bool(thinking.lead)
        self._bytes_of = bytes_of
        self.count = 0
        self.is_inside = thinking.is_open
        self.is_over = self.has_closed = False
        self.tail: tuple[int, ...] = ()

    def feed(self, token: int) -> None:
        """Take in the next token."""
        if self.is_over:
            return
        self.count += self.is_inside
        self.tail = (*self.tail, token)
        pieces = [self._bytes_of[t] for t in self.tail]
        text, marker = b"".join(pieces), self._markers[self.is_inside]
        if (at := text.find(marker)) >= 0:
            if self.is_inside:
                starts = itertools.accumulate(map(len, pieces[:-1]), initial=0)
                self.count -= sum(start >= at for start in starts)
                self.has_closed, self.is_over = True, not self._repeats
            self.is_inside = not self.is_inside
            self.tail = ()
            return
        if not self.is_inside and not self._repeats:
            self.is_over = not marker.startswith(text.lstrip())
        rest = len(text)
        while rest - len(self._bytes_of[self.tail[0]]) >= len(marker):
            rest -= len(self._bytes_of[self.tail[0]])
            self.tail = self.tail[1:]
