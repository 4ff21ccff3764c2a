"""What a process writes to stderr: one log line an event, as text or as JSON, and progress bars."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final

from minisgl.errors import ConfigError

LEVELS: Final = ("DEBUG", "INFO", "WARNING", "ERROR")
FORMATS: Final = ("text", "json")
OTHERS: Final = ("uvicorn", "asyncio", "py.warnings")  # loggers of other packages, whose lines have our form
THEIR_LEVELS: Final = {"DEBUG": "INFO", "INFO": "WARNING"}  # by ours, where it is another
BAR_WIDTH: Final = 24
QUIET_S: Final = 1.0  # shorter work shows no progress
REDRAW_S: Final = 0.1

logger = logging.getLogger(__name__)


def log_level() -> str:
    """The level that `LOG_LEVEL` asks for; raises `ConfigError` for an unknown one."""
    return _variable("LOG_LEVEL", LEVELS, "INFO")


def log_format() -> str:
    """The format that `LOG_FORMAT` asks for; raises `ConfigError` for an unknown one."""
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
    """An object with `time` (ISO 8601), `level`, `process` and `message`, and what a call gives as `extra` fields."""

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
    """Send all log lines to stderr in one form, marked with `process`; call once at the start of a process.

    Without `level` and `form` the environment counts.
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
