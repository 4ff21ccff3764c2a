"""Prompts with shared prefixes on two replicas behind one router, and on two servers in turn (round robin).

    python benchmark/replicas.py                    the built-in model, one thread each
    python benchmark/replicas.py --num-pages 4096   with pools that hold all prefixes

The prefixes together do not fit into one pool, but half of them do. Requests come in random order, from so many clients
at once. Prints the time of the whole load, the mean time to the first token, and the part of the prompts' tokens that
was cached.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.request import Request, urlopen

HEAD = {"content-type": "application/json"}


def start(*flags: str) -> tuple[subprocess.Popen[str], str]:
    """Start a server; return its process and its URL when it is ready."""
    command = [sys.executable, "-m", "minisgl", "serve", "--port", "0", "--threads", "1", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if found := re.match(r"ready on (\S+)", line):
            threading.Thread(target=process.stdout.read, daemon=True).start()  # a full pipe would stop the server
            return process, found[1]
    raise SystemExit(f"{' '.join(command)} has ended")


def ask(url: str, prompt: list[int], max_tokens: int) -> tuple[float, int, int]:
    """Return the seconds to the first token, the prompt's tokens and the cached ones."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0, "stream": True}
    body["stream_options"] = {"include_usage": True}
    began, first, usage = time.monotonic(), 0.0, {}
    with urlopen(Request(f"{url}/v1/completions", json.dumps(body).encode(), HEAD)) as response:
        for line in response:
            if line.startswith(b"data: {"):
                first = first or time.monotonic() - began
                usage = json.loads(line[6:]).get("usage") or usage
    return first, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def measure(urls: list[str], args: argparse.Namespace) -> str:
    """Send the load to `urls` in turn; return a row of the table."""
    rng = random.Random(1)
    prefixes = [[rng.randrange(1000, 4000) for _ in range(args.prefix_len)] for _ in range(args.prefixes)]
    prompts = [p + [rng.randrange(1000, 4000) for _ in range(20)] for p in prefixes for _ in range(args.each)]
    rng.shuffle(prompts)
    turn = itertools.cycle(urls)
    began = time.monotonic()
    with ThreadPoolExecutor(args.clients) as clients:
        jobs = [clients.submit(ask, next(turn), prompt, args.output_len) for prompt in prompts]
        results = [job.result() for job in jobs]
    seconds = time.monotonic() - began
    ttft = sum(first for first, _, _ in results) / len(results)
    cached = sum(hit for _, _, hit in results) / sum(n for _, n, _ in results)
    return f"{seconds:6.1f} s   {1e3 * ttft:5.0f} ms   {cached:4.0%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefixes", type=int, default=24)
    parser.add_argument("--prefix-len", type=int, default=1500)
    parser.add_argument("--each", type=int, default=10, help="requests of each prefix")
    parser.add_argument("--output-len", type=int, default=16)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--num-pages", default="1500", help="of each replica's pool")
    parser.add_argument("--runs", type=int, default=1)
    args = parser.parse_args()
    pages = ("--num-pages", args.num_pages)
    print("                 all       first token  cached")
    for _ in range(args.runs):
        for name, starts in (("router", [("--dp", "2", *pages)]), ("round robin", [pages, pages])):
            servers = [start(*flags) for flags in starts]
            try:
                print(f"{name:15} {measure([url for _, url in servers], args)}", flush=True)
            finally:
                for process, _ in servers:
                    process.terminate()
                for process, _ in servers:
                    process.wait()


if __name__ == "__main__":
    main()
