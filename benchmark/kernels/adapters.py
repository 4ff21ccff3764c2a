"""Time projections with low-rank adapters on a GPU, as nodes of a CUDA graph, beside the same without.

    PYTHONPATH=python python benchmark/kernels/adapters.py [--model 8B] [--rank 16] [--cases 1x1 64x8] [--variants]

A case is tokens x adapters: up to 256 tokens in turns, more in runs. `base` is the projection alone, its activation
included; `with` is what the engine runs for a step with adapters, `shrink last` the same in another order, `op` what
adapters add, alone. Microseconds; weights and adapters rotate beyond the L2. Results are checked against float32 first.
The last line of a case is a layer without attention, and what sorts a step's tokens by slot. `--variants` also times
both kernels alone with other options and numbers of sums, the fastest first; one token shrinks in its projection.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product

import torch
from ops import GPU, linears, randn, relative, time_us
from torch import Tensor

from minisgl.kernels.triton import adapters, ops
from minisgl.kernels.triton.adapters import Options
from minisgl.kernels.triton.launch import MAX_CHAINED, compile_ahead
from minisgl.kernels.triton.linear import gemv
from minisgl.ops import adapters as reference_adapters
from minisgl.ops import reference
from minisgl.ops.adapters import AdapterWeights, ModuleRows, TokenSlots
from minisgl.ops.deferred import finished

SLOTS = 8
MODULES = {"qkv": (4 / 6, 5 / 6, 1.0), "o": (1.0,), "gate_up": (0.5, 1.0), "down": (1.0,)}  # the ends of their rows
BYTES = 150_000_000  # of weights in turn


def adapter_weights(name: str, n_rows: int, n_in: int, rank: int) -> AdapterWeights:
    """Slots of one memory, as the engine's."""
    ends = [round(end * n_rows) for end in MODULES[name]]
    rows = tuple(ModuleRows(*at, i) for i, at in enumerate(zip([0, *ends], ends, strict=False)))
    inner = len(rows) * rank
    memory = randn(SLOTS, inner * n_in + inner + n_rows * rank, scale=0.02)
    a, shift, b = memory.split([inner * n_in, inner, n_rows * rank], 1)
    return AdapterWeights(a.view(SLOTS, inner, n_in), shift, b.view(SLOTS, n_rows, rank), rows)


def with_adapters(x: Tensor, weight: Tensor, added: AdapterWeights, slots: TokenSlots, gate: str) -> Tensor:
    return adapters.adapted_linear(ops.linear, x, weight, None, gate, slots, added)


def shrink_last(x: Tensor, weight: Tensor, added: AdapterWeights, slots: TokenSlots, gate: str) -> Tensor:
    """`with_adapters` of several tokens with the projection before the shrink."""
    first, last = options_of(x, added, gate)
    y = finished(ops.linear(x, weight, None))
    return adapters.expand(y, adapters.shrink(x, slots, added, first), slots, added, gate, last)


def op(y: Tensor, x: Tensor, added: AdapterWeights, slots: TokenSlots, gate: str) -> Tensor:
    first, last = options_of(x, added, gate)
    one = len(x) == 1
    sums = gemv(x, x[:0], None, slot=slots.slots, adapters=added)[1] if one else adapters.shrink(x, slots, added, first)
    return adapters.expand(y, sums, slots, added, gate, last)


def options_of(x: Tensor, added: AdapterWeights, gate: str) -> tuple[Options, Options]:
    n_out = added.rows[-1].stop // (2 if gate else 1)
    return adapters.launch_options(len(x), *added.a.shape, added.rank, n_out, x.dtype)


def combined(**values: Sequence[int]) -> list[Options]:
    return [dict(zip(values, chosen, strict=True)) for chosen in product(*values.values())]


def time_variants(
    x: Tensor, y: Tensor, sets: list[tuple[Tensor, AdapterWeights]], slots: TokenSlots, gate: str
) -> None:
    """Print the times of both kernels with other options, by kernel."""
    added, chosen = sets[0][1], options_of(x, sets[0][1], gate)
    if len(x) == 1:
        shrinks, expands = [], combined(BLOCK_N=(16, 32, 64, 128, 256), num_warps=(1, 2, 4))
    elif len(x) <= MAX_CHAINED:
        shrinks = [*combined(SPLITS=(2, 4, 8, 16), BLOCK_K=(128, 256)), {"BLOCK_T": 32}, {"BLOCK_R": 32}]
        expands = [
            *combined(BLOCK_N=(32, 64, 128, 256)),
            *combined(BLOCK_N=(128, 256), num_warps=(2, 8)),
            {"BLOCK_T": 32},
        ]
    else:
        shrinks = combined(SPLITS=(1, 2, 4), BLOCK_T=(32, 64))
        expands = combined(BLOCK_N=(64, 128), num_warps=(4, 8))
    sums = {n: torch.zeros(n, len(x) * added.a.shape[1], device=GPU) for n in (1, 2, 4, 8, 16)}
    usual = sums[chosen[0].get("SPLITS", 4)]
    calls: dict[tuple[str, str], list[Callable[[], Tensor]]] = {}
    for other in shrinks:
        options = chosen[0] | other
        calls["shrink", str(other)] = [partial(adapters.shrink, x, slots, a, options) for _, a in sets]
    for other in expands:
        options = chosen[1] | other
        calls["expand", str(other)] = [partial(adapters.expand, y, usual, slots, a, gate, options) for _, a in sets]
    for n, parts in sums.items():
        calls["expand", f"{n} sums"] = [partial(adapters.expand, y, parts, slots, a, gate, chosen[1]) for _, a in sets]
    with compile_ahead():
        for same in calls.values():
            same[0]()
    times = sorted((time_us(same), *key) for key, same in calls.items())
    for kernel, options in zip(("shrink", "expand"), chosen, strict=True):
        print(
            f"    {kernel} {options}: " + ", ".join(f"{other} {us:.2f}" for us, name, other in times if name == kernel)
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="8B", choices=("0.6B", "8B", "14B"))
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--cases", nargs="*", default=["1x1", "8x8", "64x8", "64x1", "256x8", "2048x8"])
    parser.add_argument("--variants", action="store_true", help="also time other options")
    args = parser.parse_args()
    for case in args.cases:
        tokens, count = map(int, case.split("x"))
        order = torch.arange(tokens, device=GPU)
        slots = TokenSlots.of(((order if tokens <= 256 else order * count // tokens) % count + 1).int(), SLOTS)
        layer = [0.0, 0.0]
        for name, (n_rows, n_in) in linears(args.model).items():
            if name not in MODULES:
                continue
            gate, sets = "silu" if name == "gate_up" else "", max(2, BYTES // (2 * n_rows * n_in))
            x = randn(tokens, n_in)
            weights = [
                (randn(n_rows, n_in, scale=0.02), adapter_weights(name, n_rows, n_in, args.rank)) for _ in range(sets)
            ]
            weight, added = weights[0]
            exact = AdapterWeights(added.a.float(), added.shift.float(), added.b.float(), added.rows)
            want = reference.linear(x.float(), weight.float())
            want = reference_adapters.add_adapters(want, x.float(), slots, exact, gate)
            error = relative(with_adapters(x, weight, added, slots, gate), want)
            base = time_us([partial(ops.linear, x, w, None, gate) for w, _ in weights])
            both = time_us([partial(with_adapters, x, w, added, slots, gate) for w, added in weights])
            y = randn(tokens, n_rows)
            calls = [partial(op, y, x, added, slots, gate) for _, added in weights]
            line = f"{args.model} {name} x{case}: base {base:.2f}, with {both:.2f} (error {error:.4f})"
            if tokens > 1:
                line += f", shrink last {time_us([partial(shrink_last, x, w, a, slots, gate) for w, a in weights]):.2f}"
            print(f"{line}, op {time_us(calls):.2f}", flush=True)
            if args.variants:
                time_variants(x, y, weights, slots, gate)
            layer = [layer[0] + base, layer[1] + both]
        sort = time_us([lambda slots=slots: TokenSlots.of(slots.slots, SLOTS).slots])
        line = f"{args.model} layer x{case}: base {layer[0]:.1f}, with {layer[1]:.1f}: {layer[0] / layer[1]:.1%}"
        print(f"{line}; sort {sort:.1f} a step")


if __name__ == "__main__":
    main()
