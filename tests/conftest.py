"""Shared set-up: tests/support is importable as `support`, tools as `tools`, and the invariant mode is on."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from minisgl.core.plan import StepCosts

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
os.environ["MINISGL_CHECK"] = "1"
# Threads of tiny tensors only wait for each other, above all when another process wants the core.
os.environ["OMP_NUM_THREADS"] = "1"
# A shell ignores SIGINT for what it runs in the background, and children inherit that: tests send it to theirs.
signal.signal(signal.SIGINT, signal.default_int_handler)
# How long an example takes says how busy the machine is.
settings.register_profile("minisgl", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("minisgl")


@pytest.fixture(scope="module")
def fixed_costs() -> Iterator[None]:
    """Engines of one rank do not time their steps, so plans do not depend on this machine and its other work."""
    from minisgl.core.plan import StepCosts
    from minisgl.engine import engine

    measure = engine.measure_costs

    def costs(run: Any, spec: Any, num_pages: int, is_async: bool) -> StepCosts:
        if spec.info.size > 1:
            return measure(run, spec, num_pages, is_async)
        if spec.draft is None:
            return StepCosts(1e-1, 1e-3)
        return StepCosts(1e-1, 1e-3, plain=((1, 0.1),), drafted=(((9, 0.11),),), proposed=(((9, 0.105),),))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "measure_costs", costs)
        yield
