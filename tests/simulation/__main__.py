"""Run seeded histories of the whole server: `python tests/simulation [--seed N] [--count N] [--start N]`.

Prints the rate and what has happened; a history that breaks a rule ends the run with its seed. Histories depend on the
seed alone, so `--seed N` replays one.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "python")]
os.environ["MINISGL_CHECK"] = "1"


def main() -> None:
    from simulation.history import run_history, summary

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, help="run this history only, and show its clients")
    parser.add_argument("--start", type=int, default=0, help="first seed")
    parser.add_argument("--count", type=int, default=1000, help="number of histories")
    args = parser.parse_args()
    if args.seed is not None:
        history = run_history(args.seed)
        print(f"{history.ending}, messages {history.digest.hexdigest()[:16]}")
        for client in history.clients:
            print(client)
        return
    began = time.monotonic()
    counts: Counter[str] = Counter()
    for done, seed in enumerate(range(args.start, args.start + args.count), start=1):
        counts += summary([run_history(seed)])
        if done % 1000 == 0 or done == args.count:
            print(f"{done} histories, {done / (time.monotonic() - began):.0f}/s", flush=True)
    print(*(f"{name} {count}" for name, count in sorted(counts.items())), sep="\n")


if __name__ == "__main__":
    main()
