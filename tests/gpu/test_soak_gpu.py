"""Minutes of traffic on a GPU while clients disconnect. Every step is checked: no page leaks, no answer changes."""

from __future__ import annotations

import os
import time

import pytest

from e2e.harness import ServerProcess
from e2e.test_load import check_load

SECONDS = float(os.environ.get("MINISGL_SOAK_SECONDS", "480"))


@pytest.mark.slow
@pytest.mark.parametrize("flags", [["--num-pages", "96"]], ids=["dry pool"])
def test_traffic_with_disconnects(flags: list[str]) -> None:
    """In float32, so that greedy answers can be compared with those of solo runs."""
    with ServerProcess("--device", "cuda", "--dtype", "float32", *flags) as server:
        until, rounds = time.monotonic() + SECONDS, 0
        while time.monotonic() < until:
            check_load(server, 2000, leaver_tokens=400)
            rounds += 1
        print(f"{rounds} x 2,000 requests")
