"""What all launchers share: programmatic dependent launch (PDL), counters, and compiling kernels ahead of their use."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from threading import Lock
from types import ModuleType, SimpleNamespace
from typing import Any, Final

import torch
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import build

from minisgl.core.layout import ROW, words

INTERPRETED: Final = os.environ.get("TRITON_INTERPRET") == "1"  # Triton reads it when it is first imported
COUNTERS: Final = 1 << 14
MAX_COMPILE_THREADS: Final = 16
MAX_CHAINED: Final = 256  # rows; a layer of 8B in FP8 at 64 rows takes 101 us instead of 106
ROW_WORDS = tl.constexpr(words(ROW))  # 32-bit words from one row's field to the next row's

_WITHOUT_PDL: Final[dict[str, Any]] = {"PDL": False}
_WITH_PDL: Final[dict[str, Any]] = {"PDL": True, "launch_pdl": True}
_counters: dict[tuple[torch.device, int, int], Tensor] = {}
_noted: dict[Hashable, Callable[[], object]] | None = None  # loaders of kernels, inside `compile_ahead`


@cache
def has_pdl(device: torch.device) -> bool:
    """Whether a kernel may start before its predecessor in the stream has ended (sm_90 and later)."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def hopper() -> ModuleType | None:
    """Return the kernels in CUDA C++, if they are there and can run on this machine's GPU."""
    has_gpu = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    if not has_gpu or find_spec("minisgl.kernels.hopper") is None:
        return None
    room = import_module("minisgl.kernels.hopper.kernels")
    return room if room.is_usable() else None


def pdl_options(device: torch.device, is_chained: bool = True) -> dict[str, Any]:
    """Return the launch options of a kernel with the parameter `PDL: tl.constexpr`; PDL is on if it `is_chained`.

    Chained kernels are those of a one-row step, those inside one op, our GEMMs and, up to MAX_CHAINED rows, norms,
    rounding and the transform before attention. With PDL, a kernel first calls `gdc_launch_dependents`. It may then
    read what no kernel of the step writes (weights), and calls `gdc_wait` before anything else. Every kernel of a chain
    must wait, because its end implies the end of all earlier kernels only if it has waited for its predecessor. If a
    kernel waits before it launches its dependents, these may read its predecessor's results before they wait
    (`moe.py: _down_gemv`). Small kernels between two GEMMs do this, too: otherwise the second GEMM would start while
    the first still fills most SMs, and crowd onto the few that are free.
    """
    return _WITH_PDL if is_chained and has_pdl(device) else _WITHOUT_PDL


def counters(device: torch.device, idle: int = 0, stride: int = 1) -> Tensor:
    """Return COUNTERS int32 that are `idle` between kernels; every `stride`-th is in use.

    For kernels whose last program finishes the work and resets the counters. All such kernels share them, so they must
    run in one stream.
    """
    tensor = _counters.get((device, idle, stride))
    if tensor is None:
        # If allocated during a capture, they would be filled only at replay, and would be in the graph's memory.
        assert device.type != "cuda" or not torch.cuda.is_current_stream_capturing(), "the first run is in a capture"
        tensor = torch.full((COUNTERS * stride,), idle, dtype=torch.int32, device=device)
        _counters[device, idle, stride] = tensor
    return tensor


def _launch_nothing(*_: Any) -> None:
    pass


def is_compiling_ahead() -> bool:
    return _noted is not None


def is_noted(key: Hashable, load: Callable[[], object]) -> bool:
    """Whether `compile_ahead` is active. It then calls `load` at its end, and the kernel must not be launched now."""
    if _noted is not None:
        _noted[key] = load
    return _noted is not None


@contextmanager
def separate_launchers() -> Iterator[None]:
    """Give each of Triton's launchers a module of its own.

    They are C modules of one name. Python loads one that it has loaded before into the newest module of that name, so
    that one of several threads could launch a kernel with the arguments of another.
    """
    load, lock = getattr(build, "_load_module_from_path", None), Lock()
    if load is None:  # another version of Triton
        yield
        return

    def load_alone(name: str, path: str) -> Any:
        with lock:
            return SimpleNamespace(**vars(load(name, path)))

    build._load_module_from_path = load_alone
    try:
        yield
    finally:
        build._load_module_from_path = load


class _Uncompiled:
    """A stand-in for a kernel that is not compiled yet."""

    function = packed_metadata = None
    launch_metadata = run = staticmethod(_launch_nothing)


@contextmanager
def compile_ahead(progress: Callable[[int, int], None] | None = None) -> Iterator[None]:
    """Record kernels instead of launching them; at the end, compile or load all of them in parallel threads.

    Compiled one by one they took 7 s of a cold start. Results of ops in this context are garbage. Ranks whose kernels
    wait for each other need not launch the same kernels in it. `progress` is called with (kernels done, all kernels).
    """
    global _noted
    cached: list[tuple[Any, str]] = []
    noted = _noted = {}

    def note(key: str, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        kernel = fn.jit_function
        data = compile["specialization_data"]
        cache = kernel.device_caches[compile["device"]][0]
        cache[key] = _Uncompiled()

        def load() -> object:
            with torch.cuda.device(compile["device"]):
                return kernel.preload(data).run  # the launcher, which Triton else compiles (in C) at the first launch

        noted[kernel, key] = load
        cached.append((kernel, key))
        return True  # tells Triton not to compile it now

    hook, run = knobs.runtime.jit_cache_hook, CompiledKernel.run
    knobs.runtime.jit_cache_hook = note
    CompiledKernel.run = property(lambda kernel: _launch_nothing)
    try:
        yield
    finally:
        knobs.runtime.jit_cache_hook, CompiledKernel.run, _noted = hook, run, None
        for kernel, key in cached:
            for caches in kernel.device_caches.values():
                caches[0].pop(key, None)
    with separate_launchers(), ThreadPoolExecutor(min(MAX_COMPILE_THREADS, os.cpu_count() or 1)) as pool:
        jobs = [pool.submit(load) for load in noted.values()]
        for done, job in enumerate(as_completed(jobs), 1):
            job.result()
            if progress is not None:
                progress(done, len(jobs))
