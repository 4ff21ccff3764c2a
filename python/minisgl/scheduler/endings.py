"""What the scheduler has to say: one message a step, and one ending a request."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from minisgl.core import FinishReason
from minisgl.errors import RequestError
from minisgl.message import DetokenizeMsg, Failure, Finished, LogprobColumns, Started, ids_to_bytes
from minisgl.params import MAX_LOGPROBS

if TYPE_CHECKING:
    import numpy.typing as npt

    from minisgl.core import Ints
    from minisgl.scheduler.io import SchedulerIO
    from minisgl.scheduler.plan import Launched
    from minisgl.scheduler.req import Req
    from minisgl.scheduler.rows import Index, Rows

NOBODY = np.empty(0, "<i8")
NO_TOKENS = np.empty(0, np.int32)


def ending(req: Req, token: int, length: int, eos_ids: frozenset[int]) -> Finished | None:
    """Whether `req` is over with its newest token, of `length` tokens in all."""
    params = req.sampling_params
    if token in eos_ids and not params.ignore_eos:
        return Finished(uid=req.uid, reason=FinishReason.STOP, has_text=False)
    if token in params.stop_token_ids:
        return Finished(uid=req.uid, reason=FinishReason.STOP, has_text=params.shows_stop, stop_token=token)
    if req.matcher is not None and req.matcher.is_complete:
        return Finished(uid=req.uid, reason=FinishReason.STOP)
    return Finished(uid=req.uid, reason=FinishReason.LENGTH) if length == req.max_len else None


def failure(uid: int, error: RequestError) -> Finished:
    """The end of a request that cannot be served."""
    return Finished(uid=uid, reason=FinishReason.ERROR, has_text=False, failure=Failure.of(error))


def non_finite(req: Req) -> RequestError:
    """Why there is no token for `req`: all its logits are -Inf, or one is NaN or +Inf."""
    if req.matcher is not None and req.sampling_params.min_tokens:
        return RequestError("grammar, min_tokens and stop_token_ids together leave no token", status=500)
    return RequestError("the model's output is not a number (NaN or Inf)", status=500)


def token_logprobs(req: Req, columns: Ints) -> LogprobColumns:
    """What `req` wants of columns of `StepResult.logprobs` [WIDTH, K]."""
    top = req.sampling_params.logprobs
    assert top is not None, f"wants no log-probabilities: {req}"
    return LogprobColumns(
        uid=req.uid,
        top=top,
        logprobs=columns[0].tobytes(),
        top_ids=columns[1 : 1 + top].T.tobytes(),
        top_logprobs=columns[1 + MAX_LOGPROBS : 1 + MAX_LOGPROBS + top].T.tobytes(),
    )


class Outbox:
    """Gathers beginnings and endings until the step's tokens are sent, or `flush` sends them alone."""

    def __init__(self, io: SchedulerIO) -> None:
        self._io = io
        self._started: list[Started] = []
        self._finished: list[Finished] = []
        self._logprobs: list[LogprobColumns] = []

    def start(self, req: Req, embedding: bytes) -> None:
        """The first token of `req` is in the next message, or its embedding."""
        p = req.sampling_params
        begun = Started(
            uid=req.uid,
            prompt_tokens=req.prompt_len,
            cached_tokens=req.prefix_hit,
            stop=p.stop,
            skip_special_tokens=p.skip_special_tokens,
            queue_seconds=req.queue_seconds,
            prefill_chunks=req.prefill_chunks,
            prompt_ids=ids_to_bytes(req.ids[: req.prompt_len]) if p.echo or p.wants_prompt_logprobs else b"",
            prompt_logprobs=None
            if req.prompt_logprobs is None
            else token_logprobs(req, np.concatenate(req.prompt_logprobs, axis=1)),
            is_silent=p.max_tokens == 0,
            embedding=embedding,
            echo=p.echo,
            shows_stop=p.shows_stop,
        )
        self._started.append(begun)

    def finish(self, end: Finished) -> None:
        self._finished.append(end)

    def note_logprobs(self, step: Launched, logprobs: Ints, usable: Index, rows: Rows) -> None:
        """Note how likely tokens of `step` are: the sampled ones at the indices `usable`, and those of prompts."""
        for i, req in zip(usable.tolist(), rows.holders(step.sampled[usable]), strict=True):
            if req.sampling_params.logprobs is not None:
                self._logprobs.append(token_logprobs(req, logprobs[:, i : i + 1]))
        at = len(step.sampled)
        for req, count in step.prompt_logprobs:
            if req.prompt_logprobs is not None:
                req.prompt_logprobs.append(logprobs[:, at : at + count])
            at += count

    def send(self, uids: npt.NDArray[np.int64], tokens: Ints) -> None:
        """A token [n] of each of `uids` [n], and what has begun and ended."""
        started, self._started = self._started, []
        finished, self._finished = self._finished, []
        logprobs, self._logprobs = self._logprobs, []
        self._io.send(
            DetokenizeMsg(
                uids=uids.tobytes(), tokens=ids_to_bytes(tokens), started=started, finished=finished, logprobs=logprobs
            )
        )

    def flush(self) -> None:
        """Send the endings that came without tokens."""
        if self._finished:
            self.send(NOBODY, NO_TOKENS)
