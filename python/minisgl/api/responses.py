"""HTTP responses to generation requests, from submission to the last byte: one JSON body or server-sent events.

A `Renderer` writes what is particular to an API.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Final, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from minisgl.api import protocol as p
from minisgl.api.frontend import ClientGoneError, FrontendManager, Submission, Timeline, joined
from minisgl.api.http import DROP, HEADERS, LEVEL, MODEL, RAW_SEND, SUBMISSION, error_body, to_json
from minisgl.api.requests import require_answer_fits
from minisgl.core.errors import RequestError
from minisgl.core.message import TokenizeMsg, UserReply

logger = logging.getLogger(__name__)

DONE: Final = b"data: [DONE]\n\n"
CHECKS: Final = 4  # checks of a write per time limit
AT_ONCE: Final = 256  # generations and log-probabilities; a thread renders larger answers, without blocking others
_STREAM_HEADERS: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


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
        return iter(())

    def last_events(self, replies: list[UserReply], timeline: Timeline) -> Iterator[bytes]:
        """Yield the events after the last reply. `replies` are the last ones of each generation."""
        return iter(())

    def failure(self, error: RequestError) -> bytes:
        """Return the last events of a stream that fails."""
        return failure_event(error)


def usage_of(replies: list[UserReply], n: int = 1) -> p.Usage:
    """Return OpenAI's usage object, from the last reply to each generation of one request.

    Each `n` adjacent generations share a prompt. It counts once, with the cached tokens of the first generation.
    """
    prompt = sum(r.prompt_tokens for r in replies[::n])
    completion = sum(r.completion_tokens for r in replies)
    drafted, accepted = sum(r.drafted_tokens for r in replies), sum(r.accepted_tokens for r in replies)
    reasoning = sum(r.reasoning_tokens for r in replies)
    details = p.CompletionDetails(reasoning, accepted, drafted - accepted)
    return p.Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=p.CachedTokens(sum(r.cached_tokens for r in replies[::n])),
        completion_tokens_details=details if reasoning or drafted else None,
    )


class WriteTimeout:
    """A time limit for each write, cheap enough to surround every token.

    Use `async with WriteTimeout(seconds) as limit`, with `limit.begin()` before each write and `limit.end()` after it.
    The block raises `TimeoutError` if a write takes longer. There is one periodic timer: a timer per write would cost
    more than making the event.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._since: float | None = None
        self._limit = asyncio.timeout(None)
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        self._since = self._loop.time()

    def end(self) -> None:
        self._since = None

    def _check(self) -> None:
        now = self._loop.time()
        if self._since is not None and now - self._since >= self._seconds:
            self._limit.reschedule(now)
        else:
            self._timer = self._loop.call_later(self._seconds / CHECKS, self._check)

    async def __aenter__(self) -> WriteTimeout:
        await self._limit.__aenter__()
        self._check()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        await self._limit.__aexit__(kind, error, trace)


class GenerationResponse(Response):
    """Submits the messages and responds with one body or server-sent events.

    If the client disconnects, its generations are aborted. A stream waits for the first reply before it sends the first
    byte, so that a refusal has its HTTP status. A later failure is an event in the stream. A client that does not read
    a stream for `--write-timeout` seconds counts as disconnected.
    """

    def __init__(
        self,
        frontend: FrontendManager,
        messages: Sequence[TokenizeMsg],
        renderer: Renderer,
        n: int = 1,
        is_stream: bool = False,
    ) -> None:
        """Each `n` adjacent messages are choices for one prompt."""
        super().__init__()
        self._frontend = frontend
        self._messages = messages
        self._renderer = renderer
        self._n = n
        self._is_stream = is_stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond. Raises `RequestError` if the request is refused before the first byte."""
        served, level = scope[MODEL].served, scope[LEVEL]
        async with self._frontend.submit(self._messages, self._n, served, level) as submission:
            scope[SUBMISSION] = submission
            watcher = asyncio.create_task(_watch(receive, submission))
            try:
                if self._is_stream:
                    # A separate task wakes for each token without the framework's layers.
                    await asyncio.create_task(self._stream(submission, scope))
                else:
                    await Response(await self._body(submission), media_type="application/json")(scope, receive, send)
            except ClientGoneError:
                logger.debug("a client disconnected before its response was complete")
            except TimeoutError:
                logger.warning("a client did not read for %g s; its request is aborted", self._frontend.write_timeout)
                scope[DROP]()
            finally:
                watcher.cancel()

    def _intact(self, replies: list[tuple[int, UserReply]]) -> list[tuple[int, UserReply]]:
        """Return `replies`, by index. Raises `RequestError` if a generation has failed."""
        for index, reply in replies:
            if reply.failure is not None:
                raise reply.failure.error().named({"prompt": self._messages[index].param})
        return replies

    async def _body(self, submission: Submission) -> bytes:
        replies: list[list[UserReply]] = [[] for _ in self._messages]
        while not submission.is_done:
            for index, reply in self._intact(await submission.next_replies()):
                replies[index].append(reply)
        whole = [joined(parts) for parts in replies]
        if sum(1 + len(reply.logprobs) for reply in whole) > AT_ONCE:
            return await asyncio.to_thread(self._renderer.body, whole, submission.timeline)
        return self._renderer.body(whole, submission.timeline)

    async def _stream(self, submission: Submission, scope: Scope) -> None:
        send: Send = scope[RAW_SEND]
        replies = self._intact(await submission.next_replies())
        headers = [*_STREAM_HEADERS, *scope[HEADERS]]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        chunks = list(self._renderer.first_events(len(self._messages)))
        async with WriteTimeout(self._frontend.write_timeout) as limit:
            try:
                while True:
                    for index, reply in replies:
                        chunks += self._renderer.events(index, reply)
                    if submission.is_done:
                        break
                    limit.begin()
                    await send({"type": "http.response.body", "body": b"".join(chunks), "more_body": True})
                    limit.end()
                    chunks = []
                    replies = self._intact(await submission.next_replies())
                chunks += self._renderer.last_events(submission.last_replies, submission.timeline)
            except RequestError as e:
                chunks.append(self._renderer.failure(e))
            limit.begin()
            await send({"type": "http.response.body", "body": b"".join(chunks), "more_body": False})


async def _watch(receive: Receive, submission: Submission) -> None:
    """Abandon the submission when its client disconnects. The body has been read, so no other message can arrive."""
    while (await receive())["type"] != "http.disconnect":
        pass
    submission.abandon()


def response_to(
    frontend: FrontendManager, messages: Sequence[TokenizeMsg], renderer: Renderer, is_stream: bool | None, n: int
) -> Response:
    """Return a stream or a response in one body, as requested. Raises `RequestError` if the body might be too large."""
    if not is_stream:
        require_answer_fits(messages, frontend.limits)
    return GenerationResponse(frontend, messages, renderer, n, bool(is_stream))
