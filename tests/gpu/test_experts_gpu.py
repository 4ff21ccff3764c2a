"""Quantized experts on a GPU against float32 with the same numbers: all kernels, formats and shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from minisgl.ops import reference
from minisgl.ops.quantized import E8M0, MXFP4, Format, Quantized
from minisgl.ops.table import load_ops

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
if torch.cuda.is_available():
    from minisgl.kernels.triton import moe as kernels
    from minisgl.kernels.triton.moe import FP8_CONFIGS, INT4_CONFIGS, MoeConfig
    from minisgl.ops.reference import Experts

    OPS = load_ops("triton")

ROWS, BLOCKS, INT8 = Format(8, 0), Format(8, 128), Format(8, 0, is_integer=True)
INT4, ZEROS = Format(4, 128, scale_dtype=torch.bfloat16), Format(4, 32, has_zeros=True, scale_dtype=torch.float16)
# hidden, size of an expert, experts, experts of a token
QWEN3_30B, MIXTRAL, ODD = (2048, 768, 128, 8), (4096, 1792, 8, 2), (144, 48, 5, 3)
GPT_OSS = (2880, 2880, 32, 4)
Weights = tuple[Quantized, Quantized]


def make(kind: Format, shape: tuple[int, int, int, int]) -> Weights:
    torch.manual_seed(0)
    hidden, size, count, _ = shape

    def experts(rows: int, columns: int) -> Quantized:
        flat = kind.empty(count * rows, columns, torch.device("cuda"))
        if kind == MXFP4:
            exponents = torch.randint(116, 121, flat.scale.shape, device="cuda").byte()
            flat.fill(torch.randint(0, 16, flat.shape, device="cuda"), exponents.view(E8M0))
        else:
            flat.round_from(torch.randn(count * rows, columns, device="cuda") * columns**-0.5)
        if flat.zeros is not None:
            flat.zeros.copy_(torch.randint(6, 11, flat.zeros.shape))
        return flat.experts(count)

    return experts(2 * size, hidden), experts(hidden, size)


def inputs(tokens: int, shape: tuple[int, int, int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    x, logits = torch.randn(tokens, shape[0], device="cuda"), torch.randn(tokens, shape[2], device="cuda")
    return x.bfloat16(), logits.bfloat16()


def error(
    got: torch.Tensor, x: torch.Tensor, logits: torch.Tensor, weights: Weights, top_k: int, **options: Any
) -> float:
    """The relative error; experts are widened as the reference asks for them."""
    wide = {name: value.float() if isinstance(value, torch.Tensor) else value for name, value in options.items()}
    want = reference.moe(x.float(), logits, Experts(*weights, top_k, True, **wide))
    assert got.shape == want.shape
    return float((got.float() - want).norm() / want.norm())


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        *((kind, shape) for kind in (ROWS, BLOCKS, INT8, INT4, ZEROS, MXFP4) for shape in (QWEN3_30B, MIXTRAL)),
        (ROWS, ODD),
        (INT8, ODD),
        (MXFP4, GPT_OSS),
    ],
    ids=str,
)
def test_experts_match_the_reference(kind: Format, shape: tuple[int, int, int, int]) -> None:
    """As exact as bfloat16 while experts have few rows; then activations are rounded to 8 bits twice."""
    weights, (hidden, size, count, top_k) = make(kind, shape), shape
    options: dict[str, Any] = {}
    if shape in (GPT_OSS, ODD):  # gates often reach the limits
        biases = torch.randn(count, 2 * size, device="cuda") * 6, torch.randn(count, hidden, device="cuda")
        options = {"gate_up_bias": biases[0].bfloat16(), "down_bias": biases[1].bfloat16(), "gate": "clamped"}
    for tokens in (1, 2, 4, 5, 33, 64, 100, 400, 2500):
        x, logits = inputs(tokens, shape)
        limit = 0.006 if tokens * top_k <= 20 * shape[2] else 0.06
        got = OPS.moe(x, logits, Experts(*weights, top_k, True, **options))
        assert error(got, x, logits, weights, top_k, **options) < limit


@pytest.mark.parametrize("kind", [ROWS, BLOCKS, INT8, INT4, ZEROS, MXFP4], ids=str)
def test_every_configuration_with_even_and_skewed_routing(kind: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, top_k = make(kind, QWEN3_30B), QWEN3_30B[3]
    for tokens in (1, 40, 600):
        x, logits = inputs(tokens, QWEN3_30B)
        skewed = torch.zeros_like(logits).index_fill_(1, torch.arange(top_k, device="cuda") * 3, 4.0)
        for router_logits in (logits, skewed):
            for _, config in INT4_CONFIGS if kind.bits == 4 else FP8_CONFIGS:

                def fixed(*args: object, config: MoeConfig = config) -> MoeConfig:
                    return config

                monkeypatch.setattr(kernels, "moe_config", fixed)
                limit = 0.006 if config.parts == 2 else 0.06
                got = kernels.by_groups(x, router_logits, Experts(*weights, top_k, True))
                assert error(got, x, router_logits, weights, top_k) < limit


@pytest.mark.parametrize("kind", [ROWS, INT8, INT4, MXFP4], ids=str)
@pytest.mark.parametrize(
    ("shape", "tokens"), [(MIXTRAL, 1), (QWEN3_30B, 1), (MIXTRAL, 16), (MIXTRAL, 64), (MIXTRAL, 300)], ids=str
)
def test_captured_experts_read_new_inputs(kind: Format, shape: tuple[int, int, int, int], tokens: int) -> None:
    """Every replay gives the bits of an eager call."""
    weights, top_k = make(kind, shape), shape[3]
    x, logits = inputs(tokens, shape)
    OPS.moe(x, logits, Experts(*weights, top_k, True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = OPS.moe(OPS.moe(x, logits, Experts(*weights, top_k, True)), logits, Experts(*weights, top_k, True))
    for _ in range(10):
        x.normal_()
        logits.normal_()
        graph.replay()
        first = OPS.moe(x, logits, Experts(*weights, top_k, True))
        assert torch.equal(out, OPS.moe(first, logits, Experts(*weights, top_k, True)))


def test_long_sums_of_one_sign() -> None:
    """The tensor cores' 14 bits would lose a part of them."""
    shape = (8192, 64, 4, 1)
    gate_up, down = make(ROWS, shape)
    gate_up.data.copy_(torch.rand(gate_up.shape, device="cuda"))
    for tokens in (2, 40, 300):
        x, logits = inputs(tokens, shape)
        x.abs_().mul_(0.001)
        assert error(OPS.moe(x, logits, Experts(gate_up, down, 1, True)), x, logits, (gate_up, down), 1) < 0.04
