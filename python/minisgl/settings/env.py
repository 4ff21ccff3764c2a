"""Environment settings that are not flags. Read by a function, never at import; a bad value raises `ConfigError`."""

from __future__ import annotations

import os

from minisgl.errors import ConfigError

_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"", "0", "false", "no", "off"}


def read_flag(name: str) -> bool:
    """The boolean environment variable `name`; unset means False."""
    value = os.environ.get(name, "").strip().lower()
    if value in _TRUE:
        return True
    if value in _FALSE:
        return False
    raise ConfigError(f"{name}={value!r} is not a boolean; use 1 or 0")


def is_check_mode() -> bool:
    """`MINISGL_CHECK=1`: verify every bookkeeping invariant at every step (see scheduler/check.py)."""
    return read_flag("MINISGL_CHECK")


def is_overlap_disabled() -> bool:
    """`MINISGL_DISABLE_OVERLAP_SCHEDULING=1`: collect each batch before the next is planned (the ablation)."""
    return read_flag("MINISGL_DISABLE_OVERLAP_SCHEDULING")
