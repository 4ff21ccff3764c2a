"""`experts.cu`: what it computes, compiled for a CPU, and the sizes with which it is launched."""

from __future__ import annotations

import ctypes
import os
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("nothing here is for the interpreter", allow_module_level=True)
pytest.importorskip("triton")

from minisgl.kernels.hopper import experts as module
from minisgl.kernels.hopper.experts import MAX_INPUTS, TILINGS, Arguments, Tiling, multiply, plan
from minisgl.kernels.triton.moe_routing import Lists
from minisgl.ops import reference
from minisgl.ops.quantized import E8M0, MXFP4, Quantized
from support.cuda_on_cpu import compiler, emulate


def test_plans() -> None:
    """CTAs fit an SM, with at least two copies of both operands."""
    for _, size in TILINGS:
        for n_in in (128, 2880, MAX_INPUTS):
            defines, _, shared = plan(size, n_in, "silu")
            stages, x_stages = int(defines["STAGES"]), int(defines["X_STAGES"])
            used = x_stages * size.columns * 128 * size.x_chunks + stages * size.tile * 128
            used += 2 * size.tile * (n_in // 32) + 16 * (stages + x_stages + 2) + 1024
            assert min(stages, x_stages) >= 2 and used <= shared <= (228 << 10) // size.ctas - 1024
    assert ctypes.sizeof(Arguments) % 64 == 0


def weights(count: int, rows: int, columns: int) -> Quantized:
    """Numbers with scales of 2^-12 to 2^4."""
    flat = MXFP4.empty(count * rows, columns, torch.device("cpu"))
    exponents = torch.randint(115, 132, flat.scale.shape).to(torch.uint8).view(E8M0)
    flat.fill(torch.randint(0, 16, flat.shape), exponents)
    return flat.experts(count)


def listed(chosen: Tensor, count: int, block_m: int) -> Lists:
    order = chosen.flatten().argsort(stable=True).int()
    tiles, first = [[0, 0, 0, 0]], 0
    for expert, size in enumerate(chosen.flatten().bincount(minlength=count).tolist()):
        tiles += [[expert, first + i, first + size, 0] for i in range(0, size, block_m)]
        first += size
    tiles[0][0] = len(tiles) - 1
    return Lists(order, torch.tensor([*tiles, [99] * 4], dtype=torch.int32), block_m)


@pytest.mark.skipif(compiler is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(
    ("size", "hidden", "inner", "gate"),
    [
        (Tiling(8, 64, 1, 2, 4, 4), 192, 320, "silu"),  # one warpgroup
        (Tiling(16, 256, 2, 2, 1, 1), 704, 192, "clamped"),  # two parts of rows, a tile of which is beyond the end
    ],
    ids=str,
)
def test_experts(size: Tiling, hidden: int, inner: int, gate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(module, monkeypatch)
    properties = SimpleNamespace(multi_processor_count=1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    torch.manual_seed(0)
    count, top_k, tokens = 4, 2, 12
    chosen = torch.stack([torch.randperm(count - 1)[:top_k] for _ in range(tokens)])
    chosen[0], chosen[1:, 0] = torch.tensor([1, 0]), 2  # the last expert has no pair, another several tiles
    chosen[1:, 1] %= 2
    x, lists = torch.randn(tokens, hidden).bfloat16(), listed(chosen, count, size.columns)
    up, down = weights(count, 2 * inner, hidden), weights(count, hidden, inner)
    biases = [torch.randn(count, n).bfloat16() for n in (2 * inner, hidden)] if gate == "clamped" else [None, None]
    given = x[lists.order // top_k].view(-1, hidden // 16, 8, 2).mT.reshape(-1, hidden).contiguous()
    middle = multiply(given, up, lists, size, biases[0], gate)
    assert middle is not None
    got = multiply(middle, down, lists, size, biases[1], "")
    assert got is not None
    for pair, expert in enumerate(chosen.flatten().tolist()):
        bias = [None if b is None else b[expert].float() for b in biases]
        want = reference.linear(x[pair // top_k].float()[None], up[expert].dense(torch.float32), bias[0], gate)
        want = reference.linear(want.bfloat16().float(), down[expert].dense(torch.float32), bias[1])
        assert (got[pair].float() - want).norm() < 0.01 * want.norm(), pair
