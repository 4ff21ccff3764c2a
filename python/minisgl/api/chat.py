"""Prepares chat completions for all APIs of conversations: OpenAI's two and Anthropic's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec
from starlette.requests import Request

from minisgl.api.fields import unread_kwargs
from minisgl.api.http import NAMES, report_ignored
from minisgl.api.parsers.output import EFFORT, OutputParser
from minisgl.api.protocol import ChatCompletionRequest
from minisgl.api.requests import ServedModel, chat_message, check_tool, unsupported_type
from minisgl.core.errors import RequestError, unsupported
from minisgl.core.message import TokenizeMsg
from minisgl.core.params import MAX_INT32
from minisgl.settings.options import ServerArgs

# Fields of a chat that turn reasoning on or off, and those of its values that turn it off.
THINKS: Final = (
    *("thinking.type", "thinking", "enable_thinking", "think", "reasoning.enabled", "reasoning.effort", EFFORT),
)
OFF: Final = (False, 0, "none", "disabled", "off")
# Fields of a chat that limit reasoning. 0 turns it off, and OpenRouter's name turns it on.
BUDGETS: Final = ("thinking.budget_tokens", "reasoning.max_tokens", "thinking_budget")
NO_LIMIT: Final = -1
TEXT: Final = {"type": "text"}


def prepared(
    request: Request,
    chat: ChatCompletionRequest,
    args: ServerArgs,
    model: ServedModel,
    names: Mapping[str, str] | None = None,
    thinks: bool | None = None,
) -> tuple[TokenizeMsg, Callable[[], OutputParser]]:
    """Return the message for `chat`, and a factory of its output parser.

    `names` maps fields of a chat to their names in the API of `request`. All later errors of `request` use them.
    `thinks` turns reasoning on or off if `chat` does not.
    """
    names = names or {}
    request.scope[NAMES] |= names
    chat, customs, left_out = with_functions(chat)
    budgets = {name: value for name in BUDGETS if (value := _at(chat, name)) is not None}
    budget = next(iter(budgets.values()), args.thinking_budget)
    chat, unread = _with_switches(chat, budgets, model, thinks if budget else False)
    unread += unread_kwargs(chat.chat_template_kwargs, model.template_variables, args.unknown_fields == "refuse")
    report_ignored(request, left_out + [names.get(name, name) for name in unread])
    try:
        message = chat_message(chat, model.defaults, model.limits)
        return model.forms.prepare(chat, message, customs, None if budget == NO_LIMIT else budget)
    except RequestError as e:
        if e.param != "tool_choice" or not left_out:
            raise
        text = f"{e.message}; this server cannot run and leaves out {', '.join(left_out)[:200]}"
        raise RequestError(text, param=e.param, code=e.code, status=e.status) from e


def with_functions(chat: ChatCompletionRequest) -> tuple[ChatCompletionRequest, frozenset[str], list[str]]:
    """Return `chat` with functions as its only tools, the names of those that were custom tools, and what is left out.

    A custom tool becomes a function of one text. Tools of other types run in a service.
    """
    functions, customs, left_out = [], set(), []
    for i, tool in enumerate(chat.tools or ()):
        match tool:
            case {"type": "custom", "custom": {"name": str(name)} as custom}:
                functions.append(_text_function(custom))
                customs.add(name)
                left_out += ["tools.format"] * (custom.get("format", TEXT) != TEXT)
            case {"type": str(kind)} if kind not in ("", "custom", "function"):
                left_out.append(f"tools.{kind}")
            case _:
                check_tool(tool, f"tools[{i}]")  # here, since what is left out counts
                functions.append(tool)
    choice = chat.tool_choice
    if isinstance(choice, dict) and choice.get("type") == "custom":
        choice = {"type": "function", "function": choice.get("custom")}
    if any(call.called is None for message in chat.messages for call in message.tool_calls or ()):
        left_out.append("messages.tool_calls")
    tools = None if chat.tools is None else functions
    return msgspec.structs.replace(chat, tools=tools, tool_choice=choice), frozenset(customs), left_out


def _text_function(custom: dict[str, Any]) -> dict[str, Any]:
    """Return the function for a custom tool. The grammar of its text is not enforced, but the model is told."""
    description = str(custom.get("description") or "")
    match custom.get("format"):
        # nested in a chat, but not in a response
        case {"grammar": {"definition": str(grammar)}} | {"definition": str(grammar)}:
            description += f"\n\nThe input must match this grammar:\n{grammar}"
    schema = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    parameters = schema | {"additionalProperties": False}
    return {
        "type": "function",
        "function": {"name": custom["name"], "description": description, "parameters": parameters},
    }


def _with_switches(
    chat: ChatCompletionRequest, budgets: dict[str, int], model: ServedModel, default: bool | None
) -> tuple[ChatCompletionRequest, list[str]]:
    """Return `chat` with the template's variables for the reasoning that it asks for, and its fields without an effect.

    `default` counts if it asks for nothing; `chat_template_kwargs` override all. `budgets` are its fields with a limit.
    Raises `RequestError` (400) if fields contradict each other, if there is no reasoning to limit, or if the template
    has no switch to turn reasoning off, and no limit can be enforced.
    """
    forms, variables = model.forms, model.template_variables
    kwargs = dict(chat.chat_template_kwargs or {})
    given: dict[str, Any] = {}
    given |= {name: value for name in THINKS if isinstance(value := _at(chat, name), str | int)}
    given |= {n: bool(v) for n, v in budgets.items() if v == 0 or (v > 0 and n == "reasoning.max_tokens")}
    if forms.switches:  # clients use both names, whatever the template calls its switch
        foreign = [n for n in ("enable_thinking", "thinking") if n not in variables and isinstance(kwargs.get(n), bool)]
        given |= {f"chat_template_kwargs.{name}": kwargs.pop(name) for name in foreign}
    levels = {name: v for name, v in given.items() if isinstance(v, str) and v not in OFF and name != "thinking.type"}
    asked = {name: value not in OFF for name, value in given.items() if name not in levels}
    thinks = next(iter(asked.values()), True if levels and default is None else default)
    if given.get("thinking.type", "auto") not in ("enabled", "adaptive", "auto", "disabled"):
        raise unsupported_type("thinking", given["thinking.type"], "thinking")
    unread: dict[str, None] = {}
    for name, budget in budgets.items():
        if not NO_LIMIT <= budget <= MAX_INT32:
            rule = f"must be a number of tokens up to {MAX_INT32}, 0 (no reasoning) or -1 (no limit)"
            raise unsupported(f"{name} {rule}", name)
        if budget != next(iter(budgets.values())):
            raise RequestError(f"{name} contradicts {next(iter(budgets))}", param=name)
        if budget > 0 and forms.reasoning is None:
            if name != BUDGETS[0]:  # which comes with every request for thinking
                raise unsupported(f"{name}: no markers of this model's reasoning are known (--reasoning-parser)", name)
            unread[name] = None
    for name, is_on in asked.items():
        if is_on is not thinks:
            raise RequestError(f"{name} contradicts {next(iter(asked))}", param=name)
        can_limit = name in budgets and forms.reasoning is not None
        if not is_on and not (forms.switches or can_limit) and (forms.reasoning is not None or EFFORT in variables):
            why = "the chat template of this model has no switch for it; leave the field out"
            raise unsupported(f"{name}: reasoning cannot be turned off: {why}", name)
    if chat.reasoning and chat.reasoning.summary is not None:  # reasoning is returned as the model wrote it
        unread["reasoning.summary"] = None
    if thinks and not forms.switches and forms.reasoning is None:
        unread |= dict.fromkeys(asked)
    values = {} if thinks is None else {name: pair[thinks] for name, pair in forms.switches.items()}
    if levels and EFFORT in variables and (thinks is not False or EFFORT not in forms.switches):
        values[EFFORT] = next(iter(levels.values()))
    else:
        unread |= dict.fromkeys(levels)
    return msgspec.structs.replace(chat, chat_template_kwargs=values | kwargs), list(unread)


def _at(value: Any, path: str) -> Any:
    """Return the field of `value` at a dotted `path`; None if it is not set."""
    for name in path.split("."):
        value = getattr(value, name, None)
    return value


def shared_fields(body: msgspec.Struct, kind: type[msgspec.Struct] = ChatCompletionRequest) -> dict[str, Any]:
    """Return the fields of a `kind` that `body` has under the same names, without nulls."""
    return {name: v for name in kind.__struct_fields__ if (v := getattr(body, name, None)) is not None}


def json_schema_format(schema: Any) -> dict[str, Any]:
    """Return the `response_format` of a chat for a JSON Schema."""
    return {"type": "json_schema", "json_schema": {"schema": schema}}
