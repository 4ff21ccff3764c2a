"""Prints the tables of docs/models.md: `PYTHONPATH=tests python -m contract.measure_parity`, from the root.

The largest difference from transformers' logits, relative to the largest logit of the position: in float32 over the
last of every prefix of 250 tokens, prefilled in one chunk of 100 and then decoded; in bfloat16 the mean over ten whole
prompts, with transformers' own beside it. Both bfloat16 figures are against transformers' float32. The second table is
the float32 figure on several ranks, over a chunk of 100 and the next 30.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import torch
import transformers

from contract.checkpoints import COMMON, SCALED_ROPES, configurations, save
from contract.harness import CPU, MiniEngine, Span
from minisgl.distributed.communicator import Communicator
from minisgl.tools.verify.checks import reference, relative_errors
from support.ranks import run_ranks

LENGTH, CHUNK = 250, 100
PROMPTS = range(160, LENGTH + 1, 10)


@torch.inference_mode()
def measure(name: str, config: transformers.PreTrainedConfig) -> None:
    last = torch.tensor(PROMPTS) - 1
    ids = random.Random(0).choices(range(COMMON["vocab_size"]), k=LENGTH)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = save(Path(folder), config)
        engine, half = MiniEngine.load(Path(folder)), MiniEngine.load(Path(folder), dtype=torch.bfloat16)
        theirs = reference(Path(folder), [ids], torch.bfloat16, CPU).logits[0][last]
    want = checkpoint.logits(ids)
    spans = [Span(0, 0, ids[:CHUNK]), *(Span(0, i, ids[i : i + 1]) for i in range(CHUNK, LENGTH))]
    full = relative_errors(torch.cat([engine.step([span]) for span in spans]), want[CHUNK - 1 :]).max()
    ours = relative_errors(
        torch.cat([half.step([Span(row, 0, ids[:n])]) for row, n in enumerate(PROMPTS)]), want[last]
    ).mean()
    print(f"| {name} | {full:.1e} | {ours:.3f} | {relative_errors(theirs, want[last]).mean():.3f} |", flush=True)


def measure_ranks(name: str, config: transformers.PreTrainedConfig) -> None:
    ids = random.Random(0).choices(range(COMMON["vocab_size"]), k=CHUNK + 30)
    spans = [Span(0, 0, ids[:CHUNK]), *(Span(0, i, ids[i : i + 1]) for i in range(CHUNK, len(ids)))]
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = save(Path(folder), config)
        want = checkpoint.logits(ids)[CHUNK - 1 :]

        def error(comm: Communicator) -> float:
            engine = MiniEngine.load(Path(folder), comm=comm)
            return float(relative_errors(torch.cat([engine.step([span]) for span in spans]), want).max())

        figures = [f"{run_ranks(size, error)[-1]:.1e}" for size in (1, 2, 4)]
    print(f"| {name} | {' | '.join(figures)} |", flush=True)


def main() -> None:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    print("| checkpoint | float32 | bfloat16 | transformers' bfloat16 |\n|---|---|---|---|")
    for name, config in configurations().items():
        measure(f"`{name}`", config)
    for name, rope in SCALED_ROPES.items():
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        measure(f"Qwen3, rope `{name}`", transformers.Qwen3Config(**COMMON, **heads, rope_parameters=dict(rope)))
    print("\n| checkpoint | TP 1 | TP 2 | TP 4 |\n|---|---|---|---|")
    for name, config in configurations().items():
        measure_ranks(f"`{name}`", config)


if __name__ == "__main__":
    main()
