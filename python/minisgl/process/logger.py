"""Logging of every process: one line an event on stderr, with the process's name. `LOG_LEVEL=DEBUG` shows detail."""

from __future__ import annotations

import logging
import os
import sys
from typing import Final

from minisgl.errors import ConfigError

LEVELS: Final = ("DEBUG", "INFO", "WARNING", "ERROR")


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
    logger = logging.getLogger("minisgl")
    for old in list(logger.handlers):
        logger.removeHandler(old)
    logger.addHandler(handler)
    logger.setLevel(level or log_level())
    logger.propagate = False
