"""Forwards requests from the tokenizers to the replica that the `Router` chooses.

This happens in the API process, which sees every reply. So it knows the load of each replica, and the output tokens of
a request that has to move. A tokenizer knows only prompts, and there may be several tokenizers.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace
from typing import Final

from minisgl.api.protocol import ReplicaView
from minisgl.api.router import SILENT_S, Replica, Router
from minisgl.core.errors import RequestError
from minisgl.core.message import (
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
from minisgl.core.plan import FinishReason
from minisgl.process.queues import Codec, ZmqAsyncPullQueue, ZmqPushQueue
from minisgl.settings.options import ServerArgs

logger = logging.getLogger(__name__)

OWN_INCARNATION: Final = -1  # the incarnation in messages that the dispatcher itself sends to the detokenizer
POLL_S: Final = 0.02


class Dispatcher:
    """The sockets to all replicas. A single replica gets its requests directly from the tokenizers."""

    def __init__(self, args: ServerArgs) -> None:
        self.router = Router()
        self.starting: set[int] = set()  # indices of replicas that are starting
        self._args = args
        self._queues: dict[int, ZmqPushQueue[BackendMsg]] = {}
        self._detokenizer: ZmqPushQueue[TokenizerMsg] = ZmqPushQueue(args.zmq_detokenizer_addr, Codec(TokenizerMsg))
        for index in range(0 if args.replicas_join else args.dp):
            self._add(index, index)
        self._inbox: ZmqAsyncPullQueue[BackendMsg] | None = None
        if args.is_routed:
            self._inbox = ZmqAsyncPullQueue(args.zmq_backend_addr, Codec(BackendMsg))
            self._forwarder = asyncio.create_task(self._forward(self._inbox), name="requests")

    # -- incarnations

    def open(self, incarnation: int, index: int) -> None:
        """Open a socket to a new `incarnation` of replica number `index`, which then gets requests."""
        self._add(incarnation, index)
        self._queues[incarnation].put([TellPrefixesMsg()])

    def _add(self, incarnation: int, index: int) -> None:
        addr = replace(self._args, incarnation=incarnation).zmq_scheduler_addr
        self._queues[incarnation] = ZmqPushQueue(addr, Codec(BackendMsg))
        self.router.open(incarnation, index, time.monotonic())
        self.starting.discard(index)

    def has_others(self, index: int) -> bool:
        """Return whether a replica with another index is running."""
        return any(r.index != index for r in self.router.replicas.values())

    async def serve(
        self, incarnation: int, died: asyncio.Future[None], leaving: asyncio.Future[None], drain_timeout: float
    ) -> bool:
        """Let `incarnation` serve until it has died, or is leaving and has no more requests. Return whether it died.

        Its requests move after `drain_timeout` seconds, later if no other replica could take them over, or at once
        if it has died. They move once the detokenizer drops all further replies from it.
        """
        await asyncio.wait([died, leaving], return_when=asyncio.FIRST_COMPLETED)
        replica, deadline = self.router.replicas[incarnation], time.monotonic() + drain_timeout
        replica.accepts_requests = False
        if not died.done():
            logger.info("replica %d takes no new requests", replica.index)
        while not died.done():
            is_over = not replica.requests or time.monotonic() > deadline
            if is_over and self.has_others(replica.index):
                break
            await asyncio.sleep(POLL_S)
        self.router.remove(incarnation, died.done())
        self._detokenizer.put([LostMsg(incarnation)])
        return died.done()

    def _move(self, incarnation: int) -> None:
        """Move the requests of `incarnation` to other replicas. If it still runs, tell it to exit."""
        queue = self._queues.pop(incarnation)
        queue.put([ExitMsg()])
        queue.close()
        moved, ended = self.router.move(incarnation, time.monotonic())
        for target, request in moved:
            self._queues[target].put([request])
        if ended:
            self._end(ended)
        logger.info("%d requests moved to other replicas, %d ended", len(moved), len(ended))

    def _end(self, ended: list[Finished]) -> None:
        """End requests that no replica has. The detokenizer drops their state and replies."""
        msg = DetokenizeMsg(uids=b"", tokens=b"", started=[], finished=ended, incarnation=OWN_INCARNATION)
        self._detokenizer.put([msg])

    # -- requests

    async def _forward(self, inbox: ZmqAsyncPullQueue[BackendMsg]) -> None:
        for queue in list(self._queues.values()):  # replicas that were running before
            queue.put([TellPrefixesMsg()])
        while True:
            for msg in await inbox.get():
                if isinstance(msg, UserMsg):
                    self._route(msg)
                elif isinstance(msg, AbortMsg):
                    for incarnation in self.router.abort(msg.uid):
                        self._queues[incarnation].put([msg])
            await asyncio.sleep(0)

    def _route(self, msg: UserMsg) -> None:
        incarnation = self.router.route(msg, time.monotonic())
        if incarnation is not None:
            self._queues[incarnation].put([msg])
            return
        failure = Failure(message="no replica is running", code="replica_failed", status=503)
        self._end([Finished(uid=msg.uid, reason=FinishReason.ERROR, has_text=False, failure=failure)])

    async def put(self, msg: FlushCacheMsg | ViewMsg, index: int | None = None) -> None:
        """Send a message to replica number `index`, or to all. Raises `RequestError` (404) if none is running."""
        replicas = [r for r in self.router.replicas.values() if index is None or r.index == index]
        if not replicas:
            raise RequestError(f"replica {index} is not running", code="no_replica", status=404)
        for replica in replicas:
            self._queues[replica.incarnation].put([msg])

    async def note(self, msg: StatsMsg | PrefixesMsg | LostMsg) -> None:
        """Give the router what it needs to know for its choice, besides the replies."""
        match msg:
            case StatsMsg():
                self.router.note_stats(msg, time.monotonic())
            case PrefixesMsg():
                self.router.note_prefixes(msg)
            case LostMsg():
                self._move(msg.incarnation)

    @property
    def silence(self) -> dict[int, float]:
        """The seconds since the last heartbeat of each replica, by index. Replicas send one between two steps."""
        now = time.monotonic()
        return {r.index: now - r.heard for r in self.router.replicas.values()}

    def describe(self) -> list[ReplicaView]:
        """Return facts about each running replica, in the order of their indices."""
        now = time.monotonic()
        return [_view(r, now - r.heard) for r in sorted(self.router.replicas.values(), key=lambda r: r.index)]

    async def close(self) -> None:
        """Tell the schedulers to exit, unless they outlive this process, and close the sockets."""
        if self._inbox is not None:
            self._forwarder.cancel()
            await asyncio.gather(self._forwarder, return_exceptions=True)
            self._inbox.close()
        self._detokenizer.close()
        for queue in self._queues.values():
            if not self._args.replicas_join:
                queue.put([ExitMsg()])
            queue.close()


def _view(replica: Replica, silence: float) -> ReplicaView:
    state = "silent" if silence > SILENT_S else "serving" if replica.accepts_requests else "draining"
    return ReplicaView(
        replica=replica.index,
        state=state,
        silent_seconds=round(silence, 1),
        requests=len(replica.requests),
        queued_tokens=replica.queued,
        cached_prefixes=len(replica.prefixes),
        stats=replica.stats,
    )
