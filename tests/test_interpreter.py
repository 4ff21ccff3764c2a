"""Runs tests/interpreter: the Triton kernels without a GPU. `make soak` runs what is slow or for 16 bits, too."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

FILES = sorted((Path(__file__).parent / "interpreter").glob("test_*.py"))


def run(files: list[Path]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-m",
            "not slow",
            "-k",
            "not float16",
            "-p",
            "no:cacheprovider",
            *map(str, files),
        ],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1800,
    )


def test_the_kernels_in_the_interpreter():
    pytest.importorskip("triton")
    assert len(FILES) > 5
    with ThreadPoolExecutor(2) as pool:  # two processes, since one thread computes each and a start takes seconds
        for done in pool.map(run, (FILES[::2], FILES[1::2])):
            assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
            assert " passed" in done.stdout
