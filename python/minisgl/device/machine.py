"""Reports the cores, memory and GPUs of this machine, without torch."""

from __future__ import annotations

import ctypes
import os
import platform
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Final

from minisgl.core.errors import ConfigError

NO_DEVICE: Final = 100  # CUDA_ERROR_NO_DEVICE


def cpu_name() -> str:
    """Return the CPU's model name."""
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.is_file() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def available_memory() -> int:
    """Return the bytes of memory that can still be allocated, within this process's cgroup limit."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with open("/proc/meminfo") as f:
        for line in f:
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    return min(available, _cgroup_free())


def _cgroup_free() -> int:
    """Return the bytes left below the cgroup's limit (version 2); a huge number without a limit."""
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except OSError:
        return 2**62
    cached = int(stat["active_file"]) + int(stat["inactive_file"])  # the page cache, which can be freed
    return 2**62 if limit == "max" else max(0, int(limit) - used + cached)


@cache
def gpu_memory() -> tuple[int, ...]:
    """Return the bytes of each GPU, from NVIDIA's driver. Raises `OSError` with the reason if torch can use none."""
    if version("torch").endswith("+cpu"):
        raise OSError("this torch is a CPU build")
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        raise OSError("there is no NVIDIA driver (libcuda.so.1)") from None
    count, device, size = ctypes.c_int(), ctypes.c_int(), ctypes.c_size_t()
    error = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    if error not in (0, NO_DEVICE):
        raise OSError(f"NVIDIA's driver answers with error {error}")
    sizes = []
    for index in range(count.value):
        driver.cuDeviceGet(ctypes.byref(device), index)
        driver.cuDeviceTotalMem_v2(ctypes.byref(size), device)
        sizes.append(size.value)
    if not sizes:
        raise OSError(f"NVIDIA's driver shows none (CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')})")
    return tuple(sizes)


def choose_device(name: str) -> str:
    """Return the type of the device `name` (auto, cpu, cuda). Raises `ConfigError` if this machine does not have it."""
    if name == "cpu":
        return name
    try:
        gpu_memory()
    except OSError as e:
        if name == "cuda":
            raise ConfigError(f"--device cuda needs an NVIDIA GPU: {e}; use --device cpu") from None
        return "cpu"
    return "cuda"
