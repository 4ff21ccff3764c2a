"""The control channel: rank 0 sends the plan of each step to every other rank, over one stream socket each.

A stream neither drops nor reorders messages, has one reader, and tells both ends when the other one is gone. Messages
are `Frame`s in msgpack; nothing is pickled.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING

import msgspec

from minisgl.core.errors import InvariantError, RankError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Array = npt.NDArray[np.int32]


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """The plan of one step, or the late masks of the previous plan, or the end of the stream if both are absent.

    In the invariant mode, a frame also has digests to compare: `digest` of all plans so far, and `results` of the first
    `collected` steps.
    """

    plan: bytes | None
    masks: bytes = b""
    digest: bytes = b""
    collected: int = 0
    results: bytes = b""


class Digest:
    """A running digest of a sequence of byte strings."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)
        self.count = 0

    def add(self, data: bytes) -> None:
        self._hash.update(data)
        self.count += 1

    @property
    def value(self) -> bytes:
        return self._hash.digest()


class PlanBus:
    """Rank 0's end of the channel: publishes to the other ranks, if there are any."""

    def __init__(self, links: Mapping[int, Connection] | None = None, is_checked: bool = False) -> None:
        self._links = dict(links or {})
        self._is_checked = is_checked and bool(self._links)
        self._plans, self._results = Digest(), Digest()
        self._is_closing = False
        self._lost: int | None = None  # set by `watch`

    def publish(self, pack: Callable[[], Array]) -> None:
        """Send the packed plan that all ranks must launch as their next step. Raises `RankError` if a rank is gone."""
        if not self._links:
            return
        plan = pack().tobytes()
        if self._is_checked:
            self._plans.add(plan)
        self._send(self._frame(plan))

    def publish_masks(self, masks: Array) -> None:
        """Send the late grammar masks of the newest plan. Raises `RankError` if a rank is gone."""
        if not self._links:
            return
        data = masks.tobytes()
        if self._is_checked:
            self._plans.add(data)
        self._send(Frame(None, data))

    def note_result(self, result: Array) -> None:
        """Record the result of the oldest running step. In the invariant mode, the other ranks compare it.

        Raises `RankError` if a rank is known to be gone, because the step may be incomplete.
        """
        if self._lost is not None:
            raise RankError(f"rank {self._lost} is gone")
        if self._is_checked:
            self._results.add(result.tobytes())

    def close(self) -> None:
        """Send the end of the stream to all ranks that are still there."""
        self._is_closing = True
        with contextlib.suppress(RankError):
            self._send(self._frame(None))
        for link in self._links.values():
            link.close()
        self._links = {}

    def watch(self, on_lost: Callable[[int], None]) -> None:
        """Call `on_lost(rank)` in a separate thread when another rank is gone."""

        def run() -> None:
            ranks = {id(link): rank for rank, link in self._links.items()}
            lost = wait(list(self._links.values()))  # other ranks never send, so readable means closed
            if not self._is_closing:
                self._lost = ranks[id(lost[0])]
                on_lost(self._lost)

        if self._links:
            threading.Thread(target=run, name="ranks", daemon=True).start()

    def _frame(self, plan: bytes | None) -> Frame:
        if not self._is_checked:
            return Frame(plan)
        return Frame(plan, b"", self._plans.value, self._results.count, self._results.value)

    def _send(self, frame: Frame) -> None:
        data = msgspec.msgpack.encode(frame)
        for rank, link in self._links.items():
            try:
                link.send_bytes(data)
            except OSError as e:
                raise RankError(f"rank {rank} is gone ({e.strerror or e})") from e


class PlanFeed:
    """The end of the channel on another rank."""

    def __init__(self, link: Connection) -> None:
        self._link = link
        self._plans = Digest()

    def receive(self) -> Frame:
        """Return the next frame. Raises `RankError` if rank 0 is gone, and `InvariantError` if the digests differ."""
        try:
            frame = msgspec.msgpack.decode(self._link.recv_bytes(), type=Frame)
        except (EOFError, OSError) as e:
            raise RankError("rank 0 is gone") from e
        if data := frame.plan or frame.masks:
            self._plans.add(data)
        if frame.digest and frame.digest != self._plans.value:
            raise InvariantError(f"plan {self._plans.count} differs from rank 0's")
        return frame

    def close(self) -> None:
        self._link.close()
