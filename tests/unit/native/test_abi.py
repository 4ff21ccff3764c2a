"""The C++ step and Python agree on the layout of a plan."""

from __future__ import annotations

import ctypes

import pytest

from minisgl.core.errors import InvariantError, NativeError
from minisgl.native import abi, library


def test_the_header_is_what_the_declarations_generate() -> None:
    assert abi.HEADER.read_text() == abi.header(), "run `python -m minisgl.native.abi`"


def test_a_library_of_another_layout_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        loaded = library.load_native()
    except NativeError as e:
        pytest.skip(str(e))
    monkeypatch.setattr(abi, "LAYOUT_VERSION", abi.LAYOUT_VERSION + 1)
    with pytest.raises(InvariantError, match="layout"):
        library.NativeLibrary(loaded.path, loaded.isa)


def test_structures_are_as_large_as_in_the_header() -> None:
    for structure in (abi.Packed, abi.Recurrence, abi.LayerWeights, abi.ModelSpec, abi.StepPlan):
        kinds = [kind for _, kind in structure._fields_]
        words = sum(len(getattr(kind, "_fields_", [kind])) for kind in kinds)
        assert ctypes.sizeof(structure) == 8 * words
