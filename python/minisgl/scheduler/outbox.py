"""What the scheduler has to say: one message a step, and one ending a request."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from minisgl.core import FinishReason
from minisgl.message import DetokenizeMsg, Finished, Started, ids_to_bytes

if TYPE_CHECKING:
    import numpy.typing as npt

    from minisgl.core import Ints, Req
    from minisgl.scheduler.io import SchedulerIO

NOBODY = np.empty(0, "<i8")
NO_TOKENS = np.empty(0, np.int32)


def ending(req: Req, token: int, length: int, eos_ids: frozenset[int]) -> Finished | None:
    """Whether `req` is over with its newest token, of `length` tokens in all."""
    params = req.sampling_params
    if token in eos_ids and not params.ignore_eos:
        return Finished(req.uid, FinishReason.STOP, has_text=False)
    if token in params.stop_token_ids:
        return Finished(req.uid, FinishReason.STOP, has_text=False, stop_token=token)
    return Finished(req.uid, FinishReason.LENGTH) if length == req.max_len else None


class Outbox:
    """Gathers beginnings and endings until the step's tokens are sent, or `flush` sends them alone."""

    def __init__(self, io: SchedulerIO) -> None:
        self._io = io
        self._started: list[Started] = []
        self._finished: list[Finished] = []

    def start(self, req: Req, queue_seconds: float, prefill_chunks: int) -> None:
        """The first token of `req` is in the next message."""
        p = req.sampling_params
        begun = Started(
            req.uid, req.prompt_len, req.prefix_hit, p.stop, p.skip_special_tokens, queue_seconds, prefill_chunks
        )
        self._started.append(begun)

    def finish(self, end: Finished) -> None:
        self._finished.append(end)

    def send(self, uids: npt.NDArray[np.int64], tokens: Ints) -> None:
        """A token [n] of each of `uids` [n], and what has begun and ended."""
        started, self._started = self._started, []
        finished, self._finished = self._finished, []
        self._io.send(DetokenizeMsg(uids.tobytes(), ids_to_bytes(tokens), started, finished))

    def flush(self) -> None:
        """Send the endings that came without tokens."""
        if self._finished:
            self.send(NOBODY, NO_TOKENS)
