"""`gemm.cu` and `gemm_large.cu`: the sizes with which they are launched, and what they compute, compiled for a CPU."""

from __future__ import annotations

import ctypes
import os
import re
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("nothing here is for the interpreter", allow_module_level=True)
pytest.importorskip("triton")

from minisgl.core.rounding import ceil_div, round_up
from minisgl.kernels.hopper import gemm as module
from minisgl.kernels.hopper.attention import SCORES, SUMS
from minisgl.kernels.hopper.gemm import (
    FP8_PRODUCT,
    FP8_SHARE,
    INT8_PRODUCT,
    INT8_SHARE,
    LARGE_MEMORY,
    MEMORY,
    Arguments,
    cuda_gemm,
    fills_tiles,
    plan_gemm,
    plan_large_gemm,
)
from minisgl.kernels.hopper.wgmma import multiply_source
from minisgl.kernels.triton.gemm import Split
from minisgl.ops import reference
from minisgl.ops.quantized import Format, Quantized
from support.cuda_on_cpu import compiler, emulate

FP8, INT8 = Format(8, 0), Format(8, 0, is_integer=True)
SHAPES = [
    (6144, 4096, ""), (4096, 4096, ""), (24576, 4096, "silu"), (4096, 12288, ""),  # 8B
    (7168, 5120, ""), (34816, 5120, "gelu_tanh"), (5120, 17408, ""), (5120, 25600, ""),
    (8, 16, ""), (16, 144, "silu"), (151936, 2048, ""), (200064, 8192, "silu"),
]  # fmt: skip


@pytest.mark.parametrize(("n_rows", "n_in", "gate"), SHAPES)
def test_plans(n_rows: int, n_in: int, gate: str) -> None:
    """CTAs cover all weight rows and fit an SM: their stages, their registers, and sums in place of the stages."""
    for rows in range(2, 129):
        parts = 2 if rows <= 32 else 1
        plan = plan_gemm(rows, parts, n_rows, n_in, gate)
        _, defines, grid, split, threads, shared, columns, size, tile = plan
        stages, groups = int(defines["STAGES"]), threads // 128 - 1
        macros = {"TILE": tile, "ROWS": size, "PARTS": columns // size, "SPLIT": split}
        assert macros.items() <= defines.items() and columns == size * parts
        assert size >= rows and tile % 16 == 0 and tile <= groups * 64 and not (gate and split > 1)
        assert grid == ceil_div(n_rows, tile) * split
        # A step's products and the sums, 64 x columns each for 128 threads, and 24 registers for all else.
        assert columns // 2 * 2 + 24 <= (65536 - 24 * 128) // (groups * 128)
        assert stages >= 2 or ceil_div(n_in, 128) <= 2
        # The last group reads whole blocks of 64 rows, and TMA writes 1,024-byte aligned stages.
        used = stages * (columns + tile) * 128 + (groups * 64 - tile) * 128 + stages * 16 + size * 4 + 1024
        assert used <= shared <= 227 << 10
        if split > 1:
            assert groups * 64 * size * 4 <= stages * (columns + tile) * 128
        else:
            assert shared <= MEMORY


def test_many_rows_are_for_tiles_that_keep_sms_busy() -> None:
    for rows in (512, 1024, 2048, 8192):
        assert fills_tiles(rows, 24576, 4096, FP8_SHARE), rows
    assert fills_tiles(1024, 4096, 12288, FP8_SHARE) and fills_tiles(256, 66 * 256, 1024, FP8_SHARE)
    assert fills_tiles(192, 151936, 4096, INT8_SHARE) and not fills_tiles(192, 4096, 4096, INT8_SHARE)
    for rows, n_rows, n_in in ((256, 24576, 4096), (640, 24576, 4096), (1280, 4096, 4096), (8192, 24576, 512)):
        assert not fills_tiles(rows, n_rows, n_in, FP8_SHARE), (rows, n_rows)
    plan = plan_large_gemm("silu", num_sms=131)
    assert plan.grid == 130 and plan.shared == LARGE_MEMORY <= 227 << 10


def test_arguments_are_as_large_as_in_cpp() -> None:
    assert ctypes.sizeof(Arguments) % 64 == 0  # a map is aligned


def test_a_product_names_all_its_registers() -> None:
    for columns in (8, 64, 128):
        for product, kind in ((FP8_PRODUCT, "f"), (INT8_PRODUCT, "r"), (SCORES, "f"), (SUMS, "f")):
            source, n = multiply_source(columns, product), columns // 2
            assert f"m64n{columns}{product.kind}" in source and source.count(f'"+{kind}"') == n
            used = {int(i) for i in re.findall(r"%(\d+)", source)}
            assert used == set(range(n + (6 if product.has_left else 3)))


def quantize(x: Tensor, parts: int, is_int: bool) -> tuple[Split, Tensor]:
    """The operands that `split_rows` makes, and what they stand for."""
    rows, most = round_up(len(x), 16), 127 if is_int else 448
    scale = x.abs().amax(1, keepdim=True) / most
    rest, found, total = x / scale, [], torch.zeros_like(x)
    for i in range(parts):
        part = rest.round().to(torch.int8) if is_int else rest.to(torch.float8_e4m3fn)
        total += part.float() / (254 if is_int else 16) ** i
        rest = (rest - part.float()) * (254 if is_int else 16)
        found.append(torch.cat((part.view(torch.int8), torch.full((rows - len(x), x.shape[1]), 99).to(torch.int8))))
    scales = torch.cat((scale[:, 0], torch.full((rows - len(x),), torch.nan)))[None]
    return Split(torch.cat(found).view(part.dtype), scales, scales), total * scale


@pytest.mark.skipif(compiler is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(
    ("kind", "rows", "parts", "n_rows", "n_in", "gate", "num_sms"),
    [
        (FP8, 5, 2, 40, 400, "", 4),  # two CTAs for each tile
        (INT8, 5, 2, 40, 272, "", 4),
        (FP8, 20, 2, 96, 272, "silu", 2),
        (INT8, 33, 1, 328, 640, "", 2),  # a warpgroup with only a part of its rows
        (FP8, 97, 1, 160, 384, "gelu_tanh", 2),
        (FP8, 300, 1, 336, 1040, "silu", 2),  # tiles beyond the ends of all dimensions
        (INT8, 300, 1, 336, 1040, "silu", 2),
        (FP8, 130, 1, 520, 1024, "", 2),
    ],
    ids=str,
)
def test_products(
    kind: Format, rows: int, parts: int, n_rows: int, n_in: int, gate: str, num_sms: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    emulate(module, monkeypatch)
    properties = SimpleNamespace(multi_processor_count=num_sms)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    torch.manual_seed(0)
    weight: Quantized = kind.empty(n_rows, n_in, torch.device("cpu"))
    weight.round_from(torch.randn(n_rows, n_in) * 0.02)
    split, x = quantize(torch.randn(rows, n_in), parts, kind.is_integer)
    dtype = torch.float16 if parts == 2 else torch.bfloat16
    bias = torch.randn(n_rows).to(dtype) if gate else None
    got = cuda_gemm(split, rows, parts, weight, bias, dtype, gate)
    want = reference.linear(x, weight.dense(torch.float32), None if bias is None else bias.float(), gate)
    assert got is not None and got.shape == want.shape
    assert ((got.float() - want).abs().amax(1) < 0.01 * want.abs().amax()).all()
