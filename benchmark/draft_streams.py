"""What drafts gain or cost end to end, by the share that is right: an engine with the computation of any weights.

    PYTHONPATH=python python benchmark/draft_streams.py --shape qwen3-8b --batches 1 8 32 64 256

Tokens per second without drafts, and what `--speculate` makes of them, for each number of requests at once. The texts
are random walks: a token is followed by its successor with the given probability, else by any of 16, so that prompt
lookup is right about that often (the printed counts tell). Random weights alone would not do: whatever the steps are
like, the same texts must come, but their two best logits are close.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import torch

from minisgl import LLM
from minisgl.models import weight
from minisgl.models.weight import Parameter, fill_dummy
from minisgl.ops.quantized import Rounding
from minisgl.tools.bench.offline import _measure
from minisgl.tools.bench.shapes import shape_options
from minisgl.tools.bench.traffic import Request
from minisgl.tools.bench.workloads import Workload

SIZE, BLOCKS = 16, 256  # tokens that follow each other, and how many such blocks there are
NEXT, OTHER = 90.0, 82.0  # logits of the successor and of the others of its block; multiples of 0.5 in bfloat16
EMBEDDING = 256.0  # root mean square, beside which the layers' outputs hardly count


@contextmanager
def walking(shape: str, options: dict[str, Any]) -> Iterator[LLM]:
    """An engine with random weights but for the rows of these tokens in the embedding and in the head."""

    def fill(parameters: tuple[Parameter, ...], rounding: Rounding) -> None:
        fill_dummy(parameters, rounding)
        tensors = {source.name: p.tensor for p in parameters for source in p.sources}
        embedding, head = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
        count, length = min(BLOCKS, len(embedding) // SIZE) * SIZE, embedding.shape[1] ** 0.5
        units = torch.linalg.qr(embedding[:count].float().unflatten(0, (-1, SIZE)).mT)[0].mT
        rows = OTHER * units.sum(1, keepdim=True) + (NEXT - OTHER) * units.roll(1, 1)
        head[:count] = rows.flatten(0, 1).to(head) / length
        embedding[:count] = units.flatten(0, 1).to(embedding) * (EMBEDDING * length)

    with shape_options(shape, options) as given, patch.object(weight, "fill_dummy", fill):
        config = Path(given["model"]) / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"tie_word_embeddings": False}))
        yield LLM(given.pop("model"), **given)


def walks(batch: int, chance: float, input_len: int, output_len: int) -> Workload:
    """`batch` requests, each with a block of its own as far as there are enough."""
    rng, requests = Random(0), []
    for number in range(batch):
        place, prompt = 0, []
        for _ in range(input_len):
            place = (place + 1) % SIZE if rng.random() < chance else rng.randrange(SIZE)
            prompt.append(number % BLOCKS * SIZE + place)
        requests.append(Request(prompt, output_len))
    return Workload("walks", "output_tok_s", requests)


def temperature(chance: float) -> float:
    """At which the successor has probability `chance`, more than 1 / SIZE."""
    return 0.0 if chance == 1 else (NEXT - OTHER) / math.log((SIZE - 1) * chance / (1 - chance))


def rates(llm: LLM, workload: Workload, chance: float, repeats: int) -> tuple[float, float, int, int]:
    """The best tokens per second of some runs without and with drafts, in turn, after one more of each, and drafted
    and accepted tokens of the last run.
    """
    best, without = [0.0, 0.0], patch.object(llm.scheduler, "drafts", None)
    for number in range(repeats + 1):
        for i, drafts in enumerate((without, nullcontext())):
            with drafts:
                run = _measure(llm, workload, temperature(chance))
            best[i] = max(best[i], run["output_tok_s"] * (number > 0))
    return *best, run["drafted_tokens"], run["accepted_tokens"]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--quantization")
    parser.add_argument("--speculate", default="auto")
    parser.add_argument("--num-draft-tokens", type=int, default=4)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 64, 256])
    parser.add_argument("--chances", type=float, nargs="+", default=[0.2, 0.5, 0.7, 0.9, 1.0], help="0.1 to 1")
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=2)
    args = parser.parse_args(argv)
    names = ("speculate", "num_draft_tokens", "quantization")
    with walking(args.shape, {name: getattr(args, name) for name in names}) as llm:
        print(f"{args.shape} {args.quantization or ''}: {llm.scheduler.engine.step_costs()}", flush=True)
        for batch in args.batches:
            line = f"{batch:3}:"
            for chance in args.chances:
                workload = walks(batch, chance, args.input_len, args.output_len)
                off, on, drafted, accepted = rates(llm, workload, chance, args.repeats)
                line += f" | {chance:g}: {off:.0f} tok/s, {on / off:.3f} x ({accepted} of {drafted})"
            print(line, flush=True)


if __name__ == "__main__":
    main()
