"""Products with a weight matrix by the algorithm of cuBLASLt that was the fastest when tried on this device.

`F.linear` takes what cuBLAS's heuristic proposes first; another of its first two dozen proposals is up to 1.3 x as fast
(`benchmark/kernels/ops.py tuned`). They are tried while `tuning` only, never while serving: a shape that was not tried
goes to `F.linear`. Where two are about as fast, which wins can differ between starts, and with it last bits of results.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from minisgl.triton.cublaslt import TYPES, Library, Product, Result, Shape

_log = logging.getLogger("minisgl.triton")

COLD_BYTES: Final = 128 << 20  # twice the second-level cache of an H200
MIN_BUCKET, MAX_BUCKET = 2048, 16384  # rows; below, waves of tiles are so few that every number of rows differs
MAX_ROW: Final = 8  # products timed in a row
CANDIDATES, FINALISTS = 24, 3
CANDIDATES_LARGE, FINALISTS_LARGE = 8, 2
MIN_GAIN: Final = 1.04  # in a graph the gaps between kernels are shorter, which has turned 2 % into a loss
MIN_GAIN_BUCKET: Final = 1.05
MAX_ERROR: Final = 1e-2  # relative to F.linear's result, whose own is 2e-3 in bfloat16
# Which kernel cuBLAS takes may change with every number of rows. Among these are all that sequences which choose a
# token come to, and whole tiles of tokens, to which the scheduler cuts prompts (`scheduler/budget.py`).
LOADED_ROWS: Final = (*range(2, 257), *range(288, 4096, 32), *range(4096, 16385, 128))

Call = Callable[[int], object]
"""Makes a product; successive numbers take turns at copies of the weight."""


class LtLinear:
    """`F.linear` without a bias, but by a better algorithm where a search has found one. `search=False`: there is none.

    While tuning, a product's number of rows is tried, and for a prefill the powers of two up to it: what wins at one
    serves the numbers of rows down to three quarters of it, if it wins clearly and is no slower than F.linear at a few
    of them. F.linear's kernels for fewer rows are loaded then, too: the first launch of one waits until the device is
    idle, behind steps of a rush for as long as one of them takes.
    """

    def __init__(self, search: bool = True) -> None:
        self.search = search
        self.seconds = 0.0  # spent searching
        self.chosen: dict[Shape, Product | None] = {}  # None: F.linear
        self._buckets: dict[Shape, Product | None] = {}
        self._loaded: dict[tuple[object, ...], int] = {}  # up to how many rows
        self._libraries: dict[int, Library] = {}
        self._other: Tensor | None = None
        self._is_tuning = False

    @contextmanager
    def tuning(self) -> Iterator[None]:
        """Within, products outside a capture are tried on the device when their shape is new."""
        self._is_tuning, before, known = self.search, self.seconds, len(self.chosen)
        try:
            yield
        finally:
            self._is_tuning, self._other = False, None
            tried = len(self.chosen) - known
            if tried:
                better = sum(product is not None for product in list(self.chosen.values())[known:])
                seconds = self.seconds - before
                _log.debug("tried %d matrix products in %.1f s: %d found faster", tried, seconds, better)

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [rows, K] contiguous, weight [N, K], bias [N], with which there is no search -> [rows, N]."""
        if self._is_tuning:
            self._load(x, weight, bias)
        if bias is not None:
            return F.linear(x, weight, bias)
        rows, n_in = x.shape
        shape = rows, len(weight), n_in, x.dtype, x.get_device()  # a plain tuple is found as well, and made faster
        if self._is_tuning:
            self._prepare(Shape(*shape), weight)
        product = self.chosen.get(shape)  # type: ignore[call-overload]
        if product is None and _is_served(rows) and shape not in self.chosen:
            product = self._buckets.get(Shape(*shape)._replace(rows=_bucket(rows)))
        if product is not None and product.resize(rows):
            out = x.new_empty((rows, shape[1]))
            if product.run(x, weight, out):
                return out
        return F.linear(x, weight)

    def _load(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        """Launch what F.linear takes for fewer rows than x has."""
        if not _can_try(weight):
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
            return  # a large graph's, for which that stands
        started = time.perf_counter()
        buckets = [2**i for i in range(MIN_BUCKET.bit_length() - 1, MAX_BUCKET.bit_length())]
        buckets = [rows for rows in buckets if rows <= _bucket(shape.rows)] if shape.rows >= MIN_BUCKET else []
        for rows in sorted({*buckets, shape.rows}):
            at = shape._replace(rows=rows)
            if at not in self.chosen:
                try:
                    self.chosen[at], serves_fewer = self._search(at, weight)
                except (torch.OutOfMemoryError, OSError) as error:  # no room, or a torch without this library
                    _log.debug("%s is left to F.linear: %s", at, error)
                    self.chosen[at], serves_fewer = None, False
                if rows in buckets:
                    self._buckets[at] = self.chosen[at] if serves_fewer else None
        self.seconds += time.perf_counter() - started

    def _search(self, shape: Shape, weight: Tensor) -> tuple[Product | None, bool]:
        """The fastest product if that is not F.linear, and whether it is no slower with up to a quarter less rows."""
        if shape.device not in self._libraries:
            self._libraries[shape.device] = Library(shape.device)
        product = Product(self._libraries[shape.device], shape)
        weights = [weight, *(weight.clone() for _ in range(min(MAX_ROW - 1, COLD_BYTES // weight.nbytes)))]
        x = torch.randn(shape.rows, shape.n_in, device=weight.device, dtype=weight.dtype)
        want = F.linear(x, weight)
        out = torch.empty_like(want)
        is_large = shape.rows >= MIN_BUCKET

        def default(i: int, rows: int = shape.rows) -> object:
            return F.linear(x[:rows], weights[i % len(weights)])

        def current(i: int, rows: int = shape.rows) -> bool:
            return product.run(x[:rows], weights[i % len(weights)], out[:rows])

        def attempt(result: Result) -> Callable[[int], bool]:
            def call(i: int) -> bool:
                product.use(result)
                return current(i)

            return call

        # The first call of a kernel loads it, which takes milliseconds.
        results = product.candidates(CANDIDATES_LARGE if is_large else CANDIDATES)
        results = [result for result in results if attempt(result)(0)]
        is_long = is_large or weight.nbytes > COLD_BYTES
        times = self._times([attempt(result) for result in results], 1 if is_long else 4, 1)
        order = sorted(range(len(results)), key=times.__getitem__)[: FINALISTS_LARGE if is_large else FINALISTS]
        results = [results[i] for i in order if _is_right(attempt(results[i]), out, want)]
        if not results:
            return None, False
        # Under a load that lasts, power limits the clock, and what was fastest in a short run may need the most.
        count = max(2, min(MAX_ROW, int((4.0 if is_large else 0.4) / min(times))))
        usual, *times = self._times([default, *map(attempt, results)], count, 3 if is_large else 5)
        if min(times) * MIN_GAIN > usual:
            return None, False
        product.use(results[times.index(min(times))])
        if not is_large or min(times) * MIN_GAIN_BUCKET > usual:
            return product, False
        for rows in (shape.rows * part // 32 for part in (24, 26, 28, 30)):
            if not product.resize(rows):
                return product, False
            usual, ours = self._times([partial(default, rows=rows), partial(current, rows=rows)], count, 3)
            if ours > usual:
                return product, False
        return product, True

    def _times(self, calls: list[Call], count: int, repeats: int) -> list[float]:
        """Median milliseconds of each of them in a row of `count`, taking turns; weights come from memory.

        Before each row the device reads other memory, which empties its cache and keeps it busy until the row is
        queued. (Writing would leave lines that must go to memory while the products run.)
        """
        if self._other is None:
            self._other = torch.zeros(COLD_BYTES // 4, device="cuda")
        times = []
        for _ in range(repeats):
            for call in calls:
                start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                for _ in range(1 + count // 2):  # 40 us each
                    self._other.sum()
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
    return _can_try(weight) and torch.version.cuda is not None and shape.dtype in TYPES and shape.rows > 0


def _can_try(weight: Tensor) -> bool:
    return weight.is_cuda and not torch.cuda.is_current_stream_capturing()


def _bucket(rows: int) -> int:
    """The least power of two that is not below `rows`."""
    return 1 << (rows - 1).bit_length()


def _is_served(rows: int) -> bool:
    """Whether a bucket stands for this many."""
    return rows * 4 >= MIN_BUCKET * 3 and rows * 4 >= _bucket(rows) * 3


def _is_right(call: Call, out: Tensor, want: Tensor) -> bool:
    """Whether it writes all of `out`, and that near `want`."""
    out.fill_(float("nan"))
    call(0)
    error = torch.linalg.vector_norm(out - want, dtype=torch.float32)
    return bool(error <= MAX_ERROR * torch.linalg.vector_norm(want, dtype=torch.float32))


tuned_linear: Final = LtLinear()
