"""A chat completion, as every API of conversations asks for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from fastapi import Request

from minisgl.api.fields import unread_kwargs
from minisgl.api.http import tell_ignored
from minisgl.api.parsers.output import SWITCHES, OutputParser
from minisgl.api.protocol import ChatCompletionRequest, ForeignChat, SamplingFields
from minisgl.api.requests import ServedModel, chat_message
from minisgl.errors import RequestError
from minisgl.message import TokenizeMsg
from minisgl.settings.options import ServerArgs


def prepared(
    request: Request,
    chat: ChatCompletionRequest,
    args: ServerArgs,
    model: ServedModel,
    names: Mapping[str, str] | None = None,
) -> tuple[TokenizeMsg, Callable[[], OutputParser] | None]:
    """The message for `chat`, which `request` asks for, and the factory of its parser (None: no parser needed).

    `names` are the names that the request's API has for fields of a chat. Raises `RequestError` with these names.
    """
    names = names or {}
    refuses = args.unknown_fields == "refuse"
    tell_ignored(request, unread_kwargs(chat.chat_template_kwargs, model.template_variables, refuses))
    try:
        message, new_parser = model.forms.prepare(chat, chat_message(chat, model.defaults, model.limits))
    except RequestError as e:
        if e.param is None or e.param not in names:
            raise
        text = e.message.replace(e.param, names[e.param], 1)
        raise RequestError(text, param=names[e.param], code=e.code, status=e.status) from e
    params = message.sampling_params
    if params.grammar is not None and params.grammar.param in names:  # its text is judged later
        grammar = msgspec.structs.replace(params.grammar, param=names[params.grammar.param])
        message = msgspec.structs.replace(message, sampling_params=msgspec.structs.replace(params, grammar=grammar))
    return message, new_parser


def shared_fields(body: ForeignChat, model: ServedModel, thinks: bool | None) -> dict[str, Any]:
    """The fields of the chat that `body` has under the same names.

    `thinks` sets the template's switch for reasoning, if it has one and `body` does not set it.
    """
    switches = {} if thinks is None else {name: thinks for name in SWITCHES if name in model.template_variables}
    kwargs = switches | (body.chat_template_kwargs or {})
    given = {name: getattr(body, name) for name in SamplingFields.__struct_fields__}
    return given | {"seed": body.seed, "chat_template_kwargs": kwargs}


def json_schema_format(schema: Any) -> dict[str, Any]:
    """The `response_format` of a chat for a JSON Schema."""
    return {"type": "json_schema", "json_schema": {"schema": schema}}
