"""The throughput line tells the truth."""

from __future__ import annotations

import logging

import msgspec
import pytest

from minisgl.api import metrics
from minisgl.api.metrics import Metrics
from minisgl.message import StatsMsg


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
    text = counted.render(second, 0, 0, 0).decode()
    assert 'minisgl:prefix_cache_queries_total{model_name="m"} 1000.0' in text
    assert 'minisgl:prefix_cache_hits_total{model_name="m"} 240.0' in text
