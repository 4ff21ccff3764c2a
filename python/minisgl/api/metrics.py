"""What /metrics shows (names follow vLLM's, under the prefix `minisgl:`) and the throughput line in the log."""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Iterable
from itertools import accumulate, islice
from typing import Final

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from minisgl.core import FinishReason
from minisgl.message import StatsMsg

logger = logging.getLogger(__name__)

LOG_INTERVAL_S: Final = 5.0
_TTFT_BUCKETS: Final = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.3, 0.6, 1.2, 2.5, 5.0, 10.0, 20.0, 60.0)
_QUEUE_BUCKETS: Final = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.3, 0.6, 1.2, 2.5, 5.0, 10.0, 20.0, 60.0)
_ITL_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.3, 0.6, 1.2, 2.5, 5.0)
_E2E_BUCKETS: Final = (0.05, 0.1, 0.3, 0.6, 1.2, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0)


class Histogram:
    """How many values were seen up to each bound, and above the last one; plain numbers, as it counts every token."""

    def __init__(self, name: str, help: str, bounds: tuple[float, ...]) -> None:
        self.name = name
        self.help = help
        self.bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self.bounds, value)] += 1
        self._sum += value

    def values(self) -> list[float]:
        """The counts, bucket by bucket, and the sum of all values."""
        return [*self._counts, self._sum]


class Tally:
    """What one API process has measured. The sums of several processes' `values` are those of the whole server."""

    def __init__(self) -> None:
        self.time_to_first_token = Histogram("time_to_first_token_seconds", "Arrival to first token", _TTFT_BUCKETS)
        self.inter_token_latency = Histogram("inter_token_latency_seconds", "Between two tokens", _ITL_BUCKETS)
        self.queue_time = Histogram("request_queue_time_seconds", "Acceptance to first planning", _QUEUE_BUCKETS)
        self._latency = Histogram("e2e_request_latency_seconds", "Arrival to end", _E2E_BUCKETS)
        self.histograms = (self.time_to_first_token, self.inter_token_latency, self.queue_time, self._latency)
        self._ends = dict.fromkeys(FinishReason, 0)

    def observe_end(self, reason: FinishReason, seconds: float) -> None:
        """Count an ended request."""
        self._ends[reason] += 1
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._latency.observe(seconds)

    def values(self) -> list[float]:
        """All numbers in a fixed order: the histograms', then the ended requests by reason."""
        return [v for h in self.histograms for v in h.values()] + list(self._ends.values())


class _ServerCollector(Collector):
    """The whole server's metrics, made when somebody asks."""

    def __init__(
        self, model: str, tally: Tally, values: list[float], stats: StatsMsg, entries: int, detokenizer_entries: int
    ) -> None:
        self._labels = [model]
        self._tally = tally
        self._values = values
        self._stats = stats
        self._entries = entries
        self._detokenizer_entries = detokenizer_entries

    def collect(self) -> Iterable[Metric]:
        s = self._stats
        held_share = s.pages_held / s.pages_total if s.pages_total else 0.0
        gauges: list[tuple[str, str, float]] = [
            ("num_requests_running", "Requests that are being computed", s.running),
            ("num_requests_waiting", "Requests in the queue", s.waiting),
            ("kv_cache_usage_perc", "Share of the KV pages held by requests, 0 to 1", held_share),
            ("kv_pages_total", "KV pages in the pool", s.pages_total),
            ("kv_pages_free", "KV pages that hold nothing", s.pages_free),
            ("kv_pages_evictable", "KV pages of cached prefixes that nobody uses", s.pages_evictable),
            ("kv_pages_held", "KV pages in use by requests", s.pages_held),
            ("frontend_entries", "Requests that the API server remembers", self._entries),
            ("detokenizer_entries", "Requests that the detokenizer remembers", self._detokenizer_entries),
        ]
        counters: list[tuple[str, str, float]] = [
            ("prompt_tokens", "Prompt tokens accepted", s.prompt_tokens),
            ("computed_prompt_tokens", "Prompt tokens that went through the model", s.computed_prompt_tokens),
            ("generation_tokens", "Tokens generated", s.generation_tokens),
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache", s.prompt_tokens),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache", s.cached_tokens),
            ("num_preemptions", "Requests sent back to the queue for lack of pages", s.preemptions),
        ]
        for kind, rows in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, help, value in rows:
                family = kind("minisgl:" + name, help, labels=["model_name"])
                family.add_metric(self._labels, value)
                yield family
        values = iter(self._values)
        for h in self._tally.histograms:
            bounds = [*map(str, h.bounds), "+Inf"]
            buckets = list(zip(bounds, accumulate(islice(values, len(bounds))), strict=True))
            histogram = HistogramMetricFamily("minisgl:" + h.name, h.help, labels=["model_name"])
            histogram.add_metric(self._labels, buckets, next(values))
            yield histogram
        ends = CounterMetricFamily(
            "minisgl:request_success", "Ended requests", labels=["model_name", "finished_reason"]
        )
        for reason, count in zip(FinishReason, values, strict=True):
            ends.add_metric([*self._labels, reason.value], count)
        yield ends


class Metrics:
    """What /metrics shows, and the throughput line."""

    def __init__(self, model: str) -> None:
        self.tally = Tally()
        self._model = model
        self._logged = StatsMsg()
        self._logged_at = time.monotonic()

    def render(self, stats: StatsMsg, entries: int, detokenizer_entries: int, others: list[list[float]]) -> bytes:
        """Prometheus' text format: the last heartbeat, and what we and the `others` (their tallies) have measured."""
        values = [sum(column) for column in zip(self.tally.values(), *others, strict=True)]
        return generate_latest(_ServerCollector(self._model, self.tally, values, stats, entries, detokenizer_entries))

    def log_throughput(self, stats: StatsMsg) -> None:
        """One line every few seconds while tokens flow; silence when idle."""
        now = time.monotonic()
        seconds = now - self._logged_at
        if seconds < LOG_INTERVAL_S:
            return
        old, self._logged, self._logged_at = self._logged, stats, now
        prefill = stats.computed_prompt_tokens - old.computed_prompt_tokens
        decode = stats.generation_tokens - old.generation_tokens
        if not prefill and not decode:
            return
        asked, hit = stats.prompt_tokens - old.prompt_tokens, stats.cached_tokens - old.cached_tokens
        logger.info(
            "prefill %.0f tok/s, decode %.0f tok/s, running %d, queued %d, KV %.0f %%, cache hits %.0f %%",
            prefill / seconds,
            decode / seconds,
            stats.running,
            stats.waiting,
            100 * stats.pages_held / max(1, stats.pages_total),
            100 * hit / max(1, asked),
        )
