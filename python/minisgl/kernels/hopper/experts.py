"""Launches `experts.cu`, the grouped GEMMs of experts in MXFP4 in CUDA C++.

Letters are those of Triton's `moe.py`: P pairs of a token and an expert, N output features, K input features.
"""

from __future__ import annotations

import ctypes
from functools import partial
from typing import Final, NamedTuple

import torch
from torch import Tensor, empty

from minisgl.core.rounding import ceil_div
from minisgl.kernels.hopper.gemv import GATES
from minisgl.kernels.hopper.nvrtc import Map, hopper_source, launch, load_kernel, tensor_map
from minisgl.kernels.hopper.wgmma import Instruction, multiply_source
from minisgl.kernels.triton.launch import is_noted
from minisgl.kernels.triton.moe import combine
from minisgl.kernels.triton.moe_routing import Lists, gather, route_and_list
from minisgl.kernels.triton.product import Mixture
from minisgl.ops.quantized import MXFP4, Quantized
from minisgl.ops.reference import Experts

PRODUCT: Final = Instruction("k16.f32.bf16.bf16", ", 1, 1, 0", name="multiply_left", has_left=True)
MEMORY: Final = 228 << 10  # of an SM, of which each CTA takes 1 KB more than it asks for
MAX_INPUTS: Final = 4096  # whose scales leave enough memory for copies
CHUNK: Final = 64


class Arguments(ctypes.Structure):
    """`struct Mixture` in `experts.cu`."""

    _fields_ = [
        *((name, Map) for name in ("x", "weight")),
        *((name, ctypes.c_void_p) for name in ("scale", "bias", "out", "order", "tiles")),
        *((name, ctypes.c_int) for name in ("n_out", "chunks")),
        ("unused", ctypes.c_char * 16),
    ]


class Tiling(NamedTuple):
    """Pairs and weight rows of a tile; warpgroups and stages of a CTA; CTAs per SM; chunks of a copy of x."""

    columns: int
    tile: int
    groups: int
    stages: int
    ctas: int
    x_chunks: int


# Bounds are the mean number of rows per expert. These are the fastest, or nearly so, of 2 to 9 at 7 numbers of tokens
# (gpt-oss-20b, H200).
TILINGS: Final = (
    (2.0, Tiling(8, 128, 2, 2, 3, 4)),
    (12.0, Tiling(16, 64, 1, 3, 4, 4)),
    (24.0, Tiling(32, 256, 4, 3, 1, 2)),
    (48.0, Tiling(64, 256, 2, 3, 1, 1)),
    (float("inf"), Tiling(128, 256, 2, 3, 1, 1)),
)


def tiling(pairs: int, experts: int) -> Tiling:
    """Return the tiles for a mean number of pairs per expert."""
    return next(found for rows, found in TILINGS if pairs <= rows * experts)


class Plan(NamedTuple):
    """Macros, threads and bytes of shared memory of a CTA."""

    defines: dict[str, int | str]
    threads: int
    shared: int


def plan(size: Tiling, n_in: int, gate: str) -> Plan:
    """Give x the memory that weights and scales leave."""
    columns, tile, groups, stages, ctas, x_chunks = size
    x_bytes, stage, rest = columns * 128 * x_chunks, tile * 128, 2 * tile * (n_in // 32) + 2048
    memory = MEMORY // ctas - 1024 - rest
    stages = min(stages, (memory - 2 * x_bytes) // stage)
    x_stages = min(16, (memory - stages * stage) // x_bytes)
    defines: dict[str, int | str] = {
        "COLUMNS": columns, "TILE": tile, "GROUPS": groups, "STAGES": stages, "X_CHUNKS": x_chunks,
        "X_STAGES": x_stages, "CTAS": ctas, "GATE": GATES.index(gate), "IS_HALF": 0, "IS_INT": 0,
    }  # fmt: skip
    threads = groups * 128 + (128 if tile > groups * 64 else 32)
    return Plan(defines, threads, stages * stage + x_stages * x_bytes + rest)


def refuses(m: Mixture) -> str | None:
    """Return why `experts.cu` does not run a mixture."""
    if m.kinds != (MXFP4, MXFP4) or m.dtype is not torch.bfloat16:
        return "for MXFP4 and tokens in bfloat16"
    return None if max(m.hidden, m.size) <= MAX_INPUTS else f"for experts of up to {MAX_INPUTS} features"


def multiply(x: Tensor, weight: Quantized, lists: Lists, size: Tiling, bias: Tensor | None, gate: str) -> Tensor | None:
    """x [P, K] as of `gather`, weight [E, n_rows, K] -> [P, N]; None if the kernel cannot be compiled.

    With a gate, the result is what the next product takes. Without one, it is in the order of pairs.
    """
    (count, n_rows, n_in), device, halves = weight.shape, x.device, 2 if gate else 1
    n_out, made = n_rows // halves, plan(size, n_in, gate)
    out = empty((len(x), n_out), dtype=x.dtype, device=device)
    header = hopper_source("wgmma", "gemms") + multiply_source(size.columns, PRODUCT)
    load = partial(load_kernel, device, "experts", header, **made.defines)
    if is_noted((device, "experts", *made.defines.items()), load):
        return out
    kernel = load()
    if kernel is None:
        return None
    sizes, box = (CHUNK * 2, len(x), n_in // CHUNK), (CHUNK * 2, size.columns, size.x_chunks)
    x_map = tensor_map(x.data_ptr(), sizes, (n_in * 2, CHUNK * 2), box)
    row, rows = n_in // 2, size.tile // halves
    weight_map = tensor_map(
        weight.data.data_ptr(), (row, n_out, halves, count), (row, n_out * row, n_rows * row), (128, rows, halves, 1),
        promotion=0,
    )  # fmt: skip
    tensors = weight.scale, bias, out, lists.order, lists.tiles
    pointers = (None if each is None else each.data_ptr() for each in tensors)
    arguments = Arguments(x_map, weight_map, *pointers, n_out, n_in // CHUNK)
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    grid = min(num_sms * size.ctas, lists.max_tiles * ceil_div(n_rows, size.tile))
    launch(kernel, arguments, device, grid, made.threads, made.shared)
    return out


def cuda_mixture(x: Tensor, router_logits: Tensor, experts: Experts) -> Tensor | None:
    """`reference.moe`; None if the kernel cannot be compiled."""
    gate_up, down, top_k, normalise, gate_up_bias, down_bias, gate, scale = experts
    assert isinstance(gate_up, Quantized) and isinstance(down, Quantized), "`refuses` has a reason"
    size = tiling(len(x) * top_k, len(gate_up))
    weights, lists = route_and_list(router_logits, top_k, normalise, size.columns, scale)
    hidden = multiply(gather(x, lists, top_k), gate_up, lists, size, gate_up_bias, gate)
    outputs = None if hidden is None else multiply(hidden, down, lists, size, down_bias, "")
    return None if outputs is None else combine(outputs, weights)
