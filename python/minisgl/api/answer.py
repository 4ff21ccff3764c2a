"""One HTTP answer, from the submitted request to its last byte: in one piece or as server-sent events."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from minisgl.api.access import RAW_SEND
from minisgl.api.call import Call, ClientGoneError
from minisgl.api.frontend import FrontendManager
from minisgl.api.render import DONE, Answer, BodyRenderer, Renderer, error_body, event, to_json
from minisgl.api.write_watch import WriteWatch
from minisgl.errors import RequestError
from minisgl.message import TokenizeMsg, UserReply

logger = logging.getLogger(__name__)

_STREAM_HEADERS: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def _raise_if_error(reply: UserReply) -> None:
    if reply.failure is not None:
        raise reply.failure.error()


class BodyResponse(Response):
    """Submits the messages and answers, in one piece, with what comes back; a client that leaves is aborted."""

    def __init__(
        self, frontend: FrontendManager, messages: Sequence[TokenizeMsg], renderer: BodyRenderer, n: int = 1
    ) -> None:
        """Each `n` messages in a row are choices for one prompt."""
        super().__init__()
        self._frontend = frontend
        self._messages = messages
        self._n = n
        self._body_renderer = renderer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises `RequestError` when refused before the first byte."""
        call = await self._frontend.submit(self._messages, self._n)
        async with call:
            watcher = asyncio.create_task(_watch(receive, call))
            try:
                await self._answer(call, scope, receive, send)
            except ClientGoneError:
                logger.debug("a client left before its answer was complete")
            finally:
                watcher.cancel()

    async def _answer(self, call: Call, scope: Scope, receive: Receive, send: Send) -> None:
        answers = [Answer() for _ in self._messages]
        while not call.is_done:
            for index, reply in await call.take():
                _raise_if_error(reply)
                answers[index].add(reply)
        body = self._body_renderer.body(answers, call.receipt)
        await Response(body, media_type="application/json")(scope, receive, send)


class StreamResponse(BodyResponse):
    """The same as server-sent events.

    The first reply is awaited before the first byte, so that a refusal has its HTTP status; a failure later is an
    event in the stream. A client that does not read a stream for `write_timeout` seconds is aborted.
    """

    def __init__(
        self,
        frontend: FrontendManager,
        messages: Sequence[TokenizeMsg],
        renderer: Renderer,
        n: int,
        write_timeout: float,
    ) -> None:
        super().__init__(frontend, messages, renderer, n)
        self._renderer = renderer
        self._write_timeout = write_timeout

    async def _answer(self, call: Call, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            # A task of its own is woken for each token without a walk through the framework's layers.
            await asyncio.create_task(self._stream(call, scope[RAW_SEND]))
        except TimeoutError:
            logger.warning("a client did not read for %g s; its request is given up", self._write_timeout)

    async def _stream(self, call: Call, send: Send) -> None:
        replies = await call.take()
        for _, reply in replies:
            _raise_if_error(reply)
        await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
        chunks = list(self._renderer.first_events(len(self._messages)))
        last: dict[int, UserReply] = {}
        async with WriteWatch(self._write_timeout) as watch:
            try:
                while True:
                    for index, reply in replies:
                        _raise_if_error(reply)
                        last[index] = reply
                        chunks += self._renderer.events(index, reply)
                    if call.is_done:
                        break
                    watch.begin()
                    await send({"type": "http.response.body", "body": b"".join(chunks), "more_body": True})
                    watch.end()
                    chunks = []
                    replies = await call.take()
                chunks += self._renderer.last_events([last[i] for i in sorted(last)], call.receipt)
            except RequestError as e:
                chunks.append(event(to_json(error_body(e.message, e.status, e.param, e.code))))
            watch.begin()
            await send({"type": "http.response.body", "body": b"".join([*chunks, DONE]), "more_body": False})


async def _watch(receive: Receive, call: Call) -> None:
    """Tell the call when its client is gone. The body has been read, so nothing else can come."""
    while (await receive())["type"] != "http.disconnect":
        pass
    call.abandon()
