"""Cubins of kernels in CUDA C++."""

from __future__ import annotations

import ctypes
import logging
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("nothing here is for the interpreter", allow_module_level=True)
pytest.importorskip("triton")

from minisgl.kernels.hopper import nvrtc


def test_cubins_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Compiled once for a source, its options and a version of NVRTC, and again if the file is damaged."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    compiled: list[bytes] = []
    monkeypatch.setattr(nvrtc, "compile_source", lambda library, source, options: compiled.append(source) or b"cubin")

    def find(version: int = 13, **defines: int) -> int:
        def set_version(major, minor) -> int:
            major._obj.value = version
            return 0

        assert nvrtc.find_or_compile(SimpleNamespace(nvrtcVersion=set_version), b"source", defines) == b"cubin"
        return len(compiled)

    assert [find(BITS=8), find(BITS=8), find(BITS=4), find(14, BITS=8)] == [1, 1, 2, 3]
    for damage in (b"", b"cubin", b"\0" * 40):
        for path in tmp_path.glob("*/kernel.cubin"):
            path.write_bytes(damage)
        before = len(compiled)
        assert [find(BITS=8), find(BITS=8)] == [before + 1, before + 1]


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fail(name: str) -> None:
        raise OSError(f"no {name}")

    monkeypatch.setattr(ctypes, "CDLL", fail)
    with caplog.at_level(logging.DEBUG):
        assert nvrtc.libraries.__wrapped__() is None
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("DEBUG", "quantized weights take Triton's kernels: no libcuda.so.1")
    ]
