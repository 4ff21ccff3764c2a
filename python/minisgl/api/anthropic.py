"""Anthropic's `/v1/messages` and `/v1/messages/count_tokens`, translated to and from chat completions."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from minisgl.api import protocol as p
from minisgl.api.chat import json_schema_format, prepared, shared_fields
from minisgl.api.frontend import Timeline
from minisgl.api.http import MODEL, anthropic_error, report_ignored, to_json
from minisgl.api.parsers.output import TOOL_CALLS, OutputParser, Step
from minisgl.api.parsers.pieces import Content, ParsedCall, Piece
from minisgl.api.requests import ServedModel, text_of, unsupported_type
from minisgl.api.responses import Renderer, named_event, response_to
from minisgl.api.routes import SSE, Routes
from minisgl.core.errors import RequestError
from minisgl.core.message import TokenizeMsg, UserReply
from minisgl.core.plan import FinishReason

# Field of a chat -> Anthropic's.
NAMES: Final = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
}
ROLES: Final = ("user", "assistant", "system")
CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}
# Endings of the types of blocks that only a service can read, besides all unknown ones in an assistant's message.
OF_SERVICES: Final = ("_tool_use", "_tool_result", "tool_reference", "redacted_thinking")
READ: Final = ("text", "thinking", "tool_use")  # of an assistant's message
PING: Final = named_event("ping", {})


def chat_messages(body: p.MessagesRequest) -> tuple[list[p.ChatMessage], list[str]]:
    """Return the messages of a chat, and the types of blocks left out, which only a service can read.

    Raises `RequestError` for other types of blocks that are not supported.
    """
    messages: list[p.ChatMessage] = []
    left_out: list[str] = []
    if body.system is not None:
        messages.append(p.ChatMessage("system", text_of(body.system, "system")))
    for message in body.messages:
        if message.role not in ROLES:
            raise RequestError(f"role {message.role[:40]!r} is not one of {', '.join(ROLES)}", param="messages")
        content = message.content
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        read = _assistant_message if message.role == "assistant" else _other_messages
        messages += read(message.role, _readable(message.role, blocks, left_out))
    return messages, left_out


def _readable(role: str, blocks: list[dict[str, Any]], left_out: list[str]) -> list[dict[str, Any]]:
    """Return the `blocks` that can be read, also within results of tools; add the types of the others to `left_out`."""
    readable = []
    for block in blocks:
        match block:
            case {"type": str(kind)} if kind.endswith(OF_SERVICES) or (role == "assistant" and kind not in READ):
                left_out.append(f"messages.{kind}")
            case {"type": "tool_result", "content": list(content)} if role == "user":
                readable.append(block | {"content": _readable("tool", content, left_out)})
            case _:
                readable.append(block)
    return readable


def _other_messages(role: str, blocks: list[dict[str, Any]]) -> Iterator[p.ChatMessage]:
    """Yield the results of tools, then the text."""
    texts = []
    for block in blocks:
        if block.get("type") != "tool_result" or role != "user":
            texts.append(block)
        else:
            result = text_of(block.get("content"), "messages")
            yield p.ChatMessage("tool", result, tool_call_id=str(block.get("tool_use_id")))
    if texts or not blocks:
        yield p.ChatMessage(role, text_of(texts, "messages"))


def _assistant_message(role: str, blocks: list[dict[str, Any]]) -> Iterator[p.ChatMessage]:
    texts, thoughts, calls = [], [], []
    for block in blocks:
        match block:
            case {"type": "thinking", "thinking": str(thinking)}:
                thoughts.append(thinking)
            case {"type": "tool_use", "id": str(call), "name": str(name)}:
                calls.append(p.ToolCall(p.ToolFunction(name, block.get("input")), call))
            case _:
                texts.append(block)
    reasoning = "".join(thoughts) or None
    yield p.ChatMessage(role, text_of(texts, "messages"), tool_calls=calls or None, reasoning_content=reasoning)


def _chat_tool(tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        return tool
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
    return {"type": "function", "function": function | {k: v for k, v in tool.items() if k == "description"}}


def chat_request(body: p.MessagesRequest, model: ServedModel, messages: list[p.ChatMessage]) -> p.ChatCompletionRequest:
    """Translate `body` to a chat completion over `messages`. Raises `RequestError` for what is not supported.

    If the last message is the assistant's, the answer continues it.
    """
    choice, output = body.tool_choice or p.AnthropicToolChoice("auto"), body.output_config or p.OutputConfig()
    if choice.type not in (*CHOICES, "tool"):
        raise unsupported_type("a choice", choice.type, "tool_choice")
    named = {"type": "function", "function": {"name": choice.name}}
    fields = shared_fields(body) | {
        "messages": messages,
        "tools": None if body.tools is None else [_chat_tool(t) for t in body.tools],
        "tool_choice": CHOICES.get(choice.type, named),
        "parallel_tool_calls": not choice.disable_parallel_tool_use,
        "reasoning_effort": output.effort or body.reasoning_effort,
        "continue_final_message": bool(messages) and messages[-1].role == "assistant",
    }
    if body.stop_sequences is not None:
        fields["stop"] = body.stop_sequences
    if output.format is not None:
        if output.format.get("type") != "json_schema":
            raise unsupported_type("a format", output.format.get("type"), "output_config")
        fields["response_format"] = json_schema_format(output.format.get("schema"))
    return p.ChatCompletionRequest(**fields)


def _usage(reply: UserReply) -> p.MessageUsage:
    return p.MessageUsage(
        input_tokens=reply.prompt_tokens - reply.cached_tokens,
        cache_read_input_tokens=reply.cached_tokens,
        output_tokens=reply.completion_tokens,
        output_tokens_details=p.ThinkingTokens(reply.reasoning_tokens),
    )


class MessageRenderer(Renderer):
    """Writes the answer as blocks: thinking, text, tool use. A whole answer is built from the events of its stream."""

    def __init__(self, model: str, new_parser: Callable[[], OutputParser]) -> None:
        self._parser = new_parser()
        self._name = "msg_" + uuid.uuid4().hex
        self._model = model
        self._blocks: list[dict[str, Any]] = []
        self._has_begun = False

    def body(self, replies: list[UserReply], timeline: Timeline) -> bytes:
        for _ in self.events(0, replies[0]):
            pass
        return to_json(self._message(replies[0], content=self._blocks, **self._end(replies[0])))

    def _message(self, reply: UserReply, **fields: Any) -> p.MessageObject:
        return p.MessageObject(id=self._name, model=self._model, usage=_usage(reply), **fields)

    def _end(self, reply: UserReply) -> dict[str, str | None]:
        assert reply.finish_reason is not None, "the generation has not ended"
        matched = reply.stop_reason if isinstance(reply.stop_reason, str) else None
        reason = "stop_sequence" if matched is not None else "end_turn"
        if self._parser.finish_reason(reply.finish_reason) == TOOL_CALLS:
            reason = "tool_use"
        elif reply.finish_reason is FinishReason.LENGTH:
            reason = "max_tokens"
        return {"stop_reason": reason, "stop_sequence": matched}

    def events(self, index: int, reply: UserReply) -> Iterator[bytes]:
        if not self._has_begun:
            self._has_begun = True
            yield named_event("message_start", {"message": self._message(reply)})
        steps = list(self._parser.steps(reply.text, reply.finish_reason is not None))
        if not steps:
            yield PING  # shows the client that the model works while the parser waits
        for step, piece in steps:
            yield from self._grow(step, piece)

    def _grow(self, step: Step, piece: Piece) -> Iterator[bytes]:
        if isinstance(piece, ParsedCall):
            block: dict[str, Any] = {"type": "tool_use", "id": piece.id, "name": piece.name, "input": {}}
            deltas = [{"type": "input_json_delta", "partial_json": piece.arguments}]
            complete = block | {"input": msgspec.Raw(piece.arguments.encode())}
        elif isinstance(piece, Content):
            block = {"type": "text", "text": ""}
            deltas = [{"type": "text_delta", "text": piece.text}] if step == "more" else []
            complete = block | {"text": piece.text}
        else:
            block = {"type": "thinking", "thinking": "", "signature": ""}
            deltas = [{"type": "thinking_delta", "thinking": piece.text}] if step == "more" else []
            deltas += [{"type": "signature_delta", "signature": ""}] if step == "close" else []
            complete = block | {"thinking": piece.text}
        index = {"index": len(self._blocks)}
        if step in ("open", "call"):
            yield named_event("content_block_start", index | {"content_block": block})
        for delta in deltas:
            yield named_event("content_block_delta", index | {"delta": delta})
        if step in ("close", "call"):
            yield named_event("content_block_stop", index)
            self._blocks.append(complete)

    def last_events(self, replies: list[UserReply], timeline: Timeline) -> Iterator[bytes]:
        yield named_event("message_delta", {"delta": self._end(replies[0]), "usage": _usage(replies[0])})
        yield named_event("message_stop", {})

    def failure(self, error: RequestError) -> bytes:
        return named_event("error", {"error": anthropic_error(error).error})


def add_messages_routes(routes: Routes) -> None:
    """Add POST /v1/messages and /v1/messages/count_tokens."""
    args, model = routes.args, routes.model

    def read(request: Request, body: p.MessagesRequest) -> tuple[TokenizeMsg, Callable[[], OutputParser]]:
        conversation, left_out = chat_messages(body)
        report_ignored(request, left_out)
        # Anthropic's models reason only if they are asked to
        return prepared(request, chat_request(body, model, conversation), args, model, NAMES, thinks=False)

    @routes.add("POST /v1/messages")
    async def messages(request: Request, body: p.MessagesRequest) -> Annotated[Response, p.MessageObject, SSE]:
        """Answer, in Anthropic's shape"""
        message, new_parser = read(request, body)
        renderer = MessageRenderer(request.scope[MODEL].name, new_parser)
        return response_to(request.app.state.frontend, [message], renderer, body.stream, 1)

    @routes.add("POST /v1/messages/count_tokens")
    async def count_tokens(request: Request, body: p.MessagesRequest) -> p.TokenCount:
        """The tokens of a conversation"""
        message, _ = read(request, body)
        return p.TokenCount(len(await request.app.state.frontend.prompt_ids(message)))
