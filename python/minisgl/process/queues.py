"""Message queues between the processes of one server: ZeroMQ PUSH/PULL over `ipc://`, with one frame per batch.

The receiver binds and the senders connect. Messages of a sender keep their order. There is no high-water mark: nothing
is dropped, and `put` on a connected queue never blocks. Memory is bounded, because the API server limits the requests
in flight. Messages that are unsent at exit are dropped after a second.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Final, Generic, TypeVar

import msgspec
import zmq
import zmq.asyncio

logger = logging.getLogger(__name__)

M = TypeVar("M")
LINGER_MS: Final = 1000
RECONNECT_MS: Final = 5  # the default of 100 would delay a request sent just before the receiver has bound
MAX_FRAMES: Final = 4096  # taken by one `get`, so that a flood cannot hold the reader forever


class Codec(Generic[M]):
    """Encodes lists of messages of one channel as msgpack. `union` is the union of the channel's message types.

    Clients' JSON may have integers of more than 64 bits, which msgpack lacks: such a list is encoded as JSON.
    """

    def __init__(self, union: Any) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[list[M]] = msgspec.msgpack.Decoder(list[union])
        self._json: msgspec.json.Decoder[list[M]] = msgspec.json.Decoder(list[union])

    def encode(self, messages: Sequence[M]) -> bytes:
        try:
            return self._encoder.encode(messages)
        except OverflowError:
            return msgspec.json.encode(messages)

    def decode(self, frame: bytes | memoryview) -> list[M]:
        """Decode a frame. Raises `msgspec.MsgspecError` unless it is a list of this channel's messages."""
        return (self._json if frame[:1] == b"[" else self._decoder).decode(frame)


class _Queue(Generic[M]):
    def __init__(self, socket: zmq.Socket[Any], addr: str, codec: Codec[M]) -> None:
        self._socket = socket
        self._addr = addr
        self._codec = codec
        socket.set(zmq.LINGER, LINGER_MS)
        socket.set(zmq.SNDHWM, 0)
        socket.set(zmq.RCVHWM, 0)
        if socket.type == zmq.PULL:
            socket.bind(addr)
        else:
            socket.set(zmq.RECONNECT_IVL, RECONNECT_MS)
            socket.connect(addr)

    def _decode(self, frame: bytes) -> list[M]:
        """Return the messages of a frame. An invalid frame is logged and skipped."""
        try:
            return self._codec.decode(frame)
        except (msgspec.MsgspecError, ValueError, RecursionError) as e:
            logger.error("skipped a frame of %d bytes on %s: %s", len(frame), self._addr, e)
            return []

    def _receive_ready(self, socket: zmq.Socket[bytes]) -> list[M]:
        messages: list[M] = []
        for _ in range(MAX_FRAMES):
            try:
                frame = socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            messages += self._decode(frame)
        return messages

    def close(self) -> None:
        self._socket.close()


class ZmqPushQueue(_Queue[M]):
    """The sending end. `put` never blocks, so an event loop can call it, too."""

    def __init__(self, addr: str, codec: Codec[M]) -> None:
        super().__init__(zmq.Context.instance().socket(zmq.PUSH), addr, codec)

    def put(self, messages: Sequence[M]) -> None:
        """Send `messages` as one frame."""
        self._socket.send(self._codec.encode(messages))


class ZmqPullQueue(_Queue[M]):
    """The receiving end."""

    def __init__(self, addr: str, codec: Codec[M]) -> None:
        super().__init__(zmq.Context.instance().socket(zmq.PULL), addr, codec)

    def get(self, timeout: float | None = None) -> list[M]:
        """Return all messages that have arrived, in order; [] if there are none.

        Waits up to `timeout` seconds for the first frame (None: forever, 0: not at all).
        """
        if timeout != 0 and not self._socket.poll(None if timeout is None else max(0, int(timeout * 1000))):
            return []
        return self._receive_ready(self._socket)


class ZmqAsyncPullQueue(_Queue[M]):
    """The receiving end on an event loop."""

    def __init__(self, addr: str, codec: Codec[M]) -> None:
        self._async = zmq.asyncio.Context.instance().socket(zmq.PULL)
        super().__init__(self._async, addr, codec)
        # The same socket without futures, to drain what has arrived. The two may be mixed, because the asyncio socket
        # polls before it waits.
        self._sync: zmq.Socket[bytes] = zmq.Socket.shadow(self._async.underlying)

    async def get(self) -> list[M]:
        """Wait for a frame, then return all messages that have arrived, in order; none if the frame was invalid."""
        first = await self._async.recv()
        return self._decode(first) + self._receive_ready(self._sync)
