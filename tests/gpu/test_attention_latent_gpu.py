"""The kernels for latents on a GPU, with their real program order and rounding, against the op table."""

from __future__ import annotations

import pytest
import torch

from contract.test_attention import MIXES
from minisgl.core.specs import Latent
from unit.attention.latent_cases import check_latents

pytestmark = pytest.mark.gpu
LONG = {
    "long decode": [(1, 20_000), (1, 5), (1, 131)],
    "many decodes": [(1, 1 + 37 * i % 900) for i in range(256)],
    "even decodes": [(1, 4096)] * 64,
    "chunks after long contexts": [(1, 700), (64, 9000), (300, 1500), (129, 129)],
}


@pytest.mark.parametrize("fp8_cache", [False, True])
@pytest.mark.parametrize(
    ("heads", "rank", "page_size"),
    [(8, 512, 64), (16, 512, 16), (20, 512, 64), (128, 512, 64), (32, 256, 128), (5, 96, 1)],
)
@pytest.mark.parametrize("mix", MIXES | LONG)
def test_latents(mix: str, heads: int, rank: int, page_size: int, fp8_cache: bool):
    kind = Latent(heads, rank, 64, 128, 128, 192**-0.5)
    chosen = (MIXES | LONG)[mix]
    check_latents(chosen, kind, page_size, torch.bfloat16, "cuda", fp8_cache=fp8_cache, scales_queries=rank == 256)


@pytest.mark.parametrize("fp8_cache", [False, True])
@pytest.mark.parametrize(("heads", "max_queries"), [(16, 4), (20, 5), (128, 3)])
def test_drafts(heads: int, max_queries: int, fp8_cache: bool):
    mix = [(1 + i % max_queries, 40 + 61 * i) for i in range(40)]
    kind = Latent(heads, 512, 64, 192, 256, 1 / 16)
    check_latents(mix, kind, 64, torch.bfloat16, "cuda", max_queries=max_queries, fp8_cache=fp8_cache)
