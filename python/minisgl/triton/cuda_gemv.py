"""Compiles and launches `gemv.cu`, the GEMV with quantized weights for Hopper in CUDA C++."""

from __future__ import annotations

import ctypes
import hashlib
import logging
from functools import cache, partial
from pathlib import Path
from typing import Final, NamedTuple

import torch
from torch import Tensor, empty, empty_like
from triton.runtime import driver
from triton.runtime.cache import get_cache_manager

from minisgl.ops.quantized import Quantized
from minisgl.rounding import ceil_div, round_up
from minisgl.triton.launch import is_noted
from minisgl.triton.linear import Norm

logger = logging.getLogger(__name__)
_warn_once = cache(logger.warning)  # once, not once per shape

SOURCE: Final = Path(__file__).parent / "cuda" / "gemv.cu"
WARPS: Final = 8
UNIT: Final = 64  # bytes of a row that a warp copies and multiplies at once
MAX_INPUTS: Final = 25600  # a warp's columns of x must fit in its registers
MAX_OUTPUTS: Final = 256  # per CTA: one per thread of its WARPS
GATES: Final = ("", "silu", "gelu_tanh")  # indexed by GATE in `gemv.cu`
MAX_WARPS: Final = 20  # MAX_THREADS in `gemv.cu`
REGISTERS: Final = 1 << 16  # per SM
# Shared memory of a CTA with a norm and of one without, in bytes. In a layer, GEMVs with and without a norm alternate.
# One CTA of each kind fits on an SM, so that the next GEMV can prefetch its weights. Two CTAs of one kind must not fit:
# otherwise an SM that attention has left first would get two of them and another SM none. So a CTA with a norm takes
# more than half of the shared memory, and one without a norm has idle warps that take more than half of the registers.
SHARED_MEMORY: Final = {True: 118 << 10, False: 107 << 10}
MORE_THAN_HALF: Final = 114 << 10

_SHARED_MEMORY_CARVEOUT: Final = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, in percent


class Arguments(ctypes.Structure):
    """`struct Arguments` in `gemv.cu`."""

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


_PDL: Final = _LaunchAttribute(6, 1)  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


@cache
def _libraries() -> tuple[ctypes.CDLL, ctypes.CDLL] | None:
    """Load the CUDA driver and NVRTC, which PyTorch installs; return None if one is missing."""
    name = f"libnvrtc.so.{str(torch.version.cuda).split('.')[0]}"
    path = next(Path(torch.__file__).parents[1].glob(f"nvidia/*/lib/{name}"), name)  # else the system's
    try:
        return ctypes.CDLL("libcuda.so.1"), ctypes.CDLL(str(path))
    except OSError as error:
        logger.debug("one row in 8 and 4 bits takes Triton's kernel: %s", error)
        return None


def supports(x: Tensor, weight: Quantized) -> bool:
    """Whether `cuda_gemv` has a kernel: for per-row scales with 8 bits, and for groups of 128 columns with 4 bits."""
    kind, n_in, floats = weight.format, weight.shape[1], (torch.bfloat16, torch.float16)
    if kind.bits == 8:
        is_supported = kind.group == 0 and n_in % UNIT == 0 and kind.scale_dtype is torch.float32
    else:
        is_supported = kind.name == "int4" and kind.group == 128 and n_in % 256 == 0 and not kind.order
        is_supported &= kind.scale_dtype in floats
    return (
        is_supported
        and n_in <= MAX_INPUTS
        and x.is_cuda
        and x.dtype in floats
        and torch.cuda.get_device_capability(x.device) == (9, 0)
        and _libraries() is not None
    )


class Launch(NamedTuple):
    """`gemv.cu`'s macros and arguments, its number of CTAs, and the shared memory of each in bytes."""

    defines: dict[str, int]
    arguments: Arguments
    grid: int
    shared: int


def plan_launch(
    x: Tensor, weight: Quantized, bias: Tensor | None, gate: str, norm: Norm | None, total: Tensor, out: Tensor,
    num_sms: int,
) -> Launch:  # fmt: skip
    """Choose the sizes: a warp's ring has as many stages as fit, and a stage one or two units."""
    kind, n_in, n_out = weight.format, weight.shape[1], out.shape[1]
    grid = num_sms * ceil_div(n_out, num_sms * MAX_OUTPUTS)
    rows = ceil_div(ceil_div(n_out, grid), 8 if gate else 16) * 16
    warp_units = ceil_div(n_in * kind.bits // 8, UNIT * WARPS)
    units = 2 if kind.bits == 4 or warp_units % 2 == 0 else 1
    blocks = ceil_div(ceil_div(warp_units, units) * units * (512 // kind.bits), 128)
    # Of a warp's x, group scales and sums, `struct Warp` in `gemv.cu`, and its part of what the CTA has behind them.
    other = round_up(blocks * 264 + rows * 4, 32) + 16
    stage = units * (16 * UNIT + (64 if kind.bits == 4 else 0))
    stages = (SHARED_MEMORY[norm is not None] // WARPS - other) // stage
    defines = {
        "WARPS": WARPS, "BITS": kind.bits, "IS_FP8": kind.name == "fp8", "N_IN": n_in, "UNITS": units, "STAGES": stages,
        "ROWS": rows, "HAS_NORM": norm is not None, "GATE": GATES.index(gate), "HAS_ZEROS": weight.zeros is not None,
        "IS_HALF": x.dtype == torch.float16, "SCALE_IS_HALF": kind.scale_dtype == torch.float16,
    }  # fmt: skip
    residual, norm_weight, eps = norm or (None, None, 0.0)
    tensors = (x, residual, total, norm_weight, weight.data, weight.scale, weight.zeros, bias, out)
    arguments = Arguments(*(None if t is None else t.data_ptr() for t in tensors), n_out, eps)
    return Launch({name: int(n) for name, n in defines.items()}, arguments, grid, WARPS * (other + stages * stage))


def _check(code: int, what: str) -> None:
    if code:
        raise RuntimeError(f"{what} failed with CUDA error {code}")


def compile_source(nvrtc: ctypes.CDLL, source: bytes, options: list[bytes]) -> bytes:
    """Return a cubin. Raises `RuntimeError` with the compiler's messages."""
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    array = (ctypes.c_char_p * len(options))(*options)
    _check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, b"gemv.cu", 0, None, None), "nvrtcCreateProgram")
    try:
        if nvrtc.nvrtcCompileProgram(program, len(options), array):
            _check(nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size)), "nvrtcGetProgramLogSize")
            log = ctypes.create_string_buffer(size.value)
            _check(nvrtc.nvrtcGetProgramLog(program, log), "nvrtcGetProgramLog")
            raise RuntimeError(log.value.decode())
        _check(nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)), "nvrtcGetCUBINSize")
        cubin = ctypes.create_string_buffer(size.value)
        _check(nvrtc.nvrtcGetCUBIN(program, cubin), "nvrtcGetCUBIN")
        return cubin.raw
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def find_or_compile(nvrtc: ctypes.CDLL, defines: dict[str, int]) -> bytes:
    """Return the cubin from Triton's cache, where a digest precedes it, or compile it.

    Raises `RuntimeError` and `OSError`.
    """
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), "nvrtcVersion")
    source = SOURCE.read_bytes()
    options = [b"--gpu-architecture=sm_90", b"--std=c++17", *(f"-D{name}={n}".encode() for name, n in defines.items())]
    key = b"\0".join((source, f"{major.value}.{minor.value}".encode(), *options))
    files = get_cache_manager(hashlib.sha256(key).hexdigest())
    path = files.get_file("gemv.cubin")
    stored = b"" if path is None else Path(path).read_bytes()
    digest, cubin = stored[:32], stored[32:]
    if digest != hashlib.sha256(cubin).digest():  # the driver may read beyond the end of a damaged cubin
        cubin = compile_source(nvrtc, source, options)
        files.put(hashlib.sha256(cubin).digest() + cubin, "gemv.cubin")
    return cubin


@cache
def _load(device: torch.device, **defines: int) -> tuple[int, int] | None:
    """Return a kernel's handle and its warps per CTA, or None if it cannot be compiled or loaded."""
    libraries = _libraries()
    assert libraries is not None, "supports() asks for them"
    try:
        cubin = find_or_compile(libraries[1], defines)
        _, function, registers, *_ = driver.active.utils.load_binary("gemv", cubin, 1 << 16, device.index)
        handle = ctypes.c_void_p(function)
        _check(libraries[0].cuFuncSetAttribute(handle, _SHARED_MEMORY_CARVEOUT, 100), "cuFuncSetAttribute")
    except (OSError, RuntimeError) as error:
        _warn_once("one row takes Triton's kernel, because gemv.cu cannot be compiled or loaded: %s", str(error))
        return None
    # Without a norm: enough warps to take more than half of the registers (see SHARED_MEMORY).
    warps = min(MAX_WARPS, REGISTERS // (2 * 32 * round_up(registers, 8)) + 1)
    return function, (WARPS if defines["HAS_NORM"] else max(WARPS, warps))


def cuda_gemv(
    x: Tensor, weight: Quantized, bias: Tensor | None, gate: str = "", norm: Norm | None = None
) -> tuple[Tensor, Tensor] | None:
    """x [1, K] -> (out [1, N], x + residual [1, K], or x itself without a residual); None if there is no kernel."""
    if not supports(x, weight):
        return None
    out = empty((1, weight.shape[0] // (2 if gate else 1)), dtype=x.dtype, device=x.device)
    total = x if norm is None or norm.residual is None else empty_like(x)
    num_sms = torch.cuda.get_device_properties(x.device).multi_processor_count
    defines, arguments, grid, shared = plan_launch(x, weight, bias, gate, norm, total, out, num_sms)
    load = partial(_load, x.device, **defines)
    if is_noted((x.device, *defines.items()), load):
        return out, total
    kernel, libraries = load(), _libraries()
    if kernel is None or libraries is None:
        return None
    function, warps = kernel
    shared = max(shared, MORE_THAN_HALF) if norm is not None else shared
    stream = torch.cuda.current_stream(x.device).cuda_stream
    config = _LaunchConfig(grid, 1, 1, warps * 32, 1, 1, shared, stream, ctypes.pointer(_PDL), 1)
    pointers = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
    launch = libraries[0].cuLaunchKernelEx
    _check(launch(ctypes.byref(config), ctypes.c_void_p(function), pointers, None), "cuLaunchKernelEx")
    return out, total
