"""Prepares chat completions for all APIs of conversations: OpenAI's two and Anthropic's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fastapi import Request

from minisgl.api.fields import unread_kwargs
from minisgl.api.http import NAMES, report_ignored
from minisgl.api.parsers.output import SWITCHES, OutputParser
from minisgl.api.protocol import ChatCompletionRequest, ForeignChat, SamplingFields
from minisgl.api.requests import ServedModel, chat_message
from minisgl.message import TokenizeMsg
from minisgl.settings.options import ServerArgs


def prepared(
    request: Request,
    chat: ChatCompletionRequest,
    args: ServerArgs,
    model: ServedModel,
    names: Mapping[str, str] | None = None,
) -> tuple[TokenizeMsg, Callable[[], OutputParser] | None]:
    """Return the message for `chat`, and a factory of its output parser (None: it needs no parser).

    `names` maps fields of a chat to their names in the API of `request`. All later errors of `request` use them.
    """
    request.scope[NAMES] |= names or {}
    refuses = args.unknown_fields == "refuse"
    report_ignored(request, unread_kwargs(chat.chat_template_kwargs, model.template_variables, refuses))
    return model.forms.prepare(chat, chat_message(chat, model.defaults, model.limits))


def shared_fields(body: ForeignChat, model: ServedModel, thinks: bool | None) -> dict[str, Any]:
    """Return the fields of a chat that `body` has under the same names.

    `thinks` turns reasoning on or off, if the template has a switch for it that `body` does not set.
    """
    switches = {} if thinks is None else {name: thinks for name in SWITCHES if name in model.template_variables}
    kwargs = switches | (body.chat_template_kwargs or {})
    given = {name: getattr(body, name) for name in SamplingFields.__struct_fields__}
    return given | {"seed": body.seed, "chat_template_kwargs": kwargs}


def json_schema_format(schema: Any) -> dict[str, Any]:
    """Return the `response_format` of a chat for a JSON Schema."""
    return {"type": "json_schema", "json_schema": {"schema": schema}}
