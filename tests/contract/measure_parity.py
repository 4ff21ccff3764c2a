"""Prints the table of docs/models.md: `PYTHONPATH=tests python -m contract.measure_parity`, from the root.

Differences from transformers' logits in float32, relative to the largest logit of the position; of several positions
the largest. First a prompt of 100 tokens and 50 that are decoded, then the same prompt in chunks of 33, behind a prefix
hit of 64 tokens, in a step with another prompt, a chunk and a sequence that decodes, and on 2 and 4 ranks. In bfloat16
the mean over ten whole prompts, with transformers' own beside it, both against transformers' float32.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import torch
import transformers

from contract.checkpoints import COMMON, SCALED_ROPES, Checkpoint, configurations, save
from contract.harness import CPU, MiniEngine, Span
from minisgl.checkpoint.hf import load_config
from minisgl.distributed.communicator import Communicator
from minisgl.models.model_config import ModelConfig
from minisgl.native.runner import layers_refusal
from minisgl.tools.verify.checks import reference, relative_errors
from support.ranks import run_ranks

LENGTH, CHUNK, DECODED = 250, 100, 50
PROMPTS = range(160, LENGTH + 1, 10)


def steps(engine: MiniEngine, ids: list[int]) -> list[tuple[torch.Tensor, list[list[int]]]]:
    """Return the logits [sequences, V] of each kind of step, and the tokens before them."""
    prompt, other = ids[:CHUNK], ids[CHUNK : CHUNK + 60]
    whole = [engine.step([Span(0, 0, prompt)])]
    whole += [engine.step([Span(0, i, ids[i : i + 1])]) for i in range(CHUNK, CHUNK + DECODED)]
    in_chunks = [engine.step([Span(1, i, prompt[i : i + 33])]) for i in range(0, CHUNK, 33)][-1]
    engine.share_prefix(1, 2, 64)
    after_hit = engine.step([Span(2, 64, other)])
    mixed = [Span(1, CHUNK, ids[CHUNK : CHUNK + 1]), Span(3, 0, other), Span(4, 0, prompt[:30], samples=False)]
    return [
        (torch.cat(whole), [ids[:n] for n in range(CHUNK, CHUNK + DECODED + 1)]),
        (in_chunks, [prompt]),
        (after_hit, [prompt[:64] + other]),
        (engine.step(mixed), [ids[: CHUNK + 1], other]),
    ]


def largest(checkpoint: Checkpoint, got: torch.Tensor, prompts: list[list[int]]) -> float:
    want = torch.cat([checkpoint.logits(ids)[-1:] for ids in prompts])
    return float(relative_errors(got, want).max())


@torch.inference_mode()
def measure(name: str, config: transformers.PreTrainedConfig) -> None:
    ids = random.Random(0).choices(range(COMMON["vocab_size"]), k=LENGTH)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = save(Path(folder), config)
        engine, half = MiniEngine.load(Path(folder)), MiniEngine.load(Path(folder), dtype=torch.bfloat16)
        figures = [largest(checkpoint, *step) for step in steps(engine, ids)]

        def error(comm: Communicator) -> float:
            return largest(checkpoint, *steps(MiniEngine.load(Path(folder), comm=comm), ids)[3])

        figures += [run_ranks(size, error)[-1] for size in (2, 4)]
        theirs = reference(Path(folder), [ids], torch.bfloat16, CPU).logits[0]
        reason = layers_refusal(ModelConfig.from_hf(load_config(Path(folder))))
    last = torch.tensor(PROMPTS) - 1
    want = checkpoint.logits(ids)[last]
    ours = torch.cat([half.step([Span(5 + row, 0, ids[:n])]) for row, n in enumerate(PROMPTS)])
    halves = [f"{float(relative_errors(logits, want).mean()):.3f}" for logits in (ours, theirs[last])]
    runs = "op by op" if reason else "C++ step"
    print(
        f"| {name} | {' | '.join(f'{figure:.1e}' for figure in figures)} | {' | '.join(halves)} | {runs} |", flush=True
    )


def main() -> None:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    names = "decoding", "chunks", "hit", "mixed", "2 ranks", "4 ranks", "bfloat16", "transformers' bfloat16", "on a CPU"
    print(f"| checkpoint | {' | '.join(names)} |\n|{'---|' * (1 + len(names))}")
    for name, config in configurations().items():
        measure(f"`{name}`", config)
    for name, rope in SCALED_ROPES.items():
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        measure(f"Qwen3, rope `{name}`", transformers.Qwen3Config(**COMMON, **heads, rope_parameters=dict(rope)))


if __name__ == "__main__":
    main()
