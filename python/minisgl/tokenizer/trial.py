"""Tries a chat template in a process with limits: whether it can be used, and how it reads messages.

A template could hang the compiler or take all memory.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, Final, TypeVar

import msgspec
from jinja2 import Template
from msgspec.structs import replace

from minisgl.core.errors import RequestError
from minisgl.process.trials import TrialLimits, Trials, serve
from minisgl.tokenizer.folder import NAMES
from minisgl.tokenizer.jinja import compile_template, fill_in
from minisgl.tokenizer.reading import BLANKS, Message, Reading

LIMITS: Final = TrialLimits(cpu_s=2, wall_s=20, memory=256 << 20, stack=8 << 20)  # common templates take 50 ms
TRIAL_DEPTH: Final = 400  # nested Python calls; the server's threads allow 1,000
TOO_MUCH: Final = f"trying it takes more than {LIMITS.cpu_s} s or {LIMITS.memory >> 20} MB"

K = TypeVar("K")
Tools = list[dict[str, Any]] | None

_WORD, _KEY = "qzxjvk", "zqkey"  # no template has them
_PARTS: Final = [{"type": "text", "text": _WORD[:3]}, {"type": "text", "text": _WORD[3:]}]
_CONTENTS: Final[dict[str, Message]] = {"text": {"content": _WORD}, "parts": {"content": _PARTS}, **BLANKS}
_ASK: Final[Message] = {"role": "user", "content": "x"}
_ANSWER: Final[Message] = {"role": "assistant", "content": _WORD}
_FUNCTION: Final = {"name": "f", "arguments": json.dumps({_KEY: _WORD})}
_CALL: Final = {"id": "abcdefghi", "type": "function", "function": _FUNCTION}  # Mistral's ids have 9 characters
_CALLS: Final[Message] = {"role": "assistant", "content": None, "tool_calls": [_CALL]}
_RESULT: Final[Message] = {"role": "tool", "tool_call_id": "abcdefghi", "name": "f", "content": "y"}
_TOOLS: Final = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}]
# Variables that requests do not set.
_KNOWN: Final = {*NAMES, "messages", "tools", "documents", "add_generation_prompt"}


def try_template(source: str, variables: Mapping[str, Any]) -> Reading:
    """Compile a template and render conversations in a child process; return what that shows."""
    return _try(json.dumps([source, dict(variables)]).encode())


@lru_cache
def _try(job: bytes) -> Reading:
    with contextlib.closing(Trials(__name__, timeout_s=2.0 * LIMITS.wall_s)) as trials:
        try:
            found = trials.run(job).splitlines()  # the process may have been killed at a limit
        except OSError as e:
            return Reading(problem=f"trying it failed: {e}")
    return msgspec.json.decode(found[-1], type=Reading) if found else Reading(problem=TOO_MUCH)


def _answer(job: bytes) -> Iterator[bytes]:
    sys.setrecursionlimit(TRIAL_DEPTH)
    yield from (msgspec.json.encode(reading) + b"\n" for reading in _trial(*json.loads(job)))


def _trial(source: str, variables: dict[str, Any]) -> Iterator[Reading]:
    """Yield whether the template can be used, and then how it reads messages."""
    try:
        template, names = compile_template(source)
    except Exception as e:  # compiling may raise any error of Jinja or Python
        cause = str(e).partition("\n")[0]
        yield Reading(problem=f"it does not compile: {cause or type(e).__name__}")
        return
    problem = "it writes nothing"
    try:
        fill_in(template, variables, [_ASK], None, True)
    except RequestError as e:
        if e.__cause__ is None or isinstance(e.__cause__, MemoryError):
            yield Reading(problem=TOO_MUCH)
            return
        problem = f"it refuses every conversation: {e.__cause__}"
    yield Reading()  # in case that the rest takes too much
    for fills, tools in itertools.product((False, True), (None, _TOOLS)):
        reading = _Probe(template, variables, fills, tools).read()
        if any(reading.contents.values()):
            yield reading
            return
    needs_more = names - _KNOWN - template.globals.keys() - variables.keys()  # which requests may set
    yield Reading(problem="" if needs_more else problem)


class _Probe:
    """Finds out how a template reads messages. `_reading` is what is known so far."""

    def __init__(self, template: Template, variables: Mapping[str, Any], fills_tokens: bool, tools: Tools) -> None:
        self._template = template
        self._variables = variables
        self._tools = tools
        self._reading = Reading(fills_tokens=fills_tokens)

    def read(self) -> Reading:
        self._read_contents("user", [], [])
        self._read_contents("system", [], [_ASK])
        self._read_contents("assistant", [_ASK], [_ASK])
        self._read_calls()
        self._read_contents("tool", [_ASK, _CALLS], [])
        last, inner = (self._show(m).rpartition(_WORD) for m in ([_ASK, _ANSWER], [_ASK, _ANSWER, _ASK]))
        if last[1] and inner[1]:
            self._reading = replace(self._reading, ending=os.path.commonprefix([last[2], inner[2]]))  # noqa: RUF071
        return self._reading

    def _show(self, messages: list[Message], tools: Tools = None, **changes: Any) -> str:
        """Return a conversation as text; "" if the template refuses it. `changes` are those of the reading."""
        reading = replace(self._reading, **changes)
        try:
            adapted = [reading.adapt(message) for message in messages]
            return fill_in(self._template, reading.variables(self._variables), adapted, tools or self._tools, False)
        except RequestError:
            return ""

    def _read_contents(self, role: str, before: list[Message], after: list[Message]) -> None:
        """Find the kinds of content of `role` that are shown between the messages `before` and `after`."""
        message = {k: v for k, v in _RESULT.items() if role == "tool" and k != "content"} | {"role": role}
        shown = {}
        for kind, content in _CONTENTS.items():
            contents = self._reading.contents | {role: (kind,)}
            shown[kind] = self._show([*before, message | content, *after], contents=contents)
        text, parts = shown["text"], shown["parts"]
        are_parts = parts.count("type") <= text.count("type") and all(part["text"] in parts for part in _PARTS)
        kinds = ["text"] * (_WORD in text) + ["parts"] * are_parts + _without_none({k: shown[k] for k in BLANKS})
        self._reading = replace(self._reading, contents=self._reading.contents | {role: (*kinds,)})

    def _read_calls(self) -> None:
        """Find the kinds of arguments, and of content beside calls."""
        for after, tools in ([_RESULT], _TOOLS), ([], _TOOLS), ([], None):
            shown = {}
            for pair in itertools.product(Reading().arguments, BLANKS):
                contents = self._reading.contents | {"call": pair[1:]}
                text = self._show([_ASK, _CALLS, *after], tools, contents=contents, arguments=pair[:1])
                shown[pair] = text if _WORD in text and f"'{_KEY}':" not in text else ""
            if pairs := _without_none(shown):
                arguments, kinds = (tuple(dict.fromkeys(column)) for column in zip(*pairs, strict=True))
                contents = self._reading.contents | {"call": kinds}
                self._reading = replace(self._reading, arguments=arguments, contents=contents)
                both = [_ASK, _CALLS | {"reasoning_content": "r", "content": _WORD + _KEY}, *after]
                joins = not self._show(both, tools) and _WORD + _KEY in self._show(both, tools, joins_thoughts=True)
                self._reading = replace(self._reading, joins_thoughts=joins)
                return


def _without_none(shown: dict[K, str]) -> list[K]:
    """Return the keys of the texts that the template has not refused, and in which the fewest "None" are printed."""
    nones = {key: text.count("None") for key, text in shown.items() if text}
    return [key for key, count in nones.items() if count == min(nones.values())]


if __name__ == "__main__":
    serve(_answer, LIMITS)
