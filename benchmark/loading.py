"""How fast weights reach the device, in one process and in several, each its shard, beside plain reads of the files.

    PYTHONPATH=python python benchmark/loading.py /data/shapes/qwen3-8b --tp 1,2,4
    PYTHONPATH=python python benchmark/loading.py ~/models/Qwen3-8B --dtype float32 --no-cold

For each number of ranks, that many processes load their shards at the same time, with the files in the page cache and
dropped from it. The time is from the common start until the last rank has its shard. `plain read` is one process that
reads the same files into small buffers with as many threads as all ranks together, measured before each run; `ratio` is
its time over ours. On a CPU the kernel clears the memory of the weights first: that is in our time only. `peak beyond`
is the most host memory of a rank besides its shard. benchmark/checkpoint.py writes checkpoints of random weights.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from minisgl.checkpoint import hf
from minisgl.tools.bench.report import format_table, provenance, spread, write_json

PIECE = 8 << 20
SAMPLES = 256  # places of a file tested for being in the page cache


def read_all(files: Iterable[Path], threads: int) -> float:
    """Seconds in which `threads` threads read `files` into buffers of their own, used again and again."""
    descriptors = [os.open(path, os.O_RDONLY) for path in files]
    queue = ((fd, start) for fd in descriptors for start in range(0, os.fstat(fd).st_size, PIECE))
    lock = threading.Lock()

    def work() -> None:
        buffer = memoryview(bytearray(PIECE))
        while True:
            with lock:
                piece = next(queue, None)
            if piece is None:
                return
            fd, start = piece
            done = 0
            while done < PIECE and (count := os.preadv(fd, [buffer[done:]], start + done)):
                done += count

    workers = [threading.Thread(target=work) for _ in range(threads)]
    begin = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    seconds = time.perf_counter() - begin
    for fd in descriptors:
        os.close(fd)
    return seconds


def drop_cache(files: Iterable[Path]) -> float:
    """Ask the kernel to drop `files` from its page cache; returns the fraction of samples that are still there."""
    kept = samples = 0
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)  # dirty pages cannot be dropped
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            size = os.fstat(fd).st_size
            for i in range(SAMPLES):
                samples += 1
                with suppress(BlockingIOError):
                    kept += bool(os.preadv(fd, [bytearray(1)], size * i // SAMPLES, os.RWF_NOWAIT))
        finally:
            os.close(fd)
    return kept / max(samples, 1)


def measure(args: argparse.Namespace, ranks: int, is_cold: bool) -> dict[str, Any]:
    """The figures for `ranks` processes that load `args.folder` together."""
    from minisgl.models.weight import default_threads

    files = hf.weight_files(args.folder)
    threads = ranks * (args.threads or default_threads())
    context = multiprocessing.get_context("spawn")
    pipes = []
    for rank in range(ranks):
        pipe, child_end = context.Pipe()
        context.Process(target=_rank, args=(args, rank, ranks, child_end), daemon=True).start()
        child_end.close()
        pipes.append(pipe)

    def ask(word: str) -> list[Any]:
        for pipe in pipes:
            pipe.send(word)
        return [pipe.recv() for pipe in pipes]  # EOFError: a rank died, see its traceback

    raw = []
    seconds = []
    cached = 0.0
    for _ in range(args.repeat):
        drop_cache(files) if is_cold else read_all(files, threads)
        raw.append(read_all(files, threads))
        cached = max(cached, drop_cache(files)) if is_cold else 1.0
        ask("prepare")
        start = time.perf_counter()
        ask("load")
        seconds.append(time.perf_counter() - start)
    facts = ask("facts")
    for pipe in pipes:
        pipe.close()
    total = sum(path.stat().st_size for path in files)
    return {
        "tp": ranks,
        "cache": "cold" if is_cold else "warm",
        "threads": threads,
        "cached_before": cached,
        "bytes": total,
        "seconds": spread(seconds),
        "raw_seconds": spread(raw),
        "gb_s": total / 1e9 / spread(seconds)["median"],
        "raw_gb_s": total / 1e9 / spread(raw)["median"],
        "ratio_percent": spread([100 * r / s for r, s in zip(raw, seconds, strict=True)]),
        "device": facts[0]["device"],
        "shard_bytes": max(f["shard_bytes"] for f in facts),
        "peak_beyond_shard_bytes": max(f["peak_beyond_shard_bytes"] for f in facts),
    }


def _rank(args: argparse.Namespace, rank: int, ranks: int, pipe: Any) -> None:
    """One process: answers "prepare" (new memory for the shard), "load" and "facts" until the pipe is closed."""
    import torch
    from checkpoint import build_parameters

    from minisgl.device.create import create_device
    from minisgl.distributed.info import DistributedInfo
    from minisgl.models.weight import fill, open_checkpoint

    if torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())
    device = create_device(args.device)
    files, config = hf.weight_files(args.folder), hf.load_config(args.folder)
    ignored = {"lm_head.weight"} if config.get("tie_word_embeddings") else set()
    held: list[Any] = []
    peaks: list[int] = []

    def prepare() -> None:
        held.clear()
        dtype = getattr(torch, args.dtype)
        held.extend(build_parameters(config, dtype, device.torch_device, DistributedInfo(rank, ranks)))

    def load() -> None:
        with suppress(OSError):  # not permitted: the peak is then that since the start
            Path("/proc/self/clear_refs").write_text("5")
        before = _memory("VmRSS")
        with ExitStack() as stack:
            fill(open_checkpoint(files, stack), tuple(held), ignored, device, threads=args.threads)
        peaks.append(_memory("VmHWM") - before)

    def facts() -> dict[str, Any]:
        size = sum(parameter.tensor.nbytes for parameter in held)
        on_host = size if device.type == "cpu" else 0
        peak = max(0, max(peaks) - on_host)
        return {"device": device.describe(), "shard_bytes": size, "peak_beyond_shard_bytes": peak}

    answers: dict[str, Callable[[], Any]] = {"prepare": prepare, "load": load, "facts": facts}
    with suppress(EOFError):
        while True:
            pipe.send(answers[pipe.recv()]())


def _memory(field: str) -> int:
    """Bytes of this process under the name that /proc/self/status has for them."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=hf.BUILTIN_MODEL, help="default: the built-in model")
    parser.add_argument("--tp", default="1,2,4", help="ranks, each a process (default: 1,2,4)")
    parser.add_argument("--threads", type=int, help="of each rank (default: the loader's choice)")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--cold", action=argparse.BooleanOptionalAction, default=True, help="also with a cold cache")
    parser.add_argument("--json", help="write everything measured to this file")
    args = parser.parse_args(argv)
    states = (False, True) if args.cold else (False,)
    results = [measure(args, int(ranks), is_cold) for ranks in args.tp.split(",") for is_cold in states]
    rows = [
        [
            f"{r['tp']} {r['cache']}",
            r["threads"],
            r["seconds"]["median"],
            r["gb_s"],
            r["raw_gb_s"],
            r["ratio_percent"]["median"],
            r["shard_bytes"] / 1e9,
            r["peak_beyond_shard_bytes"] / 1e6,
        ]
        for r in results
    ]
    print(f"{args.folder.name}: {results[0]['bytes'] / 1e9:.2f} GB to {results[0]['device']} as {args.dtype}")
    headers = ["tp, page cache", "threads", "s", "GB/s", "plain read GB/s", "ratio %", "shard GB", "peak beyond MB"]
    print(format_table(headers, rows))
    if any(r["cache"] == "cold" and r["cached_before"] > 0.05 for r in results):
        print("the kernel kept some of the files in its page cache: the cold figures are not cold")
    settings = {name: str(value) for name, value in vars(args).items()}
    write_json(args.json, {"settings": settings, "machine": provenance(), "results": results})


if __name__ == "__main__":
    main()
