"""OpenAI's chat completions and text completions: the routes, the body and the stream.

Events are byte templates around one small JSON string. This is several times cheaper than encoding an object per token.
"""

from __future__ import annotations

import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from minisgl.api import protocol as p
from minisgl.api.chat import prepared
from minisgl.api.frontend import FrontendManager, Timeline
from minisgl.api.http import MODEL, to_json
from minisgl.api.parsers.output import OutputParser
from minisgl.api.parsers.pieces import Content, ParsedCall, Piece, Reasoning
from minisgl.api.requests import completion_messages, num_choices, with_choices
from minisgl.api.responses import DONE, Renderer, event, response_to, usage_of
from minisgl.api.routes import SSE, Routes
from minisgl.core.message import TokenizeMsg, TokenLogprob, UserReply, ids_from_bytes

MIN_LOGPROB: Final = -9999.0  # OpenAI's value for a token of probability 0; JSON has no infinity
NO_TEXT: Final = b'{"content":""}'


@dataclass
class OpenAIRenderer(Renderer):
    """Writes chat completions and text completions, which differ in one object and two names.

    `new_parser` makes the parser of a chat answer. Each `n` adjacent generations are choices for one prompt.
    `with_usage` ends every stream with the usage. `prompt_ids` has the token ids of each prompt, if they are to be
    returned.
    """

    model: str
    is_chat: bool
    options: p.StreamOptions
    new_parser: Callable[[], OutputParser] = OutputParser
    n: int = 1
    with_timing: bool = False
    with_logprobs: bool = False
    with_usage: bool = False
    prompt_ids: list[list[int]] | None = None

    def __post_init__(self) -> None:
        self._parsers = defaultdict[int, OutputParser](self.new_parser)
        self._with_usage = self.with_usage or bool(self.options.include_usage)
        name = ("chatcmpl-" if self.is_chat else "cmpl-") + uuid.uuid4().hex
        self._head: dict[str, Any] = {"id": name, "created": int(time.time()), "model": self.model}
        stream_head = self._head | {"object": "chat.completion.chunk" if self.is_chat else "text_completion"}
        self._chunk_head = to_json(stream_head)[:-1] + b',"choices":['
        self._chunk_start = b"data: " + self._chunk_head + b'{"index":'
        self._content_key = b',"delta":' if self.is_chat else b',"text":'

    def body(self, replies: list[UserReply], timeline: Timeline) -> bytes:
        usage = usage_of(replies, self.n)
        choices: list[Any] = [self._choice(i, reply) for i, reply in enumerate(replies)]
        response = p.ChatCompletionResponse if self.is_chat else p.CompletionResponse
        rest: dict[str, Any] = self._head | (self._prompt(0) if self.is_chat else {})
        timing = timeline.timing(usage) if self.with_timing else None
        return to_json(response(choices=choices, usage=usage, timing=timing, **rest))

    def _choice(self, index: int, reply: UserReply) -> p.ChatChoice | p.TextChoice:
        reason = reply.finish_reason
        assert reason is not None, "the last reply of a generation has no finish reason"
        rest: dict[str, Any] = {
            "index": index,
            "logprobs": self._logprobs(reply.logprobs),
            "stop_reason": reply.stop_reason,
        }
        if self.prompt_ids is not None:
            rest["token_ids"] = ids_from_bytes(reply.output_ids).tolist()
        if not self.is_chat:
            return p.TextChoice(text=reply.text, finish_reason=reason, **rest, **self._prompt(index))
        parser = self.new_parser()
        message = message_of(parser.feed(reply.text, is_last=True))
        return p.ChatChoice(message=message, finish_reason=parser.finish_reason(reason), **rest)

    def _prompt(self, index: int) -> dict[str, Any]:
        """Return the token ids of the prompt of generation `index`, if they are to be returned."""
        return {} if self.prompt_ids is None else {"prompt_token_ids": self.prompt_ids[index // self.n]}

    def _logprobs(self, tokens: list[TokenLogprob]) -> dict[str, Any] | None:
        if not self.with_logprobs:
            return None
        return chat_logprobs(tokens) if self.is_chat else text_logprobs(tokens)

    def first_events(self, n: int) -> Iterator[bytes]:
        if self.is_chat:
            for i in range(n):
                yield self._chunk(i, b'{"role":"assistant",' + NO_TEXT[1:], None, None)

    def events(self, index: int, reply: UserReply) -> Iterator[bytes]:
        end = reply.finish_reason
        if not self.is_chat:
            yield self._chunk(index, to_json(reply.text), reply, end)
            return
        parser = self._parsers[index]
        deltas = deltas_of(parser, reply.text, end is not None)
        if not deltas and (end is None or reply.logprobs):
            deltas = [NO_TEXT]  # shows the client that the model works while the parser waits
        for delta in deltas:
            yield self._chunk(index, delta, reply, None)
            if end is not None or len(deltas) > 1:
                reply = msgspec.structs.replace(reply, logprobs=[], output_ids=b"")  # they are in the first delta
        if end is not None:
            yield self._chunk(index, b"{}", reply, parser.finish_reason(end))

    def _chunk(self, index: int, content: bytes, reply: UserReply | None, reason: str | None) -> bytes:
        parts = [self._chunk_start, b"%d" % index, self._content_key, content]
        if reply is None or reason is None:
            parts.append(b',"finish_reason":null,"logprobs":')
        else:
            end = b',"finish_reason":%b,"stop_reason":%b,"logprobs":'
            parts.append(end % (to_json(reason), to_json(reply.stop_reason)))
        parts.append(to_json(self._logprobs(reply.logprobs)) if reply is not None and reply.logprobs else b"null")
        if self.prompt_ids is not None and reply is not None:
            parts += [b',"token_ids":', to_json(ids_from_bytes(reply.output_ids).tolist())]
            if not self.is_chat and len(reply.output_ids) == 4 * reply.completion_tokens:  # the first chunk
                parts += [b",", to_json(self._prompt(index))[1:-1]]
        parts.append(b"}]")
        if self.prompt_ids is not None and reply is None:
            parts += [b",", to_json(self._prompt(index))[1:-1]]
        if self.options.continuous_usage_stats and reply is not None:
            parts += [b',"usage":', to_json(usage_of([reply]))]
        elif self._with_usage:
            parts.append(b',"usage":null')
        parts.append(b"}\n\n")
        return b"".join(parts)

    def last_events(self, replies: list[UserReply], timeline: Timeline) -> Iterator[bytes]:
        usage = usage_of(replies, self.n)
        summary: dict[str, Any] = {"usage": usage} if self._with_usage else {}
        if self.with_timing:
            summary["timing"] = timeline.timing(usage)
        if summary:
            yield event(self._chunk_head + b"]," + to_json(summary)[1:])
        yield DONE


def message_of(pieces: list[Piece]) -> p.AssistantMessage:
    """Return the message of a whole answer."""
    content = "".join(piece.text for piece in pieces if isinstance(piece, Content))
    reasoning = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
    calls = [_call(piece, piece.arguments) for piece in pieces if isinstance(piece, ParsedCall)]
    shown = content or (None if calls or reasoning else "")
    return p.AssistantMessage(shown, reasoning_content=reasoning, tool_calls=calls)


def deltas_of(parser: OutputParser, text: str, is_last: bool) -> list[bytes]:
    """Return the deltas of a stream for `text` and, if `is_last`, the end. A call has two: name, then arguments."""
    index = parser.num_calls
    deltas = []
    for piece in parser.feed(text, is_last):
        if not isinstance(piece, ParsedCall):
            name = b'{"content":' if isinstance(piece, Content) else b'{"reasoning_content":'
            deltas.append(name + to_json(piece.text) + b"}")
            continue
        head = b'{"tool_calls":[{"index":%d,' % index
        field, argument = ("custom", "input") if piece.is_custom else ("function", "arguments")
        parts = _call(piece, ""), {field: {argument: piece.arguments}}
        deltas += [head + to_json(part)[1:] + b"]}" for part in parts]
        index += 1
    return deltas


def _call(call: ParsedCall, arguments: str) -> p.GeneratedToolCall | p.GeneratedCustomCall:
    if call.is_custom:
        return p.GeneratedCustomCall(call.id, p.CustomCall(call.name, arguments))
    return p.GeneratedToolCall(call.id, p.GeneratedFunction(call.name, arguments))


def chat_logprobs(tokens: list[TokenLogprob]) -> dict[str, Any]:
    """Return `choices[].logprobs` of a chat completion."""
    content = []
    for t in tokens:
        top = [_chat_token(data, logprob) for _, data, logprob in t.top]
        content.append(_chat_token(t.data, t.logprob) | {"top_logprobs": top})
    return {"content": content, "refusal": None}


def _chat_token(data: bytes, logprob: float | None) -> dict[str, Any]:
    return {"token": token_text(data), "logprob": finite(logprob), "bytes": list(data)}


def text_logprobs(tokens: list[TokenLogprob]) -> dict[str, Any]:
    """Return `choices[].logprobs` of a text completion. The token itself is always among its alternatives."""
    return {
        "tokens": [token_text(t.data) for t in tokens],
        "token_logprobs": [finite(t.logprob) for t in tokens],
        "top_logprobs": [_alternatives(t) for t in tokens],
        "text_offset": [t.offset for t in tokens],
    }


def _alternatives(token: TokenLogprob) -> dict[str, float | None] | None:
    if token.logprob is None:
        return None
    alternatives = [*token.top, (token.id, token.data, token.logprob)]
    return {token_text(data): finite(logprob) for _, data, logprob in alternatives}


def token_text(data: bytes) -> str:
    """Return the token as text. Like OpenAI, write "bytes:" and the bytes if they are not valid UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{b:02x}" for b in data)


def finite(logprob: float | None) -> float | None:
    """Return `logprob`, but at least `MIN_LOGPROB`; None for None."""
    return None if logprob is None else max(logprob, MIN_LOGPROB)


def add_openai_routes(routes: Routes) -> None:
    """Add POST /v1/chat/completions and /v1/completions."""
    args, model = routes.args, routes.model

    async def respond(
        request: Request,
        body: p.ChatCompletionRequest | p.CompletionRequest,
        messages: list[TokenizeMsg],
        new_parser: Callable[[], OutputParser] = OutputParser,
    ) -> Response:
        n = num_choices(body, args.max_choices)
        frontend: FrontendManager = request.app.state.frontend
        renderer = OpenAIRenderer(
            request.scope[MODEL].name,
            isinstance(body, p.ChatCompletionRequest),
            body.stream_options or p.StreamOptions(),
            new_parser,
            n=n,
            # The header is for clients that cannot add fields to the body.
            with_timing=bool(body.return_timing) or request.headers.get("x-minisgl-timing") == "1",
            with_logprobs=messages[0].sampling_params.logprobs is not None,
            with_usage=args.stream_usage,
            prompt_ids=[await frontend.prompt_ids(m) for m in messages] if body.return_token_ids else None,
        )
        return response_to(frontend, with_choices(messages, n), renderer, body.stream, n)

    @routes.add("POST /v1/chat/completions")
    async def chat_completions(
        request: Request, body: p.ChatCompletionRequest
    ) -> Annotated[Response, p.ChatCompletionResponse, SSE]:
        """Answer a chat"""
        message, new_parser = prepared(request, body, args, model)
        return await respond(request, body, [message], new_parser)

    @routes.add("POST /v1/completions")
    async def completions(
        request: Request, body: p.CompletionRequest
    ) -> Annotated[Response, p.CompletionResponse, SSE]:
        """Continue a text"""
        return await respond(request, body, completion_messages(body, model.defaults, model.limits))
