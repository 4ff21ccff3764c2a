"""`compile_ahead` compiles the kernels of recorded launches and runs none of them; later launches use them."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from minisgl.kernels.triton.launch import compile_ahead

pytestmark = pytest.mark.gpu


@triton.jit
def _add(x_ptr, n, BLOCK: tl.constexpr, ADDEND: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    mask = offsets < n
    tl.store(x_ptr + offsets, tl.load(x_ptr + offsets, mask=mask) + ADDEND, mask=mask)


def test_compile_ahead_compiles_recorded_kernels_without_running_them():
    x, seen = torch.zeros(100, device="cuda"), []
    with compile_ahead(lambda done, total: seen.append((done, total))):
        for _ in range(3):
            _add[(1,)](x, 100, BLOCK=128, ADDEND=1)
            _add[(1,)](x, 100, BLOCK=128, ADDEND=2)
        assert not x.any(), "a kernel was launched"
    assert seen == [(1, 2), (2, 2)]
    cache = _add.device_caches[torch.cuda.current_device()][0]
    assert len(cache) == 2 and all(isinstance(k, triton.compiler.CompiledKernel) for k in cache.values())
    assert all(k._run is not None for k in cache.values()), "launchers are not compiled"
    _add[(1,)](x, 100, BLOCK=128, ADDEND=1)
    _add[(1,)](x, 100, BLOCK=128, ADDEND=2)
    assert bool((x == 3).all()) and len(cache) == 2
    with compile_ahead():
        _add[(1,)](x, 100, BLOCK=128, ADDEND=1)
    assert bool((x == 3).all()), "a kernel that was compiled before was launched"
    _add[(1,)](x, 100, BLOCK=128, ADDEND=1)
    assert bool((x == 4).all())


def test_exception_inside_compile_ahead_leaves_no_placeholder():
    x = torch.zeros(100, device="cuda")

    def fail() -> None:
        with compile_ahead():
            _add[(1,)](x, 100, BLOCK=256, ADDEND=5)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    _add[(1,)](x, 100, BLOCK=256, ADDEND=5)
    assert bool((x == 5).all())
