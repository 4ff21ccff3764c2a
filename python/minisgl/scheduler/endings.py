"""Where a request ends: every reason why, and the terminal message that says so."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minisgl.core.errors import RequestError
from minisgl.core.message import Failure, Finished
from minisgl.core.plan import FinishReason

if TYPE_CHECKING:
    from minisgl.scheduler.req import Req


def ended_by(req: Req, token: int, length: int, eos_ids: frozenset[int]) -> Finished | None:
    """Return how `req` ends with its newest `token`, the last of `length` tokens; None if the request goes on.

    Stop strings are found by the detokenizer, which sends an abort.
    """
    params, matcher = req.sampling_params, req.matcher
    if token in eos_ids and not params.ignore_eos:
        return Finished(uid=req.uid, reason=FinishReason.STOP, has_text=False)
    if token in params.stop_token_ids:
        has_text = params.include_stop_str_in_output
        return Finished(uid=req.uid, reason=FinishReason.STOP, has_text=has_text, stop_reason=token)
    if matcher is not None and matcher.is_complete:
        return Finished(uid=req.uid, reason=FinishReason.STOP)
    if length == req.max_len:
        return Finished(uid=req.uid, reason=FinishReason.LENGTH)
    if matcher is not None and matcher.error is not None:
        return failed(req.uid, matcher.error)
    return None


def aborted(req: Req) -> Finished:
    """End a request that its client has given up, or that a stop string has ended."""
    return Finished(uid=req.uid, reason=FinishReason.ABORT)


def failed(uid: int, error: RequestError) -> Finished:
    """End a request that cannot be served."""
    return Finished(uid=uid, reason=FinishReason.ERROR, has_text=False, failure=Failure.of(error))


def not_finite(req: Req) -> Finished:
    """End a request without a token to sample: all its logits are -Inf, or one is NaN or +Inf."""
    if req.matcher is not None and req.sampling_params.min_tokens:
        return failed(req.uid, RequestError("grammar, min_tokens and stop_token_ids leave no token", status=500))
    return failed(req.uid, RequestError("the model's output is not a number (NaN or Inf)", status=500))


def too_late(req: Req, seconds: float) -> Finished:
    """End a request that no step has reached in time."""
    message = f"the request has waited for {seconds:g} s (--max-queue-time); try again later"
    return failed(req.uid, RequestError(message, code="queue_timeout", status=503))


def shut_down(req: Req) -> Finished:
    """End a request that outlives the scheduler."""
    return failed(req.uid, RequestError("the server is shutting down", status=503))
