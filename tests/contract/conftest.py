"""The C++ step on every instruction set of this machine."""

from __future__ import annotations

import pytest

from minisgl.core.errors import NativeError
from minisgl.native import library as native
from minisgl.native.build import build_libraries

ISAS = native.usable_isas()


@pytest.fixture(scope="session")
def built() -> None:
    """Compile the best and the portable build at the same time, once for all: libraries stay in the user's cache."""
    for future in build_libraries([native.target(isa) for isa in {ISAS[0], ISAS[-1]}]):
        try:
            future.result()
        except NativeError as e:
            if "no C++ compiler" not in str(e):
                raise
            pytest.skip(str(e))


# The builds between them are left to `make soak`.
@pytest.fixture(params=[ISAS[0], *(pytest.param(isa, marks=pytest.mark.slow) for isa in ISAS[1:-1]), *ISAS[1:][-1:]])
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, built: None) -> str:
    monkeypatch.setenv("MINISGL_CPU_ISA", request.param)
    return str(request.param)


# Of these ways to compute a model, each takes its turn on every third one; each model is computed in the others.
TURNS = ("test_chunked_prefill", "test_step_without_sampling", "test_bfloat16_is_", "[4-", "-1-cpu-", "-64-reference")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave two of three models on the portable build, and on some ways, to `make soak`; and there its company."""
    for item in items:
        params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        if "depend_on_the_company" in item.name and params["isa"] == ISAS[-1] != ISAS[0]:
            item.add_marker(pytest.mark.slow)
        if "checkpoint" not in params:
            continue
        turn = next((i for i, mark in enumerate(TURNS) if mark in item.name), None)
        turn = 0 if params.get("isa") == ISAS[-1] != ISAS[0] else turn
        if turn is not None and (hash_of(params["checkpoint"]) + turn) % 3:
            item.add_marker(pytest.mark.slow)


def hash_of(name: str) -> int:
    return sum(name.encode())
