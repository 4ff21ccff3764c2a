"""The K/V storage: one tensor, cut into pages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class MHAKVPool:
    """The K/V pages of all layers; the scheduler manages their ownership.

    `data` is [layers, pages, 2 (K, V), kv_heads, page_size, head_dim]: within a page each head is contiguous, so a
    kernel for one head reads consecutive memory. A slot is page id * page_size + offset, the same in all layers. Memory
    is allocated without writing: on a CPU a page takes physical memory on first use, and its initial contents are
    arbitrary.
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
        self._layers = self.data.unbind(0)

    @property
    def page_bytes(self) -> int:
        """The bytes of one page in all layers together."""
        return self.data[:, 0].nbytes

    def layer(self, index: int) -> Tensor:
        """Return a view of the pages of layer `index`, [pages, 2, kv_heads, page_size, head_dim]."""
        return self._layers[index]

    def poison(self, pages: Sequence[int]) -> None:
        """Fill pages with NaN, so that tests detect reads before the next write."""
        self.data[:, torch.as_tensor(pages, dtype=torch.int64, device=self.device)] = float("nan")
