"""Packs the weights of a model into the layout that the C++ step reads."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from typing import TYPE_CHECKING, Final

import torch
from torch.nn import functional as F

from minisgl.core.rounding import round_up
from minisgl.ops.quantized import INT8, Quantized, unpack

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from minisgl.native.library import NativeLibrary

LANES: Final = 16  # rows of a panel of packed weights
ROUNDED_ROWS: Final = 64  # rounded at a time, so that intermediate results stay in L2


def pack_weights(matrices: Sequence[Tensor | Quantized], to_round: Sequence[object], library: NativeLibrary) -> None:
    """Pack matrices in place, into one block of memory. Those among them in `to_round` are rounded to 8 bits.

    Afterwards only the library can read the tensors; no op in torch can.
    """
    is_rounded = [any(weight is other for other in to_round) for weight in matrices]
    sizes = []
    for weight, rounds in zip(matrices, is_rounded, strict=True):
        rows, cols = round_up(weight.shape[0], LANES), weight.shape[1]
        if isinstance(weight, Quantized) or rounds:
            bits = weight.format.bits if isinstance(weight, Quantized) else INT8.bits
            sizes.append(library.quantized_size(bits, rows, cols))
        else:
            sizes.append(rows * cols * weight.itemsize)
    for weight, rounds, memory in zip(matrices, is_rounded, _allocate_zeros(sizes), strict=True):
        if isinstance(weight, Quantized):
            _pack_quantized(weight, library, memory)
            weight.data.set_(memory.view(weight.data.dtype))  # type: ignore[call-overload]  # frees the old memory
            weight.scale.set_(weight.scale.new_empty(0))  # type: ignore[call-overload]
            continue
        packed = memory.view(weight.dtype)
        if rounds:
            _pack_quantized(_round(weight), library, memory)
        else:
            cols = weight.shape[1]
            packed = packed.view(-1, cols)
            packed[: len(weight)] = weight
            library.pack(packed.data_ptr(), weight.dtype is torch.bfloat16, len(packed), cols)
            packed = packed[: len(weight)]
        weight.set_(packed)  # type: ignore[call-overload]
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(ctypes.c_size_t(0))  # or glibc would keep freed blocks below 32 MB


def _pack_quantized(weight: Quantized, library: NativeLibrary, out: Tensor) -> None:
    """Pack weights and scales into `out`, with the scales repeated for groups of the library's length."""
    kind, (rows, cols) = weight.format, weight.shape
    numbers = unpack(weight.data, kind.chunk) if kind.bits == 4 else weight.data
    scale = weight.scale.to(torch.bfloat16).repeat_interleave(kind.group // INT8.group, 1)
    padding = (0, 0, 0, round_up(rows, LANES) - rows)
    numbers, scale = F.pad(numbers, padding), F.pad(scale, padding)
    library.pack_quantized(kind.bits, numbers.data_ptr(), scale.data_ptr(), len(numbers), cols, out.data_ptr())


def _round(weight: Tensor) -> Quantized:
    """Round a matrix to 8 bits."""
    rows, cols = weight.shape
    result = INT8.empty(rows, cols, weight.device)
    for start in range(0, rows, ROUNDED_ROWS):
        stop = min(start + ROUNDED_ROWS, rows)
        result.part(start, stop).round_from(weight[start:stop])
    return result


def _allocate_zeros(sizes: list[int]) -> tuple[Tensor, ...]:
    """Return adjacent uint8 tensors of `sizes` zeros, in huge pages if possible: each step reads all of them."""
    memory = mmap.mmap(-1, sum(sizes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(AttributeError, OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).split_with_sizes(sizes)
