"""8- and 4-bit weights on a CPU: how far the logits are from those in float32. (compare.py measures the speed.)

    PYTHONPATH=python python benchmark/cpu/quantized.py                       # the built-in model on text of its own
    PYTHONPATH=python python benchmark/cpu/quantized.py --shape qwen3-0.6b    # random weights and tokens

Logits are those after each token; the errors are absolute, beside the standard deviation of the exact logits; KL is
from the exact distribution.
"""

from __future__ import annotations

import argparse
import os
import random
from typing import Any

import torch

from minisgl import LLM, SamplingParams
from minisgl.checkpoint.hf import BUILTIN_MODEL
from minisgl.tokenizer.tokenize import load_tokenizer
from minisgl.tools.bench.report import format_table
from minisgl.tools.bench.shapes import SHAPES, shape_options
from minisgl.tools.verify.steps import Span, stepper_of

KINDS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8, float32": {"dtype": "float32", "quantization": "int8"},
    "int8, bfloat16": {"dtype": "bfloat16", "quantization": "int8"},
    "int4, float32": {"dtype": "float32", "quantization": "int4"},
    "int4, bfloat16": {"dtype": "bfloat16", "quantization": "int4"},
}
PROMPTS = (
    "<|im_start|>user\nTell me a story about a fox named Lily.<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
    "Once upon a time",
)
TOKENS = 100


def sample_texts(llm: LLM) -> list[list[int]]:
    """Prompts, each with the model's greedy answer."""
    tokenizer = load_tokenizer(BUILTIN_MODEL)
    texts = [tokenizer.encode(prompt).ids for prompt in PROMPTS]
    answers = llm.generate(texts, SamplingParams(temperature=0, max_tokens=TOKENS))
    return [ids + answer.token_ids for ids, answer in zip(texts, answers, strict=True)]


def logits_of(llm: LLM, texts: list[list[int]]) -> torch.Tensor:
    stepper = stepper_of(llm)
    steps = [stepper.step([Span(row, i, [t])]) for row, ids in enumerate(texts) for i, t in enumerate(ids)]
    return torch.cat(steps).double()


def errors(options: dict[str, Any], threads: int) -> None:
    texts: list[list[int]] = []
    exact, rows = torch.empty(0), []
    for name, kind in KINDS.items():
        llm = LLM(**options, **kind, threads=threads, device="cpu")
        if not texts:
            rng = random.Random(0)
            texts = [[rng.randrange(4000) for _ in range(TOKENS)]] if options else sample_texts(llm)
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
    parser.add_argument("--shape", choices=list(SHAPES), help="default: the built-in model")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    print(f"{args.shape or 'built-in model'} · {args.threads} threads · load {os.getloadavg()[0]:.1f}")
    with shape_options(args.shape, {}) as options:
        errors(options, args.threads)
    print(f"load at the end {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
