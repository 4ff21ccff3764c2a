"""What /metrics shows (names follow vLLM's, under the prefix `minisgl:`) and the throughput line in the log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from minisgl.core import FinishReason
from minisgl.message import StatsMsg

logger = logging.getLogger(__name__)

LOG_INTERVAL_S: Final = 5.0
_TTFT_BUCKETS: Final = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.3, 0.6, 1.2, 2.5, 5.0, 10.0, 20.0, 60.0)
_QUEUE_BUCKETS: Final = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.3, 0.6, 1.2, 2.5, 5.0, 10.0, 20.0, 60.0)
_ITL_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.3, 0.6, 1.2, 2.5, 5.0)
_E2E_BUCKETS: Final = (0.05, 0.1, 0.3, 0.6, 1.2, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0)

Entries = Callable[[], tuple[StatsMsg, int, int]]


class _StatsCollector(Collector):
    """Gauges and counters read off the scheduler's last heartbeat when somebody asks."""

    def __init__(self, model: str, read: Entries) -> None:
        self._model = model
        self._read = read

    def collect(self) -> Iterable[Metric]:
        s, frontend, detokenizer = self._read()
        held_share = s.pages_held / s.pages_total if s.pages_total else 0.0
        gauges: list[tuple[str, str, float]] = [
            ("num_requests_running", "Requests that are being computed", s.running),
            ("num_requests_waiting", "Requests in the queue", s.waiting),
            ("kv_cache_usage_perc", "Share of the KV pages held by requests, 0 to 1", held_share),
            ("kv_pages_total", "KV pages in the pool", s.pages_total),
            ("kv_pages_free", "KV pages that hold nothing", s.pages_free),
            ("kv_pages_evictable", "KV pages of cached prefixes that nobody uses", s.pages_evictable),
            ("kv_pages_held", "KV pages in use by requests", s.pages_held),
            ("frontend_entries", "Requests that the API server remembers", frontend),
            ("detokenizer_entries", "Requests that the detokenizer remembers", detokenizer),
        ]
        counters: list[tuple[str, str, float]] = [
            ("prompt_tokens", "Prompt tokens accepted", s.prompt_tokens),
            ("computed_prompt_tokens", "Prompt tokens that went through the model", s.computed_prompt_tokens),
            ("generation_tokens", "Tokens generated", s.generation_tokens),
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache", s.prompt_tokens),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache", s.cached_tokens),
            ("num_preemptions", "Requests sent back to the queue for lack of pages", s.preemptions),
        ]
        for name, help, value in gauges:
            gauge = GaugeMetricFamily("minisgl:" + name, help, labels=["model_name"])
            gauge.add_metric([self._model], value)
            yield gauge
        for name, help, value in counters:
            counter = CounterMetricFamily("minisgl:" + name, help, labels=["model_name"])
            counter.add_metric([self._model], value)
            yield counter


class Metrics:
    """One server's metrics, in a registry of its own."""

    def __init__(self, model: str, read: Entries) -> None:
        """`read` gives the last heartbeat and the entries of frontend and detokenizer."""
        self._registry = CollectorRegistry()
        self._registry.register(_StatsCollector(model, read))

        def histogram(name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
            family = Histogram("minisgl:" + name, help, ["model_name"], registry=self._registry, buckets=buckets)
            return family.labels(model)

        self.time_to_first_token = histogram("time_to_first_token_seconds", "Arrival to first token", _TTFT_BUCKETS)
        self.inter_token_latency = histogram("inter_token_latency_seconds", "Between two tokens", _ITL_BUCKETS)
        self.queue_time = histogram("request_queue_time_seconds", "Acceptance to first planning", _QUEUE_BUCKETS)
        self._latency = histogram("e2e_request_latency_seconds", "Arrival to end", _E2E_BUCKETS)
        ends = Counter(
            "minisgl:request_success", "Ended requests", ["model_name", "finished_reason"], registry=self._registry
        )
        self._ends = {reason: ends.labels(model, reason.value) for reason in FinishReason}
        self._logged = StatsMsg()
        self._logged_at = time.monotonic()

    def observe_end(self, reason: FinishReason, seconds: float) -> None:
        """Count an ended request."""
        self._ends[reason].inc()
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._latency.observe(seconds)

    def render(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self._registry)

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
