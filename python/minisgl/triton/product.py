"""What a linear layer multiplies: all that the choice of a kernel depends on."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from minisgl.ops.quantized import Format, Quantized
from minisgl.triton.nvrtc import is_hopper


class Norm(NamedTuple):
    """What precedes a GEMM: `residual` += x, if there is a residual, and an RMS norm."""

    residual: Tensor | None
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
    is_hopper: bool = False

    @classmethod
    def of(cls, x: Tensor, weight: Tensor | Quantized, gate: str, norm: Norm | None) -> Product:
        """Describe a call of a linear layer."""
        kind = weight.format if isinstance(weight, Quantized) else None
        (n_rows, n_in), norm_dtype = weight.shape, None if norm is None else norm.weight.dtype
        return cls(len(x), n_rows, n_in, kind, x.dtype, gate, norm_dtype, is_hopper(x.device))
