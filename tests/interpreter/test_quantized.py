"""Products with quantized weights: every format, number of rows and shape of tile, against the dense matrix."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from minisgl.distributed.communicator import Communicator
from minisgl.kernels.triton import epilogue, ops
from minisgl.kernels.triton.epilogue import Products, finish
from minisgl.kernels.triton.gemm import GemmConfig, gemm
from minisgl.kernels.triton.launch import counters
from minisgl.kernels.triton.quantized import split_rows, split_whole_rows, widen
from minisgl.kernels.triton.quantized_gemv import StreamConfig, quantized_gemv
from minisgl.layers.builder import Builder
from minisgl.layers.linear import Linear, RMSNorm, Stream
from minisgl.ops import quantized, reference
from minisgl.ops.deferred import Deferred, Result, finished
from minisgl.ops.quantized import Format, Quantized
from minisgl.ops.table import OpTable
from support.ranks import run_ranks

ORDER = torch.randperm(384, generator=torch.Generator().manual_seed(0)).int().numpy().tobytes()
FORMATS = [
    Format(8, 0),
    Format(8, 128),
    Format(8, 0, is_integer=True),
    Format(4, 128),
    Format(4, 32),
    Format(4, 64, has_zeros=True),
    Format(4, 32, has_zeros=True, order=ORDER),
]


def error(got: Result, want: torch.Tensor) -> float:
    return float((finished(got).double() - want.double()).norm() / want.double().norm())


def matrix(kind: Format, rows: int, columns: int) -> Quantized:
    torch.manual_seed(rows + columns)
    found = kind.empty(rows, columns, torch.device("cpu"))
    if kind.order:
        found.fill(torch.randint(0, 16, (rows, columns)), torch.rand(found.scale.shape) / 50 + 0.01)
    else:
        found.round_from(0.1 * torch.randn(rows, columns))
    if found.zeros is not None:
        found.zeros.copy_(torch.randint(6, 11, found.zeros.shape))
    return found


# Each format with each number of rows, gated in every second case: the interpreter is slow.
CASES = [(kind, *rows) for kind in FORMATS for rows in ((1, 0.01), (5, 0.01), (40, 0.05))]


@pytest.mark.parametrize(
    ("kind", "rows", "limit", "gate"), [(*case, ("", "silu")[i % 2]) for i, case in enumerate(CASES)], ids=str
)
def test_linear_after_a_norm(kind: Format, rows: int, limit: float, gate: str):
    n = 64 if rows == 1 else 256  # its tiles are small
    weight, x = matrix(kind, n, 384), torch.randn(rows, 384).half()
    norm, bias, residual = torch.rand(384).half(), torch.randn(n).half(), torch.randn(rows, 384).half()
    dense = weight.dense(torch.float32)
    want, total = reference.add_norm_linear(x, residual, norm, 1e-6, dense.half(), bias, gate)
    got, got_total = ops.add_norm_linear(x, residual.clone(), norm, 1e-6, weight, bias, gate)
    assert_close(got_total, total)
    if kind.bits == 4 and rows == 1:  # x is rounded to 8 bits
        limit = 0.02
    assert error(got, want) < limit
    assert error(ops.linear(x, weight, None, gate), reference.linear(x, dense.half(), None, gate)) < limit


@pytest.mark.parametrize("config", [GemmConfig(16, 32, 128, 1, 2, 4), GemmConfig(16, 64, 128, 3, 2, 4)])
@pytest.mark.parametrize("kind", [Format(8, 0), Format(4, 64)], ids=str)
def test_tiles_and_parts_of_k(config: GemmConfig, kind: Format):
    weight, x = matrix(kind, 102, 384), torch.randn(9, 384).half()
    split = split_rows(x, None, 2, sum_group=kind.group)
    for gate in ("", "gelu_tanh"):
        got = gemm(split, 9, 2, weight, None, x.dtype, gate, config)
        assert error(got, reference.linear(x, weight.dense(x.dtype), None, gate)) < 0.01
    assert not counters(x.device).any()


@pytest.mark.parametrize(("kind", "limit"), [(Format(8, 128), 0.05), (Format(8, 0, is_integer=True), 0.01)], ids=str)
def test_more_rows_than_a_program_has(kind: Format, limit: float):
    weight, x = matrix(kind, 64, 128), torch.randn(130, 128).half()
    assert error(ops.linear(x, weight), reference.linear(x, weight.dense(x.dtype))) < limit


@pytest.mark.parametrize("gate", ["", "gelu_tanh"])
def test_scales_behind_cublas(gate: str):
    """With a bias that counts, since it must not be scaled, and with scales that differ much from row to row."""
    weight, x, residual = matrix(Format(8, 0), 64, 128), torch.randn(130, 128).half(), torch.randn(130, 128).half()
    weight.scale.mul_(torch.logspace(-1, 1, 64).unsqueeze(1))
    norm, bias = torch.rand(128).half(), torch.randn(64).half()
    want, _ = reference.add_norm_linear(x, residual, norm, 1e-6, weight.dense(torch.float16), bias, gate)
    assert error(ops.add_norm_linear(x, residual.clone(), norm, 1e-6, weight, bias, gate)[0], want) < 0.05


@pytest.mark.parametrize(("gate", "has_bias", "rows"), [("silu", True, 130), ("gelu_tanh", False, 200)])
def test_an_activation_is_left_to_the_next_layer(gate: str, has_bias: bool, rows: int):
    """Which quantizes its result without writing it."""
    up, down = matrix(Format(8, 0), 224, 128), matrix(Format(8, 0), 48, 112)
    up.scale.mul_(torch.logspace(-1, 1, 224).unsqueeze(1))
    x, norm, bias = torch.randn(rows, 128).half(), torch.rand(128).half(), torch.randn(224).half() if has_bias else None
    hidden, _ = ops.add_norm_linear(x, None, norm, 1e-6, up, bias, gate)
    want = reference.rms_norm(x.float(), norm.float(), 1e-6)
    want = reference.linear(want, up.dense(torch.float32), None if bias is None else bias.float(), gate)
    got = ops.linear(hidden, down)
    assert isinstance(hidden, Deferred) and hidden.work is not None, "no kernel has finished it"
    assert error(got, want @ down.dense(torch.float32).T) < 0.06
    assert error(hidden, want) < 0.05
    assert error(ops.linear(hidden, down), finished(got)) < 0.01, "the finished result is rounded once more"


def products(rows: int, n: int, gate: str, dtype: torch.dtype = torch.float16) -> Products:
    """Products [rows, n], and more rows, which do not count."""
    torch.manual_seed(n)
    scales = torch.rand(1, rows + 3) / 10, torch.rand(n, 1) / 10
    return Products(torch.randn(rows + 3, n).bfloat16() * 50, rows, gate, dtype, scales, torch.randn(n).to(dtype))


@pytest.mark.parametrize("n", [16, 336, 5008])
@pytest.mark.parametrize("gate", ["", "silu", "gelu_tanh"])
def test_finished_rows_in_one_part(n: int, gate: str):
    given = products(3, 2 * n, gate, torch.float32)
    parts, scale, _ = split_whole_rows(given)
    want = finish(*given)
    assert_close(parts[:3].float() * scale[0, :3, None], want, rtol=0.07, atol=2e-3 * float(scale[0, :3].max()))
    assert_close(scale[0, :3], want.abs().amax(1) / 448)


@pytest.mark.parametrize("half", [0, 336])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_an_activated_row_that_is_not_finite_stays_so(half: int):
    for bad in (torch.nan, torch.inf):
        given = products(4, 672, "silu")
        given.x[1, half + 7] = bad
        parts, scale, _ = split_whole_rows(given)
        finite = (parts[:4].float() * scale[0, :4, None]).isfinite()
        assert finite[[0, 2, 3]].all() and not finite[1].all() and not scale[0, 1].isfinite()


def test_a_row_of_zeros_is_one_of_zeros_when_activated():
    given = products(2, 64, "silu")
    given.x.zero_()
    parts, scale, _ = split_whole_rows(given._replace(bias=None))
    assert not parts[:2].float().any() and scale[0, :2].isfinite().all()


@pytest.mark.parametrize(("rows", "columns", "group"), [(37, 512, 128), (7, 96, 32), (1, 64, 64)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_weights_are_rounded_as_by_pytorch(rows: int, columns: int, group: int, dtype: torch.dtype):
    """The interpreter does not round to bfloat16 to nearest."""
    weight, kind = (torch.randn(rows, columns) * 0.02).to(torch.bfloat16), Format(4, group, scale_dtype=dtype)
    weight[0, :group] = 0
    for got, want in zip(ops.rounded(weight, kind), quantized.rounded(weight, kind), strict=True):
        assert got.dtype is want.dtype and torch.equal(got, want)
    for got, want in zip(ops.rounded(weight, Format(8, 0)), quantized.rounded(weight, Format(8, 0)), strict=True):
        assert torch.equal(got, want)


def test_a_deferred_result_is_finished_once():
    given = products(5, 48, "")
    want, x = finish(*given), Deferred(given)
    assert x.shape == want.shape and x.dtype is want.dtype and len(x) == 5 and x.work is not None
    assert torch.equal(finished(x), want) and x.work is None and finished(x) is finished(x)
    assert finished(want) is want and finished(None) is None
    stream = Stream(Deferred(given), want).at(torch.tensor([3, 1]))
    assert isinstance(stream.x, torch.Tensor) and torch.equal(stream.x, want[[3, 1]])


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("rows", [33, 200])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_partial_result_is_left_to_the_norm_behind(rows: int, has_bias: bool):
    """down's result gets the same bits from the kernel that adds, norms and quantizes as from a kernel of its own."""
    down, qkv = matrix(Format(8, 0), 48, 256), matrix(Format(8, 0), 160, 48)
    down.scale.mul_(torch.logspace(-1, 1, 48).unsqueeze(1))
    x, residual, norm = torch.randn(rows, 256).half(), torch.randn(rows, 48).half(), torch.rand(48).half()
    bias = torch.randn(48).half() if has_bias else None
    x[5, 7] = torch.nan
    left = ops.linear(x, down, bias)
    assert isinstance(left, Deferred) and left.work is not None
    got, total = ops.add_norm_linear(left, residual.clone(), norm, 1e-6, qkv)
    assert left.work is not None, "no kernel has finished it"
    assert type(got) is torch.Tensor and not got[5].isfinite().any() and not total[5].isfinite().any()
    want, want_total = ops.add_norm_linear(left.finished(), residual.clone(), norm, 1e-6, qkv)
    assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    assert_close(total, want_total, rtol=0, atol=0, equal_nan=True)
    finite = torch.arange(rows) != 5
    exact = reference.linear(x.float(), down.dense(torch.float32), None if bias is None else bias.float())
    assert error(total[finite], (exact + residual)[finite]) < 0.05


@pytest.mark.parametrize(
    ("kind", "rows"),
    [*((kind, rows) for kind in FORMATS for rows in (1, 130)), (Format(4, 128), 300)],
    ids=str,
)
def test_every_kernel_reads_a_deferred_result(kind: Format, rows: int):
    """And a deferred residual."""
    weight, whole = matrix(kind, 32, 384), finish(*products(rows, 384, ""))
    residual, norm = finish(*products(rows, 384, "")._replace(bias=None)), torch.rand(384).half()
    left = Deferred(products(rows, 384, "")._replace(bias=None))
    got, total = ops.add_norm_linear(Deferred(products(rows, 384, "")), left, norm, 1e-6, weight)
    want, want_total = ops.add_norm_linear(whole, residual, norm, 1e-6, weight)
    assert torch.equal(finished(got), finished(want)) and torch.equal(finished(total), finished(want_total))
    got, want = ops.linear(Deferred(products(rows, 384, "")), weight), ops.linear(whole, weight)
    assert torch.equal(finished(got), finished(want))


def test_ranks_add_up_finished_results(monkeypatch: pytest.MonkeyPatch):
    def finish_in_torch(
        x: torch.Tensor, rows: int, gate: str, dtype: torch.dtype, scales: Any, bias: Any
    ) -> torch.Tensor:
        return (x[:rows] * scales[0][0, :rows, None] * scales[1].T + bias).to(dtype)

    monkeypatch.setattr(epilogue, "finish", finish_in_torch)  # kernels are not interpreted in two threads
    given, residual, norm = products(5, 48, "", torch.float32), torch.randn(5, 48), torch.rand(48)
    want, want_total = reference.add_rms_norm(3 * finish_in_torch(*given), residual, norm, 1e-6)

    def rank(comm: Communicator) -> None:
        own = given._replace(x=given.x * (comm.info.rank + 1), bias=given.bias * (comm.info.rank + 1))
        builder = Builder(OpTable(), torch.float32, torch.device("cpu"), comm)
        layer, eye = RMSNorm(builder, "n", 48, 1e-6), Linear(builder, {"m": 48}, 48, bias=False)
        layer.weight.copy_(norm), eye.weight.copy_(torch.eye(48))
        for call in (layer.sum_add, partial(eye.after_sum_norm, norm=layer)):
            got, total = call(Stream(Deferred(own), residual.clone()))
            assert_close(got, want)
            assert_close(total, want_total)

    run_ranks(2, rank)


@pytest.mark.parametrize("kind", [Format(4, 32), Format(4, 32, has_zeros=True)], ids=str)
def test_zero_points_of_more_groups_than_a_step_has(kind: Format):
    weight, x = matrix(kind, 64, 640), torch.randn(5, 640).half()
    assert error(ops.linear(x, weight), reference.linear(x, weight.dense(x.dtype))) < 0.01


@pytest.mark.parametrize("kind", [Format(8, 0), Format(8, 0, is_integer=True)], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 40])
def test_columns_that_no_tile_divides(kind: Format, rows: int):
    weight, x = matrix(kind, 32, 336), torch.randn(rows, 336).half()
    assert error(ops.linear(x, weight), reference.linear(x, weight.dense(x.dtype))) < 0.05


@pytest.mark.parametrize("kind", FORMATS, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 40])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy warns of NaN, a GPU does not
def test_a_row_that_is_not_finite_stays_so(kind: Format, rows: int):
    """Else a poisoned page would not be noticed."""
    weight, x = matrix(kind, 32, 384), torch.randn(rows, 384).half()
    for bad in (torch.nan, torch.inf):
        x[-1, 130] = bad
        finite = finished(ops.linear(x, weight)).isfinite()
        assert not finite[-1].any() and finite[:-1].all()


@pytest.mark.parametrize("kind", FORMATS, ids=str)
def test_one_row_in_blocks_of_columns_by_fewer_programs_than_tiles(kind: Format, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("minisgl.kernels.triton.quantized_gemv.NUM_SMS", 3)
    weight, x = matrix(kind, 22, 384), torch.randn(1, 384).half()
    got, _ = quantized_gemv(x, weight, None, config=StreamConfig(4, 128, 1, 2, 4))
    assert error(got, reference.linear(x, weight.dense(x.dtype))) < 0.015


@pytest.mark.parametrize("kind", [kind for kind in FORMATS if kind.bits == 4], ids=str)
def test_numbers_are_widened(kind: Format):
    weight = matrix(kind, 6, 384)
    assert_close(widen(weight, torch.float16), weight.dense(torch.float16))


@pytest.mark.parametrize("group", [0, 128])
def test_rows_in_one_part(group: int):
    x = torch.randn(5, 256)
    parts, scale, _ = split_rows(x, None, 1, scale_group=group)
    wide = scale.t()[:5].repeat_interleave(256 // scale.shape[0], 1)
    assert_close(parts[:5].float() * wide, x, rtol=0.07, atol=0.01)
