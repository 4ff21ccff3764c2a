"""Measures each skill on held-out items with greedy decoding.

python -m training.evaluate --model python/minisgl/demo/model --items 200
python -m training.evaluate --model python/minisgl/demo/model --items 10000 --skills phrases
python -m training.evaluate --model python/minisgl/demo/model --items 200 --engine minisgl --quantization int8
python -m training.evaluate --model python/minisgl/demo/model --items 20 --speculate eagle3:build/head
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from training import skills
from training.conversation import Check, render

MAX_TOKENS = 420


@dataclass(frozen=True)
class Probe:
    """A prompt, and how its answer is checked."""

    skill: str
    prompt: str
    check: Check


@dataclass(frozen=True)
class Answer:
    """The text that came, and whether the model ended it by itself."""

    text: str
    ended: bool


def probes(seed: int, items: int, names: Sequence[str]) -> list[Probe]:
    """At least ``items`` graded held-out turns of each skill of ``names``."""
    result: list[Probe] = []
    for skill in names:
        rng, found = Random(f"evaluation {seed} {skill}"), 0
        while found < items:
            episode = skills.held_out_episode(skill, rng)
            for i, turn in enumerate(episode.turns):
                if turn.check is not None:
                    prompt = "".join(text for text, _ in render(episode, upto=i))
                    result.append(Probe(skill, prompt, turn.check))
                    found += 1
    return result


def with_transformers(model: str, prompts: list[str], dtype: str, tokens_a_batch: int = 120_000) -> list[Answer]:
    """Batched greedy decoding with transformers, on a GPU where there is one; "auto": bfloat16 there, else float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    if dtype == "auto":
        dtype = "bfloat16" if device == "cuda" else "float32"
    network = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).to(device)
    stops = {tokenizer.convert_tokens_to_ids("<|im_end|>"), tokenizer.convert_tokens_to_ids("<|endoftext|>")}
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    answers: dict[int, Answer] = {}
    while order:
        count, longest = 0, 0
        for i in order:
            longest = max(longest, len(tokenizer(prompts[i])["input_ids"]))
            if (count and (count + 1) * longest > tokens_a_batch) or count == 512:
                break
            count += 1
        rows, order = order[:count], order[count:]
        inputs = tokenizer([prompts[i] for i in rows], return_tensors="pt", padding=True).to(device)
        inputs.pop("token_type_ids", None)
        with torch.inference_mode():
            output = network.generate(**inputs, max_new_tokens=MAX_TOKENS, do_sample=False)
        for i, row in zip(rows, output[:, inputs["input_ids"].shape[1] :].tolist(), strict=True):
            end = next((j for j, t in enumerate(row) if t in stops), None)
            text = tokenizer.decode(row[:end], skip_special_tokens=False, clean_up_tokenization_spaces=False)
            answers[i] = Answer(text, end is not None)
    return [answers[i] for i in range(len(prompts))]


def with_minisgl(model: str, prompts: list[str], dtype: str, quantization: str | None) -> list[Answer]:
    """The same with the engine itself; its settings of these names."""
    from minisgl import LLM, SamplingParams  # type: ignore[import-not-found]

    llm = LLM(model, dtype=dtype, quantization=quantization)
    free = [llm.tokenizer.limits.max_model_len - len(llm.get_tokenizer().encode(p)) for p in prompts]
    outputs = llm.generate(prompts, [SamplingParams(temperature=0, max_tokens=min(MAX_TOKENS, n)) for n in free])
    return [Answer(o.text, getattr(o, "finish_reason", "stop") == "stop") for o in outputs]


def print_acceptance(
    model: str, drafter: str, seed: int, items: int, drafts: int, names: Sequence[str] = (*skills.SKILLS,)
) -> None:
    """Prints how many tokens each step gives with ``drafter``, the engine's ``--speculate``, on held-out items."""
    from minisgl import LLM, SamplingParams  # type: ignore[import-not-found]

    llm = LLM(model, speculate=drafter, num_draft_tokens=drafts)
    print("| skill | tokens a step, greedy | at temperature 1 |\n| --- | --- | --- |")
    for skill in names:
        prompts, rates = [p.prompt for p in probes(seed, items, [skill])], []
        for temperature in (0.0, 1.0):
            done = llm.generate(prompts, SamplingParams(temperature=temperature, seed=seed, max_tokens=MAX_TOKENS))
            tokens = sum(len(each.token_ids) for each in done)
            rates.append(tokens / (tokens - sum(each.accepted_tokens for each in done)))
        print(f"| {skill} | {rates[0]:.2f} | {rates[1]:.2f} |", flush=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--engine", choices=("minisgl", "transformers"), default="transformers")
    parser.add_argument("--dtype", choices=("auto", "bfloat16", "float32"), default="auto")
    parser.add_argument("--quantization", choices=("int8", "int4"), help="of minisgl")
    parser.add_argument("--speculate", help="of minisgl: print the tokens a step with this drafter instead")
    parser.add_argument("--items", type=int, default=200, help="held-out items a skill")
    parser.add_argument("--skills", nargs="+", choices=(*skills.SKILLS,), default=[*skills.SKILLS])
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--failures", type=Path, help="where to write the wrong answers, one JSON object a line")
    args = parser.parse_args()
    if args.quantization and args.engine != "minisgl":
        parser.error("--quantization needs --engine minisgl")
    if args.speculate:
        print_acceptance(args.model, args.speculate, args.seed, args.items, 4, args.skills)
        return
    asked = probes(args.seed, args.items, args.skills)
    prompts = [p.prompt for p in asked]
    start = time.perf_counter()
    if args.engine == "minisgl":
        answers = with_minisgl(args.model, prompts, args.dtype, args.quantization)
    else:
        answers = with_transformers(args.model, prompts, args.dtype)
    seconds = time.perf_counter() - start
    right = [a.ended and p.check.passes(a.text) for p, a in zip(asked, answers, strict=True)]
    print("| skill | items | right | ends by itself |\n| --- | --- | --- | --- |")
    for skill in args.skills:
        rows = [i for i, p in enumerate(asked) if p.skill == skill]
        good, ended = sum(right[i] for i in rows), sum(answers[i].ended for i in rows)
        print(f"| {skill} | {len(rows)} | {100 * good / len(rows):.1f} % | {100 * ended / len(rows):.1f} % |")
    ended = sum(a.ended for a in answers)
    print(f"| all | {len(asked)} | {100 * sum(right) / len(asked):.1f} % | {100 * ended / len(asked):.1f} % |")
    setting = ", ".join(filter(None, (args.engine, args.dtype, args.quantization)))
    print(f"{sum(right)} of {len(asked)} right, {seconds:.0f} s with {setting}")
    if args.failures:
        with args.failures.open("w", encoding="utf-8") as file:
            for p, a, ok in zip(asked, answers, right, strict=True):
                if not ok:
                    row = {
                        "skill": p.skill,
                        "want": p.check.want,
                        "got": a.text,
                        "ended": a.ended,
                        "prompt": p.prompt[-1500:],
                    }
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
