"""Where `decode.cu` is used. What it computes is tested in `tests/interpreter/test_attention.py` and on a GPU."""

from __future__ import annotations

import ctypes
import os
from types import SimpleNamespace

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("nothing here is for the interpreter", allow_module_level=True)
pytest.importorskip("triton")

from minisgl.triton import cuda_decode
from minisgl.triton.cuda_decode import Arguments, supports


def test_sizes_with_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cpu")
    assert not supports(device, torch.bfloat16, 128, 4, 64)
    monkeypatch.setattr(cuda_decode, "is_hopper", lambda device: True)
    assert supports(device, torch.bfloat16, 128, 4, 64) and supports(device, torch.float16, 128, 8, 128)
    for dtype, head_dim, group, page in (
        (torch.float32, 128, 4, 64), (torch.bfloat16, 64, 4, 64), (torch.bfloat16, 128, 16, 64),
        (torch.bfloat16, 128, 4, 32), (torch.bfloat16, 128, 4, 96),
    ):  # fmt: skip
        assert not supports(device, dtype, head_dim, group, page)


@pytest.mark.parametrize("has_compiler", [False, True])
def test_a_launch(monkeypatch: pytest.MonkeyPatch, has_compiler: bool) -> None:
    """Four CTAs fit on an SM. Without a compiler nothing is launched, and the caller takes Triton's kernel."""
    launched: list[tuple[Arguments, int, int, int]] = []

    def launch(kernel: object, arguments: Arguments, device: object, grid: int, threads: int, shared: int) -> None:
        launched.append((arguments, grid, threads, shared))

    monkeypatch.setattr(
        cuda_decode, "load_kernel", lambda *args, **defines: SimpleNamespace() if has_compiler else None
    )
    monkeypatch.setattr(cuda_decode, "launch", launch)
    monkeypatch.setattr(cuda_decode, "tensor_map", lambda *args: cuda_decode.Map())
    q, pages, scale = torch.zeros(3, 80, 128).half(), torch.zeros(5, 2, 8, 64, 128), torch.zeros(5, 2, 8, 64)
    out, ints = torch.zeros(3, 64, 128).bfloat16(), torch.zeros(3, 7, dtype=torch.int32)
    done = cuda_decode.cuda_decode(q, pages, scale, ints, ints, ints, scale, scale, out, 0.5, 66, 300)
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
