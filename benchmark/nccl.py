"""Times NCCL through ctypes (PyNCCL) beside NCCL through torch: all-reduce and all-gather, captured and eager.

    PYTHONPATH=python python benchmark/nccl.py [--ranks N] [--hidden 5120] [--rows 1 64 256 2048] [--json FILE]

Starts its own ranks, one for each GPU. Tensors are [rows, hidden] bfloat16, the output of an all-gather is
[ranks, rows, hidden]. `graph` is one of 20 calls captured in a CUDA graph, `eager` one of 20 calls in a loop, timed on
the GPU; `host` is the CPU time of an eager call. Every figure is the median of --rounds rounds, in microseconds a call.
Both communicators take turns within each round. `capture` is the CPU time in which 200 all-reduces are captured and
instantiated, in milliseconds. Results are checked first. Ends after --seconds, whatever the ranks do.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from typing import TYPE_CHECKING, Any

from ranks import parse_args, run_ranks, save

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from minisgl.distributed.communicator import Communicator

CALLS = 20  # in one graph or loop
CAPTURED_CALLS = 200  # as many as a large model's step has
WAYS = ("pynccl", "torch")


def run_rank(rank: int, args: argparse.Namespace, folder: str) -> None:
    """Check, then time; rank 0 saves its figures."""
    import torch
    from torch.distributed import FileStore, PrefixStore

    from minisgl.distributed.communicator import NcclCommunicator
    from minisgl.distributed.info import DistributedInfo
    from minisgl.distributed.pynccl import PyNcclCommunicator

    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    info = DistributedInfo(rank, args.ranks, args.ranks)
    store = FileStore(f"{folder}/store", args.ranks)
    comms: dict[str, Communicator] = {
        "pynccl": PyNcclCommunicator(info, device, PrefixStore("pynccl", store), "127.0.0.1"),
        "torch": NcclCommunicator(info, device, PrefixStore("torch", store), "127.0.0.1"),
    }
    figures: dict[str, dict[str, float]] = {}
    state = {
        "machine": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "figures": figures,
    }
    stream = torch.cuda.Stream()
    with torch.inference_mode(), torch.cuda.stream(stream):
        for rows in args.rows:
            x = torch.full((rows, args.hidden), rank + 1.0, device=device, dtype=torch.bfloat16)
            for name in WAYS:
                check(comms[name], x.clone(), rank, args.ranks)
            scratch = torch.zeros_like(x)  # sums of zeros stay finite, however many calls there are
            for op in ("all_reduce", "all_gather"):
                calls = {name: _call(comms[name], op, scratch) for name in WAYS}
                for name, figure in time_calls(calls, comms["torch"], args.rounds).items():
                    figures[f"{op} {rows} {name}"] = figure
        for name in WAYS:
            call = _call(comms[name], "all_reduce", scratch)
            times = []
            for _ in range(5):
                comms["torch"].all_gather_int(0)
                begin = time.perf_counter()
                graph = captured(call, CAPTURED_CALLS)
                times.append((time.perf_counter() - begin) * 1e3)
                graph.replay()
                stream.synchronize()
                del graph
            figures[f"capture {name}"] = {"ms": statistics.median(times)}
    if rank == 0:
        save(folder, state)
    torch.cuda.synchronize()
    comms["torch"].all_gather_int(0)


def check(comm: Communicator, x: torch.Tensor, rank: int, ranks: int) -> None:
    """Compare both collectives with the expected values, eagerly and captured; x is filled with rank + 1."""
    import torch

    total = ranks * (ranks + 1) / 2

    def gathered_is_right(out: torch.Tensor) -> bool:
        return all(bool((out[r] == r + 1).all()) for r in range(ranks))

    assert (comm.sum(x.clone()) == total).all(), f"{comm.name}: wrong sum"
    assert gathered_is_right(comm.all_gather(x)), f"{comm.name}: wrong all-gather"
    source, results = x.clone(), []

    def both() -> None:
        results.append((comm.sum(source * 1), comm.all_gather(source)))

    graph = captured(both, 1)
    for _ in range(2):
        graph.replay()
    torch.cuda.current_stream().synchronize()
    summed, gathered = results[-1]
    assert (summed == total).all(), f"{comm.name}: wrong sum in a graph"
    assert gathered_is_right(gathered), f"{comm.name}: wrong all-gather in a graph"


def _call(comm: Communicator, op: str, x: torch.Tensor) -> Callable[[], object]:
    collective = getattr(comm, op)
    return lambda: collective(x)


def captured(call: Callable[[], object], count: int) -> torch.cuda.CUDAGraph:
    """Capture `count` calls in the current stream, thread-locally, because NCCL's watchdog thread queries events."""
    import torch

    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode="thread_local")
    for _ in range(count):
        call()
    graph.capture_end()
    return graph


def time_calls(
    calls: dict[str, Callable[[], object]], barrier: Communicator, rounds: int
) -> dict[str, dict[str, float]]:
    """Return us a call by name and kind (graph, eager, host)."""
    import torch

    stream = torch.cuda.current_stream()
    graphs = {}
    for name, call in calls.items():
        call()
        stream.synchronize()
        graphs[name] = captured(call, CALLS)
    times: dict[str, dict[str, list[float]]] = {name: {"graph": [], "eager": [], "host": []} for name in calls}

    def timed(work: Callable[[], object], count: int) -> tuple[float, float]:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        barrier.all_gather_int(0)
        work()  # aligns the GPUs
        start.record()
        begin = time.perf_counter()
        work()
        host = time.perf_counter() - begin
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / count, host * 1e6 / count

    for _ in range(rounds):
        for name, call in calls.items():

            def loop(call: Callable[[], object] = call) -> None:
                for _ in range(CALLS):
                    call()

            times[name]["graph"].append(timed(graphs[name].replay, CALLS)[0])
            gpu, host = timed(loop, CALLS)
            times[name]["eager"].append(gpu)
            times[name]["host"].append(host)
    return {name: {kind: statistics.median(v) for kind, v in kinds.items()} for name, kinds in times.items()}


def report(state: dict[str, Any], args: argparse.Namespace) -> None:
    print(
        f"{state['machine']} x{args.ranks}, torch {state['torch']}, NCCL {state['nccl']}, "
        f"[rows, {args.hidden}] bfloat16; us a call"
    )
    kinds = ("graph", "eager", "host")
    columns = "".join(f"{f'{kind} {name}':>15}" for kind in kinds for name in WAYS)
    print(f"{'':12}{'rows':>6}{columns}")
    for op in ("all_reduce", "all_gather"):
        for rows in args.rows:
            cells = "".join(f"{state['figures'][f'{op} {rows} {name}'][kind]:15.2f}" for kind in kinds for name in WAYS)
            print(f"{op:12}{rows:6}{cells}")
    captures = ", ".join(f"{name} {state['figures'][f'capture {name}']['ms']:.1f} ms" for name in WAYS)
    print(f"capture of {CAPTURED_CALLS} all-reduces: {captures}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=5120)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 256, 2048])
    parser.add_argument("--rounds", type=int, default=15)
    args = parse_args(parser, seconds=150)
    state, failure = run_ranks(run_rank, args)
    if state is not None:
        report(state, args)
        if args.json is not None:
            args.json.write_text(json.dumps(state, indent=1))
    if failure is not None:
        print(f"failed: {failure}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
