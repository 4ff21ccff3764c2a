"""Compiles kernels in CUDA C++ (`cuda/*.cu`) for Hopper by NVRTC, and launches them."""

from __future__ import annotations

import ctypes
import hashlib
import logging
from functools import cache, lru_cache
from pathlib import Path
from typing import Final, NamedTuple

import torch
from triton.runtime import driver
from triton.runtime.cache import get_cache_manager

from minisgl.core.rounding import round_up

logger = logging.getLogger(__name__)
_warn_once = cache(logger.warning)  # once, not once per shape

SOURCES: Final = Path(__file__).parent / "cuda"

_SHARED_MEMORY_CARVEOUT: Final = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, in percent


class Map(ctypes.Structure):
    """CUtensorMap."""

    _fields_ = [("words", ctypes.c_uint64 * 16)]


class _LaunchAttribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_uint64), ("value", ctypes.c_uint * 16)]


class _LaunchConfig(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_LaunchAttribute)),
        ("num_attributes", ctypes.c_uint),
    ]


# CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION and CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
_PDL: Final = _LaunchAttribute(6, (1,))
_CLUSTERS: Final = {n: (_LaunchAttribute * 2)(_PDL, _LaunchAttribute(4, (n, 1, 1))) for n in (1, 2)}


@cache
def libraries() -> tuple[ctypes.CDLL, ctypes.CDLL] | None:
    """Load the CUDA driver and NVRTC, which PyTorch installs; return None if one is missing."""
    name = f"libnvrtc.so.{str(torch.version.cuda).split('.')[0]}"
    path = next(Path(torch.__file__).parents[1].glob(f"nvidia/*/lib/{name}"), name)  # else the system's
    try:
        return ctypes.CDLL("libcuda.so.1"), ctypes.CDLL(str(path))
    except OSError as error:
        logger.debug("quantized weights take Triton's kernels: %s", error)
        return None


def check(code: int, what: str) -> None:
    if code:
        raise RuntimeError(f"{what} failed with CUDA error {code}")


def compile_source(nvrtc: ctypes.CDLL, source: bytes, options: list[bytes]) -> bytes:
    """Return a cubin. Raises `RuntimeError` with the compiler's messages."""
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    array = (ctypes.c_char_p * len(options))(*options)
    check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, b"kernel.cu", 0, None, None), "nvrtcCreateProgram")
    try:
        if nvrtc.nvrtcCompileProgram(program, len(options), array):
            check(nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size)), "nvrtcGetProgramLogSize")
            log = ctypes.create_string_buffer(size.value)
            check(nvrtc.nvrtcGetProgramLog(program, log), "nvrtcGetProgramLog")
            raise RuntimeError(log.value.decode())
        check(nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)), "nvrtcGetCUBINSize")
        cubin = ctypes.create_string_buffer(size.value)
        check(nvrtc.nvrtcGetCUBIN(program, cubin), "nvrtcGetCUBIN")
        return cubin.raw
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def find_or_compile(nvrtc: ctypes.CDLL, source: bytes, defines: dict[str, int | str]) -> bytes:
    """Return the cubin from Triton's cache, where a digest precedes it, or compile it.

    Raises `RuntimeError` and `OSError`.
    """
    major, minor = ctypes.c_int(), ctypes.c_int()
    check(nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), "nvrtcVersion")
    options = [b"--gpu-architecture=sm_90a", b"--std=c++17", *(f"-D{name}={n}".encode() for name, n in defines.items())]
    key = b"\0".join((source, f"{major.value}.{minor.value}".encode(), *options))
    files = get_cache_manager(hashlib.sha256(key).hexdigest())
    path = files.get_file("kernel.cubin")
    stored = b"" if path is None else Path(path).read_bytes()
    digest, cubin = stored[:32], stored[32:]
    if digest != hashlib.sha256(cubin).digest():  # the driver may read beyond the end of a damaged cubin
        cubin = compile_source(nvrtc, source, options)
        files.put(hashlib.sha256(cubin).digest() + cubin, "kernel.cubin")
    return cubin


@lru_cache(1 << 14)
def tensor_map(
    address: int, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...], promotion: int = 3
) -> Map:  # fmt: skip
    """Describe a tensor of bytes, innermost dimension first, to TMA; `strides` are those of all dimensions but it.

    Rows of a box have 128 bytes, and lie in shared memory with 128-byte swizzling. L2 loads 256 bytes at a time, or
    with a `promotion` of 0 what is asked for: better where rows do not begin at multiples of them.
    """
    found, n = libraries(), len(sizes)
    assert found is not None
    buffer = (ctypes.c_uint64 * 24)()
    start = round_up(ctypes.addressof(buffer), 64)  # the driver asks for this alignment
    lists = (ctypes.c_uint64 * n)(*sizes), (ctypes.c_uint64 * n)(*strides), (ctypes.c_uint32 * n)(*box)
    ones = (ctypes.c_uint32 * n)(*[1] * n)
    # 8-bit unsigned integers; without interleaving; 128-byte swizzling; loads to L2; zeros beyond the end
    code = found[0].cuTensorMapEncodeTiled(
        ctypes.c_void_p(start), 0, n, ctypes.c_void_p(address), *lists, ones, 0, 3, promotion, 0
    )
    check(code, "cuTensorMapEncodeTiled")
    return Map.from_buffer_copy(ctypes.string_at(start, ctypes.sizeof(Map)))


@cache
def hopper_source(*names: str) -> str:
    """Return what kernels share: `hopper.cu` and the named files."""
    return "".join((SOURCES / f"{name}.cu").read_text() for name in ("hopper", *names))


class Kernel(NamedTuple):
    function: int
    registers: int  # per thread


@cache
def load_kernel(device: torch.device, name: str, header: str = "", **defines: int | str) -> Kernel | None:
    """Compile and load the function `name` of `cuda/NAME.cu`, or return None if that fails."""
    found = libraries()
    assert found is not None, "NVRTC and the driver were not found; call is_usable() first"
    try:
        cubin = find_or_compile(found[1], header.encode() + (SOURCES / f"{name}.cu").read_bytes(), defines)
        with torch.cuda.device(device):  # a thread of `compile_ahead` may be in another device's context
            _, function, registers, *_ = driver.active.utils.load_binary(name, cubin, 1 << 16, device.index)
        handle = ctypes.c_void_p(function)
        check(found[0].cuFuncSetAttribute(handle, _SHARED_MEMORY_CARVEOUT, 100), "cuFuncSetAttribute")
    except (OSError, RuntimeError) as error:
        _warn_once("Triton's kernel is used, because %s.cu cannot be compiled or loaded: %s", name, str(error))
        return None
    return Kernel(function, registers)


def launch(
    kernel: Kernel, arguments: ctypes.Structure, device: torch.device, grid: int, threads: int, shared: int,
    cluster: int = 1,
) -> None:  # fmt: skip
    """Launch by PDL a kernel with one parameter; `shared` in bytes, `cluster` CTAs."""
    found = libraries()
    assert found is not None
    stream = torch.cuda.current_stream(device).cuda_stream
    config = _LaunchConfig(grid, 1, 1, threads, 1, 1, shared, stream, _CLUSTERS[cluster], 1 + (cluster > 1))
    pointers = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
    code = found[0].cuLaunchKernelEx(ctypes.byref(config), ctypes.c_void_p(kernel.function), pointers, None)
    check(code, "cuLaunchKernelEx")
