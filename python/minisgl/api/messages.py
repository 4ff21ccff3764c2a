"""What of a conversation goes to the chat template: its messages, its tools, and other names."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from minisgl.api.protocol import ChatMessage
from minisgl.errors import RequestError

ROLES: Final = ("system", "developer", "user", "assistant", "tool")
MAX_TEMPLATE_KWARGS: Final = 32
_RESERVED_KWARGS: Final = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message")


def template_message(message: ChatMessage) -> dict[str, Any]:
    """A chat message as templates expect it: text content, tool arguments as objects."""
    if message.role not in ROLES:
        raise RequestError(f"role {message.role[:40]!r} is not one of {', '.join(ROLES)}", param="messages")
    result: dict[str, Any] = {"role": message.role, "content": _text(message.content)}
    if message.name is not None:
        result["name"] = message.name
    if message.tool_call_id is not None:
        result["tool_call_id"] = message.tool_call_id
    if message.reasoning_content is not None:
        result["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        result["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    return result


def _text(content: str | list[dict[str, Any]] | None) -> str:
    """The text; parts are put together as chat templates that know them do, with nothing in between."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in content:
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise RequestError(
                f'a content part must be {{"type": "text", "text": "..."}}; the type is {str(part.get("type"))[:40]!r}',
                param="messages",
                code="unsupported_value",
            )
        texts.append(part["text"])
    return "".join(texts)


def _arguments(arguments: str | dict[str, Any] | None) -> dict[str, Any]:
    if isinstance(arguments, dict):
        return arguments
    try:
        value = msgspec.json.decode(arguments or "{}", type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError) as e:
        raise RequestError(f"arguments of a tool call must be a JSON object: {e}", param="messages") from e
    return value


def check_tool(tool: dict[str, Any]) -> None:
    """Raises `RequestError` unless `tool` describes a function."""
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, dict):
        raise RequestError('each of tools must be {"type": "function", "function": {...}}', param="tools")
    name, parameters = function.get("name"), function.get("parameters")
    if not (isinstance(name, str) and name and (parameters is None or isinstance(parameters, dict))):
        raise RequestError("each of tools must have a name, and parameters that are an object", param="tools")


def check_template_kwargs(kwargs: dict[str, Any]) -> None:
    """Raises `RequestError` for what a client may not hand to the template."""
    if len(kwargs) > MAX_TEMPLATE_KWARGS:
        raise RequestError(
            f"chat_template_kwargs takes at most {MAX_TEMPLATE_KWARGS} names", param="chat_template_kwargs"
        )
    for name, value in kwargs.items():
        is_scalar = not isinstance(value, int) or abs(value) < 2**63
        if not name.isidentifier() or name in _RESERVED_KWARGS or not is_scalar:
            raise RequestError(f"chat_template_kwargs may not set {name!r}", param="chat_template_kwargs")
