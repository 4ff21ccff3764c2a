"""Kernels compile for a GPU of compute capability 9.0; that needs none. The interpreter does not check types."""

from __future__ import annotations

import os
from typing import Any

import pytest

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter replaces the compiler", allow_module_level=True)
triton = pytest.importorskip("triton")
backends = pytest.importorskip("triton.backends.compiler")

from minisgl.triton import norm  # noqa: E402


def compile_kernel(kernel: Any, pointers: dict[str, str], constants: dict[str, Any]) -> bytes:
    """The machine code of `kernel` for sm_90; arguments that are neither pointers nor constants are 64-bit ints."""
    signature = {name: pointers.get(name, "i64") for name in kernel.arg_names}
    signature |= dict.fromkeys(constants, "constexpr")
    source = triton.compiler.ASTSource(fn=kernel, signature=signature, constexprs=constants)
    return triton.compile(source, target=backends.GPUTarget("cuda", 90, 32)).asm["cubin"]


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(16, 8, 128), (4, 2, 32), (3, 1, 16), (5, 1, 256)])
@pytest.mark.parametrize("has_norm", [False, True])
def test_norm_rope_store_compiles_for_any_number_of_heads(heads: int, kv_heads: int, dim: int, has_norm: bool):
    pointers = dict.fromkeys(("qkv_ptr", "q_weight_ptr", "k_weight_ptr", "pages_ptr"), "*bf16")
    pointers |= {"cos_sin_ptr": "*fp32", "positions_ptr": "*i32", "out_loc_ptr": "*i64", "eps": "fp32"}
    block, kv_block = (min(triton.next_power_of_2(n), max(1, 1024 // dim)) for n in (heads, kv_heads))
    sizes = {"NUM_HEADS": heads, "NUM_KV_HEADS": kv_heads, "HEAD_DIM": dim, "PAGE_SIZE": 64}
    blocks = {"HAS_NORM": has_norm, "BLOCK_HEADS": block, "BLOCK_KV_HEADS": kv_block}
    assert compile_kernel(norm._norm_rope_store, pointers, sizes | blocks)
