"""Launches `gemm.cu` and `gemm_large.cu`, GEMMs with 8-bit weights for Hopper in CUDA C++.

Letters: M rows, N output features, K input features.
"""

from __future__ import annotations

import ctypes
from functools import cache, partial
from typing import Final, NamedTuple

import torch
from torch import Tensor, empty

from minisgl.core.rounding import ceil_div, round_up
from minisgl.kernels.hopper.gemv import GATES
from minisgl.kernels.hopper.nvrtc import Map, hopper_source, launch, load_kernel, tensor_map
from minisgl.kernels.hopper.wgmma import Instruction, multiply_source
from minisgl.kernels.triton.gemm import Split
from minisgl.kernels.triton.launch import is_noted
from minisgl.kernels.triton.linear import NUM_SMS
from minisgl.kernels.triton.product import Product
from minisgl.ops.quantized import Quantized

FP8_PRODUCT: Final = Instruction("k32.f32.e4m3.e4m3", ", 1, 1")
INT8_PRODUCT: Final = Instruction("k32.s32.s8.s8")
MAX_ROWS: Final = 128
ROWS: Final = (8, 16, 32, 64, 96, MAX_ROWS)  # of x, for which `gemm.cu` is compiled
STEP: Final = 128  # columns that are copied and multiplied at once
# Of a CTA. The kernels before and after it should fit beside it: with 225 KB, a layer of 8B takes 3 us more.
MEMORY: Final = 160 << 10
MAX_STAGES: Final = 16
LARGE_TILE: Final = 256  # rows of x and weight rows of `gemm_large.cu`'s clusters of two CTAs
LARGE_MEMORY: Final = 4 * (LARGE_TILE + 128) * STEP + 4 * 16 + 2 * 128 * 8 + 1024
# Clusters must have work for this share of the time: else cuBLAS (FP8) or Triton's kernel (int8) is faster.
FP8_SHARE: Final = 0.92
INT8_SHARE: Final = 0.5


class Arguments(ctypes.Structure):
    """`struct Arguments` in `gemms.cu`."""

    _fields_ = [
        *((name, Map) for name in ("x", "weight")),
        *((name, ctypes.c_void_p) for name in ("x_scale", "scale", "bias", "out")),
        *((name, ctypes.c_int) for name in ("rows", "n_out", "pairs", "scale_bytes")),
        ("unused", ctypes.c_char * 16),  # a map is aligned to 64 bytes, and so is the size
    ]


class Plan(NamedTuple):
    """A kernel, its macros, its number of CTAs, and the threads and the shared memory in bytes of each."""

    name: str
    defines: dict[str, int | str]
    grid: int
    cluster: int  # CTAs
    threads: int
    shared: int
    columns: int  # of a product, see `multiply_source`
    x_rows: int  # that are copied at once
    tile: int  # weight rows of a CTA


def plan_large_gemm(gate: str, num_sms: int = NUM_SMS) -> Plan:
    """Return `gemm_large.cu`'s only plan."""
    defines: dict[str, int | str] = {"GATE": GATES.index(gate)}
    return Plan("gemm_large", defines, num_sms // 2 * 2, 2, 384, LARGE_MEMORY, 128, LARGE_TILE // 2, LARGE_TILE // 2)


@cache
def plan_gemm(rows: int, parts: int, n_rows: int, n_in: int, gate: str, num_sms: int = NUM_SMS) -> Plan:
    """Choose `gemm.cu`'s tile of weight rows, and whether two CTAs share it, each with half of the columns.

    An SM copies about 45 bytes a nanosecond. A wave of CTAs and the sums of two CTAs take as long as 180 and 45 KB.
    """
    size = next(n for n in ROWS if n >= rows)
    columns = size * parts
    max_tile = 64 * (5 if columns <= 64 else 3)  # more would not fit the registers
    plans = []
    for split in (1,) if gate else (1, 2):
        per_wave = num_sms // split
        waves = ceil_div(n_rows, per_wave * max_tile)
        tile = min(max_tile, round_up(ceil_div(n_rows, per_wave * waves), 16))
        copied = ceil_div(ceil_div(n_in, 2 * STEP), split) * 2 * STEP * (columns + tile)
        plans.append((waves * (copied + 180_000) + (split - 1) * 45_000, split, tile))
    _, split, tile = min(plans)
    groups, stage = ceil_div(tile, 64), (columns + tile) * STEP
    # The last group may read weight rows beyond its tile, which are ignored.
    rest = -tile % 64 * STEP + MAX_STAGES * 16 + size * 4 + 1024
    stages = min((MEMORY - rest) // stage, MAX_STAGES, ceil_div(ceil_div(n_in, 2 * STEP), split) * 2)
    if split > 1:  # the sums take the place of the stages
        stages = max(stages, ceil_div(groups * 64 * size * 4, stage))
    defines: dict[str, int | str] = {
        "TILE": tile, "ROWS": size, "PARTS": parts, "SPLIT": split, "STAGES": stages, "GATE": GATES.index(gate),
    }  # fmt: skip
    threads, shared = (groups + 1) * 128, stages * stage + rest
    return Plan("gemm", defines, ceil_div(n_rows, tile) * split, split, threads, shared, columns, size, tile)


def fills_tiles(rows: int, n_rows: int, n_in: int, share: float) -> bool:
    """Whether `gemm_large.cu`'s tiles keep nearly all SMs busy, and are long enough."""
    clusters = NUM_SMS // 2
    waves = ceil_div(ceil_div(rows, LARGE_TILE) * ceil_div(n_rows, LARGE_TILE), clusters)
    return n_in >= 8 * STEP and rows * n_rows >= share * waves * clusters * LARGE_TILE**2


def refuses(product: Product) -> str | None:
    """Return why these kernels do not run a product; None if they do."""
    rows, n_rows, n_in, kind, dtype, gate = product[:6]
    if rows < 2 or kind is None or kind.bits != 8 or kind.group or kind.scale_dtype is not torch.float32:
        return "for two or more rows, and 8 bits with scales of rows"
    if dtype not in (torch.bfloat16, torch.float16) or n_in % 16 or n_rows % (16 if gate else 8):
        return "for rows in 16 bits, and whole tiles"
    if rows > MAX_ROWS and not fills_tiles(rows, n_rows, n_in, INT8_SHARE if kind.is_integer else FP8_SHARE):
        return "its tiles would leave SMs idle"
    return None


def cuda_gemm(
    x: Split, rows: int, parts: int, weight: Quantized, bias: Tensor | None, dtype: torch.dtype, gate: str
) -> Tensor | None:
    """x [M, K], weight [N or 2N, K] -> [M, N] in `dtype`; None if the kernel cannot be compiled."""
    (n_rows, n_in), device = weight.shape, x.parts.device
    n_out, halves, max_rows = n_rows // (2 if gate else 1), 2 if gate else 1, len(x.parts) // parts
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    if rows > MAX_ROWS:
        plan = plan_large_gemm(gate, num_sms)
    else:
        plan = plan_gemm(rows, parts, n_rows, n_in, gate, num_sms)
    is_int = weight.format.is_integer
    defines = {**plan.defines, "IS_HALF": int(dtype == torch.float16), "IS_INT": int(is_int)}
    out = empty((rows, n_out), dtype=dtype, device=device)
    product = INT8_PRODUCT if is_int else FP8_PRODUCT
    header = hopper_source("wgmma", "gemms") + multiply_source(plan.columns, product)
    load = partial(load_kernel, device, plan.name, header, **defines)
    if is_noted((device, plan.name, *defines.items()), load):
        return out
    kernel = load()
    if kernel is None:
        return None
    x_map = tensor_map(x.parts.data_ptr(), (n_in, max_rows, parts), (n_in, max_rows * n_in), (STEP, plan.x_rows, parts))
    # Blocks of 8 rows: with a gate, of both halves in turn.
    weight_map = tensor_map(
        weight.data.data_ptr(), (n_in, 8, halves, n_out // 8), (n_in, n_out * n_in, 8 * n_in),
        (STEP, 8, halves, plan.tile // (8 * halves)),
    )  # fmt: skip
    pointers = x.scale.data_ptr(), weight.scale.data_ptr(), None if bias is None else bias.data_ptr(), out.data_ptr()
    arguments = Arguments(x_map, weight_map, *pointers, rows, n_out, ceil_div(n_in, 2 * STEP), max_rows * 4)
    launch(kernel, arguments, device, plan.grid, plan.threads, plan.shared, plan.cluster)
    return out
