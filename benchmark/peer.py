"""Checks and times the peer-to-peer all-reduce + add + RMSNorm between the GPUs of this host, beside NCCL.

    PYTHONPATH=python python benchmark/peer.py [--ranks 4] [--hidden 5120] [--rows 1 2 4 ...] [--json FILE]

Starts its own ranks. Every figure is the median of replays of a CUDA graph of 20 calls, in microseconds a call; all
calls take the same rows, so the smaller sizes lie in the L2, as after a GEMM. `floor` is the time in
which the bytes that leave a GPU cross its links at 450 GB/s, those of two shots or of one shot if that is less; `share`
is what the fastest own variant reaches of it. Ends by itself after `--seconds`, whatever the ranks do; what was
measured until then is printed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from ranks import parse_args, run_ranks, save

LINK = 450e3  # bytes per us that leave a GPU (the vendor's figure)
ROWS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096]
CHECKED_ROWS = [1, 3, 64, 257]
PATIENCE = 1 << 23  # polls, some seconds (estimated): a rank that waits longer dies, and all others are ended
# name: two shots, warps, programs
VARIANTS: dict[str, tuple[bool, int, int | None]] = {
    "1 shot w8": (False, 8, None),
    "1 shot w16": (False, 16, None),
    "1 shot w32": (False, 32, None),
    "2 shots w8": (True, 8, None),
    "2 shots w16": (True, 16, None),
    "2 shots w32": (True, 32, None),
    "2 shots w16 p64": (True, 16, 64),
}


def run_rank(rank: int, args: argparse.Namespace, folder: str) -> None:
    """Check, then time; rank 0 saves its figures after every size."""
    import torch
    from torch.distributed import FileStore

    from minisgl.distributed.info import DistributedInfo
    from minisgl.distributed.peer import PeerAllReduce, graph_us
    from minisgl.distributed.pynccl import PyNcclCommunicator
    from minisgl.kernels.triton import norm
    from minisgl.kernels.triton.all_reduce import EMPTY, all_reduce
    from minisgl.ops import reference

    torch.cuda.set_device(rank)
    device, dtype = torch.device("cuda", rank), torch.bfloat16
    info = DistributedInfo(rank, args.ranks, args.ranks)
    comm = PyNcclCommunicator(info, device, FileStore(f"{folder}/store", args.ranks), "127.0.0.1")
    peer = PeerAllReduce(comm, max(*args.rows, *CHECKED_ROWS), args.hidden, dtype, patience=PATIENCE)
    weight = torch.rand(args.hidden, device=device).to(dtype)
    state: dict[str, Any] = {
        "machine": torch.cuda.get_device_name(), "torch": torch.__version__, "ranks": args.ranks,
        "hidden": args.hidden, "inbox_mb": peer.inbox.words.nbytes / 1e6, "checks": 0, "us": {},
    }  # fmt: skip

    def own(x: torch.Tensor, variant: str, normed: tuple[torch.Tensor, torch.Tensor, float] | None) -> torch.Tensor:
        two_shot, warps, programs = VARIANTS[variant]
        return all_reduce(
            x, peer.inbox, two_shot=two_shot, norm=normed, programs=programs, num_warps=warps, patience=PATIENCE
        )

    def nccl_add_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        norm.add_rms_norm(comm.sum(x), residual, weight, eps)

    def save_figures() -> None:
        if rank == 0:
            save(folder, state)

    for rows in CHECKED_ROWS:
        parts = []
        for source in range(args.ranks):
            generator = torch.Generator(device).manual_seed(rows * 100 + source)
            parts.append(torch.randn(rows, args.hidden, generator=generator, device=device).to(dtype))
        total = torch.zeros(rows, args.hidden, device=device)
        for part in parts:
            total += part
        start = parts[0].flip(0)
        normed, new = reference.add_rms_norm(total.to(dtype), start, weight.fill_(0.5), 1e-6)
        for variant, (two_shot, _, _) in VARIANTS.items():
            if not two_shot and rows > peer.inbox.part_rows:
                continue
            if "w16" in variant:
                assert torch.equal(own(parts[rank], variant, None), total.to(dtype)), f"{variant}, {rows} rows: sum"
            for _ in range(3):
                residual = start.clone()
                got = own(parts[rank], variant, (residual, weight, 1e-6))
                assert torch.equal(residual, new), f"{variant}, {rows} rows: residual"
                error = ((got.float() - normed.float()).norm() / normed.float().norm()).item()
                assert error < 6e-3, f"{variant}, {rows} rows: norm is off by {error}"
                state["checks"] += 1
    torch.cuda.synchronize()
    comm.all_gather_int(0)
    assert (peer.inbox.words == EMPTY).all(), "the inbox is not empty after use"
    save_figures()

    for is_own in (True, False):  # own ones first, so that they are known whatever NCCL does
        for rows in args.rows:
            x = torch.randn(rows, args.hidden, device=device).to(dtype)
            scratch, residual = x.clone(), torch.zeros_like(x)
            add_norm = (residual, weight, 1e-6)
            calls: dict[str, Callable[[], object]] = {
                "norm": partial(norm.add_rms_norm, x, *add_norm),
                "NCCL": partial(comm.all_reduce, scratch),
                "NCCL + norm": partial(nccl_add_norm, scratch, *add_norm),
            }
            if is_own:
                fitting = [v for v, (two_shot, _, _) in VARIANTS.items() if two_shot or rows <= peer.inbox.part_rows]
                calls = {name: partial(own, x, name, add_norm) for name in fitting}
                calls["sum only"] = partial(own, x, "2 shots w16" if rows > 64 else "1 shot w16", None)
            times = state["us"].setdefault(rows, {})
            for name, call in calls.items():
                residual.zero_()
                times[name] = graph_us(call, comm)
                save_figures()

    began = time.perf_counter()
    peer.measure(nccl_add_norm)
    state["measure_s"] = time.perf_counter() - began
    state["choices"] = [(choice.rows, choice.two_shot, choice.is_own) for choice in peer.choices]
    save_figures()
    torch.cuda.synchronize()
    comm.all_gather_int(0)


def report(state: dict[str, Any]) -> list[dict[str, Any]]:
    """Print the table; return one record for each figure."""
    ranks, row_bytes = state["ranks"], state["hidden"] * 2
    widths = {name: max(9, len(name)) for name in [*VARIANTS, "sum only", "norm", "NCCL", "NCCL + norm"]}
    print(f"{state['machine']} x{ranks}, torch {state['torch']}, hidden {state['hidden']}, bfloat16; us a call")
    print(f"{state['checks']} checks passed; inbox {state['inbox_mb']:.0f} MB")
    print(f"{'rows':>5} {'KB':>7} {'floor':>6} {'share':>5} " + " ".join(f"{name:>9}" for name in widths))
    records = []
    for rows, times in sorted(((int(rows), times) for rows, times in state["us"].items())):
        size = rows * row_bytes
        one, two = (ranks - 1) * size, 2 * (ranks - 1) / ranks * size
        floor = min(one, two) / LINK
        fastest = min((us for name, us in times.items() if name in VARIANTS), default=float("inf"))
        cells = " ".join(
            f"{times[name]:>{width}.2f}" if name in times else " " * width for name, width in widths.items()
        )
        print(f"{rows:5} {size / 1e3:7.0f} {floor:6.2f} {floor / fastest:5.0%} {cells}")
        for name, us in times.items():
            moved = (two if VARIANTS[name][0] else one) if name in VARIANTS else None
            records.append(
                {"rows": rows, "way": name, "us": us, "bytes": moved, "floor_us": floor, "share": floor / us}
            )
    if "choices" in state:
        names = {(True, True): "two shots", (False, True): "one shot"}
        ways = [f"to {rows} {names.get((two, own), 'NCCL')}" for rows, two, own in state["choices"]]
        print(f"measure() took {state['measure_s']:.1f} s: " + ", ".join(ways))
    return records


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=5120)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    args = parse_args(parser, seconds=110)
    state, failure = run_ranks(run_rank, args)
    if state is not None:
        records = report(state)
        if args.json is not None:
            args.json.write_text(json.dumps({**state, "error": failure, "figures": records}, indent=1))
    if failure is not None:
        print(f"failed: {failure}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
