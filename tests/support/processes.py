"""Waiting for what other processes do."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

# For whatever must happen: a busy machine may keep a process waiting for seconds, and a test that passes never waits so
# long. What would also come about after a time limit of the product's needs a test in which that limit is longer.
PATIENCE_S = 120.0


def eventually(condition: Callable[[], bool]) -> bool:
    """Whether `condition` becomes true."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def is_running(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
