"""Two checkouts of minisgl on a CPU, taking turns run by run, so that a noisy machine is noisy for both.

    git worktree add /data/before COMMIT
    PYTHONPATH=python python benchmark/checkpoint.py qwen3-0.6b /data/shapes
    python benchmark/cpu/versions.py /data/before . /data/shapes/qwen3-0.6b --requests 1 --rounds 12

Both processes stay up, and one waits while the other computes. Prints medians, and the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

PROMPT = 64
WARM_UP = 3


def serve(folder: str, requests: int, output: int, threads: int) -> None:
    """Child: for each seed on standard input, generate once and print the seconds."""
    from minisgl import LLM, SamplingParams

    llm = LLM(folder, dtype="bfloat16", threads=threads, schedule_policy="shortest")
    params = SamplingParams(max_tokens=output, ignore_eos=True, temperature=0.6)
    for line in sys.stdin:
        rng = random.Random(int(line))
        prompts = [[rng.randrange(5, 1000) for _ in range(PROMPT)] for _ in range(requests)]
        began = time.perf_counter()
        llm.generate(prompts, params)
        print(f"seconds {time.perf_counter() - began}", flush=True)


class Version:
    """A checkout with a model loaded."""

    def __init__(self, checkout: Path, arguments: list[str]) -> None:
        self.seconds: list[float] = []
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--child", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": str(checkout.resolve() / "python"), "GOMP_SPINCOUNT": "2000"},
            text=True,
        )

    def run(self, seed: int) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None, "pipes"
        self._process.stdin.write(f"{seed}\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("seconds "):
                self.seconds.append(float(line.split()[1]))
                return
        raise SystemExit(f"a version ended with {self._process.wait()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("model")
    parser.add_argument("--requests", default="1")
    parser.add_argument("--output-len", default="32")
    parser.add_argument("--threads", default="2")
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    arguments = [args.model, args.requests, args.output_len, args.threads]
    versions = [Version(args.before, arguments), Version(args.after, arguments)]
    for i in range(WARM_UP + args.rounds):
        for version in versions if i % 2 else versions[::-1]:
            version.run(i)
    before, after = (version.seconds[WARM_UP:] for version in versions)
    ratio = median(b / a for a, b in zip(before, after, strict=True))
    print(f"before {median(before):.4f} s, after {median(after):.4f} s, median ratio {ratio:.3f}, {args.rounds} rounds")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        serve(sys.argv[2], *map(int, sys.argv[3:]))
    else:
        main()
