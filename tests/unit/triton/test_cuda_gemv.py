"""The source of the GEMV in CUDA C++, compiled for a CPU, beside the reference."""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("nothing here is for the interpreter", allow_module_level=True)
pytest.importorskip("triton")

from minisgl.ops import reference
from minisgl.ops.quantized import Format
from minisgl.triton import cuda_gemv
from minisgl.triton.cuda_gemv import SHARED_MEMORY, SOURCE, plan_launch, supports
from minisgl.triton.launch import compile_ahead
from minisgl.triton.linear import Norm

ON_CPU = Path(__file__).parents[2] / "support" / "gemv_on_cpu.cpp"
FP8, INT8 = Format(8, 0), Format(8, 0, is_integer=True)
INT4 = Format(4, 128, scale_dtype=torch.bfloat16)
WITH_ZEROS = Format(4, 128, has_zeros=True, scale_dtype=torch.float16)

compiler = shutil.which("c++")


@pytest.mark.skipif(compiler is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(
    ("kind", "n_out", "n_in", "gate", "has_norm", "has_residual", "dtype"),
    [
        (FP8, 50, 1088, "silu", True, True, torch.bfloat16),  # the last warps have no or fewer columns
        (FP8, 150, 2048, "", False, False, torch.bfloat16),  # several tiles: the ring goes round
        (INT8, 50, 1088, "gelu_tanh", True, False, torch.float16),
        (FP8, 403, 1024, "silu", True, True, torch.bfloat16),  # many outputs per CTA
        (INT4, 3, 2048, "", False, False, torch.float16),
        (INT4, 150, 2048, "", False, False, torch.bfloat16),
        (WITH_ZEROS, 50, 1280, "silu", True, True, torch.bfloat16),
    ],
    ids=str,
)
def test_one_row(
    kind: Format, n_out: int, n_in: int, gate: str, has_norm: bool, has_residual: bool, dtype: torch.dtype,
    tmp_path: Path,
) -> None:  # fmt: skip
    torch.manual_seed(0)
    weight = kind.empty(n_out * (2 if gate else 1), n_in, torch.device("cpu"))
    weight.round_from(torch.randn(weight.shape) * 0.02)
    if weight.zeros is not None:
        weight.zeros.copy_(torch.randint(6, 11, weight.zeros.shape))
    x, residual = torch.randn(2, 1, n_in).to(dtype)
    norm_weight, bias = torch.rand(n_in).to(dtype), torch.randn(len(weight)).to(dtype)
    norm = Norm(residual if has_residual else None, norm_weight, 1e-6) if has_norm else None
    out, total = torch.full((1, n_out), torch.nan, dtype=dtype), torch.full_like(x, torch.nan)
    launch = plan_launch(x, weight, bias, gate, norm, total, out, num_sms=2)

    defines = [f"-D{name}={value}" for name, value in launch.defines.items()]
    options = ["-std=c++20", "-O1", "-w", "-shared", "-fPIC", "-pthread", f'-DSOURCE="{SOURCE}"', *defines]
    assert compiler is not None
    subprocess.run([compiler, *options, "-o", tmp_path / "gemv.so", ON_CPU], check=True)
    library = ctypes.CDLL(str(tmp_path / "gemv.so"))
    assert library.shared_bytes() <= launch.shared <= SHARED_MEMORY[has_norm]
    library.run(ctypes.byref(launch.arguments), launch.grid, ctypes.c_longlong(weight.data.numel()))

    dense = weight.dense(torch.float32)
    if norm is None:
        want = reference.linear(x.float(), dense, bias.float(), gate)
    else:
        summed = (x.float() + residual.float()).to(dtype) if has_residual else x
        assert not has_residual or torch.equal(total, summed)
        normed = reference.rms_norm(summed.float(), norm_weight.float(), 1e-6)
        want = reference.linear(normed, dense, bias.float(), gate)
    assert (out.float() - want).norm() < 0.003 * want.norm()


def test_a_cpu_has_no_such_kernel() -> None:
    assert not supports(torch.zeros(1, 512).bfloat16(), FP8.empty(16, 512, torch.device("cpu")))


def test_cubins_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Compiled once for a source, its options and a version of NVRTC, and again if the file is damaged."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    compiled: list[bytes] = []
    monkeypatch.setattr(cuda_gemv, "compile_source", lambda nvrtc, source, options: compiled.append(source) or b"cubin")

    def find(version: int = 13, **defines: int) -> int:
        def set_version(major, minor) -> int:
            major._obj.value = version
            return 0

        assert cuda_gemv.find_or_compile(SimpleNamespace(nvrtcVersion=set_version), defines) == b"cubin"
        return len(compiled)

    assert [find(BITS=8), find(BITS=8), find(BITS=4), find(14, BITS=8)] == [1, 1, 2, 3]
    for damage in (b"", b"cubin", b"\0" * 40):
        for path in tmp_path.glob("*/gemv.cubin"):
            path.write_bytes(damage)
        before = len(compiled)
        assert [find(BITS=8), find(BITS=8)] == [before + 1, before + 1]


def test_without_a_compiled_kernel(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """One warning, and Triton's kernel takes the row."""

    def fail(nvrtc: object, defines: dict[str, int]) -> bytes:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(cuda_gemv, "find_or_compile", fail)
    monkeypatch.setattr(cuda_gemv, "supports", lambda x, weight: True)
    monkeypatch.setattr(cuda_gemv, "_libraries", lambda: (None, None))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    x, weights = torch.zeros(1, 512).bfloat16(), [FP8.empty(16 << i, 512, torch.device("cpu")) for i in (0, 10)]
    with caplog.at_level(logging.WARNING), compile_ahead():
        assert cuda_gemv.cuda_gemv(x, weights[0], None) is not None, "noted, not launched"
    assert not any(cuda_gemv.cuda_gemv(x, weight, None) for weight in weights * 2)
    assert [record.message for record in caplog.records] == [
        "one row takes Triton's kernel, because gemv.cu cannot be compiled or loaded: no compiler"
    ]


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fail(name: str) -> None:
        raise OSError(f"no {name}")

    monkeypatch.setattr(ctypes, "CDLL", fail)
    with caplog.at_level(logging.DEBUG):
        assert cuda_gemv._libraries.__wrapped__() is None
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("DEBUG", "one row in 8 and 4 bits takes Triton's kernel: no libcuda.so.1")
    ]
