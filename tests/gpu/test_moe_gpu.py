"""The MoE kernels on a GPU against float64, at model shapes and odd ones, eager and captured."""

from __future__ import annotations

import pytest
import torch

from minisgl.ops import reference
from minisgl.ops.table import load_ops

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
if torch.cuda.is_available():
    from minisgl.kernels.triton import moe as kernels
    from minisgl.kernels.triton.moe import CONFIGS, MoeConfig
    from minisgl.kernels.triton.moe_routing import route, route_and_list
    from minisgl.ops.reference import Experts

    OPS = load_ops("triton")

ERROR = {torch.float32: 2e-5, torch.bfloat16: 8e-3, torch.float16: 1.5e-3}
# hidden, size of an expert, experts, experts of a token
SHAPES = {
    "qwen3-30b-a3b": (2048, 768, 128, 8),
    "qwen3-30b-a3b/2": (2048, 384, 128, 8),
    "qwen3-30b-a3b/4": (2048, 192, 128, 8),
    "mixtral-8x7b/8": (4096, 1792, 8, 2),
    "odd": (136, 40, 5, 3),
    "tails": (100, 21, 60, 4),
}
TOKENS = (1, 2, 3, 7, 16, 33, 64, 100, 300, 2500)
Tensors = tuple[torch.Tensor, ...]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def make(tokens: int, shape: str, dtype: torch.dtype) -> tuple[Tensors, Tensors, int]:
    """(x, logits), (gate_up, down), top_k."""
    hidden, size, experts, top_k = SHAPES[shape]

    def randn(*dims: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*dims, device="cuda") * scale).to(dtype)

    weights = randn(experts, 2 * size, hidden, scale=hidden**-0.5), randn(experts, hidden, size, scale=size**-0.5)
    return (randn(tokens, hidden), randn(tokens, experts)), weights, top_k


def near(got: torch.Tensor, want: torch.Tensor) -> None:
    """Assert that the relative error of each row is small."""
    assert got.shape == want.shape
    error = ((got.double() - want).norm(dim=-1) / want.norm(dim=-1)).max().item()
    assert error < ERROR[got.dtype], error


def poison(like: torch.Tensor) -> None:
    """Fill freed memory with NaN, so that the next `empty` returns NaN."""
    filled = [torch.full_like(like, float("nan")).repeat(8, 1) for _ in range(8)]
    del filled


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_moe_matches_reference(shape: str, dtype: torch.dtype):
    for tokens in TOKENS if dtype is torch.bfloat16 else (1, 5, 40, 700):
        (x, logits), weights, top_k = make(tokens, shape, dtype)
        for normalise in (True, False):
            want = reference.moe(x.double(), logits, Experts(*(w.double() for w in weights), top_k, normalise))
            poison(x)
            near(OPS.moe(x, logits, Experts(*weights, top_k, normalise)), want)


@pytest.mark.parametrize("shape", ["qwen3-30b-a3b", "tails"])
def test_every_configuration_with_even_and_skewed_routing(shape: str, monkeypatch: pytest.MonkeyPatch):
    """Every configuration is forced, also where the number of tokens would select another one."""
    monkeypatch.setattr(kernels, "MIN_EXPERTS_PER_PAIR", 10**6)
    for tokens in (1, 40, 600):
        (x, logits), weights, top_k = make(tokens, shape, torch.bfloat16)
        skewed = torch.zeros_like(logits).index_fill_(1, torch.arange(top_k, device="cuda") * 3, 4.0)
        for router_logits in (logits, skewed):
            want = reference.moe(x.double(), router_logits, Experts(*(w.double() for w in weights), top_k, True))
            for _, config in CONFIGS:

                def fixed(*args: object, config: MoeConfig = config) -> MoeConfig:
                    return config

                monkeypatch.setattr(kernels, "moe_config", fixed)
                near(OPS.moe(x, router_logits, Experts(*weights, top_k, True)), want)


@pytest.mark.parametrize("experts", [8, 60, 128, 256])
def test_routing_is_exact(experts: int):
    for tokens in (1, 31, 32, 33, 500, 5000):
        logits = torch.randn(tokens, experts, device="cuda").to(torch.bfloat16)  # with ties
        want = logits.sort(dim=-1, descending=True, stable=True).indices[:, :4]
        got, _ = route(logits, 4, True)
        assert torch.equal(got.long(), want)
        for rows in (16, 128):
            _, lists = route_and_list(logits, 4, True, rows)
            assert torch.equal(lists.order.long(), want.flatten().argsort(stable=True))
            counts = want.flatten().bincount(minlength=experts).tolist()
            tiles, start = [], 0
            for expert, count in enumerate(counts):
                tiles += [[expert, start + i, start + count] for i in range(0, count, rows)]
                start += count
            assert int(lists.tiles[0, 0]) == len(tiles) <= lists.max_tiles
            assert lists.tiles[1 : 1 + len(tiles), :3].tolist() == tiles


@pytest.mark.parametrize("tokens", [1, 2, 8, 64, 300])
def test_captured_moe_reads_new_inputs(tokens: int):
    """Run the op twice, as two layers do: every replay routes again and gives the bits of eager calls."""
    (x, logits), weights, top_k = make(tokens, "qwen3-30b-a3b/4", torch.bfloat16)

    def step() -> torch.Tensor:
        first = OPS.moe(x, logits, Experts(*weights, top_k, True))
        return OPS.moe(first, logits.flip(0), Experts(*weights, top_k, False))

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for i in range(20):
        x.normal_()
        logits.normal_()
        if i % 3 == 0:
            logits[:, : top_k + i] += 9
        graph.replay()
        assert torch.equal(out, step())


@pytest.mark.parametrize("tokens", [2, 8, 64, 300, 3000])
def test_row_does_not_depend_on_batch(tokens: int):
    (x, logits), weights, top_k = make(tokens, "qwen3-30b-a3b", torch.bfloat16)
    before = OPS.moe(x, logits, Experts(*weights, top_k, True))[tokens // 2].clone()
    row, row_logits = x[tokens // 2].clone(), logits[tokens // 2].clone()
    for index in (0, tokens - 1):
        x.normal_()
        logits.normal_()
        x[index], logits[index] = row, row_logits
        assert torch.equal(OPS.moe(x, logits, Experts(*weights, top_k, True))[index], before)
