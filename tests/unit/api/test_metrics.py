"""The throughput line tells the truth, and dashboards find the names that they ask for."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_text

from minisgl.api import metrics
from minisgl.api.metrics import Metrics
from minisgl.api.router import Router
from minisgl.core.message import StatsMsg, TierView
from minisgl.core.plan import FinishReason


def router_with(stats: StatsMsg) -> Router:
    """A router of one replica whose last heartbeat is `stats`."""
    router = Router()
    router.open(stats.incarnation, 0, 0.0)
    router.note_stats(stats, 0.0)
    return router


def test_throughput_line(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    monkeypatch.setattr(metrics.time, "monotonic", lambda: now)
    counted = Metrics("m")
    lines: list[str] = []

    def after_10_s(stats: StatsMsg) -> None:
        nonlocal now
        now += 10
        caplog.clear()
        counted.log_throughput(stats)
        lines[:] = [r.getMessage() for r in caplog.records]

    with caplog.at_level(logging.INFO, logger="minisgl"):
        # 1,000 tokens are accepted; their requests begin, and find 240 of them, in the next interval.
        first = StatsMsg(prompt_tokens=1000, computed_prompt_tokens=20, waiting=3, pages_total=10)
        after_10_s(first)
        assert lines == [
            "in 10 s: prefill 2 tok/s, decode 0 tok/s, cache hits none looked up; now: running 0, queued 3, KV 0 %"
        ]
        second = msgspec.structs.replace(
            first, looked_up_tokens=1000, cached_tokens=240, generation_tokens=50, running=3, waiting=0, pages_held=5
        )
        after_10_s(second)
        assert lines == ["in 10 s: prefill 0 tok/s, decode 5 tok/s, cache hits 24 %; now: running 3, queued 0, KV 50 %"]
        after_10_s(second)
        assert lines == []
    tier = TierView(name="disk", pages_total=90, pages_held=7, stored=30, loaded=20, lost=1)
    text = counted.render(router_with(msgspec.structs.replace(second, tiers=[tier])), 0, 0, 0, "")[0].decode()
    assert 'minisgl:kv_tier_pages_held{model_name="m",tier="disk"} 7.0' in text
    assert 'minisgl:kv_tier_loaded_total{model_name="m",tier="disk"} 20.0' in text
    assert 'minisgl:prefix_cache_queries_total{model_name="m"} 1000.0' in text
    assert 'minisgl:prefix_cache_hits_total{model_name="m"} 240.0' in text


# What vLLM's Grafana dashboard asks for, with our prefix.
DASHBOARD = """
e2e_request_latency_seconds_bucket e2e_request_latency_seconds_sum e2e_request_latency_seconds_count
generation_tokens_total inter_token_latency_seconds_bucket kv_cache_usage_perc num_requests_running
num_requests_waiting prompt_tokens_total request_decode_time_seconds_sum request_generation_tokens_bucket
request_prefill_time_seconds_sum request_prompt_tokens_bucket request_queue_time_seconds_sum request_success_total
time_to_first_token_seconds_bucket
"""


@pytest.mark.parametrize(
    ("accept", "media", "read"),
    [
        ("", "text/plain; version=0.0.4; charset=utf-8", read_text),
        (
            "application/openmetrics-text;version=1.0.0,text/plain;q=0.5",
            "application/openmetrics-text",
            read_openmetrics,
        ),
    ],
)
def test_dashboards_find_their_names(accept: str, media: str, read: Any) -> None:
    counted = Metrics("m")
    counted.observe_end(FinishReason.STOP, {"request_prompt_tokens": 30, "request_decode_time_seconds": 0.2})
    counted.observe_end(FinishReason.ABORT, {"request_prompt_tokens": 1})  # did not end by itself
    body, shown = counted.render(router_with(StatsMsg()), 0, 0, 0, accept)
    assert shown.startswith(media)
    samples = {s.name: s.value for family in read(body.decode()) for s in family.samples}
    assert {f"minisgl:{name}" for name in DASHBOARD.split()} <= samples.keys()
    assert samples["minisgl:request_prompt_tokens_sum"] == 30 and samples["minisgl:request_prompt_tokens_count"] == 1
    assert samples["process_resident_memory_bytes"] > 1e6 and samples["process_open_fds"] > 0
