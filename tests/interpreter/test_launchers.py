"""Triton's launchers, which threads load at the same time."""

from __future__ import annotations

from pathlib import Path

import pytest
from triton.runtime import build

from minisgl.kernels.triton.launch import separate_launchers

SOURCE = """
#include <Python.h>
static PyObject *launch(PyObject *self, PyObject *args) { return PyLong_FromLong(%d); }
static PyMethodDef methods[] = {{"launch", launch, METH_VARARGS, ""}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "__triton_launcher", NULL, -1, NULL};
PyMODINIT_FUNC PyInit___triton_launcher(void) {
    PyObject *module = PyModule_Create(&definition);
    PyModule_AddFunctions(module, methods);
    return module;
}
"""


def test_a_launcher_that_is_loaded_again_stays_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without care, the second of two modules that are loaded again replaces the function of the first."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    def load(number: int) -> object:
        return build.compile_module_from_src(SOURCE % number, "__triton_launcher")

    def launched() -> list[int]:
        return [module.launch() for module in [load(number) for number in (1, 2)]]

    assert launched() == [1, 2]
    assert launched() == [2, 2], "Python has mended this: `separate_launchers` can go"
    with separate_launchers():
        assert launched() == [1, 2]
