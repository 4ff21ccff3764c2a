"""The way from the tokenizers to the scheduler, or to one of several replicas, which the `Router` chooses.

The choice is made in the API process, which sees every reply: it knows the load of each replica, and the tokens that a
request has got if it must go on elsewhere. The tokenizers, of which there may be several, know the prompt alone.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace
from typing import Final

from minisgl.api.protocol import ReplicaView
from minisgl.core import FinishReason
from minisgl.errors import RequestError
from minisgl.message import (
    AbortMsg,
    BackendMsg,
    DetokenizeMsg,
    ExitMsg,
    Failure,
    Finished,
    FlushCacheMsg,
    LostMsg,
    PrefixesMsg,
    StatsMsg,
    TellPrefixesMsg,
    TokenizerMsg,
    UserMsg,
    ViewMsg,
)
from minisgl.process.queues import Codec, ZmqAsyncPullQueue, ZmqAsyncPushQueue
from minisgl.routing.router import SILENT_S, Replica, Router
from minisgl.settings.options import ServerArgs

logger = logging.getLogger(__name__)

OWN_LIFE: Final = -1  # of messages to the detokenizer that no replica has sent
POLL_S: Final = 0.02


class Dispatcher:
    """The sockets to all replicas. With one replica the tokenizers send to it directly, and nothing is chosen."""

    def __init__(self, args: ServerArgs) -> None:
        self.router = Router()
        self.starting: set[int] = set()  # replicas that do not live yet, by index
        self._args = args
        self._queues: dict[int, ZmqAsyncPushQueue[BackendMsg]] = {}
        self._detokenizer: ZmqAsyncPushQueue[TokenizerMsg] = ZmqAsyncPushQueue(
            args.zmq_detokenizer_addr, Codec(TokenizerMsg)
        )
        for index in range(0 if args.replicas_join else args.dp):
            self._add(index, index)
        self._inbox: ZmqAsyncPullQueue[BackendMsg] | None = None
        if args.is_routed:
            self._inbox = ZmqAsyncPullQueue(args.zmq_backend_addr, Codec(BackendMsg))
            self._forwarder = asyncio.create_task(self._forward(self._inbox), name="requests")

    # -- lives

    async def open(self, life: int, index: int) -> None:
        """Send requests to a new `life` of replica number `index`."""
        self._add(life, index)
        await self._queues[life].put([TellPrefixesMsg()])

    def _add(self, life: int, index: int) -> None:
        addr = replace(self._args, life=life).zmq_scheduler_addr
        self._queues[life] = ZmqAsyncPushQueue(addr, Codec(BackendMsg))
        self.router.open(life, index, time.monotonic())
        self.starting.discard(index)

    def has_others(self, index: int) -> bool:
        """Whether a replica with another index lives."""
        return any(r.index != index for r in self.router.replicas.values())

    async def drain(self, life: int, timeout: float) -> bool:
        """Send no new requests to `life`; wait up to `timeout` seconds for the end of those that it has.

        Wait longer if no other replica could take them. Return whether this one still lives.
        """
        deadline = time.monotonic() + timeout
        while (replica := self.router.replicas.get(life)) is not None:
            replica.takes_requests = False
            is_over = not replica.requests or time.monotonic() > deadline
            if is_over and self.has_others(replica.index):
                return True
            await asyncio.sleep(POLL_S)
        return False

    async def lose(self, life: int, has_died: bool) -> None:
        """Send nothing more to `life`. Its requests go on elsewhere once the detokenizer takes nothing more from it."""
        if self.router.lose(life, has_died):
            await self._detokenizer.put([LostMsg(life)])

    async def _move(self, life: int) -> None:
        """Let the requests of `life` go on elsewhere. If it still runs, it may exit, since no reply of it counts."""
        queue = self._queues.pop(life)
        await queue.put([ExitMsg()])
        queue.close()
        moved, ended = self.router.move(life, time.monotonic())
        for target, request in moved:
            await self._queues[target].put([request])
        if ended:
            await self._end(ended)
        logger.info("%d requests go on in other replicas, %d end", len(moved), len(ended))

    async def _end(self, ended: list[Finished]) -> None:
        """End requests that no replica has, by way of the detokenizer, which forgets them."""
        msg = DetokenizeMsg(uids=b"", tokens=b"", started=[], finished=ended, life=OWN_LIFE)
        await self._detokenizer.put([msg])

    # -- requests

    async def _forward(self, inbox: ZmqAsyncPullQueue[BackendMsg]) -> None:
        for queue in list(self._queues.values()):  # of those that were there from the start
            await queue.put([TellPrefixesMsg()])
        while True:
            for msg in await inbox.get():
                if isinstance(msg, UserMsg):
                    await self._route(msg)
                elif isinstance(msg, AbortMsg):
                    for life in self.router.abort(msg.uid):
                        await self._queues[life].put([msg])
            await asyncio.sleep(0)

    async def _route(self, msg: UserMsg) -> None:
        life = self.router.route(msg, time.monotonic())
        if life is not None:
            await self._queues[life].put([msg])
            return
        failure = Failure(message="no replica is running", code="replica_failed", status=503)
        await self._end([Finished(uid=msg.uid, reason=FinishReason.ERROR, has_text=False, failure=failure)])

    async def put(self, msg: FlushCacheMsg | ViewMsg, index: int | None = None) -> None:
        """Send to replica number `index`, or to all. Raises `RequestError` (404) if there is none."""
        replicas = [r for r in self.router.replicas.values() if index is None or r.index == index]
        if not replicas:
            raise RequestError(f"replica {index} is not running", code="no_replica", status=404)
        for replica in replicas:
            await self._queues[replica.life].put([msg])

    async def note(self, msg: StatsMsg | PrefixesMsg | LostMsg) -> None:
        """Take in what concerns the choice, besides the replies."""
        match msg:
            case StatsMsg():
                self.router.note_stats(msg, time.monotonic())
            case PrefixesMsg():
                self.router.note_prefixes(msg)
            case LostMsg():
                await self._move(msg.life)

    @property
    def silence(self) -> dict[int, float]:
        """The seconds since the last heartbeat of each replica, which it sends between two steps."""
        now = time.monotonic()
        return {r.index: now - r.heard for r in self.router.replicas.values()}

    def describe(self) -> list[ReplicaView]:
        """Return facts about each running replica, by index."""
        now = time.monotonic()
        return [_view(r, now - r.heard) for r in sorted(self.router.replicas.values(), key=lambda r: r.index)]

    async def close(self) -> None:
        """Close the sockets."""
        if self._inbox is not None:
            self._forwarder.cancel()
            await asyncio.gather(self._forwarder, return_exceptions=True)
            self._inbox.close()
        self._detokenizer.close()
        for queue in self._queues.values():
            queue.close()


def _view(replica: Replica, silence: float) -> ReplicaView:
    state = "silent" if silence > SILENT_S else "serving" if replica.takes_requests else "draining"
    return ReplicaView(
        replica=replica.index,
        state=state,
        silent_seconds=round(silence, 1),
        requests=len(replica.requests),
        queued_tokens=replica.queued,
        cached_prefixes=len(replica.prefixes),
        stats=replica.stats,
    )
