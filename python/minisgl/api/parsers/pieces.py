"""The pieces that parsers make of generated text, and the searches that both parsers use.

A parser is fed increments cut anywhere; its joined pieces do not depend on the cuts. Each character is read a bounded
number of times, so the work is linear in any text.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

STRIDE: Final = 512  # characters read at once, so that a long text is not copied at every marker
_JSON_SIGNS: Final = re.compile(r'["{}\[\]]')
_STRING_SIGNS: Final = re.compile(r'["\\]')


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Reasoning of the model."""

    text: str


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A complete call; `arguments` is the JSON object as the model wrote it."""

    id: str
    name: str
    arguments: str


Piece = Content | Reasoning | ParsedCall


class Parser:
    """An incremental parser: `feed` it the increments, `flush` it at the end.

    The state is the method that reads on: it consumes a part of the text, adds the pieces that are certain, and returns
    the rest. `_held` is text that may be the beginning of a marker; it is read again in front of the next text.
    """

    def __init__(self, state: Callable[[str, list[Piece]], str]) -> None:
        self._state = state
        self._held = ""

    def feed(self, text: str) -> list[Piece]:
        """The pieces that are certain after `text`."""
        pieces: list[Piece] = []
        for i in range(0, len(text), STRIDE):
            rest, self._held = self._held + text[i : i + STRIDE], ""
            while rest:
                rest = self._state(rest, pieces)
        return pieces

    def flush(self) -> list[Piece]:
        """The pieces that were held back. Nothing may be fed afterwards."""
        raise NotImplementedError


def split_at(text: str, marker: str) -> tuple[str, str, bool]:
    """(before, after, True) around the first `marker`, or (certain, held, False) without one.

    `held` is the longest end of `text` that may be the beginning of a marker.
    """
    before, found, after = text.partition(marker)
    if found:
        return before, after, True
    n = next((n for n in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:n])), 0)
    return text[: len(text) - n], text[len(text) - n :], False


def first_not_space(text: str) -> int:
    """The index of the first character that is not white space, or the length of `text`."""
    return len(text) - len(text.lstrip())


class JsonScanner:
    """Finds the end of a JSON object or array that comes in pieces, by brackets and quotes alone.

    The value may still be invalid; the decoder decides that. State: bracket depth, whether inside a string, whether the
    last character in a string was a backslash.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._is_escaped = False

    def feed(self, text: str) -> int | None:
        """The index after the value's last bracket, or None while it is open. The first text begins with a bracket."""
        i = 0
        while i < len(text):
            if self._is_escaped:
                self._is_escaped = False
                i += 1
                continue
            match = (_STRING_SIGNS if self._in_string else _JSON_SIGNS).search(text, i)
            if match is None:
                return None
            i = match.end()
            sign = match[0]
            if sign == "\\":
                self._is_escaped = True
            elif sign == '"':
                self._in_string = not self._in_string
            elif sign in "{[":
                self._depth += 1
            else:
                self._depth -= 1
                if self._depth == 0:
                    return i
        return None
