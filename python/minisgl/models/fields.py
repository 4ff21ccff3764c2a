"""Numbers of config.json, checked."""

from __future__ import annotations

from typing import Any

from minisgl.errors import ConfigError


def size(config: dict[str, Any], key: str, default: int | None = None) -> int:
    """A positive integer; `default` stands for null or nothing. Raises `ConfigError`."""
    value = config.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"config.json has {key}={value!r}; a positive integer is needed")
    return value


def number(config: dict[str, Any], key: str, default: float | None = None) -> float:
    """A positive, finite number; `default` stands for nothing. Raises `ConfigError`."""
    value = config.get(key, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise ConfigError(f"config.json has {key}={value!r}; a positive number is needed")
    return float(value)
