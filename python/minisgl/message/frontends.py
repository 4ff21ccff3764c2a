"""The way to the API processes, of which there may be several: a reply goes to the one that sent the request."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from minisgl.message.codec import Codec
from minisgl.message.frontend import ConversionReply, FrontendMsg, UserReply
from minisgl.message.view import EngineView
from minisgl.process.queues import ZmqPushQueue


def uids_of(worker: int, num_workers: int) -> Iterator[int]:
    """The request numbers of one API process: those that `worker_of` gives back to it. 0 is nobody's."""
    return itertools.count(num_workers + worker, num_workers)


def worker_of(uid: int, num_workers: int) -> int:
    """The API process that numbered the request."""
    return uid % num_workers


class Frontends:
    """The sending end towards all API processes."""

    def __init__(self, addrs: Sequence[str]) -> None:
        codec: Codec[FrontendMsg] = Codec(FrontendMsg)
        self._queues: list[ZmqPushQueue[FrontendMsg]] = [ZmqPushQueue(addr, codec) for addr in addrs]

    def put(self, messages: Sequence[FrontendMsg]) -> None:
        """Send replies to those who wait for them and all else to everybody; the order is kept."""
        if len(self._queues) == 1:
            self._queues[0].put(messages)
            return
        parts: list[list[FrontendMsg]] = [[] for _ in self._queues]
        for msg in messages:
            if isinstance(msg, UserReply | ConversionReply | EngineView):
                parts[worker_of(msg.uid, len(parts))].append(msg)
            else:
                for part in parts:
                    part.append(msg)
        for queue, part in zip(self._queues, parts, strict=True):
            if part:
                queue.put(part)

    def close(self) -> None:
        for queue in self._queues:
            queue.close()
