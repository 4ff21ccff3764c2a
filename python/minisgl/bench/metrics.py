"""Records of requests -> the figures of a run."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from minisgl.bench.client import Record
from minisgl.bench.load import Window
from minisgl.bench.report import percentiles

SHOWN_ERRORS = 5


@dataclass(frozen=True)
class Samples:
    """What the distributions are made of, in seconds."""

    ttft: list[float]
    itl: list[float]


def gaps(record: Record, start: float = 0.0, end: float = float("inf")) -> list[float]:
    """Times between the events of a request, of those that end between `start` and `end`."""
    return [b - a for a, b in pairwise(record.times) if start <= b <= end]


def tokens_of(record: Record) -> int:
    """As the server counts them, else one for each event."""
    return record.output_tokens or len(record.times)


def summarize(records: list[Record], window: Window | None = None) -> tuple[dict[str, Any], Samples]:
    """The figures of a run, and what its pictures need. Only complete requests count, except among the errors.

    With the `window` of a burst, `itl_ms` is over the burst's tokens and those of the background streams beside it.
    """
    done = [r for r in records if not r.error and r.times]
    own = [gap for r in done for gap in gaps(r)]
    beside = [gap for r in window.background for gap in gaps(r, window.start, window.end)] if window else []
    samples = Samples([r.times[0] - r.sent for r in done], own + beside)
    late = [r.sent - r.scheduled for r in records if r.scheduled is not None]
    begin = min((r.sent for r in records), default=0.0)
    wall = max((r.end for r in records), default=0.0) - begin
    tokens = sum(tokens_of(r) for r in done)
    events = sum(len(r.times) for r in done)
    failures = [*records, *(window.background if window else [])]
    errors = Counter(r.error for r in failures if r.error)
    figures: dict[str, Any] = {
        "requests": len(records),
        "completed": len(done),
        "errors": errors.total(),
        "error_messages": dict(errors.most_common(SHOWN_ERRORS)),
        "wrong_length": sum(tokens_of(r) != r.output_len for r in done),
        "wall_s": wall,
        "prompt_tokens": sum(r.prompt_tokens or r.input_len for r in done),
        "cached_tokens": sum(r.cached_tokens for r in done),
        "output_tokens": tokens,
        "tokens_per_event": tokens / events if events else None,
        "request_s": len(done) / wall if wall else None,
        "output_tok_s": tokens / wall if wall else None,
        "ttft_ms": percentiles(samples.ttft, scale=1e3),
        "itl_ms": percentiles(samples.itl, scale=1e3),
        "tpot_ms": percentiles(
            [(r.times[-1] - r.times[0]) / (tokens_of(r) - 1) for r in done if tokens_of(r) > 1], scale=1e3
        ),
        "e2e_ms": percentiles([r.end - r.sent for r in done], scale=1e3),
        "late_ms": percentiles(late, scale=1e3),
    }
    if window is not None:
        figures["own_itl_ms"] = percentiles(own, scale=1e3)
        figures["background"] = {
            "requests": len(window.background),
            "tokens": sum(window.start <= t <= window.end for r in window.background for t in r.times),
            "itl_ms": percentiles(beside, scale=1e3),
        }
    return figures, samples
