"""What other processes are asked on behalf of /tokenize, /detokenize and /engine_view, until it is answered."""

from __future__ import annotations

import asyncio

from minisgl.message import ConversionReply, EngineView, Failure

Reply = ConversionReply | EngineView


class Questions:
    """The open questions, by uid."""

    def __init__(self) -> None:
        self._waiting: dict[int, asyncio.Future[Reply]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def ask(self, uid: int) -> asyncio.Future[Reply]:
        """Where the answer to `uid` will be; `forget` it in any case."""
        self._waiting[uid] = asyncio.get_running_loop().create_future()
        return self._waiting[uid]

    def forget(self, uid: int) -> None:
        self._waiting.pop(uid, None)

    def answer(self, reply: Reply) -> None:
        """A reply has come; one that nobody waits for (any more) is ignored."""
        future = self._waiting.get(reply.uid)
        if future is not None and not future.done():
            future.set_result(reply)

    def fail(self, failure: Failure) -> None:
        """Nobody will answer any more."""
        for uid in self._waiting:
            self.answer(ConversionReply(uid, failure=failure))
