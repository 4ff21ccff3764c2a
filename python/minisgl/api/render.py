"""Replies -> response bodies and stream events, in the shapes of OpenAI.

Events are made of byte templates and one small JSON string: several times cheaper than encoding an object for each
token.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import msgspec
from starlette.responses import Response

from minisgl.api.logprobs import chat_logprobs, text_logprobs
from minisgl.api.parsers.output import OutputParser
from minisgl.api.protocol import StreamOptions
from minisgl.api.receipt import Receipt
from minisgl.message import TokenLogprob, UserReply

DONE: Final = b"data: [DONE]\n\n"

to_json: Final = msgspec.json.Encoder().encode


def event(body: bytes) -> bytes:
    """One server-sent event."""
    return b"data: " + body + b"\n\n"


def error_body(message: str, status: int, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """OpenAI's error object."""
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """`value` as a JSON response."""
    return Response(to_json(value), status, headers, media_type="application/json")


@dataclass
class Answer:
    """One generation so far, for a response in one piece."""

    text: str = ""
    last: UserReply | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    output_ids: bytearray = field(default_factory=bytearray)  # int32

    def add(self, reply: UserReply) -> None:
        self.text += reply.text
        self.logprobs += reply.logprobs
        self.output_ids += reply.output_ids
        self.last = reply


def usage(replies: list[UserReply], n: int = 1) -> dict[str, Any]:
    """OpenAI's usage object for the last replies of the generations of one request, in order.

    Each `n` in a row have the same prompt, which counts once: as the first of them found it.
    """
    prompt = sum(r.prompt_tokens for r in replies[::n])
    completion = sum(r.completion_tokens for r in replies)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(r.cached_tokens for r in replies[::n])},
    }


def _without_logprobs(reply: UserReply) -> UserReply:
    return msgspec.structs.replace(reply, logprobs=[]) if reply.logprobs else reply


class BodyRenderer(Protocol):
    """How one API writes an answer in one piece."""

    def body(self, answers: list[Answer], receipt: Receipt) -> bytes:
        """The whole response as JSON."""


class Renderer(BodyRenderer, Protocol):
    """How one API writes its answers."""

    def first_events(self, n: int) -> Iterator[bytes]:
        """What a stream of `n` generations starts with."""

    def events(self, index: int, reply: UserReply) -> Iterator[bytes]:
        """What one more reply adds to the stream."""

    def last_events(self, replies: list[UserReply], receipt: Receipt) -> Iterator[bytes]:
        """What follows the last generation, before [DONE]; `replies` are the last ones by index."""


class OpenAIRenderer:
    """Chat completions and text completions, which differ in one object and two names."""

    def __init__(
        self,
        model: str,
        is_chat: bool,
        options: StreamOptions | None,
        new_parser: Callable[[], OutputParser] | None = None,
        *,
        n: int = 1,
        with_timing: bool = False,
        with_logprobs: bool = False,
    ) -> None:
        """`new_parser` makes what takes one chat answer apart; without it all text is content.

        There are `n` answers to each prompt, in a row. The receipt and log-probabilities are shown on demand.
        """
        self._with_logprobs = with_logprobs
        self._n = n
        self._with_timing = with_timing
        self._is_chat = is_chat
        self._new_parser = new_parser
        self._parsers: dict[int, OutputParser] = {}
        self._with_usage = bool(options and options.include_usage)
        self._with_running_usage = bool(options and options.continuous_usage_stats)
        self._head = {
            "id": ("chatcmpl-" if is_chat else "cmpl-") + uuid.uuid4().hex,
            "object": "chat.completion" if is_chat else "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        stream_head = self._head | ({"object": "chat.completion.chunk"} if is_chat else {})
        self._chunk_head = to_json(stream_head)[:-1] + b',"choices":['

    def body(self, answers: list[Answer], receipt: Receipt) -> bytes:
        choices = []
        replies = []
        for i, answer in enumerate(answers):
            assert answer.last is not None and answer.last.finish_reason is not None, "an answer without an end"
            replies.append(answer.last)
            reason: str = answer.last.finish_reason
            content: dict[str, Any]
            if not self._is_chat:
                content = {"text": answer.text}
            elif self._new_parser is None:
                content = {"message": {"role": "assistant", "content": answer.text}}
            else:
                parser = self._new_parser()
                content = {"message": parser.message(answer.text)}
                reason = parser.finish_reason(answer.last.finish_reason)
            end = {"finish_reason": reason, "stop_reason": answer.last.stop_reason}
            choices.append({"index": i, **content, "logprobs": self._logprobs(answer.logprobs), **end})
        return to_json(self._head | {"choices": choices, **self._account(replies, receipt, True)})

    def _logprobs(self, tokens: list[TokenLogprob]) -> dict[str, Any] | None:
        if not self._with_logprobs:
            return None
        return chat_logprobs(tokens) if self._is_chat else text_logprobs(tokens)

    def _account(self, replies: list[UserReply], receipt: Receipt, with_usage: bool) -> dict[str, Any]:
        """What stands beside the choices at the end: usage and timing, as far as they are wanted."""
        used = usage(replies, self._n)
        account = {"usage": used} if with_usage else {}
        if self._with_timing:
            cached = used["prompt_tokens_details"]["cached_tokens"]
            account["timing"] = receipt.timing(used["completion_tokens"], cached)
        return account

    def first_events(self, n: int) -> Iterator[bytes]:
        if self._is_chat:
            for i in range(n):
                yield self._chunk(i, b'{"role":"assistant","content":""}', None, None)

    def events(self, index: int, reply: UserReply) -> Iterator[bytes]:
        if not self._is_chat:
            yield self._chunk(index, to_json(reply.text), reply, reply.finish_reason)
            return
        reason: str | None = reply.finish_reason
        if self._new_parser is None:
            if reply.finish_reason is None or reply.text or reply.logprobs:
                yield self._chunk(index, b'{"content":' + to_json(reply.text) + b"}", reply, None)
        else:
            if (parser := self._parsers.get(index)) is None:
                parser = self._parsers[index] = self._new_parser()
            deltas = list(parser.deltas(reply.text, reply.finish_reason is not None))
            if not deltas and reply.finish_reason is None:
                deltas = [b'{"content":""}']  # the parser waits, the client sees that the model works
            if not deltas and reply.logprobs:
                deltas = [b"{}"]
            for delta in deltas:
                yield self._chunk(index, delta, reply, None)
                reply = _without_logprobs(reply)  # they stand beside the first delta
            reason = reply.finish_reason and parser.finish_reason(reply.finish_reason)
        if reason is not None:
            yield self._chunk(index, b"{}", _without_logprobs(reply), reason)

    def _chunk(self, index: int, content: bytes, reply: UserReply | None, reason: str | None) -> bytes:
        end = b"null,"
        if reply is not None and reason is not None:
            end = to_json(reason) + b',"stop_reason":' + to_json(reply.stop_reason) + b","
        parts = [
            b"data: ",
            self._chunk_head,
            b'{"index":%d,' % index,
            b'"delta":' if self._is_chat else b'"text":',
            content,
            b',"finish_reason":',
            end,
            b'"logprobs":',
            to_json(self._logprobs(reply.logprobs)) if reply is not None and reply.logprobs else b"null",
            b"}]",
        ]
        if self._with_running_usage and reply is not None:
            parts += [b',"usage":', to_json(usage([reply]))]
        elif self._with_usage:
            parts.append(b',"usage":null')
        parts.append(b"}\n\n")
        return b"".join(parts)

    def last_events(self, replies: list[UserReply], receipt: Receipt) -> Iterator[bytes]:
        if account := self._account(replies, receipt, self._with_usage):
            yield event(self._chunk_head + b"]," + to_json(account)[1:])
