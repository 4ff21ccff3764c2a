"""Runs the kernels in CUDA C++ on a CPU (`hopper_on_cpu.cpp`, `gemv_on_cpu.cpp`)."""

from __future__ import annotations

import ctypes
import hashlib
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from minisgl.kernels.hopper.nvrtc import SOURCES, Map
from minisgl.native.build import Target, build_library

compiler = shutil.which("c++")


def compile_on_cpu(program: str, macros: dict[str, Any]) -> ctypes.CDLL:
    """Compile `program`, once for all runs of the tests: libraries stay in the user's cache, as the package's own."""
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(SOURCES.iterdir()))).hexdigest()
    options = ("-std=c++20", "-O1", "-w", "-shared", "-fPIC", f"-DDIGEST=0x{digest[:16]}")
    flags = (*options, *(f"-D{name}={value}" for name, value in macros.items()))
    return ctypes.CDLL(str(build_library(Target(program, Path(__file__).parent / f"{program}.cpp", flags))))


def tensor_map(
    address: int, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...], promotion: int = 3
) -> Map:  # fmt: skip
    found = Map()
    for i, word in enumerate((address, len(sizes), *sizes, *strides, *box)):
        found.words[i] = word
    return found


def launch(
    kernel: Any, arguments: ctypes.Structure, device: torch.device, grid: int, threads: int, shared: int,
    cluster: int = 1,
) -> None:  # fmt: skip
    assert shared <= 227 << 10
    kernel.run(ctypes.byref(arguments), grid, threads, cluster)


def emulate(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace what `module` uses to compile and launch kernels; return the list to which it adds their names."""
    names = []

    def load_kernel(device: torch.device, name: str, header: str, **defines: int | str) -> ctypes.CDLL:
        files = {"HOPPER": "hopper", "SOURCE": name}
        files |= {
            key: key.lower() for key in ("WGMMA", "GEMMS") if (SOURCES / f"{key.lower()}.cu").read_text() in header
        }
        names.append(name)
        paths = {key: f'"{SOURCES / file}.cu"' for key, file in files.items()}
        return compile_on_cpu("hopper_on_cpu", {**defines, "KERNEL": name, **paths})

    monkeypatch.setattr(module, "load_kernel", load_kernel)
    monkeypatch.setattr(module, "tensor_map", tensor_map)
    monkeypatch.setattr(module, "launch", launch)
    return names
