"""The check for a GPU driver, for processes that do not import torch."""

from __future__ import annotations

import ctypes

from minisgl.errors import ConfigError


def has_driver() -> bool:
    """Return whether NVIDIA's driver is installed; `device/device.py` finds the GPUs."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def check_driver(device: str) -> None:
    """Raise `ConfigError` if `device` (auto, cpu, cuda) needs a missing driver, before anything heavy starts."""
    if device == "cuda" and not has_driver():
        raise ConfigError("--device cuda needs an NVIDIA GPU, but there is no driver (libcuda.so.1); use --device cpu")
