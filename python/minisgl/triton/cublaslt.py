"""cuBLASLt through ctypes: a product with a weight matrix by a chosen algorithm."""

from __future__ import annotations

import ctypes as C
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

WORKSPACE_BYTES: Final = 64 << 20
ALIGNMENT: Final = 256  # bytes; what the heuristic supposes unless told otherwise

# From cublasLt.h and library_types.h.
TYPES: Final = {torch.float16: 2, torch.bfloat16: 14}
_COMPUTE_32F, _R_32F = 68, 0
_DESC_TRANSA, _LAYOUT_COLS = 3, 3
_PREF_WORKSPACE, _PREF_REDUCTION = 1, 3
_REDUCTION_IN_FLOAT32 = 2  # of the parts when K is split; the others round partial sums to the output's type


class Shape(NamedTuple):
    """Of a product, with all else that the choice depends on."""

    rows: int
    n_out: int
    n_in: int
    dtype: torch.dtype
    device: int


class Result(C.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algo", C.c_uint64 * 8),
        ("workspace", C.c_size_t),
        ("status", C.c_int),
        ("waves", C.c_float),
        ("reserved", C.c_int * 4),
    )


class Library:
    """The cuBLASLt that torch has loaded, with a handle and a workspace. Sound in one stream at a time."""

    def __init__(self, device: int) -> None:
        self._c = C.CDLL(f"libcublasLt.so.{str(torch.version.cuda).split('.')[0]}")
        self.device = device
        self.matmul = self._c.cublasLtMatmul
        self.handle = C.c_void_p()
        self.call("Create", C.byref(self.handle))
        self.workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=torch.device("cuda", device))

    def call(self, name: str, *args: Any) -> None:
        status = getattr(self._c, f"cublasLt{name}")(*args)
        if status:
            raise RuntimeError(f"cublasLt{name}: status {status}")

    def set(self, setter: str, target: C.c_void_p, attribute: int, value: Any) -> None:
        self.call(f"{setter}SetAttribute", target, attribute, C.byref(value), C.c_size_t(C.sizeof(value)))

    def accepts(self, *args: Any) -> bool:
        result = Result()
        status: int = self._c.cublasLtMatmulAlgoCheck(*args, C.byref(result))
        return status == 0 and result.workspace <= WORKSPACE_BYTES


class Product:
    """x [rows, K] weight [N, K]^T -> [rows, N] by one algorithm. To cuBLAS, which counts columns first, out^T = W x^T.

    All arguments of the call are built once and changed in place: converting them would take longer than the call.
    """

    def __init__(self, library: Library, shape: Shape) -> None:
        rows, n_out, n_in, dtype, _ = shape
        self._library, self._rows = library, rows
        self._desc = C.c_void_p()
        library.call("MatmulDescCreate", C.byref(self._desc), _COMPUTE_32F, _R_32F)
        library.set("MatmulDesc", self._desc, _DESC_TRANSA, C.c_int32(1))

        def layout(height: int, width: int) -> C.c_void_p:
            found = C.c_void_p()
            sizes = C.c_uint64(height), C.c_uint64(width), C.c_int64(height)
            library.call("MatrixLayoutCreate", C.byref(found), TYPES[dtype], *sizes)
            return found

        w, x, out = self._layouts = layout(n_in, n_out), layout(n_in, rows), layout(n_out, rows)
        self._algo = (C.c_uint64 * 8)()
        self._w, self._x, self._out, self._stream = (C.c_void_p() for _ in range(4))
        one, zero = C.byref(C.c_float(1)), C.byref(C.c_float(0))
        workspace = C.c_void_p(library.workspace.data_ptr()), C.c_size_t(WORKSPACE_BYTES)
        inputs = library.handle, self._desc, one, self._w, w, self._x, x, zero
        self._args = (*inputs, self._out, out, self._out, out, C.byref(self._algo), *workspace, self._stream)
        self._current_stream = torch._C._cuda_getCurrentRawStream

    def candidates(self, count: int) -> list[Result]:
        """The algorithms that cuBLAS's heuristic proposes, the most promising first."""
        library, (w, x, out) = self._library, self._layouts
        preference, found, results = C.c_void_p(), C.c_int(), (Result * count)()
        library.call("MatmulPreferenceCreate", C.byref(preference))
        library.set("MatmulPreference", preference, _PREF_WORKSPACE, C.c_size_t(WORKSPACE_BYTES))
        library.set("MatmulPreference", preference, _PREF_REDUCTION, C.c_uint32(_REDUCTION_IN_FLOAT32))
        layouts = self._desc, w, x, out, out
        try:
            library.call("MatmulAlgoGetHeuristic", library.handle, *layouts, preference, count, results, C.byref(found))
        except RuntimeError:  # no algorithm has this shape
            return []
        finally:
            library.call("MatmulPreferenceDestroy", preference)
        return [result for result in results[: found.value] if result.status == 0]

    def use(self, result: Result) -> None:
        """Multiply with this one from now on."""
        C.memmove(self._algo, result.algo, C.sizeof(self._algo))

    def resize(self, rows: int) -> bool:
        """Whether the algorithm can do `rows` rows; then it does from now on."""
        if rows != self._rows:
            library, (w, x, out) = self._library, self._layouts
            for layout in (x, out):
                library.set("MatrixLayout", layout, _LAYOUT_COLS, C.c_uint64(rows))
            self._rows = rows
            if not library.accepts(library.handle, self._desc, w, x, out, out, C.byref(self._algo)):
                self._rows = -1
                return False
        return True

    def run(self, x: Tensor, weight: Tensor, out: Tensor) -> bool:
        """Launch; whether that was possible."""
        at, wt, to = x.data_ptr(), weight.data_ptr(), out.data_ptr()
        if (at | wt | to) % ALIGNMENT or not weight.is_contiguous():
            return False
        self._x.value, self._w.value, self._out.value = at, wt, to
        self._stream.value = self._current_stream(self._library.device)
        return bool(self._library.matmul(*self._args) == 0)
