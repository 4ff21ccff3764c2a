"""Conversations, how they are written as text (ChatML), how an answer is checked, and how items are split."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, TypeVar

T = TypeVar("T")
Span = tuple[str, bool]
"""A piece of text, and whether the model is trained to produce it."""

TOOLS_HEAD = (
    "# Tools\n\nYou may call functions to help the user. Their signatures, one JSON object a line, are within "
    "<tools></tools>:\n<tools>"
)
TOOLS_TAIL = (
    "\n</tools>\n\nTo call a function, answer with its name and arguments as a JSON object within "
    '<tool_call></tool_call>:\n<tool_call>\n{"name": <function-name>, "arguments": <arguments-object>}\n</tool_call>'
)


@dataclass(frozen=True)
class Check:
    """How the answer to a turn is judged. ``kind``: exact, contains, number, json, tool, story or any."""

    kind: str
    want: Any = None

    def passes(self, answer: str) -> bool:
        """Whether ``answer`` (the text before the end token) is right."""
        return _CHECKS[self.kind](answer, self.want)


def _contains(answer: str, want: Sequence[str]) -> bool:
    return all(re.search(rf"(?<!\w){re.escape(w)}(?!\w)", answer, re.IGNORECASE) for w in want)


def _number(answer: str, want: int) -> bool:
    found = re.findall(r"-?\d+", answer)
    return bool(found) and int(found[-1]) == want


def _json(answer: str, want: Any) -> bool:
    try:
        return bool(json.loads(answer) == want)
    except ValueError:
        return False


def _tool(answer: str, want: list[dict[str, Any]]) -> bool:
    calls = re.findall(r"<tool_call>\n(.*?)\n</tool_call>", answer, re.DOTALL)
    try:
        return [json.loads(call) for call in calls] == want
    except ValueError:
        return False


def _story(answer: str, want: Sequence[str]) -> bool:
    return _contains(answer, want) and 40 <= len(answer.split()) <= 220 and answer.rstrip()[-1] in '.!?"'


_CHECKS: dict[str, Callable[[str, Any], bool]] = {
    "exact": lambda answer, want: answer == want,
    "contains": _contains,
    "number": _number,
    "json": _json,
    "tool": _tool,
    "story": _story,
    "any": lambda answer, want: bool(answer.strip()),
}


@dataclass(frozen=True)
class Turn:
    """What one side says and the answer. ``check`` is None where the answer is small talk that nobody grades."""

    user: str
    answer: str
    check: Check | None = None


@dataclass
class Episode:
    """Turns of one skill, with the system prompt or tools that they need."""

    turns: list[Turn]
    system: str | None = None
    tools: list[dict[str, Any]] = field(default_factory=list)


def dumps(value: Any) -> str:
    """JSON as the chat template's ``tojson`` writes it."""
    return json.dumps(value, ensure_ascii=False)


def tool_call(name: str, arguments: dict[str, Any]) -> str:
    """The text by which the model calls a tool."""
    return f"<tool_call>\n{dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def tool_response(content: str) -> str:
    """What the template makes of a message of role ``tool``: a user turn with the result."""
    return f"<tool_response>\n{content}\n</tool_response>"


def system_text(system: str | None, tools: Sequence[dict[str, Any]]) -> str | None:
    """The content of the system turn, or None where there is none."""
    if not tools:
        return system
    listing = "".join("\n" + dumps(tool) for tool in tools)
    return (f"{system}\n\n" if system else "") + TOOLS_HEAD + listing + TOOLS_TAIL


def render(episode: Episode, upto: int | None = None) -> list[Span]:
    """The conversation as spans. With ``upto``, the prompt for the answer of turn ``upto`` (its answer left out)."""
    spans: list[Span] = []
    system = system_text(episode.system, episode.tools)
    head = f"<|im_start|>system\n{system}<|im_end|>\n" if system is not None else ""
    for i, turn in enumerate(episode.turns):
        spans.append((f"{head}<|im_start|>user\n{turn.user}<|im_end|>\n<|im_start|>assistant\n", False))
        if i == upto:
            return spans
        spans.append((f"{turn.answer}<|im_end|>", True))
        head = "\n"
    return spans


def messages(episode: Episode, upto: int) -> list[dict[str, str]]:
    """The same prompt as OpenAI-style messages (tool calls and results as plain text)."""
    result = [] if episode.system is None else [{"role": "system", "content": episode.system}]
    for i, turn in enumerate(episode.turns[: upto + 1]):
        result.append({"role": "user", "content": turn.user})
        if i < upto:
            result.append({"role": "assistant", "content": turn.answer})
    return result


def is_held_out(key: str) -> bool:
    """Whether the item belongs to the tenth that training never sees. Stable across runs and machines."""
    return hashlib.blake2b(key.encode(), digest_size=8).digest()[0] % 10 == 0


def draw(held_out: bool, propose: Callable[[], tuple[str, T]]) -> T:
    """Proposes items until one lies on the wanted side of the split."""
    for _ in range(10_000):
        key, item = propose()
        if is_held_out(key) == held_out:
            return item
    raise RuntimeError("no item on the wanted side of the split: the skill has too few items")


_SOFTENERS = (
    "Please ",
    "Hey, ",
    "Hi! ",
    "Ok, ",
    "Now ",
    "And now: ",
    "Could you help me? ",
    "Quick question: ",
    "Well, ",
    "So, ",
)


def vary(rng: Random, template: str) -> str:
    """A template with the case and punctuation that people really type; slots in braces stay whole."""
    roll = rng.random()
    if roll < 0.12:
        template = template.lower()
    elif roll < 0.15:
        template = "".join(p if p.startswith("{") else p.upper() for p in re.split(r"(\{\w*\})", template))
    elif roll < 0.22:
        template = rng.choice(_SOFTENERS) + template[0].lower() + template[1:]
    elif roll < 0.27:
        template = template[0].lower() + template[1:]
    if rng.random() < 0.12 and template[-1] in "?.!" and not template.endswith("..."):
        template = template[:-1] + rng.choice(("", "", "!", " ?"))
    elif rng.random() < 0.05 and template[-1] in "?.":
        template += rng.choice((" Thanks!", " Thank you.", " :)", " please"))
    return template


def phrase(rng: Random, templates: Sequence[str], **slots: Any) -> str:
    """One of the templates, varied and filled."""
    return vary(rng, rng.choice(templates)).format(**slots)
