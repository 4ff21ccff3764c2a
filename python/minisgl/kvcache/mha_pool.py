"""The K/V pool: one tensor, divided into pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from minisgl.ops.quantized import E4M3, Pages, QuantizedPages

if TYPE_CHECKING:
    from minisgl.core import Ints


class MHAKVPool:
    """The K/V pages of all layers. The scheduler decides who owns each page.

    `data` is [layers, pages, 2 (K, V), kv_heads, page_size, head_dim]: each head of a page is contiguous, so a kernel
    for one head reads consecutive memory. A token's slot is page id * page_size + offset, the same in all layers. The
    memory is allocated uninitialized: on a CPU a page takes physical memory on first use. In float8_e4m3fn, `scale`
    [layers, pages, 2, kv_heads, page_size] float32 has a scale for each head of each token.
    """

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        num_kv_heads: int,
        page_size: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_pages = num_pages
        self.num_kv_heads = num_kv_heads
        self.page_size = page_size
        self.dtype = dtype
        self.device = device
        shape = (num_layers, num_pages, 2, num_kv_heads, page_size, head_dim)
        self.data = torch.empty(shape, dtype=dtype, device=device)
        self._layers: Sequence[Pages] = self.data.unbind(0)
        self.scale = torch.empty(shape[:-1] if dtype is E4M3 else (*shape[:2], 0), device=device)
        if dtype is E4M3:
            self._layers = [QuantizedPages(*layer) for layer in zip(self.data, self.scale, strict=True)]

    @property
    def page_bytes(self) -> int:
        """The bytes of one page, over all layers."""
        return self.data[:, 0].nbytes + self.scale[:, 0].nbytes

    def layer(self, index: int) -> Pages:
        """Return a view of the pages of layer `index`, [pages, 2, kv_heads, page_size, head_dim]."""
        return self._layers[index]

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

    def _parts(self) -> list[torch.Tensor]:
        """Return views of data and scales, int64 [pages, layers, words]: wide words are copied faster than bytes."""
        parts = [self.data, self.scale] if self.dtype is E4M3 else [self.data]
        return [part.flatten(2).view(torch.int64).transpose(0, 1) for part in parts]

    def poison(self, pages: Sequence[int]) -> None:
        """Fill pages with NaN, so that any read before the next write makes logits non-finite."""
        data = self.scale if self.dtype is E4M3 else self.data
        data[:, torch.tensor(pages, device=self.device)] = float("nan")
