"""Message queues between the processes of one server: ZeroMQ PUSH/PULL over `ipc://`, one frame a batch.

The receiver binds, the senders connect, and what a sender puts arrives in the order it was put. There is no
high-water mark: nothing is dropped and `put` on a connected queue never blocks; memory is bounded because the API
server bounds the requests it has under way. What is unsent at exit is given up after a second.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Final, Generic, Protocol, TypeVar

import msgspec
import zmq
import zmq.asyncio

logger = logging.getLogger(__name__)

M = TypeVar("M")
LINGER_MS: Final = 1000
RECONNECT_MS: Final = 5  # who connects before the other end has bound would try again after 100, with a request waiting
MAX_FRAMES: Final = 4096  # taken by one `get`, so that a flood cannot hold its reader forever


class FrameCodec(Protocol[M]):
    """What turns a list of messages into one frame and back; `message.Codec` is one."""

    def encode(self, messages: Sequence[M]) -> bytes: ...

    def decode(self, frame: bytes) -> list[M]: ...


def _open(socket: zmq.Socket[Any], addr: str, bind: bool) -> None:
    socket.set(zmq.LINGER, LINGER_MS)
    socket.set(zmq.SNDHWM, 0)
    socket.set(zmq.RCVHWM, 0)
    if bind:
        socket.bind(addr)
    else:
        socket.set(zmq.RECONNECT_IVL, RECONNECT_MS)
        socket.connect(addr)


def _decode(codec: FrameCodec[M], frame: bytes, addr: str) -> list[M]:
    try:
        return codec.decode(frame)
    except (msgspec.MsgspecError, ValueError, RecursionError) as e:
        logger.error("skipped a frame of %d bytes on %s: %s", len(frame), addr, e)
        return []


def _take_ready(socket: zmq.Socket[bytes], codec: FrameCodec[M], addr: str) -> list[M]:
    messages: list[M] = []
    for _ in range(MAX_FRAMES):
        try:
            frame = socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            break
        messages += _decode(codec, frame, addr)
    return messages


class ZmqPushQueue(Generic[M]):
    """The sending end."""

    def __init__(self, addr: str, codec: FrameCodec[M], bind: bool = False) -> None:
        self._codec = codec
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
        _open(self._socket, addr, bind)

    def put(self, messages: Sequence[M]) -> None:
        """Send `messages` as one frame."""
        self._socket.send(self._codec.encode(messages))

    def close(self) -> None:
        self._socket.close()


class ZmqPullQueue(Generic[M]):
    """The receiving end."""

    def __init__(self, addr: str, codec: FrameCodec[M], bind: bool = True) -> None:
        self._addr = addr
        self._codec = codec
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PULL)
        _open(self._socket, addr, bind)

    def get(self, timeout: float | None = None) -> list[M]:
        """Every message that is there, in order.

        Waits for the first frame up to `timeout` seconds (None: for ever, 0: not at all); empty when none came. A
        frame that does not decode is logged and skipped.
        """
        if timeout != 0 and not self._socket.poll(None if timeout is None else max(0, int(timeout * 1000))):
            return []
        return _take_ready(self._socket, self._codec, self._addr)

    def close(self) -> None:
        self._socket.close()


class ZmqAsyncPushQueue(Generic[M]):
    """The sending end on an event loop."""

    def __init__(self, addr: str, codec: FrameCodec[M], bind: bool = False) -> None:
        self._codec = codec
        self._socket = zmq.asyncio.Context.instance().socket(zmq.PUSH)
        _open(self._socket, addr, bind)

    async def put(self, messages: Sequence[M]) -> None:
        """Send `messages` as one frame; does not suspend on a connected queue, so it is safe while being cancelled."""
        await self._socket.send(self._codec.encode(messages))

    def close(self) -> None:
        self._socket.close()


class ZmqAsyncPullQueue(Generic[M]):
    """The receiving end on an event loop."""

    def __init__(self, addr: str, codec: FrameCodec[M], bind: bool = True) -> None:
        self._addr = addr
        self._codec = codec
        self._socket = zmq.asyncio.Context.instance().socket(zmq.PULL)
        _open(self._socket, addr, bind)
        # The same socket without futures, to drain what is there; the asyncio socket looks before it waits, so the
        # two may be mixed.
        self._sync: zmq.Socket[bytes] = zmq.Socket.shadow(self._socket.underlying)

    async def get(self) -> list[M]:
        """Wait for a frame, then every message that is there, in order (none when the only frame did not decode)."""
        first = await self._socket.recv()
        return _decode(self._codec, first, self._addr) + _take_ready(self._sync, self._codec, self._addr)

    def close(self) -> None:
        self._socket.close()
