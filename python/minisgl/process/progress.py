"""One line on a terminal that grows with long work; one log line where there is no terminal."""

from __future__ import annotations

import logging
import sys
import time

_log = logging.getLogger("minisgl.progress")

WIDTH = 24
QUIET_SECONDS = 1.0  # what is over by then is not worth a line
MIN_SECONDS = 0.1  # between two redraws


class Progress:
    """`update(done, total)` as often as you like; `unit` is a word, or "B" for bytes, which also shows a rate."""

    def __init__(self, label: str, unit: str, is_shown: bool = True) -> None:
        """Of several processes that do the same, let one be shown."""
        self.label = label
        self.unit = unit
        self.is_shown = is_shown
        self._start = time.perf_counter()
        self._drawn = 0.0

    def update(self, done: int, total: int) -> None:
        now = time.perf_counter()
        if not self.is_shown or now - self._start < QUIET_SECONDS or (done < total and now - self._drawn < MIN_SECONDS):
            return
        self._drawn = now
        seconds = max(now - self._start, 1e-9)
        if self.unit == "B":
            amount = f"{done / 1e9:.2f}/{total / 1e9:.2f} GB, {done / 1e9 / seconds:.2f} GB/s"
        else:
            amount = f"{done}/{total} {self.unit}"
        if sys.stderr.isatty():
            filled = WIDTH * done // max(total, 1)
            bar = "#" * filled + "." * (WIDTH - filled)
            end = "\n" if done >= total else ""
            print(f"\r{self.label} [{bar}] {amount}, {seconds:.1f} s ", end=end, file=sys.stderr, flush=True)
        elif done >= total:
            _log.info("%s: %s in %.1f s", self.label, amount, seconds)
