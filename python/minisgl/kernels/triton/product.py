"""What a linear layer multiplies, all that the choice of a kernel depends on; and what a kernel is to the table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minisgl.ops.deferred import Result
from minisgl.ops.quantized import Format, Quantized
from minisgl.ops.reference import Experts


def _kind(weight: Tensor | Quantized) -> Format | None:
    return weight.format if isinstance(weight, Quantized) else None


class Norm(NamedTuple):
    """What precedes a GEMM: `residual` += x, if there is a residual, and an RMS norm."""

    residual: Result | None
    weight: Tensor
    eps: float


class Product(NamedTuple):
    """x [rows, n_in] times weights [n_rows, n_in] in the format `kind`, None for the dtype of x.

    `norm_dtype` is that of the weights of a norm before it, if there is one.
    """

    rows: int
    n_rows: int
    n_in: int
    kind: Format | None
    dtype: torch.dtype
    gate: str = ""
    norm_dtype: torch.dtype | None = None

    @classmethod
    def of(cls, x: Result, weight: Tensor | Quantized, gate: str, norm: Norm | None) -> Product:
        """Describe a call of a linear layer."""
        (n_rows, n_in), norm_dtype = weight.shape, None if norm is None else norm.weight.dtype
        return cls(len(x), n_rows, n_in, _kind(weight), x.dtype, gate, norm_dtype)


class Mixture(NamedTuple):
    """Experts of `hidden` inputs and outputs and `size` features between, `top_k` for each of `rows` tokens.

    `kinds` are the formats of gate and up and of down, None for `dtype`, that of x. `gate` is as in `Experts`.
    """

    rows: int
    top_k: int
    experts: int
    hidden: int
    size: int
    kinds: tuple[Format | None, Format | None]
    dtype: torch.dtype
    gate: str = "silu"
    has_bias: bool = False

    @classmethod
    def of(cls, x: Tensor, experts: Experts) -> Mixture:
        """Describe a call of `reference.moe`."""
        gate_up, down, top_k, _, bias, _, gate, _ = experts
        (count, hidden, size), kinds = down.shape, (_kind(gate_up), _kind(down))
        return cls(len(x), top_k, count, hidden, size, kinds, x.dtype, gate, bias is not None)

    @property
    def bits(self) -> int:
        """The fewest bits per weight."""
        return min(16 if kind is None else kind.bits for kind in self.kinds)


Run = Callable[[Any, Any, Tensor | None, str, Norm | None], tuple[Result, Result]]
"""(x [M, K], weight, bias, gate, norm) -> (`reference.linear` after `norm`, x + residual).

Overwrites the residual unless M is 1. The results may be `Deferred`.
"""


class Kernel(NamedTuple):
    """A way to multiply, and why it refuses a product or a mixture."""

    name: str
    refuses: Callable[[Any], str | None]
    run: Callable[..., Any]  # `Run`, or as `reference.moe`
