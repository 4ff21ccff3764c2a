"""A trial: one row and quantized weights by a kernel in CUDA C++ (`one_row.cu`), for Hopper.

    PYTHONPATH=python python benchmark/kernels/one_row.py
    PYTHONPATH=python python benchmark/kernels/one_row.py bench offline --shape qwen3-8b --quantization fp8 ...

The first prints microseconds of the four GEMVs of a layer of 8B, in a CUDA graph of 24 layers, beside the engine's. The
second runs `minisgl` with this kernel, to be compared with the same command of `minisgl`. In a chain it was 16 to 18 %
faster, end to end slower; docs/notebook/2026-11-23-one-row-in-cuda.md has figures, the likely cause, and a remedy that
is in this code and has not run on a GPU. It takes scales of rows in 8 bits, and groups of 128 columns in 4.
"""

from __future__ import annotations

import ctypes
import logging
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple
from unittest.mock import patch

import torch
from ops import BF16, CEILING, GPU, randn, time_us
from torch import Tensor

from minisgl.__main__ import main as minisgl
from minisgl.ops.quantized import Format, Quantized
from minisgl.rounding import ceil_div
from minisgl.triton import quantized
from minisgl.triton.linear import NUM_SMS, Norm
from minisgl.triton.quantized_gemv import quantized_gemv

logger = logging.getLogger(__name__)

SOURCE: Final = Path(__file__).with_suffix(".cu")
WARPS: Final = 8
UNIT: Final = 64  # bytes of a row that are copied and multiplied together
MAX_OUTPUTS: Final = 256  # of a CTA, one for each thread of its WARPS
GATES: Final = ("", "silu", "gelu_tanh")  # by their number in `one_row.cu`
MAX_WARPS: Final = 20  # MAX_THREADS in `one_row.cu`
REGISTERS: Final = 1 << 16  # of an SM
# Bytes of shared memory of a CTA with a norm, and of one without: one of each fits on an SM, with 1 KB more for each.
# Two of a kind must not, or else an SM could get two where attention left room, and another SM none. Those with a norm
# take more than half of the shared memory, those without more than half of the registers, by idle warps. In a layer
# the two kinds take turns.
SHARED_MEMORY: Final = {True: 118 << 10, False: 107 << 10}
MORE_THAN_HALF: Final = 114 << 10

_NUM_REGISTERS, _MAX_DYNAMIC_SHARED_SIZE, _SHARED_MEMORY_CARVEOUT = 4, 8, 9  # CU_FUNC_ATTRIBUTE_*
_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_*


class Arguments(ctypes.Structure):
    """`struct Arguments` in `one_row.cu`."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "residual", "total", "norm_weight", "weight", "scale", "zeros")),
        *((name, ctypes.c_void_p) for name in ("bias", "out")),
        ("n_out", ctypes.c_int),
        ("eps", ctypes.c_float),
    ]


class _LaunchAttribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_uint64), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60)]


class _LaunchConfig(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_LaunchAttribute)),
        ("num_attributes", ctypes.c_uint),
    ]


_ATTRIBUTE: Final = _LaunchAttribute(_PROGRAMMATIC_STREAM_SERIALIZATION, 1)


@cache
def _libraries() -> tuple[ctypes.CDLL, ctypes.CDLL] | None:
    """The driver and NVRTC, which PyTorch brings."""
    name = f"libnvrtc.so.{str(torch.version.cuda).split('.')[0]}"
    packages = Path(torch.__file__).parent.parent / "nvidia"
    for path in (name, *packages.glob(f"*/lib/{name}")):
        try:
            return ctypes.CDLL("libcuda.so.1"), ctypes.CDLL(str(path))
        except OSError as error:
            logger.debug("one row in 8 and 4 bits: no %s (%s)", name, error)
    return None


def supports(x: Tensor, weight: Quantized) -> bool:
    """Whether `cuda_gemv` takes the weights: scales of rows in 8 bits, groups of 128 columns in 4."""
    kind, n_in = weight.format, weight.shape[1]
    is_supported = (
        kind.group == 0 and n_in % UNIT == 0
        if kind.bits == 8
        else kind.name == "int4" and kind.group == 128 and n_in % 256 == 0 and not kind.order
    )
    return (
        is_supported
        and x.is_cuda
        and x.dtype in (torch.bfloat16, torch.float16)
        and (kind.bits == 8 or weight.scale.dtype in (torch.bfloat16, torch.float16))
        and torch.cuda.get_device_capability(x.device) == (9, 0)
        and _libraries() is not None
    )


class Launch(NamedTuple):
    """What `one_row.cu` is compiled for, its arguments, the number of CTAs and their bytes of shared memory."""

    defines: dict[str, int]
    arguments: Arguments
    grid: int
    shared: int


def plan_launch(
    x: Tensor, weight: Quantized, bias: Tensor | None, gate: str, norm: Norm | None, total: Tensor, out: Tensor,
    num_sms: int = NUM_SMS,
) -> Launch:  # fmt: skip
    """As many stages of a warp's ring as fit; a stage has two units, or one if a warp has few or an odd number."""
    kind, n_in, n_out = weight.format, weight.shape[1], out.shape[1]
    tile, most = (8, MAX_OUTPUTS // 2) if gate else (16, MAX_OUTPUTS)
    grid = num_sms * ceil_div(n_out, num_sms * most)
    rows = ceil_div(ceil_div(n_out, grid), tile) * 16
    warp_units = ceil_div(n_in * kind.bits // 8, UNIT * WARPS)
    units = 2 if kind.bits == 4 or warp_units % 2 == 0 else 1
    blocks = ceil_div(ceil_div(warp_units, units) * units * (512 // kind.bits), 128)
    other = blocks * 264 + rows * 4 + 16  # of a warp: x, scales of its groups, sums; `struct Warp` in `one_row.cu`
    stage = units * (16 * UNIT + (64 if kind.bits == 4 else 0))
    stages = max(1, (SHARED_MEMORY[norm is not None] // WARPS - other) // stage)
    defines = {
        "WARPS": WARPS, "BITS": kind.bits, "IS_FP8": kind.name == "fp8", "N_IN": n_in, "UNITS": units, "STAGES": stages,
        "ROWS": rows, "HAS_NORM": norm is not None, "GATE": GATES.index(gate), "HAS_ZEROS": weight.zeros is not None,
        "IS_HALF": x.dtype == torch.float16, "SCALE_IS_HALF": weight.scale.dtype == torch.float16,
    }  # fmt: skip
    residual, norm_weight, eps = norm or (None, None, 0.0)
    tensors = (x, residual, total, norm_weight, weight.data, weight.scale, weight.zeros, bias, out)
    arguments = Arguments(*(None if t is None else t.data_ptr() for t in tensors), n_out, eps)
    return Launch({name: int(n) for name, n in defines.items()}, arguments, grid, WARPS * (other + stages * stage))


def _check(code: int, what: str) -> None:
    if code:
        raise RuntimeError(f"{what} failed with CUDA error {code}")


def compile_source(nvrtc: ctypes.CDLL, defines: dict[str, int]) -> bytes:
    """`one_row.cu` -> a cubin."""
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    options = ["--gpu-architecture=sm_90", "--std=c++17", *(f"-D{name}={value}" for name, value in defines.items())]
    array = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    _check(
        nvrtc.nvrtcCreateProgram(ctypes.byref(program), SOURCE.read_bytes(), b"one_row.cu", 0, None, None),
        "nvrtcCreateProgram",
    )
    try:
        if nvrtc.nvrtcCompileProgram(program, len(options), array):
            nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            nvrtc.nvrtcGetProgramLog(program, log)
            raise RuntimeError(f"one_row.cu does not compile: {log.value.decode()}")
        _check(nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)), "nvrtcGetCUBINSize")
        cubin = ctypes.create_string_buffer(size.value)
        _check(nvrtc.nvrtcGetCUBIN(program, cubin), "nvrtcGetCUBIN")
        return cubin.raw
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


@cache
def _kernel(device: torch.device, shared: int, is_large: bool, **defines: int) -> tuple[ctypes.c_void_p, int]:
    """The compiled kernel, and the warps of its CTA that a second one would lack the registers for."""
    libraries = _libraries()
    assert libraries is not None, "supports() asks for them"
    cuda, nvrtc = libraries
    module, function, registers = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int()
    with torch.cuda.device(device):
        _check(cuda.cuModuleLoadData(ctypes.byref(module), compile_source(nvrtc, defines)), "cuModuleLoadData")
        _check(cuda.cuModuleGetFunction(ctypes.byref(function), module, b"gemv"), "cuModuleGetFunction")
        _check(cuda.cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED_SIZE, shared), "cuFuncSetAttribute")
        _check(cuda.cuFuncSetAttribute(function, _SHARED_MEMORY_CARVEOUT, 100), "cuFuncSetAttribute")
        _check(cuda.cuFuncGetAttribute(ctypes.byref(registers), _NUM_REGISTERS, function), "cuFuncGetAttribute")
    warp_registers = ceil_div(registers.value, 8) * 8 * 32
    return function, WARPS if is_large else max(WARPS, min(MAX_WARPS, REGISTERS // (2 * warp_registers) + 1))


def cuda_gemv(
    x: Tensor, weight: Quantized, bias: Tensor | None, gate: str = "", norm: Norm | None = None
) -> tuple[Tensor, Tensor]:
    """x [1, K] -> (out [1, N], x + residual [1, K], or x itself without a residual)."""
    out = torch.empty((1, weight.shape[0] // (2 if gate else 1)), dtype=x.dtype, device=x.device)
    total = x if norm is None or norm.residual is None else torch.empty_like(x)
    defines, arguments, grid, shared = plan_launch(x, weight, bias, gate, norm, total, out)
    is_large = norm is not None
    shared = max(shared, MORE_THAN_HALF) if is_large else shared
    function, warps = _kernel(x.device, shared, is_large, **defines)
    stream = torch.cuda.current_stream(x.device).cuda_stream
    config = _LaunchConfig(grid, 1, 1, warps * 32, 1, 1, shared, stream, ctypes.pointer(_ATTRIBUTE), 1)
    pointers = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
    libraries = _libraries()
    assert libraries is not None, "supports() asks for them"
    _check(libraries[0].cuLaunchKernelEx(ctypes.byref(config), function, pointers, None), "cuLaunchKernelEx")
    return out, total


def either(x: Tensor, weight: Quantized, *args: Any) -> tuple[Tensor, Tensor]:
    """This kernel where it takes the weights, else the engine's."""
    return (cuda_gemv if supports(x, weight) else quantized_gemv)(x, weight, *args)


def chain_us(gemv: Callable[..., tuple[Tensor, Tensor]], layers: list[list[Quantized]], norm: Tensor) -> float:
    """Microseconds of a layer in a graph of all layers, without attention."""
    first = randn(1, norm.numel())

    def run() -> None:
        x, residual = first, first.clone()
        for qkv, o, gate_up, down in layers:
            heads, residual = gemv(x, qkv, None, "", Norm(residual, norm, 1e-6))
            x = gemv(heads[:, : o.shape[1]], o, None)[0]
            hidden, residual = gemv(x, gate_up, None, "silu", Norm(residual, norm, 1e-6))
            x = gemv(hidden, down, None)[0]

    return time_us([run], nodes=1, repeats=25) / len(layers)


def main() -> None:
    if sys.argv[1:]:
        with patch.object(quantized, "quantized_gemv", either):
            minisgl(sys.argv[1:])
        return
    shapes, norm = ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)), torch.rand(4096, device=GPU).to(BF16)
    for kind in (Format(8, 0), Format(4, 128, scale_dtype=BF16)):
        layers = [[kind.empty(*shape, GPU) for shape in shapes] for _ in range(24)]
        for weight in [weight for layer in layers for weight in layer]:
            weight.round_from(randn(*weight.shape, scale=0.02))
        floor = sum(weight.nbytes for weight in layers[0]) / CEILING
        ours, theirs = (chain_us(gemv, layers, norm) for gemv in (cuda_gemv, quantized_gemv))
        print(f"{kind}: floor {floor:.1f}, CUDA {ours:.1f}, Triton {theirs:.1f}", flush=True)


if __name__ == "__main__":
    main()
