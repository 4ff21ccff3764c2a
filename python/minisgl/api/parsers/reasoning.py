"""Separates reasoning between two tags from the answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from minisgl.api.parsers.forms import HARMONY, MARKER, ToolForm
from minisgl.api.parsers.pieces import Content, Parser, Piece, Reasoning, split_at


@dataclass(frozen=True)
class ReasoningForm:
    """The tags around a model's reasoning, which precedes the answer.

    A chat template of the family has `sign`, or else the closing tag. `starts_open`: the model reasons without an
    opening tag, unless the prompt has the closing one. `lead` stands before every answer (channels.py).
    """

    open: str
    close: str
    starts_open: bool = False
    sign: str = ""
    lead: str = ""

    @property
    def markers(self) -> frozenset[str]:
        """All texts of the form that may be special tokens, which the detokenizer would hide."""
        return frozenset(MARKER.findall(self.open + self.close + self.lead))

    def is_open(self, text: str) -> bool:
        """Return whether `text` (a prompt, or the beginning of an answer) ends inside the reasoning."""
        return text.rfind(self.open) + self.starts_open > text.rfind(self.close)


# By the name of the parser. A template has the first form whose sign it has.
REASONING_FORMS: Final = {
    HARMONY: ReasoningForm(
        "<|channel|>analysis<|message|>",
        "<|end|><|start|>assistant",
        sign="<|channel|>analysis",
        lead="<|channel|>final<|message|>",
    ),
    "think": ReasoningForm("<think>", "</think>"),
    "deepseek_r1": ReasoningForm("<think>", "</think>", starts_open=True),
    "seed_oss": ReasoningForm("<seed:think>", "</seed:think>"),
    "mistral": ReasoningForm("[THINK]", "[/THINK]"),
    "gemma4": ReasoningForm("<|channel>thought\n", "<channel|>"),
    "command": ReasoningForm("<|START_THINKING|>", "<|END_THINKING|>"),
    "kimi": ReasoningForm("◁think▷", "◁/think▷"),
    "granite": ReasoningForm("Here is my thought process:", "Here is my response:"),
}


class ReasoningParser(Parser):
    """Splits text into `Reasoning`, then `Content`.

    Only an opening tag at the very beginning counts. White space next to tags is dropped. With `is_opened`, the prompt
    ends inside the reasoning, and an opening tag at the start is redundant. So it is if the first text that is fed (all
    of an answer that is not streamed) has a closing tag only. A call of the form `tools` that no closing tag follows
    ends the reasoning.

    The states: `_at_start`, `_inside`, `_in_call`, `_after_close`, `_in_answer`.
    """

    def __init__(self, form: ReasoningForm, is_opened: bool, tools: ToolForm | None = None) -> None:
        super().__init__(self._at_start)
        self._form = form
        self._tools = tools
        self._call: list[str] = []  # text from the first call inside the reasoning
        self._is_opened = is_opened
        self._has_reasoning = False  # more than white space
        self._space: list[str] = []  # white space that is dropped if a tag follows

    def feed(self, text: str) -> list[Piece]:
        before, close, _ = text.partition(self._form.close)
        is_json = before.lstrip().startswith(("{", "["))  # with the tag in a string
        if self._state == self._at_start and close and self._form.open not in before and not is_json:
            self._is_opened = True
        return super().feed(text)

    def flush(self) -> list[Piece]:
        if self._state == self._in_call and self._tools is not None:
            text = "".join([*self._call, self._held])
            is_whole = not self._tools.close or any(marker in text for marker in self._tools.close)
            return [Content(text) if is_whole else Reasoning("".join(self._space) + text)]
        text = "".join([*self._space, self._held])
        if self._state == self._at_start and not self._is_opened:
            return [Content(text)] if text else []
        return [Reasoning(text)] if self._held else []

    def _at_start(self, text: str, pieces: list[Piece]) -> str:
        rest, tag = text.lstrip(), self._form.open
        if rest.startswith(tag):
            self._space = []
            self._state = self._inside
            return rest.removeprefix(tag)
        self._space.append(text[: len(text) - len(rest)])
        if tag.startswith(rest):  # also if there is only white space
            self._held = rest
            return ""
        space, self._space = "".join(self._space), []
        self._state = self._inside if self._is_opened else self._in_answer
        return space + rest

    def _inside(self, text: str, pieces: list[Piece]) -> str:
        calls = () if self._tools is None or self._call else self._tools.open
        certain, marker, rest = split_at(text, self._form.close, *calls)
        if not self._has_reasoning:
            certain = certain.lstrip()
        if shown := certain.rstrip():
            pieces.append(Reasoning("".join([*self._space, shown])))
            self._space = []
            self._has_reasoning = True
        self._space.append(certain[len(shown) :])
        if marker in calls:
            self._call = [marker]
            self._state = self._in_call
        elif marker:
            self._space = []
            self._state = self._after_close
        else:
            self._held, rest = rest, ""
        return rest

    def _in_call(self, text: str, pieces: list[Piece]) -> str:
        before, marker, rest = split_at(text, self._form.close)
        self._call.append(before)
        if not marker:
            self._held = rest
            return ""
        self._state = self._inside
        return "".join([*self._call, marker, rest])

    def _after_close(self, text: str, pieces: list[Piece]) -> str:
        rest = text.lstrip()
        if rest:
            self._state = self._in_answer
        return rest

    def _in_answer(self, text: str, pieces: list[Piece]) -> str:
        pieces.append(Content(text))
        return ""
