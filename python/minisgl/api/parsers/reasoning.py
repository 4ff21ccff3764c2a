"""Separates reasoning between two tags from the answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from minisgl.api.parsers.pieces import Content, Parser, Piece, Reasoning, first_not_space, split_at


@dataclass(frozen=True)
class ReasoningForm:
    """The tags around a model's reasoning, which precedes the answer."""

    open: str
    close: str

    def is_open(self, text: str) -> bool:
        """Return whether `text` (a prompt, or the beginning of an answer) ends inside the reasoning."""
        return text.rfind(self.open) > text.rfind(self.close)


REASONING_FORMS: Final = {"think": ReasoningForm("<think>", "</think>")}


class ReasoningParser(Parser):
    """Splits text into `Reasoning`, then `Content`.

    Only an opening tag at the very beginning counts. White space next to tags is dropped. With `is_opened`, the prompt
    ends inside the reasoning, and an opening tag at the start is redundant.

    The states: `_at_start`, `_inside`, `_after_close`, `_in_answer`.
    """

    def __init__(self, form: ReasoningForm, is_opened: bool) -> None:
        super().__init__(self._at_start)
        self._form = form
        self._is_opened = is_opened
        self._has_reasoning = False  # more than white space
        self._space: list[str] = []  # white space that is dropped if a tag follows

    def flush(self) -> list[Piece]:
        text = "".join([*self._space, self._held])
        if self._state == self._at_start and not self._is_opened:
            return [Content(text)] if text else []
        return [Reasoning(text)] if self._held else []

    def _at_start(self, text: str, pieces: list[Piece]) -> str:
        start = first_not_space(text)
        tag = self._form.open
        if text.startswith(tag, start):
            self._space = []
            self._state = self._inside
            return text[start + len(tag) :]
        self._space.append(text[:start])
        if tag.startswith(text[start:]):  # also if there is only white space
            self._held = text[start:]
            return ""
        space, self._space = "".join(self._space), []
        self._state = self._inside if self._is_opened else self._in_answer
        return space + text[start:]

    def _inside(self, text: str, pieces: list[Piece]) -> str:
        certain, rest, is_closed = split_at(text, self._form.close)
        if not self._has_reasoning:
            certain = certain[first_not_space(certain) :]
        shown = certain.rstrip()
        if shown:
            pieces.append(Reasoning("".join([*self._space, shown])))
            self._space = []
            self._has_reasoning = True
        if is_closed:
            self._space = []
            self._state = self._after_close
            return rest
        if self._has_reasoning:
            self._space.append(certain[len(shown) :])
        self._held = rest
        return ""

    def _after_close(self, text: str, pieces: list[Piece]) -> str:
        start = first_not_space(text)
        if start < len(text):
            self._state = self._in_answer
        return text[start:]

    def _in_answer(self, text: str, pieces: list[Piece]) -> str:
        pieces.append(Content(text))
        return ""
