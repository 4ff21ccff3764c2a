"""The engines that compare.py runs in this process or serves: minisgl and those of transformers."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from unittest.mock import patch

import numpy as np

from minisgl.core.errors import MinisglError, StartupError
from minisgl.core.message import DetokenizeMsg, FlushCacheMsg
from minisgl.core.params import SamplingParams

STATIC_BATCH = 16
CONTEXT = 1024  # tokens of the longest request
SERVE_S = 180.0
PAGES = ("--cb-num-blocks=64", "--cb-max-batch-tokens=1024")  # otherwise it allocates, and clears, most of the memory


@dataclass(frozen=True)
class Run:
    """Seconds from the call to the end, and to the moment at which every request had its first token."""

    seconds: float
    first: float


class Runner(Protocol):
    name: str

    def run(self, prompts: list[list[int]], lengths: list[int]) -> Run:
        """Generate outputs of `lengths` greedy tokens with an empty cache."""


class Minisgl:
    def __init__(self, folder: Path, dtype: str, threads: int, quantization: str | None = None) -> None:
        from minisgl.llm.llm import LLM

        self.name = f"minisgl {quantization or dtype}"
        options = {"dtype": dtype, "quantization": quantization, "threads": threads, "device": "cpu"}
        self.llm = LLM(str(folder), **options, max_seq_len=CONTEXT)

    def run(self, prompts: list[list[int]], lengths: list[int]) -> Run:
        self.llm.scheduler.handle(FlushCacheMsg())
        params = [SamplingParams(temperature=0, ignore_eos=True, max_tokens=n) for n in lengths]
        send, waiting, first = self.llm.scheduler.io.send, len(prompts), 0.0
        seen = set[int]()

        def timed_send(msg: DetokenizeMsg) -> None:
            nonlocal first
            if len(seen) < waiting:
                seen.update(np.frombuffer(msg.uids, "<i8").tolist())
                first = time.perf_counter()
            send(msg)

        with patch.object(self.llm.scheduler.io, "send", timed_send):
            start = time.perf_counter()
            done = self.llm.generate(prompts, params)
            end = time.perf_counter()
        check_lengths(self.name, [len(d.token_ids) for d in done], lengths)
        return Run(end - start, first - start)


class StaticBatches:
    """`generate` in static batches of 16, padded on the left, each as long as its longest request."""

    def __init__(self, folder: Path, dtype: str) -> None:
        self.name = "transformers"
        self._model = _load(folder, dtype)

    def run(self, prompts: list[list[int]], lengths: list[int]) -> Run:
        start, first = time.perf_counter(), 0.0
        for i in range(0, len(prompts), STATIC_BATCH):
            first = self._generate(prompts[i : i + STATIC_BATCH], max(lengths[i : i + STATIC_BATCH]))
        return Run(time.perf_counter() - start, first - start)

    def _generate(self, prompts: list[list[int]], tokens: int) -> float:
        """The time of the first tokens."""
        import torch

        times: list[float] = []

        def note(ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
            times.append(time.perf_counter())
            return torch.zeros(len(ids), dtype=torch.bool)

        width = max(map(len, prompts))
        out = self._model.generate(
            torch.tensor([[0] * (width - len(p)) + p for p in prompts]),
            attention_mask=torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts]),
            do_sample=False,
            max_new_tokens=tokens,
            eos_token_id=None,
            pad_token_id=0,
            stopping_criteria=[note],
        )
        check_lengths(self.name, [out.shape[1] - width], [tokens])
        return times[0]


class ContinuousBatching:
    """transformers' continuous batching, as in `generate_batch`, with one manager for all runs."""

    def __init__(self, folder: Path, dtype: str) -> None:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        self.name = "transformers, continuous batching"
        config = ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=1024, allow_block_sharing=False)
        self._manager = _load(folder, dtype).init_continuous_batching(
            generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
            continuous_batching_config=config,
        )
        self._manager.start()

    def run(self, prompts: list[list[int]], lengths: list[int]) -> Run:
        start = time.perf_counter()
        ids = [
            self._manager.add_request(prompt, max_new_tokens=n, record_timestamps=True, eos_token_id=-1)
            for prompt, n in zip(prompts, lengths, strict=True)
        ]
        done: dict[str, Any] = {}
        while len(done) < len(ids):
            result = self._manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                done[result.request_id] = result
            elif result is None and not self._manager.is_running():
                raise MinisglError(f"{self.name} ended")
        end = time.perf_counter()
        check_lengths(self.name, [len(done[i].generated_tokens) for i in ids], lengths)
        return Run(end - start, max(done[i].timestamps[0] for i in ids) - start)

    def close(self) -> None:
        """End the manager's thread, which would keep the process alive."""
        self._manager.stop(block=True)


def _load(folder: Path, dtype: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()


def check_lengths(name: str, lengths: list[int], wanted: list[int]) -> None:
    if lengths != wanted:
        raise MinisglError(f"{name} made {lengths} tokens instead of {wanted}")


def missing_for_transformers(*packages: str) -> str | None:
    """The command that installs what is missing; None if nothing is."""
    missing = [name for name in ("transformers", *packages) if importlib.util.find_spec(name) is None]
    return f"pip install {' '.join(missing)}" if missing else None


@contextmanager
def transformers_server(folder: Path, dtype: str, threads: int) -> Iterator[str]:
    """Run `transformers serve` with continuous batching; yields its URL. Raises `StartupError`."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [sys.executable, "-m", "transformers.cli.transformers", "serve", str(folder)]
    command += ["--device=cpu", f"--dtype={dtype}", f"--port={port}", "--host=127.0.0.1", "--continuous-batching"]
    env = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(
        [*command, *PAGES], env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + SERVE_S
        while not _answers(f"{url}/health"):
            if process.poll() is not None or time.monotonic() > deadline:
                raise StartupError("transformers serve does not start")
            time.sleep(0.2)
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
