"""Stop strings in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Finds the first of several stop strings in text that arrives in pieces.

    One matcher per string (Knuth, Morris & Pratt 1977), so a character costs the same however long the strings are.
    Held back are just the characters that may still become a stop string: the longest current partial match.
    """

    def __init__(self, stops: Sequence[str], shows_stop: bool = False) -> None:
        self._shows_stop = shows_stop
        self._stops = [(s, _failure(s)) for s in stops]
        self._matched = [0] * len(stops)
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """The text that may be shown now, and the stop string if one is complete.

        What follows that is not shown, and it itself only with `shows_stop`.
        """
        for end, char in enumerate(text, start=1):
            complete: str | None = None
            for i, (stop, failure) in enumerate(self._stops):
                n = self._matched[i]
                while n and stop[n] != char:
                    n = failure[n - 1]
                n += stop[n] == char
                if n == len(stop):
                    if complete is None or n > len(complete):
                        complete = stop
                    n = failure[n - 1]
                self._matched[i] = n
            if complete is not None:
                seen = self._held + text[:end]
                self._held = ""
                return seen if self._shows_stop else seen[: len(seen) - len(complete)], complete
        seen = self._held + text
        cut = len(seen) - max(self._matched)
        self._held = seen[cut:]
        return seen[:cut], None

    def flush(self) -> str:
        """The text held back, when no more will come."""
        return self._held


def _failure(pattern: str) -> list[int]:
    """`failure[i]`: length of the longest proper prefix of pattern[:i+1] that is also its suffix."""
    failure = [0] * len(pattern)
    n = 0
    for i in range(1, len(pattern)):
        while n and pattern[i] != pattern[n]:
            n = failure[n - 1]
        n += pattern[i] == pattern[n]
        failure[i] = n
    return failure
