"""Runs the kernels for Hopper in CUDA C++ on a CPU (`hopper_on_cpu.cpp`)."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from minisgl.triton.nvrtc import SOURCES, Map

ON_CPU = Path(__file__).parent / "hopper_on_cpu.cpp"

compiler = shutil.which("c++")


def tensor_map(address: int, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]) -> Map:
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


def emulate(module: ModuleType, monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    """Replace what `module` uses to compile and launch kernels."""

    def load_kernel(device: torch.device, name: str, header: str, **defines: int | str) -> ctypes.CDLL:
        assert compiler is not None
        files = {"HOPPER": "hopper", "SOURCE": name}
        files |= {
            key: key.lower() for key in ("WGMMA", "GEMMS") if (SOURCES / f"{key.lower()}.cu").read_text() in header
        }
        macros = {**defines, "KERNEL": name, **{key: f'"{SOURCES / file}.cu"' for key, file in files.items()}}
        to = directory / f"{name}-{hash((*defines.items(),)):x}.so"
        options = ["-std=c++20", "-O1", "-w", "-shared", "-fPIC"]
        if not to.exists():
            each = (f"-D{key}={value}" for key, value in macros.items())
            subprocess.run([compiler, *options, *each, "-o", to, ON_CPU], check=True)
        return ctypes.CDLL(str(to))

    monkeypatch.setattr(module, "load_kernel", load_kernel)
    monkeypatch.setattr(module, "tensor_map", tensor_map)
    monkeypatch.setattr(module, "launch", launch)
