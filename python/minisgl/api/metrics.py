"""Prometheus metrics, named like vLLM's with the prefix `minisgl:`, and the throughput line of the log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Final

from prometheus_client import CollectorRegistry, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from minisgl.api.requests import ServedAdapter
from minisgl.api.router import Replica, Router
from minisgl.core.message import StatsMsg
from minisgl.core.plan import FinishReason

logger = logging.getLogger(__name__)

LOG_INTERVAL_S: Final = 5.0
_TTFT_BUCKETS: Final = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.3, 0.6, 1.2, 2.5, 5.0, 10.0, 20.0, 60.0)
_QUEUE_BUCKETS: Final = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.3, 0.6, 1.2, 2.5, 5.0, 10.0, 20.0, 60.0)
_ITL_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.3, 0.6, 1.2, 2.5, 5.0)
_E2E_BUCKETS: Final = (0.05, 0.1, 0.3, 0.6, 1.2, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0)
_TOKEN_BUCKETS: Final = tuple(float(digit * 10**zeros) for zeros in range(6) for digit in (1, 2, 5))
# What Prometheus requests. Without the escaping, prometheus_client would write minisgl_ instead of minisgl: in samples.
_OPENMETRICS: Final = "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8"
# Histograms of requests that end by themselves.
_OF_ENDED: Final = {
    "e2e_request_latency_seconds": ("Arrival to end", _E2E_BUCKETS),
    "request_prompt_tokens": ("Tokens of the prompt", _TOKEN_BUCKETS),
    "request_generation_tokens": ("Tokens of the answer", _TOKEN_BUCKETS),
    "request_prefill_time_seconds": ("Arrival to first token, without the wait in the queue", _TTFT_BUCKETS),
    "request_decode_time_seconds": ("First to last token", _E2E_BUCKETS),
    "request_inference_time_seconds": ("Prefill and decode time together", _E2E_BUCKETS),
    "request_time_per_output_token_seconds": ("Decode time by the tokens after the first", _ITL_BUCKETS),
}
# Fields of `TierView`.
_TIER_METRICS: Final = {
    "pages_total": (GaugeMetricFamily, "KV pages that a tier below the device can hold"),
    "pages_held": (GaugeMetricFamily, "KV pages that are in a tier"),
    "stored": (CounterMetricFamily, "KV pages copied to a tier"),
    "loaded": (CounterMetricFamily, "KV pages copied from a tier to the device"),
    "lost": (CounterMetricFamily, "KV pages dropped from a tier because they were damaged"),
}
_REPLICA_METRICS: Final[dict[str, tuple[str, Callable[[Replica], int]]]] = {
    "replica_requests": ("Open requests of a replica", lambda r: len(r.requests)),
    "replica_queued_tokens": ("Prompt tokens that a replica has to compute", lambda r: r.queued),
    "replica_requests_running": ("Requests in a replica's batch", lambda r: r.stats.running),
    "replica_kv_pages_held": ("KV pages that a replica's requests use", lambda r: r.stats.pages_held),
    "replica_cached_prefixes": ("Cached prefixes of a replica, in pages", lambda r: len(r.prefixes)),
}


# Fields of `ServedAdapter`. An adapter that is unloaded takes its sums with it.
_OF_ADAPTERS: Final = ("requests", "prompt_tokens", "generation_tokens")


Kind = type[GaugeMetricFamily] | type[CounterMetricFamily]


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


class Metrics:
    """The metrics of the API process, the text of `/metrics`, and the throughput line of the log."""

    def __init__(
        self, model: str, adapters: Mapping[str, ServedAdapter] | None = None, classes: Sequence[str] = ()
    ) -> None:
        """`adapters` are those that are served whenever the metrics are read.

        With `classes` of clients, what is counted of single requests has their names as a label.
        """
        self._model = model
        self._adapters = adapters or {}
        self._classes: list[tuple[str, ...]] = [(name,) for name in classes] or [()]
        self._registry = CollectorRegistry()
        self.time_to_first_token = self._histograms(
            "time_to_first_token_seconds", "Arrival to first token", _TTFT_BUCKETS
        )
        self.inter_token_latency = self._histograms("inter_token_latency_seconds", "Between two tokens", _ITL_BUCKETS)
        self.queue_time = self._histograms("request_queue_time_seconds", "Acceptance to first planning", _QUEUE_BUCKETS)
        self._of_ended = {name: self._histograms(name, *form) for name, form in _OF_ENDED.items()}
        self._ends = dict.fromkeys(product(FinishReason, range(len(self._classes))), 0)
        ProcessCollector(registry=self._registry)
        self._logged = StatsMsg()
        self._logged_at = time.monotonic()

    def _labels(self, *names: str) -> list[str]:
        """Return the labels of what is counted of single requests."""
        return ["model_name", *names, *("class" for _ in self._classes[0])]

    def _histograms(self, name: str, help: str, bounds: tuple[float, ...]) -> list[Histogram]:
        """Return a histogram for each class."""
        histogram = Histogram("minisgl:" + name, help, self._labels(), registry=self._registry, buckets=bounds)
        return [histogram.labels(self._model, *name_of_class) for name_of_class in self._classes]

    def observe_end(self, reason: FinishReason, figures: Mapping[str, float], level: int = 0) -> None:
        """Count a request of the class with number `level` that has ended.

        If it ended by itself, observe its `figures`, named as in `_OF_ENDED`.
        """
        self._ends[reason, level] += 1
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            for name, value in figures.items():
                self._of_ended[name][level].observe(value)

    def render(
        self, router: Router, entries: int, detokenizer_entries: int, dropped: int, accept: str
    ) -> tuple[bytes, str]:
        """Return the figures of the replicas' last heartbeats and of this process as text, and its media type.

        The format is OpenMetrics if the header `accept` asks for it, else Prometheus' text format.
        """
        encode, media = choose_encoder(_OPENMETRICS if "application/openmetrics-text" in accept else "")
        return encode(_Families(self._families(router, entries, detokenizer_entries, dropped))), media

    def _family(self, kind: Kind, name: str, help: str, values: Mapping[str, float], *label: str) -> Metric:
        """Return a metric with `values` by label; without a label, there is a single value."""
        family = kind("minisgl:" + name, help, labels=["model_name", *label])
        for key, value in values.items():
            family.add_metric([self._model, key][: 1 + len(label)], value)
        return family

    def _families(self, router: Router, entries: int, detokenizer_entries: int, dropped: int) -> Iterator[Metric]:
        stats = router.stats
        held = stats.pages_held / stats.pages_total if stats.pages_total else 0.0
        gauges = {
            "num_requests_running": ("Requests in the running batch", stats.running),
            "num_requests_waiting": ("Requests in the queue", stats.waiting),
            "kv_cache_usage_perc": ("Fraction of the KV pages that requests hold, 0 to 1", held),
            "kv_pages_total": ("KV pages in the pool", stats.pages_total),
            "kv_pages_free": ("KV pages that are free", stats.pages_free),
            "kv_pages_evictable": ("KV pages of cached prefixes that no request uses", stats.pages_evictable),
            "kv_pages_held": ("KV pages that requests use", stats.pages_held),
            "frontend_entries": ("Open requests in the API server", entries),
            "detokenizer_entries": ("Open requests in the detokenizer", detokenizer_entries),
        }
        counters = {
            "prompt_tokens": ("Prompt tokens accepted", stats.prompt_tokens),
            "computed_prompt_tokens": ("Prompt tokens computed by the model", stats.computed_prompt_tokens),
            "generation_tokens": ("Tokens generated", stats.generation_tokens),
            "drafted_tokens": ("Tokens drafted", stats.drafted_tokens),
            "accepted_tokens": ("Draft tokens accepted", stats.accepted_tokens),
            "prefix_cache_queries": ("Prompt tokens looked up in the prefix cache", stats.looked_up_tokens),
            "prefix_cache_hits": ("Prompt tokens found in the prefix cache", stats.cached_tokens),
            "num_preemptions": ("Requests preempted for lack of KV pages", stats.preemptions),
            "dropped_messages": ("Inconsistent messages between processes", stats.dropped + dropped),
            "lost_replicas": ("Replicas that have died", router.deaths),
            "moved_requests": ("Requests moved to another replica", router.moved),
            "routed_cached_tokens": ("Prompt tokens cached by the replica that got them", router.cached),
        }
        for family, values in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, (help, value) in values.items():
                yield self._family(family, name, help, {"": value})
        replicas = {str(replica.index): replica for replica in router.replicas.values()}
        for name, (help, of) in _REPLICA_METRICS.items():
            yield self._family(GaugeMetricFamily, name, help, {i: of(r) for i, r in replicas.items()}, "replica")
        for name, (kind, help) in _TIER_METRICS.items():
            yield self._family(kind, "kv_tier_" + name, help, {t.name: getattr(t, name) for t in stats.tiers}, "tier")
        for name in _OF_ADAPTERS:
            sums = {adapter: getattr(served, name) for adapter, served in self._adapters.items()}
            help = f"The sum of {name} over the requests to an adapter that have ended"
            yield self._family(CounterMetricFamily, "lora_" + name, help, sums, "adapter")
        ends = CounterMetricFamily("minisgl:request_success", "Ended requests", labels=self._labels("finished_reason"))
        for (reason, level), count in self._ends.items():
            ends.add_metric([self._model, reason.value, *self._classes[level]], count)
        yield ends
        yield from self._registry.collect()

    def log_throughput(self, stats: StatsMsg) -> None:
        """Log a line every few seconds while tokens are generated; nothing when idle."""
        now = time.monotonic()
        seconds = now - self._logged_at
        if seconds < LOG_INTERVAL_S:
            return
        old = self._logged
        self._logged = stats
        self._logged_at = now
        prefill = stats.computed_prompt_tokens - old.computed_prompt_tokens
        decode = stats.generation_tokens - old.generation_tokens
        if not prefill and not decode:
            return
        looked_up, hits = stats.looked_up_tokens - old.looked_up_tokens, stats.cached_tokens - old.cached_tokens
        logger.info(
            "in %.0f s: prefill %.0f tok/s, decode %.0f tok/s, cache hits %s; now: running %d, queued %d, KV %.0f %%",
            seconds,
            prefill / seconds,
            decode / seconds,
            f"{100 * hits / looked_up:.0f} %" if looked_up else "none looked up",
            stats.running,
            stats.waiting,
            100 * stats.pages_held / max(1, stats.pages_total),
        )
