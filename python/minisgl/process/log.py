"""Log lines on stderr, as text or JSON, and progress lines."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final

from minisgl.core.errors import ConfigError

LEVELS: Final = ("DEBUG", "INFO", "WARNING", "ERROR")
FORMATS: Final = ("text", "json")
OTHERS: Final = ("uvicorn", "asyncio", "py.warnings")  # loggers of other packages, which get our format
THEIR_LEVELS: Final = {"DEBUG": "INFO", "INFO": "WARNING"}  # our level -> theirs, if it differs
BAR_WIDTH: Final = 16  # with which a line has at most 80 columns
QUIET_S: Final = 1.0  # shorter work shows no progress
REDRAW_S: Final = 0.1

logger = logging.getLogger(__name__)


def log_level() -> str:
    """Return the level in `LOG_LEVEL`. Raises `ConfigError` for an unknown one."""
    return _variable("LOG_LEVEL", LEVELS, "INFO")


def log_format() -> str:
    """Return the format in `LOG_FORMAT`. Raises `ConfigError` for an unknown one."""
    return _variable("LOG_FORMAT", FORMATS, "text")


def _variable(name: str, values: Sequence[str], default: str) -> str:
    given = os.environ.get(name, "").strip() or default
    for value in values:
        if given.lower() == value.lower():
            return value
    raise ConfigError(f"{name}={given} is unknown; use one of {', '.join(values)}")


class _TextLine(logging.Formatter):
    default_msec_format = "%s.%03d"

    def __init__(self, process: str) -> None:
        super().__init__(f"%(asctime)s %(levelname)s {process}: %(message)s")


class _JsonLine(logging.Formatter):
    """Formats a log line as a JSON object with `time` (ISO 8601), `level`, `process`, `message` and `extra` fields."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "process": self._process,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def configure_logging(process: str, level: str | None = None, form: str | None = None) -> None:
    """Send all log lines to stderr in one format, marked with `process`. Called once, at the start of a process.

    `level` and `form` default to the environment's.
    """
    level = level or log_level()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter((_JsonLine if (form or log_format()) == "json" else _TextLine)(process))
    logging.captureWarnings(True)
    for name, least in {"minisgl": level, **dict.fromkeys(OTHERS, THEIR_LEVELS.get(level, level))}.items():
        package = logging.getLogger(name)
        package.handlers = [handler]
        package.setLevel(least)
        package.propagate = False


def tell(text: str, is_shown: bool = True) -> None:
    """Say what a start does: in the log of a process that has one, else on a terminal."""
    if is_shown and logging.getLogger("minisgl").hasHandlers():
        logger.info("%s", text)
    elif is_shown and sys.stderr.isatty():
        print(f"minisgl: {text}", file=sys.stderr, flush=True)


def announce(text: str) -> None:
    """Print `text`. If stdout is a full disk or a closed pipe, log a warning and print nothing more."""
    try:
        print(text, flush=True)
    except OSError as e:
        logger.warning("stdout cannot be written (%s)", e.strerror)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Progress:
    """Shows the progress of long work: on a terminal a line that is updated, else one log line at the end.

    `unit` is a word, or "B" for bytes, which also shows a rate. If several processes do the same work, only one should
    set `is_shown`.
    """

    def __init__(self, label: str, unit: str, is_shown: bool = True) -> None:
        self._label = label
        self._unit = unit
        self._is_shown = is_shown
        self._start = time.perf_counter()
        self._drawn = 0.0

    def update(self, done: int, total: int, tokens: int = 0) -> None:
        """Show `done` of `total` units, and the rate of `tokens` if there are any. May be called often."""
        now = time.perf_counter()
        seconds = now - self._start
        if not self._is_shown or seconds < QUIET_S or (done < total and now - self._drawn < REDRAW_S):
            return
        self._drawn = now
        if self._unit == "B":
            amount = f"{done / 1e9:.2f}/{total / 1e9:.2f} GB, {done / 1e9 / seconds:.2f} GB/s"
        else:
            amount = f"{done}/{total} {self._unit}" + (f", {tokens / seconds:,.0f} tokens/s" if tokens else "")
        if sys.stderr.isatty():
            bar = ("#" * (BAR_WIDTH * done // max(total, 1))).ljust(BAR_WIDTH, ".")
            end = "\n" if done >= total else ""
            print(f"\r{self._label} [{bar}] {amount}, {seconds:.1f} s ", end=end, file=sys.stderr, flush=True)
        elif done >= total:
            logger.info("%s: %s in %.1f s", self._label, amount, seconds)
