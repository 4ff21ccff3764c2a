"""Weights of 8 bits beside bfloat16 ones on a CPU: how fast, and how far the logits are from those in float32.

    PYTHONPATH=python python benchmark/cpu/int8.py speed --shape qwen3-0.6b --repeat 5 --steps 8
    PYTHONPATH=python python benchmark/cpu/int8.py logits                       # the built-in model on text of its own
    PYTHONPATH=python python benchmark/cpu/int8.py logits --shape qwen3-0.6b    # random weights and tokens

Speed is measured in one process and interleaved: medians, their ratio, and the best. Logits are those after each token;
the errors are absolute, beside the standard deviation of the exact logits; KL is from the exact distribution.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from compare import Ours

from minisgl import LLM, SamplingParams
from minisgl.benchmark.report import format_table
from minisgl.benchmark.shapes import SHAPES, shape_options
from minisgl.tokenizer.tokenize import load_tokenizer
from minisgl.utils.hf import BUILTIN_MODEL
from minisgl.verify.steps import Span
from minisgl.verify.tokens import engine_of, stepper_of

KINDS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8, float32": {"dtype": "float32", "quantization": "int8"},
    "int8, bfloat16": {"dtype": "bfloat16", "quantization": "int8"},
}
PROMPTS = (
    "<|im_start|>user\nTell me a story about a fox named Lily.<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
    "Once upon a time",
)
TOKENS = 100
CACHED = 64  # of a prompt, so that its last token is a step like any other


def speed(options: dict[str, Any], threads: int, repeat: int, steps: int) -> None:
    sides = [Ours(options, "bfloat16", threads, q) for q in (None, "int8")]
    rng = random.Random(0)

    def prompts(rows: int, length: int) -> list[list[int]]:
        return [[rng.randrange(5, 4000) for _ in range(length)] for _ in range(rows)]

    def decode(texts: list[list[int]]) -> Callable[[Ours], float]:
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=steps)

        def step(side: Ours) -> float:
            start = time.perf_counter()
            side.llm.generate(texts, params)
            return 1e3 * (time.perf_counter() - start) / steps

        return step

    long = prompts(1, 512)
    cases: dict[str, Callable[[Ours], float]] = {
        "decode, batch 1, ms a step": decode(prompts(1, CACHED + 1)),
        "decode, batch 16": decode(prompts(16, CACHED + 1)),
        "prefill of 512 tokens, ms": lambda side: 1e3 * side.generate(long, 1),
    }
    rows = []
    for name, case in cases.items():
        for side in sides:
            case(side)
        runs = list(zip(*([case(side) for side in sides] for _ in range(repeat)), strict=True))
        a, b = map(statistics.median, runs)
        rows.append([name, a, b, a / b, *map(min, runs)])
    print(format_table(["case", "bfloat16", "int8", "ratio", "best of bfloat16", "of int8"], rows))


def own_texts(llm: LLM) -> list[list[int]]:
    """Prompts and what the model says to them."""
    tokenizer = load_tokenizer(BUILTIN_MODEL)
    texts = [tokenizer.encode(prompt).ids for prompt in PROMPTS]
    answers = llm.generate(texts, SamplingParams(temperature=0, max_tokens=TOKENS))
    return [ids + answer.token_ids for ids, answer in zip(texts, answers, strict=True)]


def logits_of(llm: LLM, texts: list[list[int]]) -> torch.Tensor:
    stepper = stepper_of(engine_of(llm))
    steps = [stepper.step([Span(row, i, [t])]) for row, ids in enumerate(texts) for i, t in enumerate(ids)]
    return torch.cat(steps).double()


def errors(options: dict[str, Any], threads: int) -> None:
    texts: list[list[int]] = []
    exact, rows = torch.empty(0), []
    for name, kind in KINDS.items():
        llm = LLM(**options, **kind, threads=threads, device="cpu")
        if not texts:
            rng = random.Random(0)
            texts = [[rng.randrange(4000) for _ in range(TOKENS)]] if options else own_texts(llm)
        logits = logits_of(llm, texts)
        if name == "float32":
            exact = logits
            print(f"{len(exact)} distributions over {exact.shape[1]} tokens; logits' deviation {exact.std():.3f}")
            continue
        off = (logits - exact).abs()
        wanted, ours = exact.log_softmax(-1), logits.log_softmax(-1)
        divergence = (wanted.exp() * (wanted - ours)).sum(-1)
        same = (logits.argmax(-1) == exact.argmax(-1)).double().mean()
        figures = (off.mean(), off.max(), divergence.mean(), divergence.max())
        rows.append([name, *(f"{x:.1e}" for x in figures), f"{100 * same:.1f}"])
    print(format_table(["weights, rest", "mean error", "largest", "mean KL", "largest KL", "same first, %"], rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("speed", "logits"))
    parser.add_argument("--shape", choices=list(SHAPES), help="default: the built-in model, or qwen3-10m for speed")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--steps", type=int, default=32, help="decode steps of a run")
    args = parser.parse_args()
    shape = args.shape or ("qwen3-10m" if args.what == "speed" else None)
    print(f"{shape or 'built-in model'} · {args.threads} threads · load {os.getloadavg()[0]:.1f}")
    with shape_options(shape, {}) as options:
        if args.what == "speed":
            speed(options, args.threads, args.repeat, args.steps)
        else:
            errors(options, args.threads)
    print(f"load at the end {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
