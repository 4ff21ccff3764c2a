"""OpenAI's `/v1/responses`, translated to and from chat completions."""

from __future__ import annotations

import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from minisgl.api import protocol as p
from minisgl.api.chat import json_schema_format, prepared, shared_fields
from minisgl.api.frontend import Timeline
from minisgl.api.http import MODEL, report_ignored, to_json
from minisgl.api.parsers.output import OutputParser, Step
from minisgl.api.parsers.pieces import Content, ParsedCall, Reasoning
from minisgl.api.requests import ServedModel, text_of
from minisgl.api.responses import Renderer, named_event, response_to
from minisgl.api.routes import SSE, Routes
from minisgl.core.errors import RequestError, unsupported
from minisgl.core.message import UserReply
from minisgl.core.params import SamplingParams
from minisgl.core.plan import FinishReason

MAX_KEPT: Final = 4096  # responses
MAX_KEPT_BYTES: Final = 64 << 20
# Field of a chat -> name in a response.
NAMES: Final = {"messages": "input", "response_format": "text", "max_tokens": "max_output_tokens"}
# Prefix of the id, type, and the field with what the model has written.
FUNCTION_CALL: Final = ("fc_", "function_call", "arguments")
CUSTOM_CALL: Final = ("ctc_", "custom_tool_call", "input")
TEXT_PARTS: Final = ("text", "input_text", "output_text", "reasoning_text", "summary_text", "refusal")
# Values of `include` without an effect: reasoning is always returned as text, and tools of a service are left out.
PLAIN_REASONING: Final = "reasoning.encrypted_content"
OF_SERVICES: Final = ("web_search_call.", "file_search_call.", "code_interpreter_call.", "computer_call_output.")


class KeptResponses:
    """Responses and their conversations, by id. Beyond a limit, the least recently used ones are dropped."""

    def __init__(self, max_count: int = MAX_KEPT, max_bytes: int = MAX_KEPT_BYTES) -> None:
        self._max_count = max_count
        self._max_bytes = max_bytes
        # id -> (JSON of the response, JSON of all items)
        self._kept: OrderedDict[str, tuple[bytes, bytes]] = OrderedDict()
        self._owners: dict[str, str] = {}  # id of an output item -> id of its response
        self._bytes = 0

    def keep(self, response: p.ResponseObject, body: bytes, items: Sequence[p.InputItem]) -> None:
        """Store the JSON `body` of `response`, and the `items` of its conversation before its output."""
        conversation = to_json([*items, *response.output])
        self._kept[response.id] = body, conversation
        self._owners |= {item["id"]: response.id for item in response.output}
        self._bytes += len(body) + len(conversation)
        while len(self._kept) > self._max_count or self._bytes > self._max_bytes:
            self.drop(next(iter(self._kept)))

    def body(self, name: str) -> bytes:
        """Return the JSON of response `name`. Raises `RequestError` (404) if it is not stored."""
        return self._find(name)[0]

    def conversation(self, name: str, param: str) -> list[p.InputItem]:
        """Return all items up to and including response `name`. Raises `RequestError` (400) if it is not stored."""
        return msgspec.json.decode(self._find(name, param)[1], type=list[p.InputItem])

    def item(self, name: str | None) -> p.InputItem:
        """Return the output item with the id `name`. Raises `RequestError` (400) if its response is not stored."""
        owner = self._owners.get(name or "", f"item {name}")
        return next(item for item in self.conversation(owner, "input") if item.id == name)

    def drop(self, name: str) -> None:
        """Delete response `name`. Raises `RequestError` (404) if it is not stored."""
        body, conversation = self._find(name)
        del self._kept[name]
        for item in msgspec.json.decode(body, type=p.ResponseObject).output:
            del self._owners[item["id"]]
        self._bytes -= len(body) + len(conversation)

    def _find(self, name: str, param: str | None = None) -> tuple[bytes, bytes]:
        if name not in self._kept:
            raise RequestError(
                f"{name[:100]!r} is not stored: store was false, or newer ones have replaced it",
                param=param,
                code="previous_response_not_found" if param == "previous_response_id" else "not_found",
                status=400 if param else 404,
            )
        self._kept.move_to_end(name)
        return self._kept[name]


def chat_messages(items: Sequence[p.InputItem]) -> tuple[list[p.ChatMessage], list[str]]:
    """Return the messages of the conversation in `items`, none of which is a reference, and the types left out.

    An assistant's reasoning, text and calls are separate items, but one message of a chat. Items that only a service
    can read are left out: encrypted reasoning, and those of its tools.
    """
    messages: list[p.ChatMessage] = []
    left_out: list[str] = []
    for item in items:
        kind = item.type or "message"
        if kind == "message":
            _add(messages, p.ChatMessage(item.role or "", _text_of(item.content)))
        elif kind in ("function_call", "custom_tool_call"):
            arguments = item.arguments if kind == "function_call" else {"input": item.input}
            call = p.ToolCall(p.ToolFunction(_flat_name(item.namespace, item.name or ""), arguments), item.call_id)
            _add(messages, p.ChatMessage("assistant", tool_calls=[call]))
        elif kind in ("function_call_output", "custom_tool_call_output"):
            text = _text_of(item.output)
            messages.append(p.ChatMessage("tool", text, tool_call_id=item.call_id))
        elif kind == "reasoning" and (reasoning := _text_of(item.content or item.summary)):
            messages.append(p.ChatMessage("assistant", reasoning_content=reasoning))
        else:
            left_out.append(f"input.{kind}")
    return messages, left_out


def _text_of(content: Any) -> str:
    return text_of(content, "input", TEXT_PARTS)


def _add(messages: list[p.ChatMessage], message: p.ChatMessage) -> None:
    """Append `message`, or merge it into the assistant's message before it."""
    last = messages[-1] if messages else None
    if last is None or last.role != "assistant" or message.role != "assistant" or (message.content and last.content):
        messages.append(message)
        return
    calls = [*(last.tool_calls or ()), *(message.tool_calls or ())] or None
    content = message.content or last.content
    messages[-1] = p.ChatMessage("assistant", content, tool_calls=calls, reasoning_content=last.reasoning_content)


def _tools(tools: Sequence[dict[str, Any]]) -> Iterator[tuple[str | None, dict[str, Any]]]:
    """Yield (namespace, tool) for each of `tools`, and for each inside a namespace."""
    for tool in tools:
        match tool:
            case {"type": "namespace", "name": str(name), "tools": [dict(), *_] as inner}:
                yield from ((name, t) for t in inner if isinstance(t, dict))
            case _:
                yield None, tool


def _flat_name(namespace: str | None, name: Any) -> Any:
    """Return the name under which the model sees a tool."""
    return name if namespace is None else f"{namespace}__{name}"


def _namespaces(tools: Sequence[dict[str, Any]]) -> dict[str, str | None]:
    """Return name -> namespace for the names that the model may call; also without the namespace, if that is clear."""
    named = [(namespace, str(tool.get("name"))) for namespace, tool in _tools(tools)]
    plain: dict[str, str | None] = {}
    for namespace, name in named:
        plain[name] = None if name in plain else namespace
    return plain | {_flat_name(namespace, name): namespace for namespace, name in named if namespace is not None}


def _chat_form(tool: dict[str, Any], namespace: str | None) -> dict[str, Any]:
    """Return a tool, or a choice of one, in the form of a chat completion, which nests its description."""
    kind = tool.get("type")
    if kind not in ("function", "custom") or kind in tool:
        return tool
    shown = {name: tool[name] for name in ("description", "parameters", "format") if name in tool}
    return {"type": kind, kind: {"name": _flat_name(namespace, tool.get("name"))} | shown}


def chat_request(
    body: p.ResponsesRequest, model: ServedModel, messages: list[p.ChatMessage]
) -> p.ChatCompletionRequest:
    """Translate `body` to a chat completion over the `messages` of its conversation. Raises `RequestError`."""
    if body.instructions is not None:
        messages.insert(0, p.ChatMessage("system", body.instructions))
    form = body.text.format if body.text else None
    if form is not None and form.get("type") == "json_schema":
        form = json_schema_format(form.get("schema"))
    choice = body.tool_choice
    own = {
        "messages": messages,
        "response_format": form,
        "max_tokens": body.max_output_tokens,
        "tools": None if body.tools is None else [_chat_form(tool, space) for space, tool in _tools(body.tools)],
        "tool_choice": _chat_form(choice, choice.get("namespace")) if isinstance(choice, dict) else choice,
    }
    return p.ChatCompletionRequest(**shared_fields(body) | own)


def _ignored(body: p.ResponsesRequest) -> list[str]:
    """Return the names of fields without an effect. Raises `RequestError` for fields that should have one."""
    hosted = [name for name in body.include or () if name.startswith(OF_SERVICES)]
    for name in body.include or ():
        if name != PLAIN_REASONING and name not in hosted:
            raise unsupported(f"include={name[:60]!r} is not supported", "include")
    return [f"include.{name}" for name in hosted]


def new_response(body: p.ResponsesRequest, model: str, params: SamplingParams) -> p.ResponseObject:
    """Return the response to `body` before the first token."""
    own = {
        "id": "resp_" + uuid.uuid4().hex,
        "created_at": int(time.time()),
        "model": model,
        "temperature": params.temperature,
        "text": {"format": (body.text or p.ResponseText()).format or {"type": "text"}},
        "top_p": params.top_p,
    }
    return p.ResponseObject(**shared_fields(body, p.ResponseObject) | own)


class ItemRenderer(Renderer):
    """Writes the answer as output items: reasoning, message, function call; built from the events of a stream."""

    def __init__(
        self,
        response: p.ResponseObject,
        new_parser: Callable[[], OutputParser],
        keep: Callable[[p.ResponseObject, bytes], None],
    ) -> None:
        """`keep` is called with the complete response and its JSON."""
        self._response = response
        self._namespaces = _namespaces(response.tools)
        self._parser = new_parser()
        self._keep = keep
        self._items: list[dict[str, Any]] = []  # the last one may be open
        self._events = 0

    def body(self, replies: list[UserReply], timeline: Timeline) -> bytes:
        for _ in self.events(0, replies[0]):
            pass
        return self._end(replies[0])

    def first_events(self, n: int) -> Iterator[bytes]:
        for state in ("created", "in_progress"):
            yield self._event(f"response.{state}", response=self._response)

    def events(self, index: int, reply: UserReply) -> Iterator[bytes]:
        is_cut = reply.finish_reason is FinishReason.LENGTH
        for step, piece in self._parser.steps(reply.text, reply.finish_reason is not None):
            if isinstance(piece, ParsedCall):
                yield from self._call(piece)
            else:
                yield from self._grow(step, piece, "incomplete" if is_cut else "completed")

    def last_events(self, replies: list[UserReply], timeline: Timeline) -> Iterator[bytes]:
        body = self._end(replies[0])
        yield self._event(f"response.{self._response.status}", response=msgspec.Raw(body))

    def failure(self, error: RequestError) -> bytes:
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        failed = msgspec.structs.replace(
            self._response, status="failed", output=self._items, error={"code": code, "message": error.message}
        )
        return self._event("response.failed", response=failed)

    def _event(self, name: str, **fields: Any) -> bytes:
        self._events += 1
        return named_event(name, {"sequence_number": self._events - 1} | fields)

    def _grow(self, step: Step, piece: Content | Reasoning, status: str) -> Iterator[bytes]:
        is_message = isinstance(piece, Content)
        kind = "output_text" if is_message else "reasoning_text"
        part: dict[str, Any] = {"type": kind, "text": piece.text}
        logprobs: dict[str, Any] = {"logprobs": []} if is_message else {}
        part |= ({"annotations": []} | logprobs) if is_message else {}
        if step == "open":
            item: dict[str, Any] = {"id": ("msg_" if is_message else "rs_") + uuid.uuid4().hex, "content": []}
            item |= {"type": "message", "role": "assistant"} if is_message else {"type": "reasoning", "summary": []}
            self._items.append(item | {"status": "in_progress"})
            yield self._item_event("added")
        item = self._items[-1]
        position = {"item_id": item["id"], "output_index": len(self._items) - 1, "content_index": 0}
        if step == "open":
            yield self._event("response.content_part.added", **position, part=part)
        elif step == "more":
            yield self._event(f"response.{kind}.delta", **position, delta=piece.text, **logprobs)
        else:
            item |= {"content": [part], "status": status}
            yield self._event(f"response.{kind}.done", **position, text=piece.text, **logprobs)
            yield self._event("response.content_part.done", **position, part=part)
            yield self._item_event("done")

    def _call(self, call: ParsedCall) -> Iterator[bytes]:
        prefix, kind, field = CUSTOM_CALL if call.is_custom else FUNCTION_CALL
        item = {"id": prefix + uuid.uuid4().hex, "type": kind, "call_id": call.id, "name": call.name}
        if (namespace := self._namespaces.get(call.name)) is not None:
            item |= {"namespace": namespace, "name": call.name.removeprefix(f"{namespace}__")}
        self._items.append(item | {field: "", "status": "in_progress"})
        yield self._item_event("added")
        position = {"item_id": item["id"], "output_index": len(self._items) - 1}
        self._items[-1] = item | {field: call.arguments, "status": "completed"}
        yield self._event(f"response.{kind}_{field}.delta", **position, delta=call.arguments)
        yield self._event(f"response.{kind}_{field}.done", **position, **{field: call.arguments})
        yield self._item_event("done")

    def _item_event(self, state: str) -> bytes:
        return self._event(f"response.output_item.{state}", output_index=len(self._items) - 1, item=self._items[-1])

    def _end(self, reply: UserReply) -> bytes:
        """Complete and store the response; return its JSON."""
        is_cut = reply.finish_reason is FinishReason.LENGTH
        usage = p.ResponseUsage(
            input_tokens=reply.prompt_tokens,
            input_tokens_details=p.InputDetails(reply.cached_tokens),
            output_tokens=reply.completion_tokens,
            output_tokens_details=p.ReasoningTokens(reply.reasoning_tokens),
            total_tokens=reply.prompt_tokens + reply.completion_tokens,
        )
        self._response = msgspec.structs.replace(
            self._response,
            status="incomplete" if is_cut else "completed",
            incomplete_details={"reason": "max_output_tokens"} if is_cut else None,
            output=self._items,
            usage=usage,
        )
        body = to_json(self._response)
        self._keep(self._response, body)
        return body


def add_responses_routes(routes: Routes) -> None:
    """Add POST /v1/responses, and GET and DELETE /v1/responses/{name} for stored ones."""
    args, model = routes.args, routes.model
    kept = KeptResponses()

    @routes.add("POST /v1/responses")
    async def responses(request: Request, body: p.ResponsesRequest) -> Annotated[Response, p.ResponseObject, SSE]:
        """Answer, in OpenAI's newer shape"""
        previous = body.previous_response_id
        items = [] if previous is None else kept.conversation(previous, "previous_response_id")
        given = [p.InputItem(role="user", content=body.input)] if isinstance(body.input, str) else body.input or []
        items += [kept.item(item.id) if item.type == "item_reference" else item for item in given]
        messages, left_out = chat_messages(items)
        report_ignored(request, _ignored(body) + left_out)
        message, new_parser = prepared(request, chat_request(body, model, messages), args, model, NAMES)

        def keep(response: p.ResponseObject, encoded: bytes) -> None:
            if response.store:
                kept.keep(response, encoded, items)

        response = new_response(body, request.scope[MODEL].name, message.sampling_params)
        renderer = ItemRenderer(response, new_parser, keep)
        return response_to(request.app.state.frontend, [message], renderer, body.stream, 1)

    @routes.add("GET /v1/responses/{name}")
    async def get_response(request: Request) -> Annotated[Response, p.ResponseObject]:
        """A kept response"""
        return Response(kept.body(request.path_params["name"]), media_type="application/json")

    @routes.add("DELETE /v1/responses/{name}")
    async def delete_response(request: Request) -> p.DeletedResponse:
        """Forget a response"""
        kept.drop(request.path_params["name"])
        return p.DeletedResponse(request.path_params["name"])
