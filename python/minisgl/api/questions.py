"""What other processes are asked on behalf of /tokenize, /detokenize and /engine_view, until it is answered."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from minisgl.message import ConversionReply, EngineView, Failure

Reply = ConversionReply | EngineView


class Questions:
    """The open questions, by uid."""

    def __init__(self) -> None:
        self._waiting: dict[int, asyncio.Future[Reply]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    async def ask(self, uid: int, sending: Awaitable[None]) -> Reply:
        """Send a question and wait for the reply that has its `uid`; raises `RequestError` when that is an error."""
        self._waiting[uid] = asyncio.get_running_loop().create_future()
        try:
            await sending
            reply = await self._waiting[uid]
        finally:
            del self._waiting[uid]
        if isinstance(reply, ConversionReply) and reply.failure is not None:
            raise reply.failure.error()
        return reply

    def answer(self, reply: Reply) -> None:
        """A reply has come; one that nobody waits for (any more) is ignored."""
        future = self._waiting.get(reply.uid)
        if future is not None and not future.done():
            future.set_result(reply)

    def fail(self, failure: Failure) -> None:
        """Nobody will answer any more."""
        for uid in self._waiting:
            self.answer(ConversionReply(uid=uid, failure=failure))
