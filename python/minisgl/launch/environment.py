"""`minisgl env`: the facts that a bug report needs."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path

import minisgl


def describe_environment() -> str:
    """List versions, processor, devices and backends, one fact a line. Imports torch."""
    facts = {
        "minisgl": minisgl.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "processor": f"{cpu_name()}, {len(os.sched_getaffinity(0))} cores usable",
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB",
    }
    for package in ("torch", "numpy", "tokenizers", "safetensors", "fastapi", "uvicorn", "pyzmq", "msgspec"):
        facts[package] = _version(package)
    facts |= _devices() | _backends()
    width = max(map(len, facts))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in facts.items())


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def cpu_name() -> str:
    """The marketing name of the processor."""
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.is_file() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _backends() -> dict[str, str]:
    from minisgl.attention.selection import ATTENTION
    from minisgl.ops.table import OPS

    return {"attention backends": ", ".join(ATTENTION.names), "op tables": ", ".join(OPS.names)}


def _devices() -> dict[str, str]:
    import torch

    facts = {"cpu features": torch.backends.cpu.get_cpu_capability(), "torch threads": str(torch.get_num_threads())}
    if not torch.cuda.is_available():
        return facts | {"gpu": "none usable by this torch"}
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        facts[f"gpu {i}"] = f"{p.name}, {p.total_memory / 2**30:.0f} GiB, compute capability {p.major}.{p.minor}"
    return facts | {"cuda": str(torch.version.cuda)}
