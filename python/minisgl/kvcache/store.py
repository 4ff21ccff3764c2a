"""The state that lives as long as the text, such as K/V: tensors that are divided into pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from minisgl.ops.quantized import E4M3, Pages, QuantizedPages

if TYPE_CHECKING:
    from minisgl.core import Ints
    from minisgl.specs import State


class LayerState:
    """What one layer keeps. Its `pages` are there once the store has allocated them."""

    pages: Pages

    def __init__(self, spec: State) -> None:
        self.spec = spec


class StateStore:
    """The pages of all layers, and of a drafter's. The scheduler decides who owns each page.

    A page id is one page of each state, so a token has the same slot, page id * page_size + offset, in all of them.
    States that are declared alike are one tensor, such as K/V [layers, pages, 2, kv_heads, page_size, head_dim]. The
    memory is allocated uninitialized: on a CPU a page takes physical memory on first use. In float8_e4m3fn, a tensor
    has another with a float32 scale for each vector, such as [layers, pages, 2, kv_heads, page_size].
    """

    def __init__(self, page_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.page_size = page_size
        self.dtype = dtype
        self.device = device
        self.num_pages = 0
        self.page_bytes = 0  # of all states
        self.tensors: list[torch.Tensor] = []
        self._states: dict[State, list[LayerState]] = {}

    def add(self, states: Sequence[LayerState]) -> None:
        """Take in states; `allocate` gives them their pages."""
        for state in states:
            self._states.setdefault(state.spec, []).append(state)
            self.page_bytes += state.spec.page_bytes(self.page_size, self.dtype.itemsize, self.dtype is E4M3)

    def allocate(self, num_pages: int) -> None:
        """Allocate the pages of all states, instead of those before."""
        self.num_pages = num_pages
        self.tensors = []
        for spec, states in self._states.items():
            shape = (len(states), num_pages, *spec.page_shape(self.page_size))
            data = torch.empty(shape, dtype=self.dtype, device=self.device)
            self.tensors.append(data)
            layers: Sequence[Pages] = data.unbind(0)
            if self.dtype is E4M3:
                self.tensors.append(torch.empty(shape[:-1], device=self.device))
                layers = [QuantizedPages(*layer) for layer in zip(data, self.tensors[-1], strict=True)]
            for state, pages in zip(states, layers, strict=True):
                state.pages = pages

    def index(self, pages: Ints) -> torch.Tensor:
        """Return page ids as int64 in host memory, for `read` and `write`; pinned for async copies to a GPU."""
        index = torch.from_numpy(pages.astype(np.int64))
        return index.pin_memory() if self.device.type == "cuda" else index

    def read(self, pages: torch.Tensor) -> torch.Tensor:
        """Return a copy of the pages [n] on the device, uint8 [n, page_bytes]."""
        index = pages.to(self.device, non_blocking=True)
        parts = [part[index].flatten(1) for part in self._parts()]
        return (parts[0] if len(parts) == 1 else torch.cat(parts, 1)).view(torch.uint8)

    def write(self, pages: torch.Tensor, data: torch.Tensor) -> None:
        """Overwrite the pages [n] with `data`, uint8 [n, page_bytes] on the device."""
        index, words = pages.to(self.device, non_blocking=True), data.view(torch.int64)
        for part in self._parts():
            source, words = words[:, : part[0].numel()], words[:, part[0].numel() :]
            part[index] = source.reshape(len(pages), *part.shape[1:])

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Overwrite the pages `target` [n] with the pages `source` [n], layer by layer."""
        into, of = (ids.to(self.device, non_blocking=True) for ids in (target, source))
        for layers in self.tensors:
            for layer in layers.flatten(2).view(torch.int64):
                layer[into] = layer[of]

    def _parts(self) -> list[torch.Tensor]:
        """Return views of the tensors, int64 [pages, layers, words]: wide words are copied faster than bytes."""
        return [tensor.flatten(2).view(torch.int64).transpose(0, 1) for tensor in self.tensors]

    def poison(self, pages: Sequence[int]) -> None:
        """Fill pages with NaN, so that any read before the next write makes logits non-finite."""
        for tensor in self.tensors:
            if tensor.dtype is not E4M3:  # whose scales become NaN
                tensor[:, torch.tensor(pages, dtype=torch.int64, device=self.device)] = float("nan")
