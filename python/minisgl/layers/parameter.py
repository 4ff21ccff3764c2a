"""A weight on the device, and the checkpoint's tensors that fill it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import torch

from minisgl.ops.quantized import Quantized

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


class Init(Enum):
    """The values of a parameter without a checkpoint (`--dummy-weight`)."""

    NORMAL = "normal"  # standard deviation 0.02
    ONES = "ones"


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint tensor whose part `slices` fills the rows of a parameter from `start` on."""

    name: str
    shape: tuple[int, ...]  # in the checkpoint
    slices: tuple[slice, ...]  # one slice with explicit bounds for each dimension
    start: int

    @property
    def rows(self) -> int:
        """The number of rows that it fills."""
        return int(self.slices[0].stop - self.slices[0].start)


@dataclass(frozen=True, slots=True)
class Parameter:
    """A tensor on the device, and the checkpoint tensors that fill it.

    Once filled, its rows are put in an `order` (row order[i] in place i), `offset` is added to its values, and they are
    multiplied by `scale`.
    """

    tensor: Tensor | Quantized
    sources: tuple[Source, ...]
    init: Init
    offset: float = 0.0
    scale: float = 1.0
    order: Sequence[int] | None = None

    def finish(self) -> bool:
        """Do what is done once all sources are in the tensor; return false if its rows cannot change places."""
        if isinstance(self.tensor, Quantized):
            device = self.tensor.data.device
            return self.order is None or self.tensor.reorder(torch.tensor(self.order, device=device))
        if self.order is not None:
            self.tensor.copy_(self.tensor[torch.tensor(self.order, device=self.tensor.device)])
        if self.offset:
            self.tensor.add_(self.offset)
        if self.scale != 1.0:
            self.tensor.mul_(self.scale)
        return True
