"""Shared set-up: helpers of tests/support are importable as `support`, and the invariant mode is on."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))
os.environ["MINISGL_CHECK"] = "1"
# Threads of tiny tensors only wait for each other, above all when another process wants the core.
os.environ["OMP_NUM_THREADS"] = "1"
# How long an example takes says how busy the machine is.
settings.register_profile("minisgl", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("minisgl")
