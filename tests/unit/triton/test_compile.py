"""Kernels compile for a GPU of compute capability 9.0; that needs none. The interpreter does not check types."""

from __future__ import annotations

import math
import os
import re
from typing import Any

import pytest

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter replaces the compiler", allow_module_level=True)
triton = pytest.importorskip("triton")
backends = pytest.importorskip("triton.backends.compiler")

import torch  # noqa: E402

from minisgl.kernels.triton import (  # noqa: E402
    adapters,
    attention_decode,
    attention_latent,
    attention_prefill,
    epilogue,
    gated_delta,
    gemm,
    linear,
    moe,
    norm,
    quantized,
    quantized_gemv,
)


def compile_kernel(
    kernel: Any,
    pointers: dict[str, str],
    constants: dict[str, Any],
    form: str = "cubin",
    is_aligned: bool = False,
    **options: int,
) -> Any:
    """The machine code of `kernel` for sm_90; arguments that are neither pointers nor constants are 64-bit ints.

    `is_aligned`: all of these are multiples of 16, as the launcher tells the compiler where they are.
    """
    signature = {name: pointers.get(name, "i64") for name in kernel.arg_names}
    signature |= dict.fromkeys(constants, "constexpr")
    attrs = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind != "constexpr"}
    source = triton.compiler.ASTSource(kernel, signature, constants, attrs if is_aligned else None)
    return triton.compile(source, target=backends.GPUTarget("cuda", 90, 32), options=options).asm[form]


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(16, 8, 128), (4, 2, 32), (3, 1, 80), (5, 1, 512)])
@pytest.mark.parametrize("has_norm", [False, True])
def test_norm_rope_store_compiles_for_any_number_of_heads(heads: int, kv_heads: int, dim: int, has_norm: bool):
    pointers = dict.fromkeys(("qkv_ptr", "q_weight_ptr", "k_weight_ptr", "pages_ptr", "scale_ptr"), "*bf16")
    pointers |= {"cos_sin_ptr": "*fp32", "positions_ptr": "*i32", "out_loc_ptr": "*i64", "eps": "fp32"}
    pointers |= {"q_scale_ptr": "*fp32"}
    most = max(1, 1024 // triton.next_power_of_2(dim))
    block, kv_block = (min(triton.next_power_of_2(n), most) for n in (heads, kv_heads))
    sizes = {"NUM_HEADS": heads, "NUM_KV_HEADS": kv_heads, "HEAD_DIM": dim, "PAGE_SIZE": 64}
    blocks = {
        "HAS_NORM": has_norm,
        "NORMS_V": has_norm,
        "BLOCK_HEADS": block,
        "BLOCK_KV_HEADS": kv_block,
        "IS_FP8": False,
    }
    assert compile_kernel(norm._norm_rope_store, pointers, sizes | blocks)


TYPES = {"fp8": "*fp8e4nv", "int8": "*i8", "int4": "*u8", "mxfp4": "*u8"}  # of the numbers


@pytest.mark.parametrize(
    ("parts", "name", "group", "gate"),
    [(2, "fp8", 0, "silu"), (1, "fp8", 128, ""), (2, "int8", 0, "silu"), (2, "int4", 128, "silu"), (2, "int4", 32, "")],
)
def test_products_with_quantized_weights_compile(parts: int, name: str, group: int, gate: str):
    pointers = dict.fromkeys(("x_scale_ptr", "sums_ptr", "partial_ptr", "scale_ptr"), "*fp32")
    pointers |= {"x_ptr": TYPES["int8" if name == "int8" else "fp8"], "weight_ptr": TYPES[name], "counter_ptr": "*i32"}
    pointers |= dict.fromkeys(("zeros_ptr", "bias_ptr", "out_ptr"), "*bf16")
    sizes = {
        "ROWS": 16,
        "BLOCK_N": 64,
        "BLOCK_K": 128,
        "SPLIT_K": 2,
        "NUM_STAGES": 4,
        "INTERPRETED": False,
        "PDL": True,
    }
    kind = {"PARTS": parts, "BITS": 4 if name == "int4" else 8, "GROUP": group, "HAS_ZEROS": group == 32, "GATE": gate}
    kind |= {"HAS_BIAS": True, "EVEN_K": name == "int4"}
    assert compile_kernel(gemm._gemm, pointers, sizes | kind)


@pytest.mark.parametrize("gate", ["", "gelu_tanh"])
def test_scales_behind_a_product_compile(gate: str):
    pointers = {"x_ptr": "*bf16", "bias_ptr": "*bf16", "out_ptr": "*bf16", "x_scale_ptr": "*fp32", "scale_ptr": "*fp32"}
    options = {"GATE": gate, "HAS_SCALES": True, "HAS_BIAS": True, "BLOCK": 1024, "PDL": True}
    assert compile_kernel(epilogue._finish, pointers, options)


@pytest.mark.parametrize(("gate", "is_even"), [("silu", True), ("gelu_tanh", False)])
def test_quantizing_activated_rows_compiles(gate: str, is_even: bool):
    """Of two programs on an SM, each thread has 64 registers."""
    pointers = {"x_ptr": "*bf16", "bias_ptr": "*bf16", "parts_ptr": "*fp8e4nv"}
    pointers |= dict.fromkeys(("x_scale_ptr", "column_scale_ptr", "scale_ptr"), "*fp32")
    kind = {
        "GATE": gate,
        "HAS_SCALES": True,
        "HAS_BIAS": not is_even,
        "NUM_BLOCKS": 3,
        "BLOCK": 4096,
        "EVEN": is_even,
        "PDL": True,
    }
    ptx = compile_kernel(quantized._split_whole_rows, pointers, kind, "ptx", True, num_warps=16, maxnreg=64)
    assert ".maxnreg 64" in ptx and "max.NaN.f32" in ptx
    assert len(re.findall(r"ld\.global\S*\.v4", ptx)) >= (18 if is_even else 12)


@pytest.mark.parametrize(("has_scales", "has_bias"), [(False, False), (True, False), (True, True)])
def test_quantizing_rows_behind_a_norm_compiles(has_scales: bool, has_bias: bool):
    """Rows of 4,096, 8 columns a thread."""
    pointers = dict.fromkeys(("x_ptr", "bias_ptr", "residual_ptr", "norm_weight_ptr"), "*bf16")
    pointers |= dict.fromkeys(("x_scale_ptr", "column_scale_ptr", "scale_ptr", "sums_ptr"), "*fp32")
    pointers |= {"order_ptr": "*i32", "parts_ptr": "*fp8e4nv", "eps": "fp32"}
    kind = {"PARTS": 1, "SCALE_GROUP": 0, "SUM_GROUP": 0, "HAS_SCALES": has_scales, "HAS_BIAS": has_bias}
    kind |= {"HAS_NORM": True, "HAS_RESIDUAL": True, "HAS_ORDER": False, "BLOCK": 4096, "PDL": True}
    assert compile_kernel(quantized._split_rows, pointers, kind, num_warps=16 if has_scales else 8)


@pytest.mark.parametrize("group", [32, 128])
def test_widening_compiles(group: int):
    pointers = {"data_ptr": "*u8", "scale_ptr": "*bf16", "zeros_ptr": "*bf16", "order_ptr": "*i32", "out_ptr": "*bf16"}
    kind = {"GROUP": group, "HAS_ZEROS": group == 32, "HAS_ORDER": True, "BLOCK_N": 64}
    assert compile_kernel(quantized._widen, pointers, kind)


@pytest.mark.parametrize(("bits", "split_k"), [(8, 1), (8, 4), (4, 1), (4, 2), (16, 1), (16, 8)])
def test_tiles_are_copied_16_bytes_at_a_time(bits: int, split_k: int):
    """Where K is split, too: copies of 4 bytes made that slower than not to split it."""
    pointers = dict.fromkeys(("x_scale_ptr", "sums_ptr", "partial_ptr", "scale_ptr", "zeros_ptr"), "*fp32")
    pointers |= {"weight_ptr": {8: "*fp8e4nv", 4: "*u8", 16: "*bf16"}[bits], "counter_ptr": "*i32"}
    pointers |= dict.fromkeys(("bias_ptr", "out_ptr"), "*bf16") | {"x_ptr": "*bf16" if bits == 16 else "*fp8e4nv"}
    sizes = {"BLOCK_N": 64, "BLOCK_K": 128, "SPLIT_K": split_k, "NUM_STAGES": 3, "GATE": "", "HAS_BIAS": False}
    sizes |= {"ROWS": 64, "PARTS": 1, "BITS": bits, "GROUP": 128 if bits == 4 else 0}
    sizes |= {"HAS_ZEROS": False, "EVEN_K": True, "INTERPRETED": False, "PDL": True}
    code = compile_kernel(gemm._gemm, pointers, sizes, "ptx", True)
    copies = re.findall(r"cp\.async\.c[ag]\.shared.*?, (0x\w+)", code)
    assert set(copies) == {"0x10"}


@pytest.mark.parametrize(
    ("name", "group", "gate"),
    [("fp8", 0, "silu"), ("fp8", 128, ""), ("int8", 0, ""), ("int4", 128, "silu"), ("int4", 64, ""), ("int4", 32, "")],
)
def test_products_of_one_row_with_quantized_weights_compile(name: str, group: int, gate: str):
    bits = 4 if name == "int4" else 8
    pointers = dict.fromkeys(("x_ptr", "residual_ptr", "total_ptr", "norm_weight_ptr", "bias_ptr", "out_ptr"), "*bf16")
    pointers |= {"weight_ptr": TYPES[name] if bits == 8 else "*i64", "eps": "fp32", "order_ptr": "*i32"}
    pointers |= dict.fromkeys(("scale_ptr", "zeros_ptr"), "*fp32" if bits == 8 else "*bf16")
    sizes = {"BLOCK_N": 4, "BLOCK_K": 1024, "NUM_BLOCKS_K": 2, "NUM_STAGES": 3, "INTERPRETED": False, "PDL": True}
    kind = {"BITS": bits, "GROUP": group, "HAS_ZEROS": group == 32, "GATE": gate, "HAS_ORDER": bits == 4}
    has = {"HAS_NORM": True, "HAS_RESIDUAL": True, "HAS_BIAS": True}
    assert compile_kernel(quantized_gemv._quantized_gemv, pointers, sizes | kind | has)


@pytest.mark.parametrize(
    ("name", "scale"), [("fp8", 1), ("fp8", 128), ("int8", 1), ("int4", 128), ("int4", 32), ("mxfp4", 32)]
)
def test_quantized_experts_compile(name: str, scale: int):
    """A GEMV for each pair, and GEMMs with x in two parts and in one."""
    bits = 8 if name in ("fp8", "int8") else 4
    scales = "*fp32" if bits == 8 else "*u8" if name == "mxfp4" else "*bf16"
    pointers = dict.fromkeys(("scale_ptr", "zeros_ptr"), scales)
    pointers |= dict.fromkeys(("x_scale_ptr", "sums_ptr", "weights_ptr"), "*fp32")
    pointers |= dict.fromkeys(("experts_ptr", "order_ptr", "tiles_ptr"), "*i32")
    pointers |= {"x_ptr": "*bf16", "weight_ptr": TYPES[name], "bias_ptr": "*bf16", "out_ptr": "*bf16"}
    own = {"TOP_K": 8, "HAS_ZEROS": name == "int4" and scale == 32, "INTERPRETED": False, "PDL": True}
    common = {"TOP_K": 8, "BLOCK_N": 16, "BLOCK_K": 256, "NUM_BLOCKS_K": 2, "INTERPRETED": False, "PDL": True}
    if bits == 8:
        common["SCALE"] = scale
        assert compile_kernel(moe._gate_up_gemv, pointers, common | {"GATE": "silu"})
        common |= {"BLOCK_P": 8, "BLOCK_N": 4, "BLOCK_K": 128, "AHEAD": 1}
        assert compile_kernel(moe._down_gemv, pointers, common)
    else:
        for gate in ("silu", "clamped", ""):
            kind = {"GROUP": scale, "GATE": gate}
            assert compile_kernel(moe._gemv_of_4_bits, pointers, common | own | kind)
    pointers["x_ptr"] = TYPES["int8" if name == "int8" else "fp8"]
    sizes = {"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 128, "NUM_STAGES": 3, "EVEN_K": True, "SCALE": scale}
    for parts, swap_ab in ((2, True), (1, bits == 4)):
        kind = {
            "PARTS": parts,
            "SWAP_AB": swap_ab,
            "GATE": "silu" if parts == 2 else "",
            "GROUP_M": 1 if swap_ab else 8,
        }
        assert compile_kernel(moe._grouped_gemm, pointers, sizes | own | kind | {"BITS": bits})


@pytest.mark.slow
@pytest.mark.parametrize(("dim", "is_fp8", "has_options"), [(128, True, False), (80, True, True), (512, False, True)])
def test_attention_compiles(dim: int, is_fp8: bool, has_options: bool):
    """With the tiles of `TritonAttention`, whose shared memory an SM of an H200 has."""
    pointers = dict.fromkeys(("out_ptr", "q_weight_ptr", "k_weight_ptr"), "*bf16")
    pointers |= dict.fromkeys(("kv_scale_ptr", "part_ptr", "lse_ptr", "cos_sin_ptr"), "*fp32")
    pointers |= dict.fromkeys(("sinks_ptr", "q_scale_ptr"), "*fp32")
    pointers |= dict.fromkeys(("page_table_ptr", "work_ptr", "counters_ptr"), "*i32")
    pointers |= {"pages_ptr": "*fp8e4nv" if is_fp8 else "*bf16", "out_loc_ptr": "*i64", "scale": "fp32", "eps": "fp32"}
    sizes = {"NUM_KV_HEADS": 8, "GROUP_SIZE": 4, "HEAD_DIM": dim, "PAGE_SIZE": 64, "WINDOW": 0, "IS_FP8": is_fp8}
    sizes |= {"SOFTCAP": 72.0 if has_options else 0.0}
    constants = {} if has_options else {"sinks_ptr": None, "q_scale_ptr": None}
    decode = {
        "BLOCK_G": 4,
        "BLOCK_M": 16,
        "TILE_KEYS": 16 if dim == 512 else 64,
        "NUM_STAGES": 5,
        "NUM_SPLITS": 66,
        "PDL": False,
        "MAX_QUERIES": 1,
    }
    query = "*fp16" if is_fp8 else "*bf16"
    for is_fused, kind in ((False, query), (True, "*bf16"))[: 1 if dim == 512 else 2]:
        every = sizes | decode | constants | {"FUSED": is_fused, "HAS_NORM": is_fused, "NORMS_V": is_fused}
        assert compile_kernel(attention_decode.decode_attention, pointers | {"q_ptr": kind}, every)
    pointers["q_ptr"] = query
    block_m, block_n = (64, 32) if dim == 512 else (128, 64)
    prefill = {"BLOCK_M": block_m, "BLOCK_N": block_n, "NUM_STAGES": 2, "MAX_PARTS": 512}
    every = sizes | prefill | ({} if has_options else {"sinks_ptr": None})
    assert compile_kernel(attention_prefill.prefill_attention, pointers, every, num_warps=8)


@pytest.mark.parametrize(
    ("is_fp8", "heads", "tile", "stages"), [(False, 20, 64, 3), (True, 20, 32, 5), (False, 16, 32, 5)]
)
def test_attention_to_latents_compiles(is_fp8: bool, heads: int, tile: int, stages: int):
    """With the tiles of `TritonLatents` for 20 heads of GLM-4.7-Flash, or 16 of a rank of DeepSeek V3."""
    pointers = dict.fromkeys(("q_ptr", "q_rope_ptr", "out_ptr", "latents_ptr", "weight_ptr"), "*bf16")
    pointers |= dict.fromkeys(("key_scale_ptr", "scale_ptr", "part_ptr", "lse_ptr", "cos_sin_ptr"), "*fp32")
    pointers |= dict.fromkeys(("page_table_ptr", "work_ptr", "kv_lens_ptr", "positions_ptr", "starts_ptr"), "*i32")
    pointers |= {"ends_ptr": "*i32", "pages_ptr": "*fp8e4nv" if is_fp8 else "*bf16", "out_loc_ptr": "*i64"}
    pointers |= {"scale": "fp32", "eps": "fp32", "q_scale_ptr": "*fp32"}
    blocks = {"HEAD_BLOCKS": 1, "GROUP_SIZE": heads, "MAX_QUERIES": 1, "RANK": 512, "NUM_SPLITS": 132}
    blocks["BLOCK_M"] = 16 if heads == 16 else 32
    own = {"ROPE_DIM": 64, "PAGE_SIZE": 64, "TILE_KEYS": tile, "NUM_STAGES": stages, "IS_FP8": is_fp8}
    ptx = compile_kernel(attention_latent.attend_latents, pointers, blocks | own, "ptx", True, num_warps=4)
    if not is_fp8:
        copies = re.findall(r"cp\.async\.cg\.shared.*?, (0x\w+)", ptx)
        assert len(copies) >= 72 * tile // 64 and set(copies) == {"0x10"} and "wgmma" in ptx
    assert compile_kernel(attention_latent.merge_latents, pointers, blocks | {"ROWS": 4})
    sizes = {"NUM_HEADS": 20, "NOPE_DIM": 192, "ROPE_DIM": 64, "RANK": 512, "PAGE_SIZE": 64, "BLOCK_H": 16}
    assert compile_kernel(attention_latent._store_latents, pointers, sizes | {"IS_FP8": is_fp8}, num_warps=2)


def test_the_plan_of_prefill_compiles():
    pointers = dict.fromkeys(("rows_ptr", "kv_lens_ptr", "cu_query_lens_ptr", "work_ptr"), "*i32")
    pointers |= dict.fromkeys(("first_seq", "num_seqs", "num_programs"), "i32")
    sizes = {"NUM_KV_HEADS": 8, "BLOCK_Q": 32, "MAX_PARTS": 512, "WINDOW": 0}
    assert compile_kernel(attention_prefill.plan_prefill, pointers, sizes)


@pytest.mark.slow
def test_gated_delta_compiles():
    pointers = dict.fromkeys(("slots_ptr", "state_lens_ptr", "rows_ptr", "cu_query_lens_ptr"), "*i32")
    pointers |= dict.fromkeys(("positions_ptr", "captures_ptr", "folds_ptr"), "*i32")
    pointers |= dict.fromkeys(
        ("a_log_ptr", "dt_bias_ptr", "decay_ptr", "total_ptr", "delta_ptr", "inputs_ptr"), "*fp32"
    )
    pointers["products_ptr"] = "*fp32"
    numbers = {"HK": 2, "HV": 4, "DK": 64, "DV": 128, "R": 20, "WIDTH": 4, "PRECISION": "tf32", "SEQUENCES": 128}
    numbers |= {"CHANNELS": 512, "BLOCK_V": 32, "CAPTURES": 4, "NUM_STAGES": 2, "PDL": True, "TOKENS": 32}
    kernels = [gated_delta._convolve, gated_delta._prepare, gated_delta._scan, gated_delta._finish, gated_delta._fold]
    for kernel in (gated_delta._prepare_decode, gated_delta._decode_one, gated_delta._decode_several, *kernels):
        names = kernel.arg_names
        constants = {name: value for name, value in numbers.items() if name in names}
        own = {name: pointers.get(name, "*bf16") for name in names if name.endswith("_ptr")}
        own |= {"eps": "fp32"} if "eps" in names else {}
        assert compile_kernel(kernel, own, constants, is_aligned=True)


@pytest.mark.parametrize("gate", ["", "silu"])
@pytest.mark.parametrize("parts", [0, 4])
def test_a_projection_of_one_row_compiles_with_its_adapter(parts: int, gate: str):
    """Its weights are loaded 16 bytes at a time with and without."""
    kind = {"slot_ptr": "*i32", "total_ptr": "*fp32"}
    kind = {name: kind.get(name, "*bf16") for name in linear._gemv.arg_names if name.endswith("_ptr")} | {"eps": "fp32"}
    has = {"HAS_NORM": False, "HAS_RESIDUAL": False, "HAS_BIAS": False, "GATE": gate, "PDL": True}
    sizes = {"BLOCK_N": 2, "BLOCK_K": 1024, "NUM_BLOCKS_K": 5, "BLOCKS": 2, "PARTS": parts}
    ptx = compile_kernel(linear._gemv, kind, sizes | has, "ptx", True, num_warps=4)
    assert len(re.findall(r"ld\.global\.v4\.b32", ptx)) >= 5 * (2 if gate else 1) * 2


@pytest.mark.parametrize(
    ("tokens", "rank", "n_rows", "gate"),
    [(1, 16, 6144, "silu"), (64, 16, 24576, "silu"), (64, 48, 4096, ""), (4096, 64, 6144, ""), (2, 16, 1, "")],
)
def test_adapters_compile(tokens: int, rank: int, n_rows: int, gate: str):
    """Weights and results move 16 bytes at a time; a projection of one output is of one in every launch."""
    n_out, kind = n_rows // (2 if gate else 1), dict.fromkeys(("x_ptr", "a_ptr", "y_ptr", "out_ptr", "b_ptr"), "*bf16")
    kind |= dict.fromkeys(("slot_ptr", "bounds_ptr", "tiles_ptr"), "*i32") | {"order_ptr": "*i64"}
    kind |= {"shift_ptr": "*bf16", "sums_ptr": "*fp32", "tokens": "i32", "n_rows": "i32"}
    options = adapters.launch_options(tokens, 8, 2 * rank, 4096, rank, n_out, torch.bfloat16)
    names = ("num_warps", "num_stages")
    shrink, expand = ({name: value for name, value in each.items() if name not in names} for each in options)
    launch = [{name: each[name] for name in names if name in each} for each in options]
    expand |= {"PDL": tokens <= 64, "GATE": gate} | ({"n_rows": 1} if n_rows == 1 else {})
    if tokens == 1:
        expand |= {"PARTS": 4}
    else:
        ptx = compile_kernel(adapters._shrink, kind, shrink | {"PDL": tokens <= 64}, "ptx", True, **launch[0])
        assert set(re.findall(r"cp\.async\.c[ag]\.\S+ \[.*?\], \[.*?\], (0x\w+|\d+)", ptx)) == {"0x10"}
        expand |= {"SPLITS": shrink["SPLITS"], "ALIGNMENT": math.gcd(n_rows, 16)}
    kernel = adapters._expand_one if tokens == 1 else adapters._expand
    ptx = compile_kernel(kernel, kind, expand, "ptx", True, **launch[1])
    assert tokens == 1 or n_rows == 1 or (".global.b16" not in ptx and "st.global.v4" in ptx)
    assert ptx.count("ld.global.v4.b32") >= (2 if gate else 1)
