"""Launches `decode.cu` and `prefill.cu`, attention over 8-bit pages for Hopper in CUDA C++."""

from __future__ import annotations

import ctypes
from functools import partial
from typing import Final

import torch
from torch import Tensor

from minisgl.kernels.hopper.nvrtc import Map, hopper_source, launch, load_kernel, tensor_map
from minisgl.kernels.hopper.wgmma import Instruction, multiply_source
from minisgl.kernels.triton.attention_prefill import COUNTERS
from minisgl.kernels.triton.launch import is_noted

TILE_KEYS: Final = 64
DIM: Final = 128
STAGES: Final = 3  # tiles of a CTA of `decode.cu`; four CTAs fit on an SM
DECODE_THREADS: Final = 96
MAX_GROUP: Final = 8  # query heads of a KV head: the N of the tensor cores' products in `decode.cu`
PREFILL_ROWS: Final = 128  # of a tile: queries times query heads of a KV head
PREFILL_THREADS: Final = 384
PREFILL_MEMORY: Final = 212 << 10
SCORES: Final = Instruction("k16.f32.f16.f16", ", 1, 1, 0", has_left=True)
SUMS: Final = Instruction("k16.f32.f16.f16", ", 1, 1, 1", name="multiply_columns", has_left=True)


class DecodeArguments(ctypes.Structure):
    """`struct Arguments` in `decode.cu`."""

    _fields_ = [
        ("pages", Map),
        *(
            (name, ctypes.c_void_p)
            for name in ("q", "kv_scale", "page_table", "work", "counters", "part", "lse", "out")
        ),
        ("stride_scale", ctypes.c_longlong),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("stride_q", "stride_table", "window")),
        ("unused", ctypes.c_char * 40),  # a map is aligned to 64 bytes, and so is the size
    ]


class PrefillArguments(ctypes.Structure):
    """`struct Arguments` in `prefill.cu`."""

    _fields_ = [
        *((name, Map) for name in ("query", "pages")),
        *((name, ctypes.c_void_p) for name in ("kv_scale", "page_table", "work", "out")),
        ("stride_scale", ctypes.c_longlong),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("stride_table", "window")),
        ("unused", ctypes.c_char * 12),
    ]


def supports(dtype: torch.dtype, head_dim: int, group: int, page_size: int) -> bool:
    """Whether there are kernels for 8-bit pages and results in `dtype`."""
    fits = head_dim == DIM and group <= MAX_GROUP and page_size % TILE_KEYS == 0
    return fits and dtype in (torch.bfloat16, torch.float16)


def _page_map(pages: Tensor) -> Map:
    num_pages, _, heads, page_size, _ = pages.shape
    sizes, strides = (DIM, heads * page_size, 2, num_pages), (DIM, heads * page_size * DIM, pages.stride(0))
    return tensor_map(pages.data_ptr(), sizes, strides, (DIM, TILE_KEYS, 2, 1))


def _defines(pages: Tensor, out: Tensor) -> dict[str, int | str]:
    _, _, heads, page_size, _ = pages.shape
    is_half = int(out.dtype == torch.float16)
    return {"HEADS": heads, "GROUP": out.shape[1] // heads, "PAGE": page_size, "IS_HALF": is_half}


def cuda_decode(
    q: Tensor, pages: Tensor, kv_scale: Tensor, page_table: Tensor, work: Tensor, counters: Tensor, part: Tensor,
    lse: Tensor, out: Tensor, scale: float, splits: int, window: int,
) -> bool:  # fmt: skip
    """Attend with one query for each sequence, as `attention_decode.decode_attention`; False without a compiler."""
    defines, device = {**_defines(pages, out), "SPLITS": splits, "STAGES": STAGES}, q.device
    load = partial(load_kernel, device, "decode", hopper_source(), **defines)
    if is_noted((device, "decode", *defines.items()), load):
        return True
    kernel = load()
    if kernel is None:
        return False
    heads, group = pages.shape[2], out.shape[1] // pages.shape[2]
    pointers = (each.data_ptr() for each in (q, kv_scale, page_table, work, counters, part, lse, out))
    arguments = DecodeArguments(
        _page_map(pages), *pointers, kv_scale.stride(0), scale, q.stride(0), page_table.stride(0), window
    )
    shared = STAGES * (2 * TILE_KEYS * (DIM + 4) + group * DIM * 2 + 32 + 16)
    launch(kernel, arguments, device, splits * heads, DECODE_THREADS, shared)
    return True


def cuda_prefill(
    q: Tensor, pages: Tensor, kv_scale: Tensor, page_table: Tensor, work: Tensor, max_parts: int, out: Tensor,
    scale: float, window: int, grid: int,
) -> bool:  # fmt: skip
    """Attend as `attention_prefill.prefill_attention`, with tiles that are not split; False without a compiler.

    q [T, >= Hq, 128] is float16; `work` lists tiles of PREFILL_ROWS / group queries.
    """
    defines, device = {**_defines(pages, out), "ITEMS": COUNTERS.value + max_parts, "MEMORY": PREFILL_MEMORY}, q.device
    header = hopper_source("wgmma") + multiply_source(TILE_KEYS, SCORES) + multiply_source(DIM, SUMS)
    load = partial(load_kernel, device, "prefill", header, **defines)
    if is_noted((device, "prefill", *defines.items()), load):
        return True
    kernel = load()
    if kernel is None:
        return False
    num_tokens, num_heads, _ = q.shape
    group = out.shape[1] // pages.shape[2]
    strides, box = (DIM * 2, q.stride(0) * 2), (DIM, group, PREFILL_ROWS // group)
    query_map = tensor_map(q.data_ptr(), (DIM * 2, num_heads, num_tokens), strides, box)
    pointers = (each.data_ptr() for each in (kv_scale, page_table, work, out))
    arguments = PrefillArguments(
        query_map, _page_map(pages), *pointers, kv_scale.stride(0), scale, page_table.stride(0), window
    )
    launch(kernel, arguments, device, grid, PREFILL_THREADS, PREFILL_MEMORY)
    return True
