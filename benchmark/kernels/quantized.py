"""Time GEMMs with quantized weights on a GPU, as nodes of a CUDA graph, against bfloat16 and other tiles.

    PYTHONPATH=python python benchmark/kernels/quantized.py [--model 8B] [--rows 1,2,16,64,256] [--tiles] [--load 0.5]
    PYTHONPATH=python python benchmark/kernels/quantized.py --chain [--rows 1,160,256,8192] [--profile]

`ours` is what the engine runs, including the quantization of activations. Weights rotate beyond the L2. The lower bound
is the bytes of the weights over 4,550 GB/s. Figures are in microseconds; the error is relative to float32. `--load`
keeps the card busy for so many seconds before each timing, until its power limits the clock.

`--chain` times all GEMMs of a layer with norms and activations, without attention, in one CUDA graph: one row through
24 layers, by the engine's kernel and by Triton's; more rows through 8 layers of FP8, by the engine's ops, in three
graphs. `--profile` adds the kernels of a layer. As in the engine, cuBLASLt has no workspace, unless
CUBLASLT_WORKSPACE_SIZE=1024 (KiB, PyTorch's default) is set.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from functools import partial
from itertools import product

import torch
from ops import BF16, CEILING, GPU, linears, randn, relative, time_us
from torch import Tensor
from torch.nn import functional as F
from triton.runtime.errors import OutOfResources

from minisgl.kernels.hopper import gemm as cuda_gemm
from minisgl.kernels.triton import ops
from minisgl.kernels.triton.cublas import cublas_linear
from minisgl.kernels.triton.gemm import GemmConfig, gemm
from minisgl.kernels.triton.kernels import multiply
from minisgl.kernels.triton.product import Norm, Product
from minisgl.kernels.triton.quantized import (
    MAX_EXACT_ROWS,
    refuses_rows,
    split_rows,
    split_size,
)
from minisgl.kernels.triton.quantized_gemv import quantized_gemv
from minisgl.ops import reference
from minisgl.ops.deferred import Result, finished
from minisgl.ops.quantized import E4M3, Format, Quantized

INT8 = Format(8, 0, is_integer=True)
FORMATS = (Format(8, 0), Format(8, 128), INT8, Format(4, 128, scale_dtype=BF16), Format(4, 32, True, torch.float16))
TILES = list(product((64, 128), (128, 256), (1, 2, 4), (3, 4, 6, 8), (4, 8)))  # without rows of x


def matrix(kind: Format, n_out: int, n_in: int) -> Quantized:
    weight = kind.empty(n_out, n_in, GPU)
    weight.round_from(randn(n_out, n_in, scale=0.02))
    if weight.zeros is not None:
        weight.zeros.fill_(7)
    return weight


def matrices(kind: Format, n_out: int, n_in: int) -> list[Quantized]:
    """As many matrices as fill the L2 three times."""
    return [matrix(kind, n_out, n_in) for _ in range(max(2, int(150e6 * 8 / (n_out * n_in * kind.bits))))]


def linear(x: Tensor, weight: Quantized, gate: str) -> Tensor:
    return finished(ops.linear(x, weight, None, gate))


def best_tile(x: Tensor, weights: list[Quantized], gate: str) -> str:
    """The fastest tile of our kernel, without the rounding of activations."""
    kind, rows = weights[0].format, len(x)
    parts = 2 if rows <= MAX_EXACT_ROWS[kind.bits] else 1
    dtype, sum_group = torch.int8 if kind.is_integer else E4M3, kind.group if kind.bits == 4 else 0
    split = split_rows(x, None, parts, dtype=dtype, sum_group=sum_group)
    times: list[tuple[float, GemmConfig]] = []
    for block_m, rest in product({64 // parts, split_size(rows, parts)}, TILES):
        tile = GemmConfig(block_m, *rest)
        if x.shape[1] % (tile.block_k * tile.split_k) == 0:
            calls = [partial(gemm, split, rows, parts, w, None, BF16, gate, tile) for w in weights]
            try:
                times.append((time_us(calls, repeats=3), tile))
            except OutOfResources:
                continue
    best, tile = min(times)
    return f", best of {len(times)} tiles {best:.1f} {tuple(tile)}"


def alone(x: Tensor, weights: list[Quantized], gate: str, load: float) -> str:
    """cuBLAS with scales of rows, and with one scale, and our CUDA kernel, without the rounding of activations."""
    rows, split = len(x), split_rows(x, None, 1)
    scaled = [partial(cublas_linear.scaled, split.parts, w.data, (split.scale, w.scale), BF16) for w in weights]
    unscaled = [partial(cublas_linear.scaled, split.parts, w.data, None, BF16) for w in weights]
    line = f", cuBLAS {time_us(scaled, load=load):.1f}, with one scale {time_us(unscaled, load=load):.1f}"
    if cuda_gemm.refuses(Product.of(split.parts[:rows], weights[0], gate, None)._replace(dtype=BF16)) is not None:
        return line
    ours = [partial(cuda_gemm.cuda_gemm, split, rows, 1, w, None, BF16, gate) for w in weights]
    return line + f", in CUDA {time_us(ours, load=load):.1f}"


def chain_us(gemv: Callable[..., tuple[Result, Result]], layers: list[list[Quantized]]) -> float:
    """Microseconds of a layer, whose GEMVs are qkv, o, gate and up, and down, in a graph of all layers."""
    width = layers[0][0].shape[1]
    first, weight = randn(1, width), torch.rand(width, device=GPU).to(BF16)

    def run() -> None:
        x, residual = first, first.clone()
        for qkv, o, gate_up, down in layers:
            heads, residual = gemv(x, qkv, None, "", Norm(residual, weight, 1e-6))
            x = gemv(finished(heads)[:, : o.shape[1]], o, None, "")[0]
            hidden, residual = gemv(x, gate_up, None, "silu", Norm(residual, weight, 1e-6))
            x = gemv(hidden, down, None, "")[0]
        finished(x)

    return time_us([run], nodes=1, repeats=25) / len(layers)


def layer_run(layers: list[list[Quantized]], rows: int) -> Callable[[], Tensor]:
    """`rows` rows through all layers by the engine's ops; what attention returns is always the same."""
    width = layers[0][0].shape[1]
    first, attended, weight = randn(rows, width), randn(rows, layers[0][1].shape[1]), torch.rand(width, device=GPU)
    weight = weight.to(BF16)

    def run() -> Tensor:
        x, residual = first, first.clone()
        for qkv, o, gate_up, down in layers:
            _, residual = ops.add_norm_linear(x, residual, weight, 1e-6, qkv)
            x = ops.linear(attended, o)
            hidden, residual = ops.add_norm_linear(x, residual, weight, 1e-6, gate_up, None, "silu")
            x = ops.linear(hidden, down)
        return ops.rms_norm(finished(x), weight, 1e-6)

    return run


def print_kernels(run: Callable[[], Tensor], layers: int) -> None:
    """The kernels of a layer in order of their time, in microseconds, launched one by one."""
    run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    for event in sorted(profile.key_averages(), key=lambda event: -event.self_device_time_total):
        us, count = event.self_device_time_total / layers, event.count / layers
        print(f"    {us:8.1f} us, {count:.1f} launches of {event.key[:100]}", flush=True)


def print_layers(model: str, rows: list[int], has_profile: bool) -> None:
    shapes = [linears(model)[name] for name in ("qkv", "o", "gate_up", "down")]
    layers = [[matrix(FORMATS[0], *shape) for shape in shapes] for _ in range(8)]
    for count in rows:
        run = layer_run(layers, count)
        times = [time_us([run], nodes=1, repeats=25) / len(layers) for _ in range(3)]
        print(f"{model}, {FORMATS[0]}, x{count}: a layer {', '.join(f'{us:.1f}' for us in times)}", flush=True)
        if has_profile:
            print_kernels(run, len(layers))


def print_chains(model: str) -> None:
    shapes = [linears(model)[name] for name in ("qkv", "o", "gate_up", "down")]
    for kind in FORMATS:
        layers = [[matrix(kind, *shape) for shape in shapes] for _ in range(24)]
        ours, theirs = (chain_us(gemv, layers) for gemv in (multiply, quantized_gemv))
        floor = sum(weight.nbytes for weight in layers[0]) / CEILING
        print(f"{model}, {kind}: floor {floor:.1f}, ours {ours:.1f}, Triton {theirs:.1f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="8B", choices=("0.6B", "8B", "14B"))
    parser.add_argument("--rows", help="numbers of rows (1,2,16,32,64,96,128,160,192,256; 1 of --chain)")
    parser.add_argument("--tiles", action="store_true", help="also time other tiles of our kernel")
    parser.add_argument("--load", type=float, default=0.0, help="seconds of load before each timing")
    parser.add_argument("--chain", action="store_true", help="only time rows through layers")
    parser.add_argument("--profile", action="store_true", help="with --chain, also print the kernels of a layer")
    args = parser.parse_args()
    rows = [*map(int, (args.rows or ("1" if args.chain else "1,2,16,32,64,96,128,160,192,256")).split(","))]
    os.environ.setdefault("CUBLASLT_WORKSPACE_SIZE", "0")  # see `minisgl/device/cuda.py`
    if args.chain:
        if 1 in rows:
            print_chains(args.model)
        if max(rows) > 1:
            print_layers(args.model, [count for count in rows if count > 1], args.profile)
        return
    for name, (n_out, n_in) in linears(args.model).items():
        if name == "lm_head":
            continue
        gate = "silu" if name == "gate_up" else ""
        plain = [randn(n_out, n_in, scale=0.02) for _ in range(max(2, int(75e6 / (n_out * n_in))))]
        for kind in FORMATS:
            weights = matrices(kind, n_out, n_in)
            dense = weights[0].dense(torch.float32)
            for count in rows:
                x = randn(count, n_in)
                ours = [partial(linear, x, w, gate) for w in weights]
                error = relative(ours[0](), reference.linear(x.float(), dense, None, gate))
                line = f"{args.model} {name} x{count}, {kind}: floor {weights[0].nbytes / CEILING:.1f}"
                line += f", ours {time_us(ours, load=args.load):.1f} (error {error:.4f})"
                line += f", bfloat16 {time_us([partial(F.linear, x, w) for w in plain], load=args.load):.1f}"
                line += alone(x, weights, gate, args.load) if kind == FORMATS[0] else ""
                refusal = refuses_rows(Product.of(x, weights[0], gate, None))
                has_tiles = args.tiles and refusal is None and (count > 1 or kind.bits == 4)
                print(line + (best_tile(x, weights, gate) if has_tiles else ""), flush=True)


if __name__ == "__main__":
    main()
