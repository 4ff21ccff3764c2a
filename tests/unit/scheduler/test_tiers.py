"""Prefixes below the device: found again, in the right place, whatever else happens, and never believed when damaged."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from minisgl.core import FinishReason, StepCosts
from minisgl.kvcache.tiers import TierSpec
from minisgl.settings.options import EngineConfig
from support.fake_engine import FakeEngine
from support.traces import Harness, run_random_trace

HOST, DISK = TierSpec("host", 40, 1e-6), TierSpec("disk", 60, 1e-6)
CHOICES = {"host": [HOST], "disk": [DISK], "both": [HOST, DISK]}


@pytest.mark.parametrize("damage", [0.0, 0.2])
@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("names", CHOICES)
def test_random_traces_with_tiers(names: str, depth: int, damage: float) -> None:
    stored = loaded = lost = 0
    for seed in range(4):
        number = 1000 * depth + seed + 500 * (damage > 0)
        h, ends = run_random_trace(number, depth, "auto" if seed == 3 else "off", CHOICES[names], damage)
        assert {*h.errors.values()} <= {"", "no grammar"}
        tiers = h.scheduler.cache.prefix.tiers
        stored += sum(tier.stored_pages for tier in tiers)
        loaded += sum(tier.loaded_pages for tier in tiers)
        lost += sum(tier.lost_pages for tier in tiers)
        assert h.engine.num_moves == [sum(t.stored_pages for t in tiers), sum(t.loaded_pages for t in tiers)]
    assert stored > 50 and loaded > 2
    assert (lost > 0) == (damage > 0)
