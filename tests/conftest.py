"""Shared set-up: tests/support is importable as `support`, tools as `tools`, and the invariant mode is on."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from hypothesis import HealthCheck, settings

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
os.environ["MINISGL_CHECK"] = "1"
# Threads of tiny tensors only wait for each other, above all when another process wants the core.
os.environ["OMP_NUM_THREADS"] = "1"
# A shell ignores SIGINT for what it runs in the background, and children inherit that: tests send it to theirs.
signal.signal(signal.SIGINT, signal.default_int_handler)
# How long an example takes says how busy the machine is.
settings.register_profile("minisgl", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("minisgl")
