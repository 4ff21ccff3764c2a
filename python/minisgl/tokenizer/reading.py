"""How a chat template reads messages, and messages in the form that it reads.

A template is written for one form of messages, and OpenAI's API allows several. A message reaches the template as in
transformers: as the client sent it, but without nulls, and with the reasoning under all its names. Where the template
fails with that, drops it, or shows Python's repr of it, another form is used.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from minisgl.tokenizer.folder import NAMES

Message = dict[str, Any]

# Content without text, in the order of preference.
BLANKS: Final[dict[str, Message]] = {"absent": {}, "null": {"content": None}, "empty": {"content": ""}}
REASONING: Final = ("reasoning_content", "thinking", "reasoning")  # names of the same field
MAX_DEPTH: Final = 100  # levels of JSON in the arguments of a call; a template may read them recursively
INVALID: Final = "INVALID_JSON"  # Anthropic's key for arguments that are not a JSON object, where one is needed


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """What the trial of a template has found out.

    `problem` says why the template cannot be used. `ending` is the text that it writes after an answer. `contents` has
    the kinds of content that it shows, by role: "text", "parts" (a list) or one of `BLANKS`; "call" is the role of an
    assistant's message with calls and without text. `arguments` has the kinds of a call's arguments: "object", "text".
    `joins_thoughts`: beside calls, the template takes text or reasoning, but not both, so the text becomes reasoning.
    """

    problem: str = ""
    ending: str = ""
    fills_tokens: bool = False  # special tokens that the model lacks are "", not undefined
    contents: dict[str, tuple[str, ...]] = {}
    arguments: tuple[str, ...] = ("object", "text")
    joins_thoughts: bool = False

    def variables(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the variables of the template, `given` those that are known."""
        return (dict.fromkeys(NAMES, "") if self.fills_tokens else {}) | dict(given)

    def adapt(self, message: Message) -> Message:
        """Return a copy of `message` in the form that the template reads."""
        result = {k: v for k, v in message.items() if v is not None}
        if (reasoning := next((result[name] for name in REASONING if name in result), None)) is not None:
            result = {"thinking": reasoning, **result, "reasoning_content": reasoning}
        content, calls = result.get("content"), result.get("tool_calls")
        if self.joins_thoughts and calls and reasoning and isinstance(content, str) and content:
            result |= dict.fromkeys(REASONING, f"{reasoning}\n\n{content}")
            result["content"] = content = ""
        if calls:
            result["tool_calls"] = [self._call(call) for call in calls]
        kinds = self.contents.get("call" if calls and not content else str(result.get("role")), ())
        if isinstance(content, list) and "parts" not in kinds:
            texts = [text for part in content if isinstance(part, dict) and isinstance(text := part.get("text"), str)]
            if len(texts) == len(content):
                result["content"] = content = "".join(texts)
        elif content and isinstance(content, str) and "parts" in kinds and "text" not in kinds:
            result["content"] = [{"type": "text", "text": content}]
        blanks = [kind for kind in BLANKS if kind in kinds]
        if not content and blanks and ("empty" if "content" in result else "absent") not in blanks:
            result.pop("content", None)
            result |= BLANKS[blanks[0]]
        return result

    def _call(self, call: Any) -> Any:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict):
            return call
        read = function | {"arguments": self._arguments(function.get("arguments"))}
        return call | {"function": read} if "function" in call else read

    def _arguments(self, given: Any) -> Any:
        """Return a call's arguments as an object if possible; blank and null are an empty one."""
        text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False, default=str)
        if text.strip() in ("", "null"):
            text = "{}"
        value = given if isinstance(given, dict) else _json_object(text)
        if value is not None and "object" in self.arguments:
            return value
        return text if "text" in self.arguments else {INVALID: text}


def _json_object(text: str) -> dict[str, Any] | None:
    """Return the JSON object in `text`; None if there is none, or if it cannot be written again."""
    try:
        value = msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, ValueError, RecursionError):  # also for numbers beyond float64
        return None
    level: list[Any] = [value]
    depth = 0
    while level and depth <= MAX_DEPTH:
        parts = (v for part in level for v in (part.values() if isinstance(part, dict) else part))
        level, depth = [part for part in parts if isinstance(part, dict | list)], depth + 1
    return value if depth <= MAX_DEPTH else None
