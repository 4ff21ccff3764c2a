"""Time gated DeltaNet's kernels on a GPU, as nodes of a CUDA graph, beside the time that moving their bytes takes.

    PYTHONPATH=python python benchmark/kernels/gated_delta.py [decode] [prefill] [fold] [--delta bfloat16]

The sizes are those of Qwen3-Next: 16 key heads, 32 value heads, dimensions of 128. Bytes are those that an op must read
and write at least once; the rate is compared with 4,550 GB/s, the most that reading weights reached on an H200. Calls
use different slots in turn, so that the L2 does not have S. `tests/gpu/test_gated_delta_gpu.py` checks the results.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial

import torch
from ops import CEILING, time_us
from torch import Tensor

from minisgl.core.plan import StepShape
from minisgl.kernels.triton.gated_delta import fold, gated_delta
from minisgl.ops.gated_delta import DeltaState, DeltaStep, DeltaWeights

HK, HV, DK, DV, WIDTH, LAYERS = 16, 32, 128, 128, 4, 30
CHANNELS = 2 * HK * DK + HV * DV
BF16, GPU = torch.bfloat16, "cuda"
DECODES = [(1, 1), (4, 1), (16, 1), (64, 1), (256, 1), (1, 4), (1, 9), (16, 4), (64, 4)]  # rows, tokens of each
PREFILLS = [(16, 1024), (1, 4096), (1, 200), (4, 64), (1, 16384)]  # chunks, tokens of each
FOLDS = [1, 4, 64]  # rows


def make_states(layers: int, slots: int, entries: int, delta: torch.dtype) -> list[DeltaState]:
    def random(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
        return torch.empty(slots, layers, *shape, device=GPU, dtype=dtype).normal_(0, 0.1)

    s, recent = random(HV, DK, DV, dtype=delta), random(entries, HK * DK + HV * DV)
    decay, conv = -random(entries, HV, dtype=torch.float32).abs(), random(entries + WIDTH - 1, CHANNELS)
    return [DeltaState(*(x[:, i] for x in (s, recent, decay, conv))) for i in range(layers)]


def make_step(first_slot: int, decodes: int, chunks: int, tokens: int, pending: int) -> DeltaStep:
    """`decodes` or `chunks` sequences of `tokens`; the former have `pending` tokens since S."""
    count = decodes + chunks
    start = 100 if decodes else 0

    def ints(values: object) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=GPU)

    return DeltaStep(
        decodes,
        StepShape(decodes, tokens if decodes else 1, chunks, chunks * tokens),
        ints(range(first_slot, first_slot + count)),
        ints([start - pending] * count),
        ints(range(count)),
        ints([i * tokens for i in range(count + 1)]),
        ints([start + i for _ in range(count) for i in range(tokens)]),
        ints([(-1, 0, 0)] * 4),
    )


def make_weights() -> DeltaWeights:
    conv, norm = torch.randn(CHANNELS, 1, WIDTH, device=GPU).to(BF16), torch.ones(DV, device=GPU, dtype=BF16)
    return DeltaWeights(conv, torch.zeros(HV, device=GPU), torch.zeros(HV, device=GPU), norm, 1e-6, HK)


def mixing_calls(
    decodes: int, chunks: int, tokens: int, pending: int, delta: torch.dtype
) -> list[Callable[[], object]]:
    """Return calls with different slots, whose S together exceed the L2 of 50 MB."""
    count = decodes + chunks
    calls = max(2, min(48, 160 // count))
    entries = 20 if tokens == 1 or chunks else 44
    (state,) = make_states(1, calls * count, entries, delta)
    qkvz = torch.randn(count * tokens, CHANNELS + HV * DV, device=GPU).to(BF16)
    ba = torch.randn(count * tokens, 2 * HV, device=GPU).to(BF16)
    steps = [make_step(i * count, decodes, chunks, tokens, pending) for i in range(calls)]
    return [partial(gated_delta, qkvz, ba, make_weights(), state, step) for step in steps]


def results(parts: set[str], delta: torch.dtype) -> Iterator[tuple[str, float, float]]:
    """Yield names, microseconds and bytes."""
    size = HV * DK * DV * torch.empty(0, dtype=delta).element_size()
    token = 2 * (CHANNELS + 2 * HV * DV + 2 * HV)  # inputs, gates and output
    recent = 2 * (HK * DK + HV * DV) + 4 * HV
    for rows, tokens in DECODES if "decode" in parts else ():
        for pending in (0, 10):
            us = time_us(mixing_calls(rows, 0, tokens, pending, delta))
            moved = rows * (size + tokens * (token + recent + 2 * CHANNELS) + pending * recent)
            yield f"decode {rows} x {tokens}, {pending} since S", us, moved
    for chunks, tokens in PREFILLS if "prefill" in parts else ():
        us = time_us(mixing_calls(0, chunks, tokens, 0, delta), nodes=4 if chunks * tokens > 4096 else 48)
        yield f"prefill {chunks} x {tokens}", us, chunks * (size + tokens * token)
    for rows in FOLDS if "fold" in parts else ():
        sets = max(1, min(8, 64 // rows))
        states = make_states(LAYERS, sets * rows, 20, delta)
        folds = [
            torch.tensor([(i * rows + j, 90, 100) for j in range(rows)], dtype=torch.int32, device=GPU)
            for i in range(sets)
        ]
        us = time_us([partial(fold, states, f) for f in folds], nodes=8)
        yield f"fold {rows} rows x {LAYERS} layers, 10 tokens", us, rows * LAYERS * (2 * size + 10 * recent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=["decode", "prefill", "fold"])
    parser.add_argument("--delta", default="float32", choices=["float32", "bfloat16"])
    args = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, S in {args.delta}")
    print(f"{'':36} {'us':>9} {'floor us':>9} {'of 4,550 GB/s':>14}")
    for name, us, moved in results(set(args.parts), getattr(torch, args.delta)):
        print(f"{name:36} {us:9.1f} {moved / CEILING:9.1f} {moved / CEILING / us:14.0%}", flush=True)


if __name__ == "__main__":
    main()
