"""Hugging Face's chat templates: Jinja in a sandbox, with the conventions of transformers.

A template comes from the model folder, never from a client. Clients only provide messages, and rendering is limited in
size and time. A template could still hang the compiler or take all memory, so each is first tried in a process with
limits, which runs this module as a program.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from minisgl.errors import RequestError
from minisgl.process.limits import limit_resources, module_environment
from minisgl.tokenizer.folder import read_settings, special_names

MAX_MESSAGES: Final = 2048  # templates may loop over messages within messages
MAX_RENDERED_CHARS: Final = 16 * 1024 * 1024
MAX_RENDER_SECONDS: Final = 5.0
TRIAL_CPU_S: Final = 2  # to compile and render a template; common ones take 20 ms
TRIAL_WALL_S: Final = 20.0  # the same in wall time, for busy machines
TRIAL_MEMORY: Final = 256 << 20
TRIAL_STACK: Final = 8 << 20
TRIAL_DEPTH: Final = 400  # nested Python calls; the server's threads allow 1,000
TOO_MUCH: Final = f"trying it takes more than {TRIAL_CPU_S} s or {TRIAL_MEMORY >> 20} MB"
_CONTINUE_MARK: Final = "\ue000continue-here\ue000"  # private-use characters: no template strips or escapes them


class _Generation(Extension):
    """`{% generation %}`, which marks the assistant's tokens for trainers. It opens a scope and adds no text."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's declaration)

    def parse(self, parser: Parser) -> nodes.Scope:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


@lru_cache
def _compile(source: str) -> tuple[Template, frozenset[str]]:
    """Compile a template; return it, and the names of the variables that it reads."""
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    env.filters["tojson"] = _to_json
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = _strftime_now
    return env.from_string(source), frozenset(find_undeclared_variables(env.parse(source)))


def _sources(folder: Path, settings: dict[str, Any]) -> dict[str, str]:
    """Return name -> text of all templates; a single one is "default". Files override tokenizer_config.json."""
    files = {"default": folder / "chat_template.jinja"}
    files |= {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if named := {n: f.read_text(encoding="utf-8", errors="replace") for n, f in files.items() if f.is_file()}:
        return named
    value = settings.get("chat_template")
    if isinstance(value, str):
        return {"default": value}
    if not isinstance(value, list):
        return {}
    listed = (t for t in value if isinstance(t, dict) and {"name", "template"} <= t.keys())
    return {str(t["name"]): str(t["template"]) for t in listed}


@dataclass(frozen=True)
class ChatTemplate:
    """The chat templates of one model folder by name, as text. `render` turns messages into the prompt's text.

    `problems` has the reason for each template that cannot be used. `defaults` are variables that requests may set.
    """

    sources: dict[str, str]
    special_tokens: dict[str, str]
    problems: dict[str, str]
    defaults: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of_folder(
        cls, folder: Path, source: str | None = None, defaults: Mapping[str, Any] | None = None
    ) -> ChatTemplate:
        """Read the templates of a folder, which may have none, or use only `source`; and try each.

        Raises `ConfigError` for unreadable JSON.
        """
        settings = read_settings(folder)
        sources = _sources(folder, settings) if source is None else {"default": source}
        problems = {name: problem for name, text in sources.items() if (problem := _try(text))}
        return cls(sources, special_names(settings), problems, dict(defaults or {}))

    @property
    def source(self) -> str:
        """The text of all templates, from which the model's abilities are detected."""
        return "\n".join(self.sources.values())

    @property
    def variables(self) -> frozenset[str]:
        """The names of the variables that the templates read."""
        usable = (text for name, text in self.sources.items() if name not in self.problems)
        return frozenset().union(*(_compile(text)[1] for text in usable))

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """Render a conversation as text, special tokens included.

        `continue_final_message` leaves the last message open, so that the model continues it. Raises `RequestError` if
        no template is usable, or if the template rejects the conversation.
        """
        name = "tool_use" if tools and "tool_use" in self.sources else "default"
        problem = self.problems.get(name)
        if problem is not None or name not in self.sources:
            why = "no chat template" if problem is None else f"a chat template that cannot be used ({problem})"
            raise RequestError(f"this model has {why}; use /v1/completions", param="messages", code="no_chat_template")
        template, known = _compile(self.sources[name])
        if len(messages) > MAX_MESSAGES:
            raise RequestError(f"messages has {len(messages)} entries; the limit is {MAX_MESSAGES}", param="messages")
        messages = [self._adapt(m) for m in messages]
        if continue_final_message:
            if not messages or not isinstance(messages[-1].get("content"), str):
                raise RequestError(
                    "continue_final_message needs a last message with text", param="continue_final_message"
                )
            final = messages[-1]["content"]
            messages[-1]["content"] = final.rstrip() + _CONTINUE_MARK
        # The conventional names come last, so that `variables` cannot override them.
        given = self.defaults | dict(variables or {})
        context = self.special_tokens | {k: v for k, v in given.items() if k in known}
        text = _fill_in(template, context, messages, tools, add_generation_prompt)
        if continue_final_message:
            head, mark, _ = text.rpartition(_CONTINUE_MARK)
            if not mark:
                raise RequestError("the chat template drops the last message", param="continue_final_message")
            text = head + final[len(final.rstrip()) :]
        return text

    def _adapt(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return a copy for the template. "developer" becomes "system": few templates know OpenAI's newer name."""
        if message.get("role") == "developer" and "developer" not in self.source:
            return {**message, "role": "system"}
        return dict(message)


def _fill_in(
    template: Template,
    context: dict[str, Any],
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    add_generation_prompt: bool,
) -> str:
    context |= {"messages": messages, "tools": tools or None, "documents": None}
    context["add_generation_prompt"] = add_generation_prompt
    deadline = time.monotonic() + MAX_RENDER_SECONDS
    parts: list[str] = []
    size = 0
    try:
        for piece in template.generate(context):
            parts.append(piece)
            size += len(piece)
            if size > MAX_RENDERED_CHARS or time.monotonic() > deadline:
                raise RequestError("the conversation is too large for the chat template", param="messages")
    except RequestError:
        raise
    except Exception as e:  # a template is a program: a missing field can raise anything
        raise RequestError(
            f"the chat template refuses this conversation: {e}", param="messages", code="chat_template_error"
        ) from e
    return "".join(parts)


@lru_cache
def _try(source: str) -> str:
    """Compile a template and render one message, in a child process. Return why that fails; "" if it works."""
    command = [sys.executable, "-m", "minisgl.tokenizer.template"]
    limits: dict[str, Any] = {"timeout": TRIAL_WALL_S, "env": module_environment(), "process_group": 0}
    try:
        done = subprocess.run(command, input=source.encode(errors="replace"), capture_output=True, **limits)
    except subprocess.TimeoutExpired:
        return TOO_MUCH
    if done.returncode > 0:
        lines = done.stderr.decode().splitlines() or ["no reason given"]
        return f"trying it failed: {lines[-1]}"
    return TOO_MUCH if done.returncode else done.stdout.decode()  # below 0: killed at a limit


def _trial(source: str) -> str:
    try:
        template, _ = _compile(source)
    except Exception as e:  # compiling may raise any error of Jinja or Python
        cause = str(e).partition("\n")[0]
        return f"it does not compile: {cause or type(e).__name__}"
    try:
        _fill_in(template, {}, [{"role": "user", "content": "x"}], None, True)
    except RequestError as e:
        is_too_large = e.__cause__ is None or isinstance(e.__cause__, MemoryError)
        return TOO_MUCH if is_too_large else ""  # other errors are about this conversation
    return ""


if __name__ == "__main__":
    limit_resources(TRIAL_CPU_S, TRIAL_MEMORY, TRIAL_STACK)
    sys.setrecursionlimit(TRIAL_DEPTH)
    sys.stdout.buffer.write(_trial(sys.stdin.buffer.read().decode()).encode())
