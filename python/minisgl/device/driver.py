"""Whether there can be a GPU at all, for processes that do not import torch."""

from __future__ import annotations

import ctypes

from minisgl.errors import ConfigError


def has_driver() -> bool:
    """Whether NVIDIA's driver is installed; it says nothing of GPUs, which `device/device.py` finds out."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def check_driver(device: str) -> None:
    """Raises `ConfigError` when `device` (auto, cpu, cuda) surely cannot be had, before anything heavy starts."""
    if device == "cuda" and not has_driver():
        raise ConfigError(
            "--device cuda needs an NVIDIA GPU: there is no driver for one (libcuda.so.1); use --device cpu"
        )
