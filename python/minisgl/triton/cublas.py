"""Linear layers by cuBLAS: its kernels loaded beforehand, and an autotuner over the algorithms of cuBLASLt.

`F.linear` takes what cuBLAS's heuristic proposes first. Another of its first two dozen proposals is up to 1.3 x as fast
(`benchmark/kernels/ops.py tuned`). They are tried within `autotuning` only, never while serving: a shape that was not
tried goes to `F.linear`. Where two are about as fast, which one wins can differ between starts, and with it the last
bits of results.
"""

from __future__ import annotations

import ctypes as C
import logging
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

_log = logging.getLogger("minisgl.triton")

COLD_BYTES: Final = 128 << 20  # twice the L2 of an H200
MIN_BUCKET, MAX_BUCKET = 2048, 16384  # rows; with fewer rows there are so few waves of tiles that every number differs
MAX_CALLS: Final = 8  # GEMMs timed in a row
CANDIDATES, FINALISTS = 24, 3
CANDIDATES_LARGE, FINALISTS_LARGE = 8, 2
MIN_GAIN: Final = 1.04  # in a graph the gaps between kernels are shorter, which has turned 2 % into a loss
MIN_GAIN_BUCKET: Final = 1.05
MAX_ERROR: Final = 1e-2  # relative to F.linear's result, whose own error is 2e-3 in bfloat16
# cuBLAS may take another kernel for every number of rows. Among these are all numbers of sequences that sample, and
# whole tiles of tokens, to which the scheduler cuts prompts (`scheduler/budget.py`).
LOADED_ROWS: Final = (*range(2, 257), *range(288, 4096, 32), *range(4096, 16385, 128))


# -- cuBLASLt through ctypes

WORKSPACE_BYTES: Final = 64 << 20
ALIGNMENT: Final = 256  # bytes that the heuristic assumes by default

# From cublasLt.h and library_types.h.
TYPES: Final = {torch.float16: 2, torch.bfloat16: 14}
_COMPUTE_32F, _R_32F = 68, 0
_DESC_TRANSA, _LAYOUT_COLS = 3, 3
_PREF_WORKSPACE, _PREF_REDUCTION = 1, 3
_REDUCTION_IN_FLOAT32 = 2  # of partial sums if K is split; the other schemes round them to the output's type


class Shape(NamedTuple):
    """All that the choice of an algorithm depends on."""

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
    """The cuBLASLt that torch has loaded, with a handle and a workspace for one stream at a time."""

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


class LtGemm:
    """x [M, K] weight [N, K]^T -> [M, N] by one algorithm. To cuBLAS, which is column-major, out^T = W x^T.

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
        """The algorithms that cuBLAS's heuristic proposes, best first."""
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
        """Multiply by this algorithm from now on."""
        C.memmove(self._algo, result.algo, C.sizeof(self._algo))

    def resize(self, rows: int) -> bool:
        """Change the number of rows; False if the algorithm cannot do it."""
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
        """Launch; False if that was not possible."""
        x_ptr, weight_ptr, out_ptr = x.data_ptr(), weight.data_ptr(), out.data_ptr()
        if (x_ptr | weight_ptr | out_ptr) % ALIGNMENT or not weight.is_contiguous():
            return False
        self._x.value, self._w.value, self._out.value = x_ptr, weight_ptr, out_ptr
        self._stream.value = self._current_stream(self._library.device)
        return bool(self._library.matmul(*self._args) == 0)


# -- the autotuner

Call = Callable[[int], object]
"""Runs a GEMM; successive numbers take turns at copies of the weight."""


class CublasLinear:
    """`F.linear`, by a faster algorithm where the search has found one; with `search=False` there is no search.

    While tuning, each new number of rows is tried, for a prefill the powers of two up to it, too. The winner at a power
    of two serves the numbers of rows down to three quarters of it, if it wins clearly and is no slower than F.linear at
    a few of them. F.linear's kernels for fewer rows are loaded, too: the first launch of a kernel waits until the
    device is idle, under load for as long as the steps in flight take (80 to 110 ms).
    """

    def __init__(self, search: bool = True) -> None:
        self.search = search
        self.seconds = 0.0  # spent on the search
        self.chosen: dict[Shape, LtGemm | None] = {}  # None: F.linear
        self._buckets: dict[Shape, LtGemm | None] = {}
        self._loaded: dict[tuple[object, ...], int] = {}  # up to this many rows
        self._libraries: dict[int, Library] = {}
        self._evictor: Tensor | None = None
        self._is_tuning = False

    @contextmanager
    def autotuning(self) -> Iterator[None]:
        """Within, load kernels and try algorithms for every new shape that is not being captured."""
        self._is_tuning, before, known = self.search, self.seconds, len(self.chosen)
        try:
            yield
        finally:
            self._is_tuning, self._evictor = False, None
            tried = len(self.chosen) - known
            if tried:
                better = sum(gemm is not None for gemm in list(self.chosen.values())[known:])
                seconds = self.seconds - before
                _log.debug("tried algorithms for %d GEMMs in %.1f s: %d are faster", tried, seconds, better)

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [M, K] contiguous, weight [N, K], bias [N] -> [M, N]; layers with a bias are not searched."""
        if self._is_tuning:
            self._load(x, weight, bias)
        if bias is not None:
            return F.linear(x, weight, bias)
        rows, n_in = x.shape
        shape = rows, len(weight), n_in, x.dtype, x.get_device()  # finds a Shape, and is made faster
        if self._is_tuning:
            self._prepare(Shape(*shape), weight)
        gemm = self.chosen.get(shape)  # type: ignore[call-overload]
        if gemm is None and _is_served(rows) and shape not in self.chosen:
            gemm = self._buckets.get(Shape(*shape)._replace(rows=_bucket(rows)))
        if gemm is not None and gemm.resize(rows):
            out = x.new_empty((rows, shape[1]))
            if gemm.run(x, weight, out):
                return out
        return F.linear(x, weight)

    def _load(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        """Launch F.linear's kernels for fewer rows than x has."""
        if not _can_tune(weight):
            return
        kind = weight.shape, weight.dtype, bias is None
        before, self._loaded[kind] = self._loaded.get(kind, 0), max(len(x), self._loaded.get(kind, 0))
        for rows in LOADED_ROWS:
            if before < rows < len(x):
                F.linear(x[:rows], weight, bias)

    def _prepare(self, shape: Shape, weight: Tensor) -> None:
        if shape in self.chosen or not _can_search(shape, weight):
            return
        if shape.rows >= MIN_BUCKET and shape._replace(rows=_bucket(shape.rows)) in self._buckets:
            return  # the bucket serves this size
        started = time.perf_counter()
        buckets = [2**i for i in range(MIN_BUCKET.bit_length() - 1, MAX_BUCKET.bit_length())]
        buckets = [rows for rows in buckets if rows <= _bucket(shape.rows)] if shape.rows >= MIN_BUCKET else []
        for rows in sorted({*buckets, shape.rows}):
            tried = shape._replace(rows=rows)
            if tried not in self.chosen:
                try:
                    self.chosen[tried], serves_fewer = self._search(tried, weight)
                except (torch.OutOfMemoryError, OSError) as error:  # no memory, or a torch without this library
                    _log.debug("%s is left to F.linear: %s", tried, error)
                    self.chosen[tried], serves_fewer = None, False
                if rows in buckets:
                    self._buckets[tried] = self.chosen[tried] if serves_fewer else None
        self.seconds += time.perf_counter() - started

    def _search(self, shape: Shape, weight: Tensor) -> tuple[LtGemm | None, bool]:
        """The fastest GEMM if that is not F.linear, and whether it is no slower with up to a quarter fewer rows."""
        if shape.device not in self._libraries:
            self._libraries[shape.device] = Library(shape.device)
        gemm = LtGemm(self._libraries[shape.device], shape)
        weights = [weight, *(weight.clone() for _ in range(min(MAX_CALLS - 1, COLD_BYTES // weight.nbytes)))]
        x = torch.randn(shape.rows, shape.n_in, device=weight.device, dtype=weight.dtype)
        want = F.linear(x, weight)
        out = torch.empty_like(want)
        is_large = shape.rows >= MIN_BUCKET

        def default(i: int, rows: int = shape.rows) -> object:
            return F.linear(x[:rows], weights[i % len(weights)])

        def current(i: int, rows: int = shape.rows) -> bool:
            return gemm.run(x[:rows], weights[i % len(weights)], out[:rows])

        def attempt(result: Result) -> Callable[[int], bool]:
            def call(i: int) -> bool:
                gemm.use(result)
                return current(i)

            return call

        # The first call of a kernel loads it, which takes milliseconds.
        results = gemm.candidates(CANDIDATES_LARGE if is_large else CANDIDATES)
        results = [result for result in results if attempt(result)(0)]
        is_long = is_large or weight.nbytes > COLD_BYTES
        times = self._times([attempt(result) for result in results], 1 if is_long else 4, 1)
        order = sorted(range(len(results)), key=times.__getitem__)[: FINALISTS_LARGE if is_large else FINALISTS]
        results = [results[i] for i in order if _is_correct(attempt(results[i]), out, want)]
        if not results:
            return None, False
        # Under a load that lasts, power limits the clock, and what was fastest in a short run may need the most.
        count = max(2, min(MAX_CALLS, int((4.0 if is_large else 0.4) / min(times))))
        usual, *times = self._times([default, *map(attempt, results)], count, 3 if is_large else 5)
        if min(times) * MIN_GAIN > usual:
            return None, False
        gemm.use(results[times.index(min(times))])
        if not is_large or min(times) * MIN_GAIN_BUCKET > usual:
            return gemm, False
        for rows in (shape.rows * part // 32 for part in (24, 26, 28, 30)):
            if not gemm.resize(rows):
                return gemm, False
            usual, ours = self._times([partial(default, rows=rows), partial(current, rows=rows)], count, 3)
            if ours > usual:
                return gemm, False
        return gemm, True

    def _times(self, calls: list[Call], count: int, repeats: int) -> list[float]:
        """Median milliseconds of each call in a series of `count`; the calls take turns and weights come from memory.

        Before each series the device reads other memory, which evicts L2 and keeps it busy until the series is queued.
        (Writing would leave dirty lines that must go to memory while the GEMMs run.)
        """
        if self._evictor is None:
            self._evictor = torch.zeros(COLD_BYTES // 4, device="cuda")
        times = []
        for _ in range(repeats):
            for call in calls:
                start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                for _ in range(1 + count // 2):  # 40 us each
                    self._evictor.sum()
                start.record()
                for i in range(count):
                    call(i)
                stop.record()
                times.append((start, stop))
        torch.cuda.current_stream().synchronize()
        return [
            statistics.median(start.elapsed_time(stop) for start, stop in times[i :: len(calls)]) / count
            for i in range(len(calls))
        ]


def _can_search(shape: Shape, weight: Tensor) -> bool:
    return _can_tune(weight) and torch.version.cuda is not None and shape.dtype in TYPES and shape.rows > 0


def _can_tune(weight: Tensor) -> bool:
    return weight.is_cuda and not torch.cuda.is_current_stream_capturing()


def _bucket(rows: int) -> int:
    """The smallest power of two >= `rows`."""
    return 1 << (rows - 1).bit_length()


def _is_served(rows: int) -> bool:
    """Whether the bucket of this number of rows serves it."""
    return rows * 4 >= MIN_BUCKET * 3 and rows * 4 >= _bucket(rows) * 3


def _is_correct(call: Call, out: Tensor, want: Tensor) -> bool:
    """Whether `call` writes all of `out`, close to `want`."""
    out.fill_(float("nan"))
    call(0)
    error = torch.linalg.vector_norm(out - want, dtype=torch.float32)
    return bool(error <= MAX_ERROR * torch.linalg.vector_norm(want, dtype=torch.float32))


cublas_linear: Final = CublasLinear()
