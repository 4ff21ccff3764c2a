"""Products with quantized weights at any number of rows, and the built-in model with them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from minisgl import LLM, SamplingParams
from minisgl.checkpoint.hf import BUILTIN_MODEL
from minisgl.models import quantize
from minisgl.ops import quantized, reference
from minisgl.ops.deferred import Result, finished
from minisgl.ops.quantized import Format
from minisgl.ops.table import load_ops

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

FORMATS = [
    Format(8, 0),
    Format(8, 128),
    Format(8, 0, is_integer=True),
    Format(4, 128, scale_dtype=torch.bfloat16),
    Format(4, 64, scale_dtype=torch.float16),
    Format(4, 32, has_zeros=True, scale_dtype=torch.float16),
    Format(4, 128, scale_dtype=torch.float16, order=torch.randperm(2048).int().numpy().tobytes()),
]
QUESTIONS = ["What is 12 + 30?", "Repeat exactly: a b c", "What is 45 - 7?", "Count from 3 to 12."]


def error(got: Result, want: torch.Tensor) -> float:
    return float((finished(got).double() - want.double()).norm() / want.double().norm())


@pytest.mark.parametrize("group", [32, 128])
def test_weights_are_rounded_as_by_pytorch(group: int) -> None:
    """But for sums of errors that nearly tie."""
    torch.manual_seed(0)
    kind = Format(4, group, scale_dtype=torch.bfloat16)
    weight = (torch.randn(1000, 4096, device="cuda") * 0.02).bfloat16()
    pairs = zip(load_ops("triton").rounded(weight, kind), quantized.rounded(weight, kind), strict=True)
    for got, want in pairs:
        assert got.dtype is want.dtype and (got != want).float().mean() < 1e-4


@pytest.mark.parametrize("kind", FORMATS, ids=str)
def test_products(kind: Format) -> None:
    """A few rows as exact as bfloat16; larger steps round activations to 3 bits after the point, and one row for
    weights of 4 bits to 7 bits."""
    torch.manual_seed(0)
    ops = load_ops("triton")
    weight = kind.empty(1024, 2048, torch.device("cuda"))
    if kind.order:
        q, scale = torch.randint(0, 16, weight.shape), torch.rand(weight.scale.shape) / 100 + 0.002
        weight.fill(q.cuda(), scale.cuda())
    else:
        weight.round_from(torch.randn(1024, 2048, device="cuda") * 0.02)
    if weight.zeros is not None:
        weight.zeros.copy_(torch.randint(6, 11, weight.zeros.shape))
    dense, norm = weight.dense(torch.float32), torch.rand(2048, device="cuda").bfloat16()
    bias = torch.randn(1024, device="cuda").bfloat16()
    for rows in (1, 2, 8, 9, 16, 17, 33, 64, 65, 97, 128, 200, 1000):
        x, residual = torch.randn(2, rows, 2048, device="cuda").bfloat16()
        is_rounded = rows > 32 if kind.bits == 8 else 16 < rows <= 256
        limit = 0.05 if is_rounded else 0.015 if rows == 1 and kind.bits == 4 else 0.006
        for gate in ("", "silu"):
            got, total = ops.add_norm_linear(x, residual.clone(), norm, 1e-6, weight, bias, gate)
            floats = (t.float() for t in (x, residual, norm))
            want, wanted_total = reference.add_norm_linear(*floats, 1e-6, dense, bias.float(), gate)
            assert error(got, want) < limit and error(total, wanted_total) < 0.006
            assert error(ops.linear(x, weight, None, gate), reference.linear(x.float(), dense, None, gate)) < limit


@pytest.mark.parametrize("gate", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(
    ("rows", "n"), [(129, 1024), (256, 12288), (200, 17408), (140, 25600), (1000, 9728), (130, 336)]
)
def test_activated_rows_in_one_part(rows: int, n: int, gate: str) -> None:
    """Scales, bias, activation and rounding in one kernel; a row that is not finite stays so."""
    from minisgl.kernels.triton.epilogue import Products, finish
    from minisgl.kernels.triton.quantized import split_whole_rows

    torch.manual_seed(0)
    scales = torch.rand(1, rows + 16, device="cuda") / 10, torch.rand(2 * n, 1, device="cuda") / 10
    x, bias = 50 * torch.randn(rows + 16, 2 * n, device="cuda").bfloat16(), torch.randn(2 * n, device="cuda").bfloat16()
    for products in (Products(x, rows, gate, torch.float32, scales, each) for each in (None, bias)):
        parts, scale, _ = split_whole_rows(products)
        want = finish(*products)
        assert error(parts[:rows].float() * scale[0, :rows, None], want) < 0.04
        assert torch.allclose(scale[0, :rows] * 448, want.abs().amax(1), rtol=1e-5)
    for bad in (torch.nan, torch.inf):
        for column in (0, n - 1, n, 2 * n - 1):
            broken = x.clone()
            broken[5, column] = bad
            parts, scale, _ = split_whole_rows(products._replace(x=broken))
            finite = (parts[:rows].float() * scale[0, :rows, None]).isfinite()
            assert not scale[0, 5].isfinite() and not finite[5].all() and finite[:5].all() and finite[6:].all()


@pytest.mark.parametrize(
    ("rows", "n_rows", "n_in", "gate", "dtype"),
    [
        (129, 1280, 1024, "", torch.bfloat16),
        (300, 3120, 1152, "silu", torch.bfloat16),
        (1000, 6144, 1040, "gelu_tanh", torch.float16),
        (5000, 4104, 4096, "", torch.float16),
        (2048, 4096, 12288, "", torch.bfloat16),
    ],
)
@pytest.mark.parametrize("kind", [FORMATS[0], FORMATS[2]], ids=str)
def test_many_rows_by_clusters(
    kind: Format, rows: int, n_rows: int, n_in: int, gate: str, dtype: torch.dtype
) -> None:  # fmt: skip
    """Tiles beyond the ends of all dimensions; sums of positive numbers, which show what accumulators lose."""
    from minisgl.kernels.hopper.gemm import cuda_gemm
    from minisgl.kernels.triton.quantized import split_rows

    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("for Hopper")
    torch.manual_seed(0)
    weight = kind.empty(n_rows, n_in, torch.device("cuda"))
    weight.round_from(torch.randn(n_rows, n_in, device="cuda") * 0.02)
    bias = torch.randn(n_rows, device="cuda").to(dtype)
    x = torch.randn(rows, n_in, device="cuda").to(dtype)
    if not gate:
        x = x.abs()
        weight.data.copy_(weight.data.float().abs())
    split = split_rows(x, None, 1, dtype=torch.int8 if kind.is_integer else torch.float8_e4m3fn)
    rounded = split.parts[:rows].float() * split.scale[0, :rows, None]
    for each in (None, bias):
        got = cuda_gemm(split, rows, 1, weight, each, dtype, gate)
        assert got is not None
        want = reference.linear(rounded, weight.dense(torch.float32), None if each is None else each.float(), gate)
        assert error(got, want) < 0.004
        assert error(got[-1], want[-1]) < 0.006 and error(got[:, -1], want[:, -1]) < 0.006
        if not gate and each is None:
            assert 0.996 < float(got.double().sum() / want.double().sum()) < 1.001


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("rows", [33, 129, 256])
def test_a_partial_result_is_left_to_the_norm_behind(rows: int, has_bias: bool) -> None:
    """It becomes the same bits as by a kernel of its own, also in a graph."""
    torch.manual_seed(0)
    ops, cuda = load_ops("triton"), torch.device("cuda")
    down, qkv = FORMATS[0].empty(4096, 9216, cuda), FORMATS[0].empty(512, 4096, cuda)
    for weight in (down, qkv):
        weight.round_from(torch.randn(weight.shape, device=cuda) * 0.02)
    x, residual = torch.randn(rows, 9216, device=cuda).bfloat16(), torch.randn(rows, 4096, device=cuda).bfloat16()
    norm, bias = torch.rand(4096, device=cuda).bfloat16(), torch.randn(4096, device=cuda).bfloat16()
    x[5, 7] = torch.nan

    def run(read: Callable[[Result], Result]) -> tuple[torch.Tensor, torch.Tensor]:
        out = read(ops.linear(x, down, bias if has_bias else None))
        result: tuple[torch.Tensor, torch.Tensor] = ops.add_norm_linear(out, residual.clone(), norm, 1e-6, qkv)
        return result

    want, want_total = run(lambda out: finished(out).clone())
    left, left_total = run(lambda out: out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, captured_total = run(lambda out: out)
    graph.replay()
    finite = torch.arange(rows, device=cuda) != 5
    for got, total in ((left, left_total), (captured, captured_total)):
        assert not got[5].isfinite().any() and not total[5].isfinite().any()
        assert torch.equal(total[finite], want_total[finite])
        assert error(got[finite], want[finite]) < 0.01  # the norm's sum has another order
    exact = reference.linear(x.float(), down.dense(torch.float32), bias.float() if has_bias else None) + residual
    assert error(want_total[finite], exact[finite]) < 0.05


@pytest.mark.parametrize("kind", [FORMATS[0], FORMATS[2], FORMATS[3]], ids=str)
@pytest.mark.parametrize(("n_out", "n_in", "gate"), [(25601, 5120, "silu"), (17000, 1024, "silu"), (5120, 25600, "")])
def test_one_row_of_large_matrices(kind: Format, n_out: int, n_in: int, gate: str) -> None:
    """The most outputs and inputs for which a CTA has one turn, as in the shapes of 14B and 32B."""
    torch.manual_seed(0)
    weight = kind.empty(n_out * (2 if gate else 1), n_in, torch.device("cuda"))
    weight.round_from(torch.randn(weight.shape, device="cuda") * 0.02)
    x = torch.randn(1, n_in, device="cuda").bfloat16()
    want = reference.linear(x.float(), weight.dense(torch.float32), None, gate)
    assert error(load_ops("triton").linear(x, weight, None, gate), want) < 0.006


@pytest.mark.parametrize(
    ("n_out", "n_in", "gate"),
    [
        (24576, 4096, "silu"),  # a wave of CTAs, each with three warpgroups
        (34816, 5120, "gelu_tanh"),  # the same with five, or two waves
        (4096, 12288, ""),  # pairs of CTAs
        (7168, 5120, ""),  # the last group and the last tile are not full
        (1000, 1040, ""),  # the last step is not full
        (2080, 144, "silu"),  # no step but the first
    ],
)
def test_few_rows_of_large_matrices(n_out: int, n_in: int, gate: str) -> None:
    """In FP8, in each number of rows for which there is a kernel, and with rows that are not finite."""
    torch.manual_seed(0)
    ops, weight = load_ops("triton"), FORMATS[0].empty(n_out, n_in, torch.device("cuda"))
    weight.round_from(torch.randn(weight.shape, device="cuda") * 0.02)
    dense, bias = weight.dense(torch.float32), torch.randn(n_out, device="cuda")
    for rows in (2, 7, 13, 16, 32, 64, 90, 128):
        x = torch.randn(rows, n_in, device="cuda")
        for dtype in (torch.bfloat16, torch.float16):
            got = finished(ops.linear(x.to(dtype), weight, bias.to(dtype), gate))
            want = reference.linear(x.to(dtype).float(), dense, bias.to(dtype).float(), gate)
            assert error(got, want) < (0.006 if rows <= 32 else 0.05)
        assert torch.equal(got, finished(ops.linear(x.to(dtype), weight, bias.to(dtype), gate)))
        x[1, 5] = torch.nan
        finite = torch.arange(rows, device="cuda") != 1
        broken = finished(ops.linear(x.to(dtype), weight, bias.to(dtype), gate))
        assert torch.equal(broken[finite], got[finite]) and not broken[1].isfinite().any()


@pytest.mark.parametrize("rows", [1, 2, 40, 100, 200, 300])
@pytest.mark.parametrize("kind", FORMATS[:4], ids=str)
def test_a_chain_of_layers(kind: Format, rows: int) -> None:
    """Kernels that start before their predecessors end, or that are one, give the bits of one after the other."""
    torch.manual_seed(0)
    ops, norm = load_ops("triton"), torch.rand(1024, device="cuda").bfloat16()
    layers = []
    for _ in range(6):
        pair = kind.empty(4096, 1024, norm.device), kind.empty(1024, 2048, norm.device)
        for weight in pair:
            weight.round_from(torch.randn(weight.shape, device="cuda") * 0.03)
        layers.append(pair)
    first = torch.randn(rows, 1024, device="cuda").bfloat16()

    def run(read: Callable[[Result], Result]) -> torch.Tensor:
        x, residual = first, first.clone()
        for up, down in layers:
            hidden, residual = ops.add_norm_linear(x, residual, norm, 1e-6, up, None, "silu")
            x = read(ops.linear(read(hidden), down))
        return finished(x) + finished(residual)  # inside the graph

    def wait(x: Result) -> Result:
        x = finished(x) if rows == 1 else x  # else the norm's sum has another order
        torch.cuda.synchronize()
        return x

    want, got = run(wait), run(lambda x: x)
    if rows == 1 and kind.bits == 4:  # a chain has more warps than a single GEMV, and another order of sums
        assert error(got, want) < 0.01
        want = got
    assert torch.equal(got, want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run(lambda x: x)
    for _ in range(20):
        got.zero_()
        graph.replay()
        assert torch.equal(got, want)


@pytest.mark.parametrize("kind", [FORMATS[0], FORMATS[2], FORMATS[3]], ids=str)
def test_one_row_with_another_norm(kind: Format) -> None:
    """A norm's weight in float32, as Gemma 3 has, where `gemv.cu` reads 16 bits."""
    torch.manual_seed(0)
    weight = kind.empty(512, 1024, torch.device("cuda"))
    weight.round_from(torch.randn(weight.shape, device="cuda") * 0.02)
    (x, residual), norm = torch.randn(2, 1, 1024, device="cuda").bfloat16(), torch.rand(1024, device="cuda")
    got, _ = load_ops("triton").add_norm_linear(x, residual, norm, 1e-6, weight)
    dense = weight.dense(torch.float32)
    want, _ = reference.add_norm_linear(x.float(), residual.float(), norm, 1e-6, dense)
    assert error(got, want) < 0.015


@pytest.mark.parametrize("kind", FORMATS[:4], ids=str)
def test_long_sums_of_one_sign(kind: Format) -> None:
    """The tensor cores' 14 bits would lose a part of them."""
    weight = kind.empty(256, 12288, torch.device("cuda"))
    weight.round_from(torch.rand(256, 12288, device="cuda"))
    for rows in (1, 16, 40, 256):
        x = torch.rand(rows, 12288, device="cuda").bfloat16()
        assert error(load_ops("triton").linear(x, weight), x.float() @ weight.dense(torch.float32).T) < 0.005


def test_blocks_that_are_no_multiple_of_four() -> None:
    """cuBLAS would read scales beyond the row."""
    ops, weight = load_ops("triton"), Format(8, 128).empty(256, 768, torch.device("cuda"))
    weight.round_from(torch.randn(256, 768, device="cuda"))
    for rows in (1, 40, 300):
        x = torch.randn(rows, 768, device="cuda").bfloat16()
        assert error(ops.linear(x, weight), x.float() @ weight.dense(torch.float32).T) < 0.05


@pytest.mark.parametrize("scheme", ["fp8", "int8", "int4"])
def test_the_built_in_model(scheme: str, tmp_path: Path) -> None:
    """Rounded at the start or before, with graphs and without: right answers."""
    quantize.quantize(str(BUILTIN_MODEL), tmp_path / "out", scheme)
    params = SamplingParams(temperature=0.0, max_tokens=40)
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    made, eager = {"quantization": scheme}, {"quantization": scheme, "cuda_graph_max_bs": 0}
    for options in (made, {"model": str(tmp_path / "out")}, eager):
        with LLM(**{"device": "cuda", "num_pages": 2000} | options) as llm:
            assert scheme in str(llm.scheduler.engine.describe()["quantization"])
            for answers in (llm.chat(chats, params), [llm.chat(chat, params)[0] for chat in chats]):
                texts = [answer.text for answer in answers]
                assert "42" in texts[0] and "a b c" in texts[1] and "38" in texts[2] and "11" in texts[3]


@pytest.mark.parametrize("scheme", [None, "fp8"])
def test_a_cache_of_8_bits(scheme: str | None) -> None:
    """Right answers, also far from their source; nearly twice the tokens for each byte."""
    filler = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
    far = f"{filler * 40}The secret code of the castle is 7305982. {filler * 30}\n\n"
    far += "What is the secret code of the castle?"
    chats = [[{"role": "user", "content": question}] for question in [*QUESTIONS, far]]
    with LLM(device="cuda", num_pages=2000, quantization=scheme, kv_cache_dtype="fp8") as llm:
        facts = llm.scheduler.engine.describe()
        assert int(facts["kv_bytes"]) * 1.88 < int(facts["kv_tokens"]) * 6 * 2 * 4 * 64 * 2
        for _ in range(2):  # the second time after a cached prefix
            texts = [answer.text for answer in llm.chat(chats, SamplingParams(temperature=0.0, max_tokens=40))]
            assert "42" in texts[0] and "38" in texts[2] and "11" in texts[3] and "7305982" in texts[4]
