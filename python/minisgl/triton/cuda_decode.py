"""Launches `decode.cu`, decode attention over 8-bit pages for Hopper in CUDA C++."""

from __future__ import annotations

import ctypes
from functools import partial
from typing import Final

import torch
from torch import Tensor

from minisgl.triton.launch import is_noted
from minisgl.triton.nvrtc import Map, hopper_source, is_hopper, launch, load_kernel, tensor_map

TILE_KEYS: Final = 64
DIM: Final = 128
STAGES: Final = 3  # tiles of a CTA; four CTAs fit on an SM
THREADS: Final = 96
MAX_GROUP: Final = 8  # query heads of a KV head: the N of the tensor cores' products


class Arguments(ctypes.Structure):
    """`struct Arguments` in `decode.cu`."""

    _fields_ = [
        ("pages", Map),
        *(
            (name, ctypes.c_void_p)
            for name in ("q", "kv_scale", "page_table", "work", "counters", "part", "lse", "out")
        ),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("stride_q", "stride_table", "window")),
        ("unused", ctypes.c_char * 48),  # a map is aligned to 64 bytes, and so is the size
    ]


def supports(device: torch.device, dtype: torch.dtype, head_dim: int, group: int, page_size: int) -> bool:
    """Whether there is a kernel for 8-bit pages and results in `dtype`."""
    fits = head_dim == DIM and group <= MAX_GROUP and page_size % TILE_KEYS == 0
    return fits and dtype in (torch.bfloat16, torch.float16) and is_hopper(device)


def cuda_decode(
    q: Tensor, pages: Tensor, kv_scale: Tensor, page_table: Tensor, work: Tensor, counters: Tensor, part: Tensor,
    lse: Tensor, out: Tensor, scale: float, splits: int, window: int,
) -> bool:  # fmt: skip
    """Attend with one query for each sequence, as `attention_decode.decode_attention`; False without a compiler."""
    (num_pages, _, heads, page_size, _), device = pages.shape, q.device
    group = out.shape[1] // heads
    defines: dict[str, int | str] = {
        "HEADS": heads, "GROUP": group, "PAGE": page_size, "SPLITS": splits, "STAGES": STAGES,
        "IS_HALF": int(out.dtype == torch.float16),
    }  # fmt: skip
    load = partial(load_kernel, device, "decode", hopper_source(), **defines)
    if is_noted((device, "decode", *defines.items()), load):
        return True
    kernel = load()
    if kernel is None:
        return False
    sizes = DIM, heads * page_size, 2 * num_pages
    page_map = tensor_map(pages.data_ptr(), sizes, (DIM, heads * page_size * DIM), (DIM, TILE_KEYS, 2))
    pointers = (each.data_ptr() for each in (q, kv_scale, page_table, work, counters, part, lse, out))
    arguments = Arguments(page_map, *pointers, scale, q.stride(0), page_table.stride(0), window)
    shared = STAGES * (2 * TILE_KEYS * (DIM + 4) + group * DIM * 2 + 32 + 16)
    launch(kernel, arguments, device, splits * heads, THREADS, shared)
    return True
