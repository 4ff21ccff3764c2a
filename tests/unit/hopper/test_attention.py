"""Where `decode.cu` and `prefill.cu` are used. What they compute is tested in `tests/interpreter/` and on a GPU."""

from __future__ import annotations

import ctypes
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("nothing here is for the interpreter", allow_module_level=True)
pytest.importorskip("triton")

from minisgl.kernels.hopper import attention as cuda_attention
from minisgl.kernels.hopper.attention import supports


def test_sizes_with_a_kernel() -> None:
    assert supports(torch.bfloat16, 128, 4, 64) and supports(torch.float16, 128, 8, 128)
    for dtype, head_dim, group, page in (
        (torch.float32, 128, 4, 64), (torch.bfloat16, 64, 4, 64), (torch.bfloat16, 128, 16, 64),
        (torch.bfloat16, 128, 4, 32), (torch.bfloat16, 128, 4, 96),
    ):  # fmt: skip
        assert not supports(dtype, head_dim, group, page)


def note_launches(monkeypatch: pytest.MonkeyPatch, has_compiler: bool) -> list[tuple[Any, int, int, int]]:
    launched: list[tuple[Any, int, int, int]] = []

    def launch(kernel: object, arguments: object, device: object, grid: int, threads: int, shared: int) -> None:
        launched.append((arguments, grid, threads, shared))

    monkeypatch.setattr(
        cuda_attention, "load_kernel", lambda *args, **defines: SimpleNamespace() if has_compiler else None
    )
    monkeypatch.setattr(cuda_attention, "launch", launch)
    monkeypatch.setattr(cuda_attention, "tensor_map", lambda *args: cuda_attention.Map())
    return launched


@pytest.mark.parametrize("has_compiler", [False, True])
def test_a_launch_for_many_decodes(monkeypatch: pytest.MonkeyPatch, has_compiler: bool) -> None:
    """Four CTAs fit on an SM. Without a compiler nothing is launched, and the caller takes Triton's kernel."""
    launched = note_launches(monkeypatch, has_compiler)
    q, pages, scale = torch.zeros(3, 80, 128).half(), torch.zeros(5, 2, 8, 64, 128), torch.zeros(5, 2, 8, 64)
    out, ints = torch.zeros(3, 64, 128).bfloat16(), torch.zeros(3, 7, dtype=torch.int32)
    done = cuda_attention.cuda_decode(q, pages, scale, ints, ints, ints, scale, scale, out, 0.5, 66, 300)
    assert done == has_compiler == bool(launched)
    for arguments, grid, threads, shared in launched:
        assert grid == 66 * 8 and threads == 96 and 4 * (shared + 1024) <= 228 << 10
        assert (arguments.stride_q, arguments.stride_table, arguments.window, arguments.scale) == (
            80 * 128,
            7,
            300,
            0.5,
        )
        assert ctypes.sizeof(arguments) % 64 == 0  # as in C++, where a map is aligned


@pytest.mark.parametrize("has_compiler", [False, True])
def test_a_launch_for_chunks(monkeypatch: pytest.MonkeyPatch, has_compiler: bool) -> None:
    """A CTA on each SM."""
    launched = note_launches(monkeypatch, has_compiler)
    q, pages, scale = torch.zeros(99, 80, 128).half(), torch.zeros(5, 2, 8, 64, 128), torch.zeros(5, 2, 8, 64)
    out, ints = torch.zeros(99, 64, 128).bfloat16(), torch.zeros(3, 7, dtype=torch.int32)
    done = cuda_attention.cuda_prefill(q, pages, scale, ints, ints, 1, out, 0.5, 300, 132)
    assert done == has_compiler == bool(launched)
    for arguments, grid, threads, shared in launched:
        assert grid == 132 and threads == 384 and shared <= 227 << 10
        assert (arguments.stride_table, arguments.window, arguments.scale) == (7, 300, 0.5)
        assert ctypes.sizeof(arguments) % 64 == 0
