"""Kernels compiled ahead: nothing runs meanwhile, everything works afterwards."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from minisgl.triton.launch import compile_ahead

pytestmark = pytest.mark.gpu


@triton.jit
def _add(x, n, N: tl.constexpr, BY: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(x + i, tl.load(x + i, mask=i < n) + BY, mask=i < n)


def test_kernels_are_noted_then_compiled_and_launched_as_usual():
    x, seen = torch.zeros(100, device="cuda"), []
    with compile_ahead(lambda done, total: seen.append((done, total))):
        for _ in range(3):
            _add[(1,)](x, 100, N=128, BY=1)
            _add[(1,)](x, 100, N=128, BY=2)
        assert not x.any(), "a kernel was launched"
    assert seen == [(1, 2), (2, 2)]
    cache = _add.device_caches[torch.cuda.current_device()][0]
    assert len(cache) == 2 and all(isinstance(k, triton.compiler.CompiledKernel) for k in cache.values())
    _add[(1,)](x, 100, N=128, BY=1)
    _add[(1,)](x, 100, N=128, BY=2)
    assert bool((x == 3).all()) and len(cache) == 2
    with compile_ahead():
        _add[(1,)](x, 100, N=128, BY=1)
    assert bool((x == 3).all()), "a kernel that was compiled before was launched"
    _add[(1,)](x, 100, N=128, BY=1)
    assert bool((x == 4).all())


def test_a_failure_within_leaves_no_placeholder():
    x = torch.zeros(100, device="cuda")

    def fail() -> None:
        with compile_ahead():
            _add[(1,)](x, 100, N=256, BY=5)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    _add[(1,)](x, 100, N=256, BY=5)
    assert bool((x == 5).all())
