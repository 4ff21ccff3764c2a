"""What follows a GEMM: scales, bias and activation, by a kernel of their own or by the kernel that reads the result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor, empty
from torch.utils._pytree import tree_map_only
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minisgl.triton.launch import MAX_CHAINED, pdl_options


@triton.jit
def gated(gate, up, GATE: tl.constexpr, USE_ROOT: tl.constexpr = False):
    """Apply one of `reference.GATES` in float32; g / 2 (1 + tanh(z)) is g / (1 + exp(-2 z)).

    USE_ROOT: exp2 and rsqrt are one instruction each, exp and a division five each. But they take more registers: with
    them, fewer programs of a GEMV fit on an SM, and one stream of 0.6B takes 637 us instead of 616.
    """
    z = gate
    if GATE == "gelu_tanh":
        z = 1.5957691216057308 * gate * (1 + 0.044715 * gate * gate)  # 2 sqrt(2 / pi)
        z = tl.maximum(z, -80.0)  # exp(80) is large enough, and finite
    if USE_ROOT:
        root = tl.rsqrt(1 + tl.exp2(-1.4426950408889634 * z))  # log2(e)
        return (gate * root) * (root * up)
    return gate / (1 + tl.exp(-z)) * up


@triton.jit
def load_finished(
    x_ptr, x_scale_ptr, scale_ptr, bias_ptr, offs, mask, HAS_SCALES: tl.constexpr, HAS_BIAS: tl.constexpr
):
    """Return x x_scale scale + bias in float32, where `x_ptr` and `x_scale_ptr` point to one row of a GEMM's result."""
    x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    if HAS_SCALES:
        x *= tl.load(x_scale_ptr) * tl.load(scale_ptr + offs, mask=mask, other=0.0)
    if HAS_BIAS:
        x += tl.load(bias_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    return x


@triton.jit
def _finish(
    x_ptr, x_scale_ptr, scale_ptr, bias_ptr, out_ptr, n,
    GATE: tl.constexpr, HAS_SCALES: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[t] = x[t] x_scale[t] scale + bias; with GATE, gate(g) * up of its two halves; grid (T, n / BLOCK)."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < n
    HALVES: tl.constexpr = 2 if GATE != "" else 1
    result = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(HALVES):
        x = load_finished(
            x_ptr + row * HALVES * n, x_scale_ptr + row, scale_ptr, bias_ptr, i * n + offs, mask, HAS_SCALES, HAS_BIAS
        )
        result = gated(result, x, GATE) if i == 1 else x
    tl.store(out_ptr + row * n + offs, result.to(out_ptr.dtype.element_ty), mask=mask)


def finish(
    x: Tensor, rows: int, gate: str, dtype: torch.dtype, scales: tuple[Tensor, Tensor] | None = None,
    bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Finish a GEMM's result x [rows or more, N] -> [rows, N or N / 2].

    Applies the scales of rows [T] and columns [N], the bias [N] and `gate_and_mul`, and rounds once.
    """
    n = x.shape[1] // (2 if gate else 1)
    out = empty((rows, n), dtype=dtype, device=x.device)
    block = min(1024, triton.next_power_of_2(n))
    x_scale, scale = scales or (x, x)
    _finish[(rows, triton.cdiv(n, block))](
        x, x_scale, scale, x if bias is None else bias, out, n, GATE=gate, HAS_SCALES=scales is not None,
        HAS_BIAS=bias is not None, BLOCK=block, **pdl_options(x.device, scales is not None and rows <= MAX_CHAINED),
    )  # fmt: skip
    return out


class Work(Protocol):
    """What is left to do for a result."""

    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...

    def finish(self) -> Tensor:
        """Return the result."""


class Products(NamedTuple):
    """The arguments of `finish`."""

    x: Tensor
    rows: int
    gate: str
    dtype: torch.dtype
    scales: tuple[Tensor, Tensor] | None
    bias: Tensor | None

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.x.shape[1] // (2 if self.gate else 1)

    @property
    def device(self) -> torch.device:
        return self.x.device

    def finish(self) -> Tensor:
        return finish(*self)


class Unfinished(Tensor):
    """A result [T, N] whose reader may do the rest of the work with its own, which saves a kernel.

    The kernels that quantize rows (`quantized.py`) take a GEMM's `Products`: they apply scales, bias and activation.
    The GEMV that follows one or more GEMVs makes them one kernel (`hopper/gemv.py: Chain`). Any other reader, PyTorch's
    ops and communicators included, gets the result of `work.finish`, which is called once; `work` is then None. A
    result that is read after the end of a CUDA graph must be finished inside the graph.
    """

    # To read these must not finish the result.
    __slots__ = ("_finished", "device", "dtype", "shape", "work")
    work: Work | None

    @staticmethod
    def __new__(cls, work: Work) -> Unfinished:
        return Tensor._make_wrapper_subclass(cls, work.shape, dtype=work.dtype, device=work.device)

    def __init__(self, work: Work) -> None:
        self.work = work
        self.shape, self.dtype, self.device = torch.Size(work.shape), work.dtype, work.device

    def __len__(self) -> int:
        return self.shape[0]

    def finished(self) -> Tensor:
        """Return the result as an ordinary tensor, always the same one."""
        if self.work is not None:
            self._finished, self.work = self.work.finish(), None
        return self._finished

    @classmethod
    def __torch_function__(
        cls, op: Callable[..., Any], types: object, args: tuple[object, ...] = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map_only(Unfinished, Unfinished.finished, (args, kwargs or {}))
        return op(*args, **kwargs)

    # PyTorch asks for it, but imports 500 modules (0.8 s) when it first calls one.
    __torch_dispatch__ = __torch_function__  # type: ignore[assignment]


def finished(x: Tensor) -> Tensor:
    """Return x as an ordinary tensor."""
    return x.finished() if isinstance(x, Unfinished) else x


def gate_and_mul(x: Tensor, gate: str) -> Tensor:
    """`reference.gate_and_mul`, rounded once."""
    return finish(x, len(x), gate, x.dtype)
