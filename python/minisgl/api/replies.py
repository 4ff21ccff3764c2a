"""Turns replies into response bodies and stream events in OpenAI's format.

Events are byte templates around one small JSON string. This is several times cheaper than encoding an object per token.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Protocol

import msgspec

from minisgl.api import protocol as p
from minisgl.api.frontend import Timeline
from minisgl.api.http import error_body, to_json
from minisgl.api.parsers.output import OutputParser
from minisgl.errors import RequestError
from minisgl.message import TokenLogprob, UserReply, ids_from_bytes

DONE: Final = b"data: [DONE]\n\n"
MIN_LOGPROB: Final = -9999.0  # OpenAI's value for a token of probability 0; JSON has no infinity


def event(body: bytes) -> bytes:
    """Return a server-sent event with the data `body`."""
    return b"data: " + body + b"\n\n"


def named_event(name: str, fields: dict[str, Any]) -> bytes:
    """Return a server-sent event with a name, which is also the `type` in its data."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), to_json({"type": name} | fields))


def failure_event(error: RequestError) -> bytes:
    """Return the last event of a failed stream in OpenAI's format."""
    return event(to_json(error_body(error))) + DONE


class Renderer(Protocol):
    """Writes the responses of one API, as one body or as a stream."""

    def body(self, replies: list[UserReply], timeline: Timeline) -> bytes:
        """Return the response as one JSON body, from the joined replies to each generation."""

    def first_events(self, n: int) -> Iterator[bytes]:
        """Yield the events at the start of a stream of `n` generations."""
        return iter(())

    def events(self, index: int, reply: UserReply) -> Iterator[bytes]:
        """Yield the events for a reply to generation `index`."""

    def last_events(self, replies: list[UserReply], timeline: Timeline) -> Iterator[bytes]:
        """Yield the events after the last reply. `replies` are the last ones of each generation."""

    def failure(self, error: RequestError) -> bytes:
        """Return the last events of a stream that fails."""
        return failure_event(error)


@dataclass
class OpenAIRenderer(Renderer):
    """Writes chat completions and text completions, which differ in one object and two names.

    `new_parser` makes the parser of a chat answer; without it, all text is content. Each `n` adjacent generations are
    choices for one prompt. `with_usage` ends every stream with the usage. `prompt_ids` has the token ids of each
    prompt, if they are to be returned.
    """

    model: str
    is_chat: bool
    options: p.StreamOptions
    new_parser: Callable[[], OutputParser] | None = None
    n: int = 1
    with_timing: bool = False
    with_logprobs: bool = False
    with_usage: bool = False
    prompt_ids: list[list[int]] | None = None

    def __post_init__(self) -> None:
        self._parsers: dict[int, OutputParser] = {}
        self._with_usage = self.with_usage or bool(self.options.include_usage)
        name = ("chatcmpl-" if self.is_chat else "cmpl-") + uuid.uuid4().hex
        self._head: dict[str, Any] = {"id": name, "created": int(time.time()), "model": self.model}
        stream_head = self._head | {"object": "chat.completion.chunk" if self.is_chat else "text_completion"}
        self._chunk_head = to_json(stream_head)[:-1] + b',"choices":['

    def body(self, replies: list[UserReply], timeline: Timeline) -> bytes:
        usage = usage_of(replies, self.n)
        choices: list[Any] = [self._choice(i, reply) for i, reply in enumerate(replies)]
        response = p.ChatCompletionResponse if self.is_chat else p.CompletionResponse
        rest: dict[str, Any] = self._head | (self._prompt(0) if self.is_chat else {})
        timing = timeline.timing(usage) if self.with_timing else None
        return to_json(response(choices=choices, usage=usage, timing=timing, **rest))

    def _choice(self, index: int, reply: UserReply) -> p.ChatChoice | p.TextChoice:
        reason = reply.finish_reason
        assert reason is not None, "a generation without an end"
        rest: dict[str, Any] = {
            "index": index,
            "logprobs": self._logprobs(reply.logprobs),
            "stop_reason": reply.stop_reason,
        }
        if self.prompt_ids is not None:
            rest["token_ids"] = ids_from_bytes(reply.output_ids).tolist()
        if not self.is_chat:
            return p.TextChoice(text=reply.text, finish_reason=reason, **rest, **self._prompt(index))
        if self.new_parser is None:
            return p.ChatChoice(message=p.AssistantMessage(reply.text), finish_reason=reason, **rest)
        parser = self.new_parser()
        return p.ChatChoice(message=parser.message(reply.text), finish_reason=parser.finish_reason(reason), **rest)

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
                yield self._chunk(i, b'{"role":"assistant","content":""}', None, None)

    def events(self, index: int, reply: UserReply) -> Iterator[bytes]:
        if not self.is_chat:
            yield self._chunk(index, to_json(reply.text), reply, reply.finish_reason)
            return
        reason: str | None = reply.finish_reason
        if self.new_parser is None:
            if reply.finish_reason is None or reply.text or reply.logprobs:
                yield self._chunk(index, b'{"content":' + to_json(reply.text) + b"}", reply, None)
                reply = _without_tokens(reply)
        else:
            if (parser := self._parsers.get(index)) is None:
                parser = self._parsers[index] = self.new_parser()
            deltas = list(parser.deltas(reply.text, reply.finish_reason is not None))
            if not deltas and reply.finish_reason is None:
                deltas = [b'{"content":""}']  # shows the client that the model works while the parser waits
            if not deltas and reply.logprobs:
                deltas = [b"{}"]
            for delta in deltas:
                yield self._chunk(index, delta, reply, None)
                reply = _without_tokens(reply)  # they are in the first delta
            reason = reply.finish_reason and parser.finish_reason(reply.finish_reason)
        if reason is not None:
            yield self._chunk(index, b"{}", reply, reason)

    def _chunk(self, index: int, content: bytes, reply: UserReply | None, reason: str | None) -> bytes:
        end = b"null,"
        if reply is not None and reason is not None:
            end = to_json(reason) + b',"stop_reason":' + to_json(reply.stop_reason) + b","
        parts = [
            b"data: ",
            self._chunk_head,
            b'{"index":%d,' % index,
            b'"delta":' if self.is_chat else b'"text":',
            content,
            b',"finish_reason":',
            end,
            b'"logprobs":',
            to_json(self._logprobs(reply.logprobs)) if reply is not None and reply.logprobs else b"null",
        ]
        prompt = to_json(self._prompt(index))[1:-1]
        if prompt and reply is not None:
            parts += [b',"token_ids":', to_json(ids_from_bytes(reply.output_ids).tolist())]
            if not self.is_chat and len(reply.output_ids) == 4 * reply.completion_tokens:  # the first chunk
                parts += [b",", prompt]
        parts.append(b"}]")
        if prompt and reply is None:
            parts += [b",", prompt]
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


def _without_tokens(reply: UserReply) -> UserReply:
    return msgspec.structs.replace(reply, logprobs=[], output_ids=b"")


def usage_of(replies: list[UserReply], n: int = 1) -> p.Usage:
    """Return OpenAI's usage object, from the last reply to each generation of one request.

    Each `n` adjacent generations share a prompt. It counts once, with the cached tokens of the first generation.
    """
    prompt = sum(r.prompt_tokens for r in replies[::n])
    completion = sum(r.completion_tokens for r in replies)
    drafted, accepted = sum(r.drafted_tokens for r in replies), sum(r.accepted_tokens for r in replies)
    return p.Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=p.CachedTokens(sum(r.cached_tokens for r in replies[::n])),
        completion_tokens_details=p.DraftedTokens(accepted, drafted - accepted) if drafted else None,
    )


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
