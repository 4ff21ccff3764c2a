"""The native step on 64-bit ARM: cross-compiled, and its self-test under emulation."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from minisgl.native import library as native

COMPILER, EMULATOR, LIBRARIES = "aarch64-linux-gnu-g++", "qemu-aarch64", "/usr/aarch64-linux-gnu"


def test_the_self_test_passes_on_arm(tmp_path: Path):
    for tool in (COMPILER, EMULATOR):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed (Debian: g++-aarch64-linux-gnu, qemu-user)")
    assert native.isas_of("aarch64") == ["generic"]
    main = tmp_path / "main.cpp"
    main.write_text('extern "C" int minisgl_self_test(); int main() { return minisgl_self_test(); }')
    flags = [flag for flag in native.target("generic").flags if flag != "-shared"]
    program = tmp_path / "self_test"
    build = [COMPILER, *flags, "-Werror", str(native.SOURCE), str(main), "-o", str(program)]
    subprocess.run(build, check=True, timeout=600)
    result = subprocess.run([EMULATOR, "-L", LIBRARIES, str(program)], capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
