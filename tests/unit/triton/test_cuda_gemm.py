"""The sizes with which `gemm.cu` and `gemm_large.cu` are launched. What they compute is tested on a GPU."""

from __future__ import annotations

import ctypes
import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("nothing here is for the interpreter", allow_module_level=True)
pytest.importorskip("triton")

from minisgl.ops.quantized import Format
from minisgl.rounding import ceil_div
from minisgl.triton.cuda_gemm import (
    FP8_SHARE,
    INT8_SHARE,
    LARGE_MEMORY,
    MEMORY,
    Arguments,
    fills_tiles,
    multiply_source,
    plan_gemm,
    plan_large_gemm,
    supports,
)

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
        for is_int in (False, True):
            source = multiply_source(columns, is_int)
            assert f"m64n{columns}k32" in source and source.count('"+r"' if is_int else '"+f"') == columns // 2


def test_a_cpu_has_no_such_kernel() -> None:
    weight = Format(8, 0).empty(16, 512, torch.device("cpu"))
    assert not supports(16, weight, torch.bfloat16, "")
