"""Creates the device that the settings ask for."""

from __future__ import annotations

import torch

from minisgl.core.errors import ConfigError
from minisgl.device.device import CpuDevice, Device


def create_device(name: str, threads: int | None = None, index: int = 0, count: int = 1) -> Device:
    """Create the device `name` (auto, cpu, cuda) for process `index` of `count` on this machine; each gets its own GPU.

    Raises `ConfigError` if this machine does not have the device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return CpuDevice(threads, count)
    if name != "cuda":
        raise ConfigError(f"device {name!r} is unknown; use --device auto, cpu or cuda")
    if not torch.cuda.is_available():
        built = f"torch {torch.__version__} finds none" if torch.version.cuda else "this torch is a CPU build"
        raise ConfigError(f"--device cuda needs an NVIDIA GPU: {built}; use --device cpu")
    from minisgl.device.cuda import CudaDevice

    if (found := torch.cuda.device_count()) < count:
        raise ConfigError(f"{count} ranks need as many GPUs on this host, which has {found}; give another --tp")
    return CudaDevice(torch.cuda.current_device() if count == 1 else index)
