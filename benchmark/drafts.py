"""What drafts gain: answers of the built-in model (or --model) per second with each --speculate, in turns.

    PYTHONPATH=python python benchmark/drafts.py --rounds 7 --streams 1 8

Every engine answers the same prompts in every round, one engine after the other, on one thread. Seconds are those of
the process on a CPU, so that other work on the machine counts less. Prints the median over the rounds of tokens per
second, and of the ratio to `off` in the same round: with the prompts, and after the first token of each answer.
Raises `AssertionError` where a text differs from that of `off`.
"""

from __future__ import annotations

import argparse
import json
import time
from statistics import median

from minisgl import LLM, SamplingParams
from minisgl.core.params import Grammar

TEXTS = (
    "The lighthouse keeper wrote down the weather every evening, and counted fourteen lamps before he went to sleep.",
    "def area(width, height):\n    return width * height\n\nprint(area(3, 2))\nprint(area(5, 4))",
    "Grün, blau, rot: 東京 🚀 x9, crème brûlée, and then again grün, blau, rot.",
    "Two ships waited behind the island until morning, because the wind came from the north-west.",
)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "city": {"type": "string"},
        "occupation": {"type": "string"},
        "is_member": {"type": "boolean"},
    },
    "required": ["name", "age", "city", "occupation", "is_member"],
    "additionalProperties": False,
}
PEOPLE = (
    "Anna is a 34 year old baker from Lisbon and a member.",
    "Tom, 27, lives in Oslo, works as a nurse and is not a member.",
    "Mira from Vienna is 51, a teacher, and a member.",
    "Jonas is 19, a student in Prague, and not a member.",
)
ANIMALS = ("fox named Rika", "robin called Skia", "bear named Olo", "cat named Minka")

KINDS = {
    "copying": [f"Repeat exactly: {text}" for text in TEXTS],
    "JSON, grammar": [f"Extract this JSON schema: {json.dumps(SCHEMA)}\n\n{person}" for person in PEOPLE],
    "JSON": [f"Extract this JSON schema: {json.dumps(SCHEMA)}\n\n{person}" for person in PEOPLE],
    "stories": [f"Tell me a short story about a {animal}." for animal in ANIMALS],
    "stories, T = 1": [f"Tell me a short story about a {animal}." for animal in ANIMALS],
}


def params(kind: str, max_tokens: int) -> SamplingParams:
    grammar = Grammar("json_schema", json.dumps(SCHEMA), param="schema") if kind.endswith("grammar") else None
    return SamplingParams(temperature=float(kind.endswith("1")), seed=0, max_tokens=max_tokens, grammar=grammar)


def answers(llm: LLM, kind: str, streams: int, max_tokens: int) -> tuple[float, list[list[int]]]:
    """Return the seconds, and the tokens, of the prompts of `kind`, `streams` at a time."""
    prompts = [[{"role": "user", "content": text}] for text in KINDS[kind] * max(1, streams // 4)]
    tokens: list[list[int]] = []
    began = time.process_time()
    for i in range(0, len(prompts), streams):
        done = llm.chat(prompts[i : i + streams], params(kind, max_tokens), use_tqdm=False)
        tokens += [each.token_ids for each in done]
    return time.process_time() - began, tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="")
    parser.add_argument("--speculate", nargs="+", default=["auto", "ngram"])
    parser.add_argument("--num-draft-tokens", type=int, default=4)
    parser.add_argument("--streams", type=int, nargs="+", default=[1])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    names = ["off", *args.speculate]
    # Without a prefix cache a repeated prompt is no easier, and a tree has nothing to offer.
    cache = {"cache_type": "radix" if "tree" in names else "naive"}
    llms = {
        name: LLM(
            args.model, speculate=name, num_draft_tokens=args.num_draft_tokens, threads=1, num_pages=4096, **cache
        )
        for name in names
    }
    for streams in args.streams:
        for kind in KINDS:
            rates: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
            counts = {name: (s.drafted_tokens, s.accepted_tokens) for name, s in stats(llms).items()}
            for number in range(args.rounds + 1):
                want: list[list[int]] = []
                for name, llm in llms.items():
                    seconds, tokens = answers(llm, kind, streams, 200)
                    assert tokens == (want := want or tokens), f"{name} changes a text of {kind}"
                    prompts = answers(llm, kind, streams, 1)[0]
                    if number:  # the first round warms up
                        count = sum(map(len, tokens))
                        rates[name].append((count / seconds, (count - len(tokens)) / (seconds - prompts)))
            line = f"{kind:15} {streams:3} streams: off {median(rate for rate, _ in rates['off']):6.0f} tok/s"
            for name in args.speculate:
                pairs = [list(zip(a, b, strict=True)) for a, b in zip(rates[name], rates["off"], strict=True)]
                whole, decoding = (median(pair[i][0] / pair[i][1] for pair in pairs) for i in range(2))
                drafted, accepted = (
                    b - a
                    for a, b in zip(
                        counts[name], (stats(llms)[name].drafted_tokens, stats(llms)[name].accepted_tokens), strict=True
                    )
                )
                line += f" | {name} {whole:.2f} x, decoding {decoding:.2f} x ({accepted} of {drafted} right)"
            print(line, flush=True)


def stats(llms: dict[str, LLM]) -> dict[str, object]:
    return {name: llm.scheduler.stats for name, llm in llms.items()}


if __name__ == "__main__":
    main()
