"""The C++ step on every instruction set of this machine."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from minisgl.native import library as native


@pytest.fixture(scope="session")
def built() -> None:
    """Compile for all instruction sets at once."""
    if native.build_library(native.SOURCE, native.FLAGS) is None:
        pytest.skip("no C++ compiler")
    with ThreadPoolExecutor() as pool:
        list(
            pool.map(lambda isa: native.build_library(native.SOURCE, native.compiler_flags(isa)), native.usable_isas())
        )


@pytest.fixture(params=native.usable_isas())
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, built: None) -> str:
    monkeypatch.setenv("MINISGL_CPU_ISA", request.param)
    return str(request.param)
