"""Shared set-up: helpers of tests/support are importable as `support`, and the invariant mode is on."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
os.environ["MINISGL_CHECK"] = "1"
