"""The kernels for latents against the op table, on pages full of NaN; in float16, see `test_attention.py`."""

from __future__ import annotations

import pytest
import torch

from contract.test_attention import MIXES
from minisgl.core.specs import Latent
from unit.attention.latent_cases import check_latents


@pytest.mark.parametrize(
    ("mix", "page_size", "heads", "rank", "max_queries", "fp8_cache"),
    [
        ([(1, 300), *MIXES["mixed"][2:]], 16, 3, 64, 1, False),
        ([(1, 5 + i) for i in range(25)], 64, 20, 48, 1, False),
        ([(3, 3), (1, 170), (5, 300), (2, 128), (40, 90)], 64, 8, 64, 5, True),
    ],
    ids=["chunks", "many rows and two blocks", "drafts over 8 bits"],
)
def test_latents(mix: list[tuple[int, int]], page_size: int, heads: int, rank: int, max_queries: int, fp8_cache: bool):
    kind = Latent(heads, rank, 16, 24, 32, 0.2)
    options = {"max_queries": max_queries, "fp8_cache": fp8_cache, "scales_queries": rank == 48}
    check_latents(mix, kind, page_size, torch.float16, "cpu", **options)
