"""Reasoning between two tags, separated from the answer."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from minisgl.api.parsers.pieces import Content, Piece, Reasoning, first_not_space, split_at


@dataclass(frozen=True)
class ReasoningForm:
    """The tags around a model's reasoning, which precedes the answer."""

    open: str
    close: str

    def is_open(self, text: str) -> bool:
        """Whether `text` (a prompt, or the beginning of an answer) ends inside the reasoning."""
        return text.rfind(self.open) > text.rfind(self.close)


REASONING_FORMS: Final = {"think": ReasoningForm("<think>", "</think>")}


class _State(Enum):
    START = auto()  # only white space so far
    OPENED = auto()  # inside, only white space so far
    INSIDE = auto()
    CLOSED = auto()  # after the closing tag, only white space so far
    ANSWER = auto()


class ReasoningParser:
    """Text -> `Reasoning`, then `Content`.

    Only an opening tag at the very beginning counts. White space next to the tags belongs to them. `is_opened`: the
    prompt ends inside the reasoning; an opening tag at the start is then redundant.
    """

    def __init__(self, form: ReasoningForm, is_opened: bool) -> None:
        self._form = form
        self._is_opened = is_opened
        self._state = _State.START
        self._held = ""
        self._space: list[str] = []  # white space that is dropped if a tag follows

    def feed(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        if self._state is _State.START:
            text = self._start(self._take(text))
        if self._state in (_State.OPENED, _State.INSIDE):
            text = self._inside(self._take(text), pieces)
        if self._state is _State.CLOSED and (start := first_not_space(text)) < len(text):
            self._state = _State.ANSWER
            text = text[start:]
        if self._state is _State.ANSWER and text:
            pieces.append(Content(text))
        return pieces

    def flush(self) -> list[Piece]:
        held, self._held = self._held, ""
        text = "".join([*self._space, held])
        if self._state is _State.START and not self._is_opened:
            return [Content(text)] if text else []
        return [Reasoning(text)] if held else []

    def _take(self, text: str) -> str:
        text, self._held = self._held + text, ""
        return text

    def _start(self, text: str) -> str:
        """The rest after an opening tag, or the text itself without one; empty while undecided (the text is held)."""
        start = first_not_space(text)
        tag = self._form.open
        if text.startswith(tag, start):
            self._space = []
            self._state = _State.OPENED
            return text[start + len(tag) :]
        self._space.append(text[:start])
        if tag.startswith(text[start:]):  # also when only white space is there
            self._held = text[start:]
            return ""
        space, self._space = "".join(self._space), []
        self._state = _State.OPENED if self._is_opened else _State.ANSWER
        return space + text[start:]

    def _inside(self, text: str, pieces: list[Piece]) -> str:
        """Emit the reasoning in `text` to `pieces` and return the text after the closing tag."""
        certain, rest, is_closed = split_at(text, self._form.close)
        if self._state is _State.OPENED:
            certain = certain[first_not_space(certain) :]
        shown = certain.rstrip()
        if shown:
            pieces.append(Reasoning("".join([*self._space, shown])))
            self._space = []
            self._state = _State.INSIDE
        if self._state is _State.INSIDE:
            self._space.append(certain[len(shown) :])
        if is_closed:
            self._state = _State.CLOSED
            self._space = []
            return rest
        self._held = rest
        return ""
