"""One HTTP request's generations: their replies on the way to whoever waits for them, and what is measured of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

import msgspec

from minisgl.api.receipt import Receipt
from minisgl.message import TokenizeMsg, UserReply

if TYPE_CHECKING:
    from minisgl.api.frontend import FrontendManager


class ClientGoneError(Exception):
    """The client closed the connection before its answer was complete."""


def _merge(old: UserReply, new: UserReply) -> UserReply:
    """One reply that says what both say: how a slow reader's backlog stays one reply long."""
    return msgspec.structs.replace(
        new,
        text=old.text + new.text,
        logprobs=old.logprobs + new.logprobs,
        output_ids=old.output_ids + new.output_ids,
    )


class Call:
    """The generations of one HTTP request, by index. Use it as an async context manager: what is unfinished at the
    end is aborted and forgotten.

    Of several choices for one prompt the first is sent alone and the others when it has a token: then its prompt is in
    the prefix cache, and they need not compute it again. Until then they are in `_held`, by the uid of the first.
    """

    def __init__(self, frontend: FrontendManager, messages: Sequence[TokenizeMsg], n: int) -> None:
        """The requests have their uids; each `n` in a row have the same prompt."""
        uids = [m.uid for m in messages]
        self.created = time.monotonic()
        self._frontend = frontend
        self.uids = tuple(uids)
        self._index = {uid: i for i, uid in enumerate(uids)}
        self._unfinished = set(uids)
        self._pending: dict[int, UserReply] = {}
        self._waiter: asyncio.Future[None] | None = None  # of whoever waits in `take`
        self._held = {uids[i]: messages[i + 1 : i + n] for i in range(0, len(uids), n) if n > 1}
        self._is_abandoned = False
        self._last_token: dict[int, float] = {}
        self.receipt = Receipt(self.created)

    @property
    def is_done(self) -> bool:
        """Every generation has ended and been delivered."""
        return not self._unfinished and not self._pending

    @property
    def unfinished(self) -> frozenset[int]:
        return frozenset(self._unfinished)

    def push(self, reply: UserReply) -> None:
        """A reply for one of this call's uids; nothing counts after the terminal one."""
        uid = reply.uid
        if uid not in self._unfinished:
            return
        if reply.finish_reason is not None:
            self._unfinished.discard(uid)
        self._measure(reply)
        old = self._pending.get(uid)
        self._pending[uid] = reply if old is None else _merge(old, reply)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _measure(self, reply: UserReply) -> None:
        now = time.monotonic()
        metrics = self._frontend.metrics
        last = self._last_token.get(reply.uid)
        if last is None and reply.completion_tokens:
            metrics.time_to_first_token.observe(now - self.created)
            metrics.queue_time.observe(reply.queue_seconds)
            self.receipt.start(reply, now)
        elif last is not None:
            metrics.inter_token_latency.observe(now - last)
        self._last_token[reply.uid] = now
        if reply.finish_reason is not None:
            metrics.observe_end(reply.finish_reason, now - self.created)
            self.receipt.end(now)

    def abandon(self) -> None:
        """The client is gone: whoever waits in `take` gets `ClientGoneError`."""
        self._is_abandoned = True
        self._wake()

    async def take(self) -> list[tuple[int, UserReply]]:
        """Wait for replies; at most one of each generation, (index, increment since the last one)."""
        if not self._pending and not self._is_abandoned:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._is_abandoned:
            raise ClientGoneError
        pending, self._pending = self._pending, {}
        if self._held:
            begun = [uid for uid, reply in pending.items() if reply.failure is None]
            await self._frontend.send([m for uid in begun for m in self._held.pop(uid, ())])
        return [(self._index[uid], reply) for uid, reply in pending.items()]

    async def __aenter__(self) -> Call:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._frontend.forget(self)
