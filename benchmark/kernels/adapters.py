"""Time projections with low-rank adapters on a GPU, as nodes of a CUDA graph, beside the same without.

    PYTHONPATH=python python benchmark/kernels/adapters.py [--model 8B] [--rank 16] [--cases 1x1 64x8 2048x1] [--splits]

A case is tokens x adapters: up to 256 tokens in turns, more in runs. `base` is the projection alone, its activation
included; `with` is what the engine runs for a step with adapters; `op` is `add_adapters` alone. Microseconds; weights
and adapters rotate beyond the L2. Results are checked against float32 first. The last line of a case is a layer without
attention. `--splits` also times the op with other parts of K.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
from ops import GPU, linears, randn, relative, time_us
from torch import Tensor

from minisgl.kernels.triton import adapters, ops
from minisgl.ops import adapters as reference_adapters
from minisgl.ops import reference
from minisgl.ops.adapters import AdapterWeights, ModuleRows
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


def with_adapters(x: Tensor, weight: Tensor, added: AdapterWeights, slots: Tensor, gate: str) -> Tensor:
    return adapters.add_adapters(finished(ops.linear(x, weight)), x, slots, added, gate)


def other_splits(call: Callable[[], Tensor]) -> str:
    """Time the op with each number of parts of K."""
    chosen, found = adapters.launch_options, []
    for splits in (1, 2, 4, 8, 16, 32):

        def options(*shape: object, splits: int = splits) -> tuple[dict[str, int], dict[str, int]]:
            shrink, expand = chosen(*shape)  # type: ignore[arg-type]
            return shrink, expand | {"SPLITS": splits}

        adapters.launch_options = options  # type: ignore[assignment]
        found.append(f"{splits}: {time_us([call]):.2f}")
    adapters.launch_options = chosen
    return ", splits " + ", ".join(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="8B", choices=("0.6B", "8B", "14B"))
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--cases", nargs="*", default=["1x1", "64x8", "2048x1", "16384x8"])
    parser.add_argument("--splits", action="store_true", help="also time other parts of K")
    args = parser.parse_args()
    for case in args.cases:
        tokens, count = map(int, case.split("x"))
        order = torch.arange(tokens, device=GPU)
        slots = ((order if tokens <= 256 else order * count // tokens) % count + 1).int()
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
            calls = [partial(adapters.add_adapters, y, x, slots, added, gate) for _, added in weights]
            line = f"{args.model} {name} x{case}: base {base:.2f}, with {both:.2f} (error {error:.4f})"
            line += f", op {time_us(calls):.2f}"
            print(line + (other_splits(calls[0]) if args.splits else ""), flush=True)
            layer = [layer[0] + base, layer[1] + both]
        print(f"{args.model} layer x{case}: base {layer[0]:.1f}, with {layer[1]:.1f}: {layer[0] / layer[1]:.1%}")


if __name__ == "__main__":
    main()
