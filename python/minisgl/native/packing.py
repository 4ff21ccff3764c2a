"""Packs the weights of a model for the C++ step."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
from typing import TYPE_CHECKING, Final

import torch
from torch.nn import functional as F

from minisgl.rounding import round_up

if TYPE_CHECKING:
    from torch import Tensor

    from minisgl.models.llama import LlamaForCausalLM
    from minisgl.native.library import NativeLibrary

LANES: Final = 16  # rows of a panel of packed weights


def pack_weights(model: LlamaForCausalLM, library: NativeLibrary, quantizes: bool) -> None:
    """Pack or quantize all matrices except an untied embedding, and move them into one block of memory.

    The tensors then hold what the library reads; quantized weights are bytes that no op in torch can use.
    """
    embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
    matrices = [
        p.tensor
        for p in model.parameters
        if isinstance(p.tensor, torch.Tensor)
        and p.tensor.dim() == 2
        and (p.tensor is not embedding or head is embedding)
    ]
    shapes = [(round_up(len(weight), LANES), weight.shape[1]) for weight in matrices]
    item = embedding.itemsize
    places = _zeros([library.int8_size(*shape) if quantizes else math.prod(shape) * item for shape in shapes])
    for (rows, cols), weight, place in zip(shapes, matrices, places, strict=True):
        packed = place.view(weight.dtype)
        is_bf16 = weight.dtype is torch.bfloat16
        if quantizes:
            whole = F.pad(weight, (0, 0, 0, rows - len(weight))) if rows > len(weight) else weight
            library.quantize(whole.data_ptr(), is_bf16, rows, cols, packed.data_ptr())
        else:
            packed = packed.view(rows, cols)[: len(weight)]
            packed.copy_(weight)
            library.pack(packed.data_ptr(), is_bf16, rows, cols)
        weight.set_(packed)  # type: ignore[call-overload]  # frees the old memory
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(ctypes.c_size_t(0))  # else glibc keeps freed blocks below 32 MB


def _zeros(sizes: list[int]) -> tuple[Tensor, ...]:
    """Zeroed bytes side by side, in huge pages where Linux has them: a step would touch thousands of small pages."""
    memory = mmap.mmap(-1, sum(sizes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(AttributeError, OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).split_with_sizes(sizes)
