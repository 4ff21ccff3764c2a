"""Lists of messages <-> msgpack bytes. Decoding accepts the channel's own types and nothing else."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec
import numpy as np

if TYPE_CHECKING:
    from minisgl.core import Ints

M = TypeVar("M")


class Codec(Generic[M]):
    """Encoder and decoder of one channel; `union` is the union of the message types that may travel on it."""

    def __init__(self, union: Any) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[list[M]] = msgspec.msgpack.Decoder(list[union])

    def encode(self, messages: Sequence[M]) -> bytes:
        return self._encoder.encode(messages)

    def decode(self, frame: bytes | memoryview) -> list[M]:
        """Raises `msgspec.MsgspecError` for anything but a list of this channel's messages."""
        return self._decoder.decode(frame)


def ids_to_bytes(ids: Ints | Sequence[int]) -> bytes:
    """Token ids as little-endian int32 bytes: 4 bytes a token, no parsing.

    Raises `struct.error` if something in a list is no int32, `TypeError` for an array of anything but integers. (Of a
    list numpy makes an array in twice the time.)
    """
    if isinstance(ids, np.ndarray):
        return ids.astype("<i4", casting="same_kind", copy=False).tobytes()
    return struct.pack(f"<{len(ids)}i", *ids)


def ids_from_bytes(data: bytes) -> Ints:
    """Read-only int32 view of `ids_to_bytes`' output; raises `ValueError` when the length is not a multiple of 4."""
    return np.frombuffer(data, dtype="<i4")
