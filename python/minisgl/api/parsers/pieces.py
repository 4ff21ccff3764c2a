"""The pieces into which parsers split generated text, and the searches that both parsers use.

A parser gets increments that may be cut anywhere; its joined pieces do not depend on the cuts. Each character is read a
bounded number of times, so the work is linear in the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

import msgspec

MAX_HEAD_CHARS: Final = 256  # between a marker and the value; in which a value without a marker must name its tool
STRIDE: Final = 512  # characters per read, so that a long text is not copied at every marker
# What a scanner looks for, by the quote of the string that it is inside, after a backslash if there was one.
_ANY: Final = re.compile(".", re.DOTALL)
_SIGNS: Final = {"": re.compile(r"[\"'{}\[\]()]"), '"': re.compile(r'["\\]'), "'": re.compile(r"['\\]")}


class Content(msgspec.Struct, frozen=True):
    """Text for the user."""

    text: str


class Reasoning(msgspec.Struct, frozen=True):
    """Reasoning of the model."""

    text: str


class ParsedCall(msgspec.Struct, frozen=True):
    """A complete call. `arguments` is the JSON object as the model wrote it; with `is_custom`, a custom tool's text."""

    id: str
    name: str
    arguments: str
    is_custom: bool = False


Piece = Content | Reasoning | ParsedCall


class Parser:
    """An incremental parser: `feed` it the increments, `flush` it at the end.

    The state is the method that reads next: it consumes a part of the text, adds the pieces that are certain, and
    returns the rest. `_held` is text that may begin a marker; it is read again with the next text.
    """

    def __init__(self, state: Callable[[str, list[Piece]], str]) -> None:
        self._state = state
        self._held = ""

    def feed(self, text: str) -> list[Piece]:
        """Parse `text`; return the pieces that are certain now."""
        pieces: list[Piece] = []
        for i in range(0, len(text), STRIDE):
            rest, self._held = self._held + text[i : i + STRIDE], ""
            while rest:
                rest = self._state(rest, pieces)
        return pieces

    def flush(self) -> list[Piece]:
        """Return the pieces that were held back. Nothing may be fed afterwards."""
        raise NotImplementedError


def split_at(text: str, *markers: str) -> tuple[str, str, str]:
    """Return (before, marker, after) for the first of `markers` in `text`, or (certain, "", held) without one.

    `held` is the longest suffix of `text` that may begin a marker.
    """
    if not any(m[0] in text for m in markers):  # nearly always
        return text, "", ""
    start, marker = min(((i, m) for m in markers if (i := text.find(m)) >= 0), default=(0, ""))
    if marker:
        return text[:start], marker, text[start + len(marker) :]
    longest = max(map(len, markers), default=1) - 1
    ends = (text[-n:] for n in range(min(longest, len(text)), 0, -1))
    held = next((end for end in ends if any(m.startswith(end) for m in markers)), "")
    return text[: len(text) - len(held)], "", held


class ValueScanner:
    """Finds the end of a JSON object or array, or a Python list, that arrives in pieces: by its brackets and quotes.

    The value may still be invalid, which the decoder finds out. The state is the bracket depth, and the quote of the
    string that the scanner is inside, after a backslash if that was the last character.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._quote = ""

    def feed(self, text: str) -> int | None:
        """Return the index after the value's last bracket, or None while it is open. The first text begins with one."""
        end = 0
        while match := _SIGNS.get(self._quote, _ANY).search(text, end):
            end = match.end()
            sign = match[0]
            if len(self._quote) == 2:
                self._quote = self._quote[1]
            elif sign == "\\":
                self._quote = sign + self._quote
            elif sign in "\"'":
                self._quote = "" if self._quote else sign
            else:
                self._depth += 1 if sign in "{[(" else -1
                if self._depth == 0:
                    return end
        return None
