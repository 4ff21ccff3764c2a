"""minisgl on a CPU beside Hugging Face transformers, in one process and interleaved: medians and their ratio.

    PYTHONPATH=python python benchmark/cpu/compare.py --shape qwen3-10m --dtype bfloat16 --threads 2
    PYTHONPATH=python python benchmark/cpu/compare.py --shape qwen3-0.6b --repeat 3 --cases decode,prefill

Random weights, greedy, no end of sequence. Decode is the time of a token behind the first, after prompts of 64 tokens;
mixed is 48 requests of mixed length, for transformers in static batches of 16 that are padded on the left, each as long
as its longest request; http is the same through a server of ours with 16 streaming clients, beside that same loop.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from minisgl import LLM, SamplingParams
from minisgl.benchmark.online import run_online
from minisgl.benchmark.patterns import OnlineSettings
from minisgl.benchmark.report import format_table
from minisgl.benchmark.shapes import SHAPES, shape_options
from minisgl.message import FlushCacheMsg

PROMPT, MIXED, STATIC_BATCH = 64, 48, 16


@dataclass
class Case:
    """What both do; each callable returns the figure of one run."""

    name: str
    unit: str
    ours: Callable[[], float]
    theirs: Callable[[], float]
    higher_is_better: bool = False


class Transformers:
    def __init__(self, folder: str, dtype: str) -> None:
        torch.manual_seed(0)
        config = AutoConfig.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]], tokens: int) -> float:
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        start = time.perf_counter()
        out = self.model.generate(
            ids, attention_mask=mask, do_sample=False, max_new_tokens=tokens, min_new_tokens=tokens, pad_token_id=0
        )
        seconds = time.perf_counter() - start
        assert out.shape == (len(prompts), width + tokens)
        return seconds


class Ours:
    def __init__(self, options: dict[str, Any], dtype: str, threads: int, quantization: str | None = None) -> None:
        self.llm = LLM(
            options["model"],
            dummy_weight=True,
            dtype=dtype,
            quantization=quantization,
            threads=threads,
            device="cpu",
            max_seq_len=2048,
        )

    def generate(self, prompts: list[list[int]], tokens: int | list[int]) -> float:
        self.llm.scheduler.handle(FlushCacheMsg())
        lengths = tokens if isinstance(tokens, list) else [tokens] * len(prompts)
        params = [SamplingParams(temperature=0, ignore_eos=True, max_tokens=n) for n in lengths]
        start = time.perf_counter()
        done = self.llm.generate(prompts, params)
        seconds = time.perf_counter() - start
        assert [len(d.token_ids) for d in done] == lengths
        return seconds


def cases(ours: Ours, theirs: Transformers, vocab: int, steps: int, options: dict[str, Any]) -> dict[str, list[Case]]:
    rng = random.Random(0)

    def prompt(length: int) -> list[int]:
        return [rng.randrange(5, min(vocab, 4000)) for _ in range(length)]

    def decode(rows: int) -> Case:
        prompts = [prompt(PROMPT) for _ in range(rows)]

        def of(generate: Callable[[list[list[int]], int], float]) -> Callable[[], float]:
            return lambda: 1e3 * (generate(prompts, 1 + steps) - generate(prompts, 1)) / steps

        return Case(f"decode, batch {rows}", "ms/step", of(ours.generate), of(theirs.generate))

    long = [prompt(512)]
    requests = [(prompt(rng.randint(16, 128)), rng.randint(16, 128)) for _ in range(MIXED)]
    total = sum(n for _, n in requests)

    def mixed() -> float:
        return total / ours.generate([p for p, _ in requests], [n for _, n in requests])

    def static() -> float:
        batches = [requests[i : i + STATIC_BATCH] for i in range(0, MIXED, STATIC_BATCH)]
        return total / sum(theirs.generate([p for p, _ in b], max(n for _, n in b)) for b in batches)

    def http() -> float:
        settings = OnlineSettings(
            pattern="closed", num_requests=MIXED, input_len="16-128", output_len="16-128", streams=(STATIC_BATCH,)
        )
        report, _ = run_online(settings, None, options)
        return float(report["results"][0]["output_tok_s"])

    return {
        "decode": [decode(1), decode(16)],
        "prefill": [
            Case(
                "prefill, 512 tokens",
                "ms",
                lambda: 1e3 * ours.generate(long, 1),
                lambda: 1e3 * theirs.generate(long, 1),
            )
        ],
        "mixed": [Case("48 mixed requests", "tok/s", mixed, static, True)],
        "http": [Case("the same over HTTP", "tok/s", http, static, True)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-10m", choices=list(SHAPES))
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--steps", type=int, default=32, help="decode steps of a run")
    parser.add_argument("--cases", default="decode,prefill,mixed,http")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with shape_options(args.shape, {}) as options:
        server = {
            **options,
            "dtype": args.dtype,
            "threads": args.threads,
            "device": "cpu",
            "max_seq_len": 2048,
        }
        ours, theirs = Ours(options, args.dtype, args.threads), Transformers(options["model"], args.dtype)
        known = cases(ours, theirs, SHAPES[args.shape]["vocab_size"], args.steps, server)
        print(
            f"{ours.llm.scheduler.describe()['runners']} · {args.dtype} · {args.threads} threads · "
            f"torch {torch.__version__} · load {os.getloadavg()[0]:.1f}"
        )
        rows = []
        for case in (c for name in args.cases.split(",") for c in known[name]):
            case.ours(), case.theirs()
            pairs = [(case.ours(), case.theirs()) for _ in range(args.repeat)]
            a, b = (statistics.median(side) for side in zip(*pairs, strict=True))
            rows.append([case.name, case.unit, a, b, a / b if case.higher_is_better else b / a])
            print(rows[-1], flush=True)
        print(format_table(["case", "unit", "minisgl", "transformers", "ratio"], rows))
        print(f"load at the end {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
