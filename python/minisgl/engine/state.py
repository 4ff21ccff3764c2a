"""What the device remembers from step to step, indexed by row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from minisgl.core import Batch


class RowState:
    """Persistent per-request tensors. A step first applies the plan's writes (`apply`), last commits its tokens.

    page_table   [rows, pages per row] int32
    last_token   [rows] int32, the newest sampled token
    temperature, top_p, min_p [rows] float32; top_k [rows] int32; noise_key [rows] int64
    """

    def __init__(self, rows: int, pages_per_row: int, device: torch.device) -> None:
        self.page_table = torch.zeros(rows, pages_per_row, dtype=torch.int32, device=device)
        self.last_token = torch.zeros(rows, dtype=torch.int32, device=device)
        self.temperature = torch.zeros(rows, dtype=torch.float32, device=device)
        self.top_k = torch.zeros(rows, dtype=torch.int32, device=device)
        self.top_p = torch.ones(rows, dtype=torch.float32, device=device)
        self.min_p = torch.zeros(rows, dtype=torch.float32, device=device)
        self.noise_key = torch.zeros(rows, dtype=torch.int64, device=device)

    def apply(self, batch: Batch) -> None:
        """Write the page-table entries and sampling states that this step begins with."""
        if len(batch.page_writes):
            row, index, page = batch.page_writes.unbind(1)
            self.page_table[row, index] = page.int()
        if len(batch.row_writes):
            w = batch.row_writes
            rows = w[:, 0].long()
            self.temperature[rows] = w[:, 1].contiguous().view(torch.float32)
            self.top_k[rows] = w[:, 2]
            self.top_p[rows] = w[:, 3].contiguous().view(torch.float32)
            self.min_p[rows] = w[:, 4].contiguous().view(torch.float32)
            low, high = w[:, 5].long() & 0xFFFFFFFF, w[:, 6].long() << 32
            self.noise_key[rows] = high | low
