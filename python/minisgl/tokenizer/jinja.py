"""Compiles Jinja templates and renders them in a sandbox, within limits, with the conventions of transformers."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache, partial
from typing import Any, Final

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from minisgl.core.errors import RequestError

MAX_RENDERED_CHARS: Final = 16 * 1024 * 1024
MAX_RENDER_SECONDS: Final = 5.0


class _Generation(Extension):
    """`{% generation %}`, which marks the assistant's tokens for trainers. It opens a scope and adds no text."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's declaration)

    def parse(self, parser: Parser) -> nodes.Scope:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


@lru_cache
def compile_template(source: str) -> tuple[Template, frozenset[str]]:
    """Compile a template; return it, and the names of the variables that it reads."""
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    env.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = _strftime_now
    return env.from_string(source), frozenset(find_undeclared_variables(env.parse(source)))


def fill_in(
    template: Template,
    variables: Mapping[str, Any],
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    add_generation_prompt: bool,
) -> str:
    """Render a conversation. Raises `RequestError` if it is too large, or if the template refuses it."""
    # The conventional names come last, so that `variables` cannot override them.
    context = {**variables, "messages": messages, "tools": tools or None, "documents": None}
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
