"""`minisgl bench loading`: how fast weights reach the device, in one process or several, and how fast they could."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from minisgl.bench.checkpoint import shard, wanted_parameters
from minisgl.bench.plain_read import drop_cache, read_all
from minisgl.bench.report import format_table, provenance, spread, spread_percent
from minisgl.checkpoint import hf
from minisgl.errors import ConfigError, MinisglError

START_TIMEOUT_S: Final = 300.0
TIMEOUT_S: Final = 3600.0


@dataclass(frozen=True, kw_only=True)
class LoadingSettings:
    """What to run; the defaults are the command line's. `threads` is for each rank; None is the loader's own choice."""

    tp: tuple[int, ...]
    threads: int | None
    repeat: int
    device: str
    dtype: str
    cold: bool

    def __post_init__(self) -> None:
        """Raises `ConfigError` for a value that cannot work."""
        if not self.tp or min(self.tp) < 1:
            raise ConfigError("--tp must be numbers of ranks like 1,2,4")
        if self.repeat < 1 or (self.threads is not None and self.threads < 1):
            raise ConfigError("--repeat and --threads must be at least 1")


def run_loading(settings: LoadingSettings, folder: Path) -> dict[str, Any]:
    """Load `folder` in every way asked for; returns everything measured, ready for JSON.

    Ranks load at the same time, each its shard; the time is that from their common start to the end of the last.
    """
    import torch

    from minisgl.models.weight import default_threads

    files = hf.weight_files(folder)
    total = sum(path.stat().st_size for path in files)
    wanted = wanted_parameters(hf.load_config(folder))
    for ranks in settings.tp:
        shard(wanted, 0, ranks, torch.bfloat16, torch.device("meta"))  # refuses what cannot be divided
    results = []
    for ranks in settings.tp:
        threads = ranks * (settings.threads or default_threads())
        for is_cold in (False, True) if settings.cold else (False,):
            results.append({"tp": ranks, "cache": "cold" if is_cold else "warm", "threads": threads})
            results[-1] |= _measure(settings, folder, files, total, ranks, threads, is_cold)
    return {
        "benchmark": "loading",
        "settings": asdict(settings),
        "folder": folder.name,
        "files": len(files),
        "bytes": total,
        "machine": provenance(),
        "results": results,
    }


def _measure(
    settings: LoadingSettings, folder: Path, files: list[Path], total: int, ranks: int, threads: int, is_cold: bool
) -> dict[str, Any]:
    def set_cache() -> float:
        if is_cold:
            return drop_cache(files)
        read_all(files, threads)
        return 1.0

    raw, seconds, cached = [], [], []
    with _Ranks(settings, folder, ranks) as loaders:
        for _ in range(settings.repeat):
            set_cache()
            raw.append(read_all(files, threads))
            cached.append(set_cache())
            seconds.append(loaders.load())
        facts = loaders.facts()
    share = spread([100 * r / s for r, s in zip(raw, seconds, strict=True)])
    return {
        "seconds": spread(seconds),
        "gb_s": total / 1e9 / spread(seconds)["median"],
        "raw_gb_s": total / 1e9 / spread(raw)["median"],
        "raw_seconds": spread(raw),
        "share_percent": share,
        "cached_before": max(cached) if is_cold else min(cached),
        **facts,
    }


class _Ranks:
    """Processes that load their shards together, as often as asked."""

    def __init__(self, settings: LoadingSettings, folder: Path, ranks: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes, self._processes = [], []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=_rank, args=(settings, folder, rank, ranks, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def __enter__(self) -> _Ranks:
        self._collect(START_TIMEOUT_S)
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(START_TIMEOUT_S)

    def _collect(self, timeout: float) -> list[Any]:
        values = []
        for rank, pipe in enumerate(self._pipes):
            try:
                value = pipe.recv() if pipe.poll(timeout) else TimeoutError(f"no answer in {timeout:g} s")
            except EOFError:
                value = RuntimeError("it ended")
            if isinstance(value, MinisglError):
                raise value
            if isinstance(value, BaseException):
                raise MinisglError(f"rank {rank} failed: {value}")
            values.append(value)
        return values

    def _ask(self, word: str) -> list[Any]:
        for pipe in self._pipes:
            pipe.send(word)
        return self._collect(TIMEOUT_S)

    def load(self) -> float:
        """Seconds from the common start until the last has its shard."""
        self._ask("prepare")
        start = time.perf_counter()
        self._ask("load")
        return time.perf_counter() - start

    def facts(self) -> dict[str, Any]:
        facts = self._ask("facts")
        return {
            "device": facts[0]["device"],
            "shard_bytes": max(f["shard_bytes"] for f in facts),
            "peak_beyond_shard_bytes": max(f["peak_beyond_shard_bytes"] for f in facts),
        }


def _rank(settings: LoadingSettings, folder: Path, rank: int, ranks: int, pipe: Any) -> None:
    """One process: answers "prepare" (new memory for the shard), "load" and "facts" until the pipe is closed."""
    try:
        answers = _loader(settings, folder, rank, ranks)
        pipe.send(None)
        while True:
            try:
                word = pipe.recv()
            except EOFError:
                return
            pipe.send(answers[word]())
    except BaseException as e:
        pipe.send(e if isinstance(e, MinisglError) else RuntimeError(f"{type(e).__name__}: {e}"))


def _loader(settings: LoadingSettings, folder: Path, rank: int, ranks: int) -> dict[str, Callable[[], Any]]:
    import torch

    from minisgl.device.device import create_device
    from minisgl.models.weight import load_weights

    if torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())
    device = create_device(settings.device)
    files, config = hf.weight_files(folder), hf.load_config(folder)
    wanted = wanted_parameters(config)
    ignored = {"lm_head.weight"} if config.get("tie_word_embeddings") else set()
    held: list[Any] = []
    peaks: list[int] = []

    def prepare() -> None:
        held.clear()
        held.extend(shard(wanted, rank, ranks, getattr(torch, settings.dtype), device.torch_device))

    def load() -> None:
        before = _start_of_peak()
        load_weights(files, tuple(held), ignored, device, threads=settings.threads)
        peaks.append(_memory("VmHWM") - before)

    def facts() -> dict[str, Any]:
        size = sum(parameter.tensor.nbytes for parameter in held)
        on_host = size if device.type == "cpu" else 0
        return {
            "device": device.describe(),
            "shard_bytes": size,
            "peak_beyond_shard_bytes": max(0, max(peaks) - on_host),
        }

    return {"prepare": prepare, "load": load, "facts": facts}


def _memory(field: str) -> int:
    """Bytes of this process by the name that /proc/self/status has for them."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def _start_of_peak() -> int:
    """Let the peak of the resident memory begin at what is resident now, which is returned."""
    with suppress(OSError):  # not allowed: then it is the peak since the start
        Path("/proc/self/clear_refs").write_text("5")
    return _memory("VmRSS")


def loading_table(report: dict[str, Any]) -> str:
    """The report for people."""
    rows = [
        [
            f"{r['tp']} {r['cache']}",
            r["threads"],
            r["seconds"]["median"],
            r["gb_s"],
            r["raw_gb_s"],
            r["share_percent"]["median"],
            r["shard_bytes"] / 1e9,
            r["peak_beyond_shard_bytes"] / 1e6,
            spread_percent(r["seconds"]) if report["settings"]["repeat"] > 1 else None,
        ]
        for r in report["results"]
    ]
    headers = ["tp, page cache", "threads", "s", "GB/s", "plain read GB/s", "share %"]
    headers += ["shard GB", "peak beyond it MB", "spread %"]
    head = (
        f"{report['folder']}: {report['bytes'] / 1e9:.2f} GB in {report['files']} files, to "
        f"{report['results'][0]['device']} as {report['settings']['dtype']}"
    )
    warm = [r for r in report["results"] if r["cache"] == "cold" and r["cached_before"] > 0.05]
    note = "the kernel kept some of the files in its page cache: what is called cold is not" if warm else None
    return "\n".join([line for line in (head, format_table(headers, rows), note) if line])
