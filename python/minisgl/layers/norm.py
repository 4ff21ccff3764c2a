"""RMS normalisation: always one op with the projection behind it, see `kernel/reference.py: add_norm_linear`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minisgl.layers.base import Init

if TYPE_CHECKING:
    from minisgl.layers.base import Builder


class RMSNorm:
    """weight [size]; `name` is the checkpoint's module name."""

    def __init__(self, builder: Builder, name: str, size: int, eps: float) -> None:
        self.weight = builder.parameter({f"{name}.weight": size}, init=Init.ONES)
        self.eps = eps
