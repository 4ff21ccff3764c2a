"""Times the MoE op on a GPU, as a whole and by kernel, beside its floor, and tries other tiles.

    PYTHONPATH=python python benchmark/kernels/moe.py [SHAPE ...] [--sizes 1 16 256] [--limit SECONDS] [--own]
        [--format int4]

Every result is checked against float32 first, with fresh inputs. Times are of nodes of a CUDA graph, over inputs that
are routed to different experts. The floor is the larger of the bytes (weights of the distinct selected experts, x,
logits, output) over 4,550 GB/s, the most that reading weights reached on an H200, and the operations over 742 TFLOP/s.
The first run compiles in several processes. A GEMM's tile is given as BLOCK_M (s: the weights are the M side), then
BLOCK_N, BLOCK_K, stages, warps; a GEMV's as BLOCK_N, BLOCK_K, warps.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from ops import CEILING, GPU, randn, relative, time_us

from minisgl.kernels.triton.kernels import mix
from minisgl.kernels.triton.moe import (
    CONFIGS,
    FP8_CONFIGS,
    INT4_CONFIGS,
    GemmTile,
    GemvTile,
    MoeConfig,
    combine,
    grouped_gemm,
    pair_down,
    pair_gate_up,
)
from minisgl.kernels.triton.moe_routing import route, route_and_list
from minisgl.ops import reference
from minisgl.ops.quantized import E8M0, MXFP4, Format, Quantized
from minisgl.ops.reference import Experts

OPERATIONS = 742e6  # per us
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096, 16384)
PAIR_SIZES = 4  # tokens up to which a pair at a time is tried


class Shape(NamedTuple):
    hidden: int
    size: int  # of an expert
    experts: int
    top_k: int


SHAPES = {
    "qwen3-30b-a3b": Shape(2048, 768, 128, 8),
    "qwen3-30b-a3b/2": Shape(2048, 384, 128, 8),
    "qwen3-30b-a3b/4": Shape(2048, 192, 128, 8),
    "mixtral-8x7b": Shape(4096, 14336, 8, 2),
    "gpt-oss-20b": Shape(2880, 2880, 32, 4),
}

PAIR_UP = ((1, 1024, 4), (2, 1024, 4), (4, 1024, 4), (1, 512, 2), (2, 512, 2), (2, 256, 1))
PAIR_DOWN = ((1, 256, 1), (2, 256, 1), (4, 256, 1), (1, 512, 2), (2, 512, 2), (1, 1024, 4))
# By pairs of a tile and whether the weights are the M side: tiles to try for both GEMMs.
SMALL = ((64, 128, 4, 4), (64, 128, 3, 4), (64, 64, 4, 4), (128, 64, 4, 4), (128, 128, 3, 8))
TILES: dict[tuple[int, bool], tuple[tuple[int, int, int, int], ...]] = {
    (16, True): (*SMALL, (64, 128, 2, 4), (64, 64, 6, 4), (128, 128, 3, 4)),
    (32, True): SMALL,
    (64, True): ((64, 64, 4, 4), (128, 64, 4, 4), (128, 64, 3, 8), (128, 128, 3, 8)),
    (64, False): ((128, 64, 3, 4), (128, 64, 4, 4), (256, 64, 3, 4), (256, 64, 4, 8), (128, 128, 3, 4)),
    (128, False): (
        (256, 64, 4, 8),
        (256, 64, 3, 8),
        (128, 64, 3, 4),
        (128, 64, 3, 8),
        (128, 64, 4, 8),
        (128, 128, 3, 8),
    ),
}


def layouts(pairs_per_expert: float) -> list[tuple[int, bool]]:
    """Return the keys of `TILES` that may suit a mean number of pairs."""
    limits = [(4, [16]), (12, [16, 32]), (40, [16, 32, 64]), (200, [32, 64, 128]), (1e9, [64, 128])]
    rows = next(rows for limit, rows in limits if pairs_per_expert <= limit)
    return [key for key in TILES if key[0] in rows]


FORMATS = {
    "bf16": None,
    "fp8": Format(8, 0),
    "fp8-blocks": Format(8, 128),
    "int8": Format(8, 0, is_integer=True),
    "int4": Format(4, 128, scale_dtype=torch.bfloat16),
    "int4-zeros": Format(4, 64, has_zeros=True, scale_dtype=torch.bfloat16),
    "mxfp4": MXFP4,
}


class Weights(NamedTuple):
    gate_up: torch.Tensor | Quantized
    down: torch.Tensor | Quantized

    @classmethod
    def make(cls, shape: Shape, kind: Format | None = None) -> Weights:
        hidden, size, experts, _ = shape
        return cls(matrices(kind, experts, 2 * size, hidden), matrices(kind, experts, hidden, size))

    @property
    def bytes_per_weight(self) -> float:
        return self.gate_up.nbytes / math.prod(self.gate_up.shape)


def matrices(kind: Format | None, experts: int, rows: int, columns: int) -> torch.Tensor | Quantized:
    if kind is None:
        return randn(experts, rows, columns, scale=columns**-0.5)
    weight = kind.empty(experts * rows, columns, GPU)
    for e in range(experts):  # few at a time: rounding takes memory
        part = weight.part(e * rows, (e + 1) * rows)
        if kind == MXFP4:
            exponents = torch.randint(116, 121, part.scale.shape, device=GPU).byte()
            part.fill(torch.randint(0, 16, part.shape, device=GPU), exponents.view(E8M0))
        else:
            part.round_from(randn(rows, columns, scale=columns**-0.5))
    if weight.zeros is not None:
        weight.zeros.fill_(7)
    return weight.experts(experts)


class Inputs(NamedTuple):
    x: torch.Tensor
    logits: torch.Tensor

    @classmethod
    def make(cls, shape: Shape, tokens: int) -> Inputs:
        return cls(randn(tokens, shape.hidden), randn(tokens, shape.experts))


def error(shape: Shape, inputs: Inputs, weights: Weights) -> float:
    """Return the relative error of the op against the reference in float32, with the same routing."""
    got = mix(*inputs, Experts(*weights, shape.top_k, True))
    exact = (w if isinstance(w, Quantized) else w.float() for w in weights)
    return relative(got, reference.moe(inputs.x.float(), inputs.logits, Experts(*exact, shape.top_k, True)))


def floor_us(shape: Shape, sets: list[Inputs], bytes_per_weight: float) -> tuple[float, float, float]:
    """Return (floor, bytes, operations) of one call, the mean over the sets."""
    hidden, size, experts, top_k = shape
    tokens = len(sets[0].x)
    distinct = sum(len(s.logits.float().topk(top_k).indices.unique()) for s in sets) / len(sets)
    moved = bytes_per_weight * distinct * 3 * hidden * size + 2.0 * tokens * (2 * hidden + experts)
    operations = 6.0 * tokens * top_k * hidden * size
    return max(moved / CEILING, operations / OPERATIONS), moved, operations


def timed(calls: list[Callable[[], object]], guess: float) -> float:
    """Return us a call, with about 4 ms of device time a replay."""
    nodes = max(len(calls), min(48, int(4000 / guess)))
    return time_us(calls, nodes, repeats=5)


def best(times: dict[str, float], count: int = 4) -> str:
    return " ".join(f"{name}={us:.1f}" for name, us in sorted(times.items(), key=lambda t: t[1])[:count])


def name(lists_rows: int, swap: bool, tile: GemmTile) -> str:
    return f"{lists_rows}{'s' if swap else ''}:" + ",".join(map(str, tile))


def measure(title: str, shape: Shape, tokens: int, weights: Weights, everything: bool) -> None:
    sets = [Inputs.make(shape, tokens) for _ in range(16 if tokens <= 16 else 4 if tokens <= 256 else 1)]
    wrong = error(shape, sets[0], weights)
    floor, moved, operations = floor_us(shape, sets, weights.bytes_per_weight)
    experts = Experts(*weights, shape.top_k, True)
    limit = 0.06 if isinstance(weights.gate_up, Quantized) else 0.01
    own = timed([partial(mix, *s, experts) for s in sets], floor)
    print(
        f"{title:16} x{tokens:<6} {own:8.1f} us, floor {floor:7.1f} ({floor / own:4.0%}), "
        f"{moved / 1e6:7.1f} MB {moved / own / 1e3:5.0f} GB/s, {operations / 1e9:8.1f} GFLOP "
        f"{operations / own / 1e6:4.0f} TFLOP/s, error {wrong:.4f}{'' if wrong < limit else ' WRONG'}",
        flush=True,
    )
    if everything:
        for line in parts(shape, sets, weights, floor):
            print("    " + line, flush=True)


def parts(shape: Shape, sets: list[Inputs], weights: Weights, floor: float) -> Iterator[str]:
    """Time the kernels one by one, with all tiles to try."""
    top_k, tokens = shape.top_k, len(sets[0].x)
    if tokens <= PAIR_SIZES:
        routed = [route(s.logits, top_k, True) for s in sets]
        hidden = [pair_gate_up(s.x, e, weights.gate_up) for s, (e, _) in zip(sets, routed, strict=True)]
        routing = timed([partial(route, s.logits, top_k, True) for s in sets], 3)
        up, down = {}, {}
        for tile in map(GemvTile._make, PAIR_UP):
            calls = [
                partial(pair_gate_up, s.x, e, weights.gate_up, tile=tile)
                for s, (e, _) in zip(sets, routed, strict=True)
            ]
            up[",".join(map(str, tile))] = timed(calls, floor)
        for tile in map(GemvTile._make, PAIR_DOWN):
            calls = [partial(pair_down, h, *c, weights.down, tile=tile) for h, c in zip(hidden, routed, strict=True)]
            down[",".join(map(str, tile))] = timed(calls, floor)
        total = routing + min(up.values()) + min(down.values())
        yield f"pairs  best {total:8.1f} | route {routing:.1f} | up {best(up)} | down {best(down)}"
    for rows in sorted({rows for rows, _ in layouts(tokens * top_k / shape.experts)}):
        lists = [route_and_list(s.logits, top_k, True, rows) for s in sets]
        routing = timed([partial(route_and_list, s.logits, top_k, True, rows) for s in sets], 5)
        up, down = {}, {}
        made: list[tuple[torch.Tensor, torch.Tensor]] = []
        for key in (key for key in TILES if key[0] == rows):
            for tile in map(GemmTile._make, TILES[key]):
                gemm = partial(grouped_gemm, top_k=top_k, config=MoeConfig(*key, tile, tile))
                ups = [
                    partial(gemm, s.x, weights.gate_up, li, gate="silu") for s, (_, li) in zip(sets, lists, strict=True)
                ]
                hidden = [call() for call in ups]
                downs = [partial(gemm, h, weights.down, li) for h, (_, li) in zip(hidden, lists, strict=True)]
                made.append((hidden[0], downs[0]()))
                up[name(rows, key[1], tile)] = timed(ups, floor)
                down[name(rows, key[1], tile)] = timed(downs, floor)
        for one, other in pairwise(made):
            if not all(relative(a, b) < 0.01 for a, b in zip(one, other, strict=True)):
                yield "WRONG: tiles disagree"
        combining = timed([partial(combine, made[0][1], w) for w, _ in lists], 5)
        total = routing + min(up.values()) + min(down.values()) + combining
        yield (
            f"{rows:3} rows best {total:8.1f} | route {routing:.1f} combine {combining:.1f} | up {best(up)} | "
            f"down {best(down)}"
        )


def compile_jobs(
    shapes: list[str], sizes: list[int], everything: bool, kind: Format | None
) -> Iterator[Callable[[], object]]:
    """One call for each kernel that the measurement will need, on inputs as small as give the same kernel."""
    configs = [c for _, c in (CONFIGS if kind is None else INT4_CONFIGS if kind.bits == 4 else FP8_CONFIGS)]
    if everything:
        configs += [MoeConfig(*key, tile, tile) for key, tiles in TILES.items() for tile in map(GemmTile._make, tiles)]
    gemm_keys = set()
    for shape in (SHAPES[s] for s in shapes):
        for config in configs:
            gemm_keys.add((shape.top_k, config, True, shape.hidden % config.up.block_k == 0))
            gemm_keys.add((shape.top_k, config, False, shape.size % config.down.block_k == 0))
        for tokens in sizes:
            for rows in {c.block_m for c in configs}:
                yield partial(
                    lambda s, t, r: route_and_list(randn(t, s.experts), s.top_k, True, r), shape, tokens, rows
                )
        for tile in map(GemvTile._make, PAIR_UP) if everything else [None]:
            yield partial(compile_gemvs, shape, kind, tile, None)
        for tile in map(GemvTile._make, PAIR_DOWN) if everything else []:
            yield partial(compile_gemvs, shape, kind, None, tile)
    for item in sorted(gemm_keys, key=str):
        yield partial(compile_gemms, kind, *item)


def compile_gemvs(shape: Shape, kind: Format | None, up: GemvTile | None, down: GemvTile | None) -> None:
    few = shape._replace(experts=shape.top_k)
    weights, inputs = Weights.make(few, kind), Inputs.make(few, 2)
    experts, probabilities = route(inputs.logits, few.top_k, True)
    hidden = pair_gate_up(inputs.x, experts, weights.gate_up, tile=up)
    pair_down(hidden, experts, probabilities, weights.down, tile=down)


def compile_gemms(kind: Format | None, top_k: int, config: MoeConfig, is_gated: bool, is_even: bool) -> None:
    tile, tokens = config.up if is_gated else config.down, 3
    n_in = tile.block_k * 2 if is_even else tile.block_k + (64 if kind == MXFP4 else 16)
    _, lists = route_and_list(randn(tokens, 8), top_k, True, config.block_m)
    x, weight = randn(tokens if is_gated else tokens * top_k, n_in), matrices(kind, 8, tile.block_n * 2, n_in)
    parts_of = grouped_gemm(x, weight, lists, top_k, config, gate="silu" if is_gated else "")
    combine(parts_of, torch.ones(tokens, top_k, device=GPU))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", help=", ".join(SHAPES))
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--own", action="store_true", help="time only the op, with its own tiles")
    parser.add_argument("--format", choices=FORMATS, default="bf16", help="of weights; others than bf16 need --own")
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after which no further size starts")
    parser.add_argument("--share", type=int, nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    kind = FORMATS[args.format]
    assert kind is None or args.own, "the tiles to try are for bf16"
    started, shapes = time.time(), args.shapes or list(SHAPES)
    if args.share is not None:
        for i, job in enumerate(compile_jobs(shapes, args.sizes, not args.own, kind)):
            if i % args.share[1] == args.share[0]:
                job()
        torch.cuda.synchronize()
        return
    count = max(1, min(16, os.cpu_count() or 1))
    command = [sys.executable, __file__, *sys.argv[1:], "--share"]
    workers = [subprocess.Popen([*command, str(i), str(count)]) for i in range(count)]
    failed = sum(w.wait() != 0 for w in workers)
    print(f"compiled in {time.time() - started:.0f} s, {failed} of {count} processes failed", flush=True)
    torch.manual_seed(0)
    with torch.inference_mode():
        for title in shapes:
            shape = SHAPES[title]
            weights = Weights.make(shape, kind)
            for tokens in args.sizes:
                if time.time() - started < args.limit:
                    measure(title, shape, tokens, weights, not args.own)
                    torch.cuda.empty_cache()
            del weights
            torch.cuda.empty_cache()
            print(f"-- {title}: {time.time() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
