"""Compiling the kernels of steps to come all at once, in threads: one after the other they took 7 s of a cold start."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from typing import Any, Final

from triton import knobs
from triton.compiler import CompiledKernel

MAX_THREADS: Final = 16


def _launch_nothing(*_: Any) -> None:
    pass


class _Uncompiled:
    """Stands for a kernel that is yet to be compiled."""

    function = packed_metadata = None
    launch_metadata = run = staticmethod(_launch_nothing)


@contextmanager
def compiled_ahead(progress: Callable[[int, int], None] | None = None) -> Iterator[None]:
    """Within, no kernel is launched; those that this process has not yet are noted, and at the end compiled or loaded.

    So what runs within computes garbage, and ranks whose kernels wait for each other need not have launched the same
    ones before. `progress` is called with (kernels done, kernels in all).
    """
    noted: dict[tuple[Any, str], Callable[[], object]] = {}

    def note(key: str, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        kernel, data = fn.jit_function, compile["specialization_data"]
        cache = kernel.device_caches[compile["device"]][0]
        cache[key] = _Uncompiled()

        def load() -> object:
            return kernel.preload(data)

        noted[kernel, key] = load
        return True  # do not compile it now

    before, knobs.runtime.jit_cache_hook = knobs.runtime.jit_cache_hook, note
    run, CompiledKernel.run = CompiledKernel.run, property(lambda kernel: _launch_nothing)
    try:
        yield
    finally:
        knobs.runtime.jit_cache_hook, CompiledKernel.run = before, run
        for kernel, key in noted:
            for caches in kernel.device_caches.values():
                caches[0].pop(key, None)
    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as pool:
        jobs = [pool.submit(load) for load in noted.values()]
        for done, job in enumerate(as_completed(jobs), 1):
            job.result()
            if progress is not None:
                progress(done, len(jobs))
