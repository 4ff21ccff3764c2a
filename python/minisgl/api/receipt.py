"""The receipt of one HTTP request (`return_timing`): how long it waited and how fast it was answered."""

from __future__ import annotations

from typing import Any

from minisgl.message import UserReply


class Receipt:
    """Times in seconds of a monotonic clock; of several generations the longest wait and the sum of the chunks.

    Written at the first token and at the end of a generation, not in between.
    """

    def __init__(self, created: float) -> None:
        self._created = created
        self._first: float | None = None  # when the first token of any generation came
        self._last = created
        self._queue_seconds = 0.0
        self._chunks = 0
        self._num_started = 0

    def start(self, reply: UserReply, now: float) -> None:
        """`reply` has the first token of a generation."""
        if self._first is None:
            self._first = now
        self._queue_seconds = max(self._queue_seconds, reply.queue_seconds)
        self._chunks += reply.prefill_chunks
        self._num_started += 1

    def end(self, now: float) -> None:
        """A generation is over."""
        self._last = now

    def timing(self, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
        """The object for the client. The rate counts what follows the first token of each generation; None: nothing."""
        first = self._last if self._first is None else self._first
        decoded, seconds = completion_tokens - self._num_started, self._last - first
        return {
            "queue_ms": round(1e3 * self._queue_seconds, 3),
            "ttft_ms": None if self._first is None else round(1e3 * (first - self._created), 3),
            "cached_tokens": cached_tokens,
            "prefill_chunks": self._chunks,
            "tokens_per_s": round(decoded / seconds, 2) if decoded > 0 and seconds > 0 else None,
        }
