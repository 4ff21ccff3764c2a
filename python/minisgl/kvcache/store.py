"""The state of texts, such as K/V: one memory that is divided into pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from minisgl.core.layout import FULL, STATE
from minisgl.core.rounding import round_up
from minisgl.core.specs import Paged, PerRow
from minisgl.kvcache.arena import Blocks, divide
from minisgl.ops.quantized import E4M3, Pages, QuantizedPages

if TYPE_CHECKING:
    from minisgl.core.plan import Ints
    from minisgl.core.specs import State


STATE_ALIGNMENT: Final = 64  # of a state within a page, in bytes


class LayerState:
    """What one layer keeps. Its `pages` are there once the store has allocated them."""

    pages: Pages

    def __init__(self, spec: State) -> None:
        self.spec = spec


class StateStore:
    """The state of all texts on one rank, of all layers and of a drafter. The scheduler decides who owns each page.

    A page of a group is one page of each of its states, one after the other, so a token has the same slot, page id *
    page_size + offset, in all of them. In float8_e4m3fn, a state's page is followed by a float32 scale for each vector.
    Pages of all groups are in one memory of blocks (`arena.py`), uninitialized: on a CPU a page takes physical memory
    on first use. The `pages` of layers are views of it.
    """

    def __init__(
        self, page_size: int, dtype: torch.dtype, device: torch.device, model_dtype: torch.dtype = torch.float32
    ) -> None:
        """`dtype` is that of `Paged` states, `model_dtype` that of narrow `PerRow` states."""
        self.page_size = page_size
        self.dtype = dtype
        self.model_dtype = model_dtype
        self.device = device
        self.states: list[LayerState] = []
        self.blocks = Blocks(0, ())
        self.strides: list[int] = []  # bytes from page to page of each group
        self.unit_bytes = 0
        self.memory = torch.empty(0, dtype=torch.uint8, device=device)

    def add(self, states: Sequence[LayerState]) -> None:
        """Take in states; `allocate` gives them their pages."""
        self.states += states

    @property
    def page_bytes(self) -> tuple[int, ...]:
        """The bytes of a page of each group, without what aligns the next."""
        sizes = [0] * (1 + max(state.spec.group for state in self.states))
        for state in self.states:
            sizes[state.spec.group] += self._bytes(state.spec)
        return tuple(sizes)

    def _bytes(self, spec: State) -> int:
        is_fp8 = isinstance(spec, Paged) and self.dtype is E4M3
        item = self.model_dtype if isinstance(spec, PerRow) else self.dtype
        return round_up(spec.page_bytes(self.page_size, item.itemsize, is_fp8), STATE_ALIGNMENT)

    def allocate(self, blocks: int) -> None:
        """Allocate so many blocks, and one of dummy pages for each group, instead of those before."""
        size, pages = divide(self.page_bytes)
        self.blocks = Blocks(blocks, pages)
        self.memory = torch.empty(size * (blocks + len(pages)), dtype=torch.uint8, device=self.device)
        self.strides, self.unit_bytes = [size // count for count in pages], size // self.blocks.units
        ends = [0] * len(pages)
        for state in self.states:
            state.pages = self._view(state.spec, ends[state.spec.group])
            ends[state.spec.group] += self._bytes(state.spec)

    def _view(self, spec: State, start: int) -> Pages:
        """Return the pages of one state, which begin at the byte `start` of its group's pages."""
        stride = self.strides[spec.group]
        shape = len(self.memory) // stride, *spec.page_shape(self.page_size)
        dtype = self.dtype
        if isinstance(spec, PerRow):
            dtype = torch.float32 if spec.is_wide else self.model_dtype

        def view(dtype: torch.dtype, shape: tuple[int, ...], start: int) -> torch.Tensor:
            strides = [stride // dtype.itemsize, *torch.empty(shape[1:], device="meta").stride()]
            return torch.as_strided(self.memory.view(dtype), shape, strides, start // dtype.itemsize)

        data = view(dtype, shape, start)
        if dtype is not E4M3:
            return data
        return QuantizedPages(data, view(torch.float32, shape[:-1], start + data[0].numel()))

    def dummy(self, group: int) -> int:
        """Return the page of a group that no text has: unused sequences of captured steps write to it."""
        return (self.blocks.count + group) * self.blocks.pages[group]

    def rows(self, group: int) -> torch.Tensor:
        """Return the pages of a group as int64 [ids, words of a page]: a view."""
        return self.memory.view(torch.int64).view(-1, self.strides[group] // 8)

    @property
    def units(self) -> torch.Tensor:
        """The units of memory (`Blocks`), int64 [units, words of a unit]: a view."""
        return self.memory.view(torch.int64).view(-1, self.unit_bytes // 8)

    def index(self, units: Ints) -> torch.Tensor:
        """Return units as int64 in host memory, for `read` and `write`; pinned for async copies to a GPU."""
        index = torch.from_numpy(units.astype(np.int64))
        return index.pin_memory() if self.device.type == "cuda" else index

    def read(self, units: torch.Tensor) -> torch.Tensor:
        """Return a copy of units [n] on the device, uint8 [n, bytes of a unit]."""
        return self.units[units.to(self.device, non_blocking=True)].view(torch.uint8)

    def write(self, units: torch.Tensor, data: torch.Tensor) -> None:
        """Overwrite units [n] with `data`, uint8 [n, bytes of a unit] on the device."""
        self.units[units.to(self.device, non_blocking=True)] = data.view(torch.int64)

    def copy(self, source: Ints, target: Ints) -> None:
        """Overwrite the slots `target` [n] of STATE with the slots `source` [n], in this order; each has megabytes."""
        rows = self.rows(STATE)
        for of, into in zip(source.tolist(), target.tolist(), strict=True):
            rows[into].copy_(rows[of])

    def poison(self, pages: Sequence[int], group: int = FULL) -> None:
        """Fill pages with NaN, so that any read before the next write makes logits non-finite."""
        self.rows(group).view(torch.uint8)[torch.tensor(pages, dtype=torch.int64, device=self.device)] = 0xFF
