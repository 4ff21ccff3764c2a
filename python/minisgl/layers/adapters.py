"""The projections that adapters change, and where what an adapter's file has of them goes in a slot."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from minisgl.core.rounding import round_up
from minisgl.ops.adapters import AdapterWeights, ModuleRows

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from minisgl.layers.parameter import Source

ALIGNMENT: Final = 64  # elements of a slot: each tensor begins at such a multiple
RANK_STEP: Final = 16  # ranks are padded to a multiple of it, as tensor cores read them


@dataclass(frozen=True, slots=True)
class AdapterSizes:
    """How many adapters there is room for: on the device, in host memory, and their largest rank."""

    slots: int
    hosted: int
    rank: int


class LowRank(NamedTuple):
    """What an adapter adds to a module: (b a x + bias) times scale, with a [r, K], b [N, r], bias [N] or None."""

    a: Tensor
    b: Tensor
    scale: float
    bias: Tensor | None = None

    @property
    def rank(self) -> int:
        """The number of columns of b that a slot needs: a bias takes one."""
        return len(self.a) + (self.bias is not None)


@dataclass(slots=True)
class Adapted:
    """A projection [N, K] of one rank that adapters change. `sources` and `order` are as in `layers/builder.py`.

    With `adds_bias`, this rank adds the adapters' biases: of several that add partial sums, one does.
    """

    sources: tuple[Source, ...]
    order: Sequence[int] | None
    adds_bias: bool
    weights: AdapterWeights = field(init=False)

    @property
    def modules(self) -> dict[str, tuple[int, int]]:
        """The checkpoint's names of the modules, and the shapes [N, K] of their weights."""
        return {s.name.removesuffix(".weight"): (s.shape[0], s.shape[1]) for s in self.sources}

    def shapes(self, rank: int) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of a, shift, b and ranks of a slot (`AdapterWeights`); b has rows to a multiple of 16."""
        columns = self.sources[0].slices[1]
        inner = len(self.modules) * rank
        return (inner, columns.stop - columns.start), (inner,), (round_up(self._num_rows, RANK_STEP), rank), (1,)

    @property
    def _num_rows(self) -> int:
        return sum(s.rows for s in self.sources)

    def elements(self, rank: int) -> int:
        """Return the number of elements of a slot that hold this projection."""
        return sum(round_up(math.prod(shape), ALIGNMENT) for shape in self.shapes(rank))

    def view(self, memory: Tensor, start: int, rank: int) -> AdapterWeights:
        """Return the projection's part of slots [S, elements], which begins at `start`."""
        views = []
        for shape in self.shapes(rank):
            size = math.prod(shape)
            views.append(memory[:, start : start + size].view(-1, *shape))
            start += round_up(size, ALIGNMENT)
        a, shift, b, ranks = views
        return AdapterWeights(a, shift, b[:, : self._num_rows], self._module_rows(), ranks)

    def fill(self, slot: AdapterWeights, adapter: Mapping[str, LowRank]) -> None:
        """Write an adapter into a cleared slot (S = 1), whose rank suffices."""
        a, shift, b = slot.a[0], slot.shift[0], slot.b[0]
        largest = max((adapter[name].rank for name in self.modules if name in adapter), default=0)
        assert slot.ranks is not None, "a slot has ranks"
        slot.ranks.fill_(round_up(largest, RANK_STEP))  # exact in any type
        for index, name in enumerate(self.modules):
            if (low := adapter.get(name)) is None:
                continue
            first, rank = index * slot.rank, len(low.a)
            for source in (s for s in self.sources if s.name == f"{name}.weight"):
                rows, columns = source.slices
                a[first : first + rank] = low.a[:, columns]
                target = b[source.start : source.start + source.rows]
                target[:, :rank] = low.b[rows].float() * low.scale
                if low.bias is not None and self.adds_bias:
                    shift[first + rank] = 1.0
                    target[:, rank] = low.bias[rows].float() * low.scale
        if self.order is not None:
            b.copy_(b[torch.tensor(self.order)])

    def _module_rows(self) -> tuple[ModuleRows, ...]:
        """Return the rows of each module, in the projection's order."""
        names = [*self.modules]
        index = [0] * self._num_rows
        for s in self.sources:
            index[s.start : s.start + s.rows] = [names.index(s.name.removesuffix(".weight"))] * s.rows
        if self.order is not None:
            index = [index[row] for row in self.order]
        ends = [i for i in range(1, len(index) + 1) if i == len(index) or index[i] != index[i - 1]]
        return tuple(ModuleRows(start, end, index[start]) for start, end in zip([0, *ends], ends, strict=False))
