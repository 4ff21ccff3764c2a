"""What a process writes to stderr: one log line an event, and progress bars. `LOG_LEVEL=DEBUG` shows detail."""

from __future__ import annotations

import logging
import os
import sys
import time
from typing import Final

from minisgl.errors import ConfigError

LEVELS: Final = ("DEBUG", "INFO", "WARNING", "ERROR")
BAR_WIDTH: Final = 24
QUIET_S: Final = 1.0  # shorter work shows no progress
REDRAW_S: Final = 0.1

logger = logging.getLogger(__name__)


def log_level() -> str:
    """The level that the environment asks for; raises `ConfigError` for an unknown one."""
    level = os.environ.get("LOG_LEVEL", "").strip().upper() or "INFO"
    if level not in LEVELS:
        raise ConfigError(f"LOG_LEVEL={level} is unknown; use one of {', '.join(LEVELS)}")
    return level


def configure_logging(process: str, level: str | None = None) -> None:
    """Send the package's log lines to stderr, marked with `process`; call once at the start of a process."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname).1s {process}: %(message)s", "%H:%M:%S"))
    package = logging.getLogger("minisgl")
    package.handlers = [handler]
    package.setLevel(level or log_level())
    package.propagate = False


def announce(text: str) -> None:
    """Print `text`. A full disk or a closed pipe costs only the text, also of what is still to be printed."""
    try:
        print(text, flush=True)
    except OSError as e:
        logger.warning("stdout cannot be written (%s)", e.strerror)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Progress:
    """One line on a terminal that follows long work; one log line at the end without a terminal.

    `unit` is a word, or "B" for bytes, which also shows a rate. Of several processes that do the same work, only one
    should set `is_shown`.
    """

    def __init__(self, label: str, unit: str, is_shown: bool = True) -> None:
        self._label = label
        self._unit = unit
        self._is_shown = is_shown
        self._start = time.perf_counter()
        self._drawn = 0.0

    def update(self, done: int, total: int) -> None:
        """Show `done` of `total` units; may be called as often as progress is made."""
        now = time.perf_counter()
        seconds = now - self._start
        if not self._is_shown or seconds < QUIET_S or (done < total and now - self._drawn < REDRAW_S):
            return
        self._drawn = now
        if self._unit == "B":
            amount = f"{done / 1e9:.2f}/{total / 1e9:.2f} GB, {done / 1e9 / seconds:.2f} GB/s"
        else:
            amount = f"{done}/{total} {self._unit}"
        if sys.stderr.isatty():
            bar = ("#" * (BAR_WIDTH * done // max(total, 1))).ljust(BAR_WIDTH, ".")
            end = "\n" if done >= total else ""
            print(f"\r{self._label} [{bar}] {amount}, {seconds:.1f} s ", end=end, file=sys.stderr, flush=True)
        elif done >= total:
            logger.info("%s: %s in %.1f s", self._label, amount, seconds)
