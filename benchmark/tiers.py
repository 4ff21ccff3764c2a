"""What K/V below the device gains: a prefix found there, conversations larger than the pool, and the cost for others.

    PYTHONPATH=python python benchmark/tiers.py --shape qwen3-8b --host-kv 100000000000 --prefix 32768 --pool 40000
    PYTHONPATH=python python benchmark/tiers.py --disk-kv /var/tmp/kv:2G            (the built-in model, on a CPU)

Two engines, without and with the tier, answer the same prompts of random tokens, greedily.

prefix         a prompt is computed, comes again at once, and again after another has driven it out of the pool, at once
               and after idle time, in which the other was stored: seconds to the first token. The first hit needs no
               load, so the difference is what loading costs; after it, what the tier's speed at the start makes of it.
streams        the longest time between two tokens of streams, alone and while such a prefix comes
conversations  each turn adds tokens to one of several conversations that do not fit into the pool together: prompt and
               output tokens per second
no hits        prompts that share nothing, in turns

The last line says how many answers are equal: all on a CPU; on a GPU a cached prefix is computed in other pieces, which
may round otherwise.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from statistics import median

from minisgl import LLM, SamplingParams
from minisgl.llm.completions import Completions
from minisgl.llm.llm import prompt_messages
from minisgl.tools.bench.shapes import shape_options

Tokens = list[int]


def tokens(rng: random.Random, count: int) -> Tokens:
    return [rng.randrange(1000, 2000) for _ in range(count)]


def timed(llm: LLM, prompts: Sequence[Tokens], length: int) -> tuple[float, list[Tokens], int]:
    """Return the seconds, the answers and the number of prompt tokens found in the cache."""
    began = time.perf_counter()
    done = llm.generate(
        list(prompts), SamplingParams(max_tokens=length, ignore_eos=True, temperature=0), use_tqdm=False
    )
    seconds = time.perf_counter() - began
    return seconds, [answer.token_ids for answer in done], sum(answer.num_cached_tokens for answer in done)


def prefix(llm: LLM, args: argparse.Namespace, seed: int) -> tuple[str, list[Tokens]]:
    """Return what to print, and the answers."""
    rng = random.Random(seed)
    seconds: dict[str, list[float]] = {"computed": [], "in the pool": [], "driven out": [], "and after idle time": []}
    cached, answers = 0, []
    for _ in range(args.rounds):
        prompt = tokens(rng, args.prefix)
        for name, times in seconds.items():
            if name in ("driven out", "and after idle time"):
                timed(llm, [tokens(rng, args.prefix)], 1)
            if name == "and after idle time":
                idle(llm)
            took, told, cached = timed(llm, [prompt], 1)
            times.append(took)
            answers += told
    text = "first token " + ", ".join(f"{median(times):.3f} s {name}" for name, times in seconds.items())
    if not (tiers := llm.scheduler.cache.prefix.tiers):
        return text, answers
    page = tiers[0].spec.page_seconds
    load, gb = cached / args.page_size * page, cached * args.token_bytes / 1e9
    return f"{text} ({cached} tokens, {gb:.2f} GB: {load:.3f} s at {gb / load if load else 0:.1f} GB/s)", answers


def idle(llm: LLM) -> None:
    """Let the scheduler do what it does while nothing is to be computed."""
    tiers = llm.scheduler.cache.prefix.tiers
    stored = -1
    while stored < (stored := sum(tier.stored_pages for tier in tiers)):
        llm.scheduler.step()
    while llm.scheduler.launched:
        llm.scheduler.step()


def streams(llm: LLM, args: argparse.Namespace, seed: int) -> tuple[str, list[Tokens]]:
    rng = random.Random(seed)
    prompt = tokens(rng, args.prefix)
    for driven in (prompt, tokens(rng, args.prefix)):
        timed(llm, [driven], 1)
    prompts = [*(tokens(rng, args.page_size) for _ in range(args.streams)), prompt]
    lengths = [args.stream_tokens] * args.streams + [1]
    params = [SamplingParams(max_tokens=length, ignore_eos=True, temperature=0) for length in lengths]
    completions = Completions(llm.detokenizer)
    requests = llm.prepare(prompt_messages(prompts, llm.tokenizer.limits), params)
    done = [completions.add(request) for request in requests]
    late, stats = [completions.waiting.pop()], llm.scheduler.stats
    uid = late[0].uid
    before: list[float] = []
    during: list[float] = []
    count, last = stats.generation_tokens, time.perf_counter()
    while completions.pending:
        if late and len(before) > args.stream_tokens // 3:
            completions.waiting.append(late.pop())
        is_there = not late and (uid in llm.scheduler.live or not during)
        llm.advance(completions)
        if stats.generation_tokens > count:
            now = time.perf_counter()
            if late or is_there:
                (before if late else during).append(now - last)
            count, last = stats.generation_tokens, now
    answers = [answer.token_ids for answer in done]
    text = f"{1e3 * median(before):.1f} ms between tokens, at most {1e3 * max(during):.1f} ms while the prompt comes"
    return f"{text}, whose first token takes {sum(during):.3f} s", answers


def conversations(llm: LLM, args: argparse.Namespace, seed: int) -> tuple[str, list[Tokens]]:
    rng = random.Random(seed)
    histories = [tokens(rng, args.turn) for _ in range(args.conversations)]
    seconds, total, cached, all_answers = 0.0, 0, 0, []
    for _ in range(args.turns):
        for i in range(0, len(histories), args.streams):
            part = histories[i : i + args.streams]
            took, answers, found = timed(llm, part, args.output)
            seconds, cached, total = (
                seconds + took,
                cached + found,
                total + sum(map(len, part)) + args.output * len(part),
            )
            all_answers += answers
            for history, answer in zip(part, answers, strict=True):
                history += answer + tokens(rng, args.turn)
    return f"{total / seconds:.0f} tok/s of prompts and outputs, {cached} tokens found", all_answers


def no_hits(engines: dict[str, LLM], args: argparse.Namespace, seed: int) -> tuple[str, list[list[Tokens]]]:
    """In turns, since the machine may become slower or faster meanwhile: return what to print, and both's answers."""
    rng = random.Random(seed)
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    all_answers: list[list[Tokens]] = [[] for _ in engines]
    for number in range(3 * args.rounds):
        prompts = [tokens(rng, args.turn) for _ in range(args.conversations)]
        pairs = list(zip(engines.items(), all_answers, strict=True))
        for (name, llm), answers in pairs if number % 2 else reversed(pairs):
            took, told, _ = timed(llm, prompts, args.output)
            seconds[name].append(took)
            answers += told
    count = args.conversations * (args.turn + args.output)
    rates = ", ".join(f"{count / median(took):.0f} tok/s {name} tier" for name, took in seconds.items())
    ratios = sorted(b / a for a, b in zip(*seconds.values(), strict=True))
    return f"{rates}; with it {median(ratios):.3f} x as long (from {ratios[0]:.3f} to {ratios[-1]:.3f})", all_answers


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", help="random weights; without it, the built-in model")
    parser.add_argument("--host-kv", type=int)
    parser.add_argument("--disk-kv")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--pool", type=int, default=4096, help="tokens that the device holds")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--prefix", type=int, default=3500)
    parser.add_argument("--conversations", type=int, default=8)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--turn", type=int, default=300, help="tokens that a turn adds")
    parser.add_argument("--output", type=int, default=16)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--stream-tokens", type=int, default=120)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--skip", nargs="*", default=(), help="names of cases")
    args = parser.parse_args(argv)
    tier = {name: value for name in ("host_kv", "disk_kv") if (value := getattr(args, name))}
    if not tier:
        parser.error("give --host-kv or --disk-kv")
    common = {
        "num_pages": args.pool // args.page_size, "page_size": args.page_size, "kv_cache_dtype": args.kv_cache_dtype,
    }  # fmt: skip
    cases = {"prefix": prefix, "streams": streams, "conversations": conversations}
    answers: list[list[list[Tokens]]] = []
    with shape_options(args.shape, common) as given, LLM(**given) as plain, LLM(**given, **tier) as tiered:
        engines = {"without": plain, "with": tiered}
        args.token_bytes = int(plain.scheduler.engine.describe()["kv_bytes"]) / args.pool
        for llm in engines.values():
            timed(llm, [tokens(random.Random(0), args.prefix)], args.output)  # warms up
        for seed, (name, case) in enumerate(cases.items(), 1):
            if name not in args.skip:
                answers.append([])
                for label, llm in engines.items():
                    text, told = case(llm, args, seed)
                    answers[-1].append(told)
                    print(f"{name:13} {label:7} tier: {text}", flush=True)
        if "no hits" not in args.skip:
            text, told = no_hits(engines, args, len(cases) + 1)
            answers.append(told)
            print(f"no hits       {text}", flush=True)
    pairs = [pair for without, told in answers for pair in zip(without, told, strict=True)]
    print(f"{sum(a == b for a, b in pairs)} of {len(pairs)} answers are equal")


if __name__ == "__main__":
    main()
