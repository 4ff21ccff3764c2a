"""The kernels of the mixture of experts: exact routing and lists, GEMMs in every kind of tile, independent rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing import assert_close

from minisgl.kernels.triton.kernels import mix
from minisgl.kernels.triton.moe import (
    CONFIGS,
    FLOAT32,
    FP8_CONFIGS,
    INT4_CONFIGS,
    GemmTile,
    GemvTile,
    MoeConfig,
    combine,
    grouped_gemm,
    moe_config,
    pair_down,
    pair_gate_up,
)
from minisgl.kernels.triton.moe_routing import Lists, gather, route, route_and_list
from minisgl.ops import reference
from minisgl.ops.quantized import E8M0, MXFP4, Format, Quantized
from minisgl.ops.reference import Experts

HALF = torch.float16  # the interpreter computes bfloat16 GEMMs wrong


def chosen(logits: torch.Tensor, top_k: int, normalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    experts = logits.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = logits.softmax(-1, dtype=torch.float32).gather(-1, experts)
    return experts.int(), weights / weights.sum(-1, keepdim=True) if normalise else weights


def check_lists(lists: Lists, experts: torch.Tensor) -> None:
    """Pairs are sorted by expert, then token; tiles cover all pairs once, and none has two experts or is too long."""
    pairs = experts.flatten().long()
    assert lists.order.tolist() == pairs.argsort(stable=True).tolist()
    count = int(lists.tiles[0, 0])
    assert count <= lists.max_tiles
    starts = [0]
    for expert, start, end, _ in lists.tiles[1 : 1 + count].tolist():
        last = min(end, start + lists.block_m)
        assert start == starts[-1] < last
        assert set(pairs[lists.order[start:last].long()].tolist()) == {expert}
        assert end == int((pairs <= expert).sum())
        starts.append(last)
    assert starts[-1] == len(pairs)


@pytest.mark.parametrize(("num_experts", "top_k", "normalise"), [(5, 5, False), (40, 3, True), (128, 8, True)])
@pytest.mark.parametrize("tokens", [1, 3, 33, 70])
def test_routing_and_lists(tokens: int, num_experts: int, top_k: int, normalise: bool):
    torch.manual_seed(tokens)
    logits = torch.randn(tokens, num_experts).to(torch.bfloat16)  # with equals among them
    want = chosen(logits, top_k, normalise)
    experts, weights = route(logits, top_k, normalise)
    assert torch.equal(experts, want[0])
    assert_close(weights, want[1], rtol=1e-5, atol=1e-7)
    for rows in (1, 16):
        again, lists = route_and_list(logits, top_k, normalise, rows)
        assert torch.equal(again, weights)
        check_lists(lists, experts)


@pytest.mark.parametrize("tokens", [20, 70])
def test_lists_if_all_tokens_choose_one_expert_and_with_the_most_tiles(tokens: int):
    logits = torch.zeros(tokens, 6)
    for rows in (8, 32):
        _, lists = route_and_list(logits, 2, True, rows)
        check_lists(lists, torch.tensor([[0, 1]] * tokens))
    logits = torch.zeros(16, 4).scatter_(1, torch.tensor([[0]] * 13 + [[1], [2], [3]]), 1.0)
    _, lists = route_and_list(logits, 1, True, 4)
    check_lists(lists, logits.argmax(1, keepdim=True))
    assert int(lists.tiles[0, 0]) == lists.max_tiles == 7


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy warns of NaN, a GPU does not
def test_gathered_rows_have_even_columns_of_each_16_first():
    x, order = torch.randn(5, 192).bfloat16(), torch.randperm(10).int()
    want = x[order // 2].view(10, 12, 8, 2).mT.reshape(10, 192)
    assert torch.equal(gather(x, Lists(order, order, 1), 2), want)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_non_finite_logits_still_choose_different_experts():
    nan, inf = float("nan"), float("inf")
    logits = torch.tensor([[nan] * 3, [0, nan, 0], [inf, inf, 1], [-inf] * 3, [-inf, -inf, 1], [-3.4e38, -inf, -0.0]])
    experts, weights = route(logits, 2, True)
    assert experts.tolist() == [[0, 1], [0, 2], [0, 1], [0, 1], [2, 0], [2, 0]]
    assert bool(weights[:4].isnan().all()) and weights[4:].tolist() == [[1, 0], [1, 0]]
    zeros, _ = route(torch.tensor([[-1.0, -0.0, 0.0], [0.0, -0.0, 0.0]]), 2, True)
    assert zeros.tolist() == [[1, 2], [0, 1]], "both zeros are equal"
    _, lists = route_and_list(logits, 2, True, 4)
    check_lists(lists, experts)


@pytest.mark.parametrize("tile", [GemmTile(16, 16, 2, 4), GemmTile(32, 32, 3, 4)])
@pytest.mark.parametrize(("rows", "swap"), [(16, True), (16, False), (32, True)])
def test_grouped_gemm(rows: int, swap: bool, tile: GemmTile):
    """With tails in all dimensions, experts without tokens and experts of several tiles."""
    torch.manual_seed(0)
    tokens, hidden, size, num_experts, top_k = 45, 40, 21, 6, 2
    x, gate_up, down = (
        (torch.randn(*s) / 4).to(HALF) for s in ((tokens, hidden), (6, 2 * size, hidden), (6, 24, size))
    )
    logits = torch.randn(tokens, num_experts)
    logits[:, 2], logits[:, 4] = -9, 9
    experts, weights = chosen(logits, top_k, True)
    _, lists = route_and_list(logits, top_k, True, rows)
    order = lists.order.long()
    sorted_experts = experts.flatten()[order].long()
    config = MoeConfig(rows, swap, tile, tile)
    got = grouped_gemm(x, gate_up, lists, top_k, config, gate="silu")
    want = torch.einsum("pnk,pk->pn", gate_up[sorted_experts].double(), x[order // top_k].double())
    want = reference.gate_and_mul(want, "silu")
    assert_close(got.double(), want, rtol=2e-3, atol=2e-3)
    parts = grouped_gemm(got, down, lists, top_k, config)
    want = torch.empty(tokens * top_k, 24, dtype=torch.float64)
    want[order] = torch.einsum("pnk,pk->pn", down[sorted_experts].double(), got.double())
    assert_close(parts.double(), want, rtol=2e-3, atol=2e-3)
    total = (parts.view(tokens, top_k, -1).double() * weights[:, :, None]).sum(1)
    assert_close(combine(parts, weights).double(), total, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("tile", [None, GemvTile(1, 64, 1, 1, 2), GemvTile(4, 32, 1, 2, 3), GemvTile(4, 16, 1, 4, 9)])
def test_gemv_for_each_pair(tile: GemvTile | None):
    torch.manual_seed(0)
    tokens, hidden, size, top_k = 2, 72, 21, 3
    x, gate_up, down = torch.randn(tokens, hidden), torch.randn(5, 2 * size, hidden), torch.randn(5, hidden, size)
    logits = torch.randn(tokens, 5)
    experts, weights = route(logits, top_k, False)
    got = pair_down(pair_gate_up(x, experts, gate_up, tile=tile), experts, weights, down, tile=tile)
    assert_close(got, reference.moe(x, logits, Experts(gate_up, down, top_k, False)), rtol=1e-4, atol=1e-3)


def options(count: int, rows: int, hidden: int) -> list[dict[str, Any]]:
    """No options, and biases with gates that often reach the limits."""
    biases = {"gate_up_bias": torch.randn(count, rows) * 6, "down_bias": torch.randn(count, hidden)}
    return [{}, {name: b.to(HALF) for name, b in biases.items()} | {"gate": "clamped"}]


def widened(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value.double() if isinstance(value, torch.Tensor) else value for name, value in options.items()}


def experts_of(kind: Format, count: int, rows: int, columns: int) -> Quantized:
    flat = kind.empty(count * rows, columns, torch.device("cpu"))
    if kind == MXFP4:
        exponents = torch.randint(122, 126, flat.scale.shape).byte()
        flat.fill(torch.randint(0, 16, (count * rows, columns)), exponents.view(E8M0))
    else:
        flat.round_from(torch.randn(count * rows, columns) * columns**-0.5)
    if flat.zeros is not None:
        flat.zeros.copy_(torch.randint(6, 11, flat.zeros.shape))
    return flat.experts(count)


# The blocks' sizes, or rows and columns that no tile divides.
SIZES = {
    Format(8, 0): (80, 48),
    Format(8, 128): (256, 128),
    Format(8, 0, is_integer=True): (80, 48),
    Format(4, 128): (256, 128),
    Format(4, 32, scale_dtype=torch.float16): (256, 128),
    Format(4, 64, has_zeros=True): (256, 128),
    MXFP4: (192, 64),
}


@pytest.mark.parametrize("kind", SIZES, ids=str)
@pytest.mark.parametrize(("tokens", "limit"), [(1, 0.002), (2, 0.004), (33, 0.05)])
def test_quantized_experts(kind: Format, tokens: int, limit: float):
    """A GEMV for each pair, two parts and one part of x."""
    torch.manual_seed(0)
    hidden, size = SIZES[kind]
    gate_up, down = experts_of(kind, 8, 2 * size, hidden), experts_of(kind, 8, hidden, size)
    x, logits = torch.randn(tokens, hidden).to(HALF), torch.randn(tokens, 8)
    dense = [torch.stack([w[e].dense(torch.float64) for e in range(8)]) for w in (gate_up, down)]
    for given in options(8, 2 * size, hidden):
        got = mix(x, logits, Experts(gate_up, down, 2, True, **given)).double()
        want = reference.moe(x.double(), logits, Experts(*dense, 2, True, **widened(given)))
        assert float((got - want).norm() / want.norm()) < limit


@pytest.mark.parametrize("kind", [Format(4, 128), Format(4, 64, has_zeros=True), MXFP4], ids=str)
def test_one_token_of_many_columns(kind: Format):
    """One tile has all columns of gate and up; those beyond 1,152 are masked."""
    torch.manual_seed(0)
    gate_up, x = experts_of(kind, 3, 48, 1152), torch.randn(1, 1152).to(HALF)
    experts, _ = route(torch.randn(1, 3), 2, True)
    dense = torch.stack([gate_up[int(e)].dense(torch.float64) for e in experts[0]])
    want = reference.gate_and_mul(torch.einsum("pnk,k->pn", dense, x[0].double()), "silu")
    assert_close(pair_gate_up(x, experts, gate_up).double(), want, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("kind", [Format(8, 0, is_integer=True), Format(4, 32), MXFP4], ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 33])
def test_experts_of_which_one_matrix_has_16_bits(kind: Format, tokens: int):
    """As on ranks whose columns of down cut a group."""
    torch.manual_seed(0)
    gate_up, down = experts_of(kind, 8, 48, 128), (torch.randn(8, 128, 24) / 5).to(HALF)
    x, logits = torch.randn(tokens, 128).to(HALF), torch.randn(tokens, 8)
    dense = torch.stack([gate_up[e].dense(torch.float64) for e in range(8)])
    for given in options(8, 48, 128):
        got = mix(x, logits, Experts(gate_up, down, 2, True, **given)).double()
        want = reference.moe(x.double(), logits, Experts(dense, down.double(), 2, True, **widened(given)))
        assert float((got - want).norm() / want.norm()) < 0.05


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_a_row_does_not_depend_on_its_batch(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
    gate_up, down = torch.randn(6, 32, 24).to(dtype), torch.randn(6, 24, 16).to(dtype)
    for tokens in (2, 18, 33):
        outs = []
        row, row_logits = torch.randn(24).to(dtype), torch.randn(6)
        for at in (0, tokens - 1):
            x, logits = torch.randn(tokens, 24).to(dtype), torch.randn(tokens, 6)
            x[at], logits[at] = row, row_logits
            outs.append(mix(x, logits, Experts(gate_up, down, 2, True))[at])
        assert torch.equal(*outs)


def test_every_number_of_pairs_has_tiles():
    for pairs in (1, 24, 128, 5000, 10**6):
        assert moe_config(pairs, 128, torch.float32) is FLOAT32
        for bits, configs in ((16, CONFIGS), (8, FP8_CONFIGS), (4, INT4_CONFIGS)):
            assert moe_config(pairs, 128, HALF, bits) in [c for _, c in configs]
    for config in (c for _, c in (*CONFIGS, *FP8_CONFIGS, *INT4_CONFIGS)):
        for tile in (config.up, config.down):
            # Weights of 16 bits, which a layer may also have beside others of 8.
            staged = 2 * tile.num_stages * tile.block_k * (config.block_m + tile.block_n)
            assert staged <= 227 * 1024, "more shared memory than a block can have"
            assert not config.swap_ab or tile.block_n % 64 == 0, "wgmma takes at least 64 rows"
            assert not config.parts or max(tile.block_n, tile.block_k) <= 128, "a tile has one scale of a block"
        assert config.swap_ab or config.parts < 2
    assert all(config.swap_ab for _, config in INT4_CONFIGS)
    for configs in (CONFIGS, FP8_CONFIGS, INT4_CONFIGS):
        assert list(configs) == sorted(configs)
