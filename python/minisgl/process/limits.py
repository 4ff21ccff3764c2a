"""For processes that try what might not end: their environment, and the limits that they set for themselves."""

from __future__ import annotations

import os
import resource
from pathlib import Path


def module_environment() -> dict[str, str]:
    """Return environment variables for `python -m` with a module of this package."""
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "TOKENIZERS_PARALLELISM": "false"}


def limit_resources(cpu_s: int, memory: int, stack: int) -> None:
    """Limit this process to `cpu_s` seconds, `memory` more bytes and `stack` bytes, and lower its priority."""
    os.nice(5)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limits = {
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_AS: pages * resource.getpagesize() + memory,
        resource.RLIMIT_STACK: stack,
        resource.RLIMIT_CORE: 0,
    }
    for kind, most in limits.items():
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
