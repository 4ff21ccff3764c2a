"""A normal client beside a hostile one: what each attack costs the normal one, and the server's memory.

    PYTHONPATH=python python benchmark/abuse.py                    # all attacks
    PYTHONPATH=python python benchmark/abuse.py trailers silent    # some

The normal client streams short answers and asks for structured output, in turn; the server has the
built-in model. Prints for each attack the median and the 99th percentile, in ms, of the time to the first token, the
time between tokens and the time of a structured answer, and the largest resident set of all processes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles
from typing import Any
from urllib.parse import urlsplit

import httpx

SECONDS = 12.0
NOFILE = 1024
LOW = str(-(2**63))
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


class Server:
    """`minisgl serve` on a free port, with the usual limit on open files."""

    def __enter__(self) -> Server:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "minisgl", "serve", "--port", "0", "--threads", "1"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (NOFILE, NOFILE)),
        )
        assert self.process.stdout is not None, "a pipe"
        for line in self.process.stdout:
            if line.startswith("ready on "):
                self.url = line.split()[2]
                threading.Thread(target=self.process.stdout.read, daemon=True).start()
                return self
        raise SystemExit("the server did not start")

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait()

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def memory(self) -> float:
        """Resident MB of all processes."""
        pids = [self.process.pid, *(int(p) for p in _children(self.process.pid))]
        pages = 0
        for pid in pids:
            with contextlib.suppress(OSError):
                pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6

    def connect(self) -> socket.socket:
        address = urlsplit(self.url)
        return socket.create_connection((address.hostname, address.port), timeout=SECONDS)


def _children(pid: int) -> list[str]:
    found: list[str] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            found += [child, *_children(int(child))]
    return found


def post(server: Server, path: str, body: Any, timeout: float = SECONDS) -> None:
    with contextlib.suppress(httpx.HTTPError):
        httpx.post(server.url + path, json=body, timeout=timeout)


def trailers(server: Server, stop: threading.Event) -> None:
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\n"
    while not stop.is_set():
        with contextlib.suppress(OSError), server.connect() as sock:
            sock.sendall(head.encode())
            for _ in range(24):
                sock.sendall(b"a:\r\n" * 250_000)


def silent(server: Server, stop: threading.Event) -> None:
    socks = []
    for _ in range(NOFILE + 76):
        with contextlib.suppress(OSError):
            socks.append(server.connect())
    stop.wait()
    for sock in socks:
        sock.close()


def grammar(text: str) -> Callable[[Server, threading.Event], None]:
    """Requests with the same hostile schema or expression, eight at a time, each a little different."""

    def attack(server: Server, stop: threading.Event) -> None:
        count = 0
        while not stop.is_set():
            count += 1
            body = {"prompt": "x", "max_tokens": 64, **json.loads(text.replace("@", str(count % 50)))}
            post(server, "/v1/completions", body)

    return attack


def tokenize(server: Server, stop: threading.Event) -> None:
    while not stop.is_set():
        post(server, "/tokenize", {"prompt": "lorem ipsum " * 325_000}, 60)


def prompts(server: Server, stop: threading.Event) -> None:
    """Prompts of nearly the whole context, each another."""
    count = 0
    while not stop.is_set():
        count += 1
        text = f"{threading.get_ident()} {count} " + "Once upon a time there was a fox. " * 400
        post(server, "/v1/completions", {"prompt": text, "max_tokens": 8}, 60)


def long_requests(server: Server, stop: threading.Event) -> None:
    """200 requests at once with prompts of 1,000 tokens and answers of 2,000, as long as it takes."""

    def run(i: int) -> None:
        text = f"{i} " + "Once upon a time there was a fox. " * 110
        with (
            contextlib.suppress(httpx.HTTPError),
            # Without certificates: 200 clients that load them would take the server's cores.
            httpx.Client(base_url=server.url, timeout=60, verify=False) as client,
        ):
            body = {"prompt": text, "max_tokens": 2000, "ignore_eos": True, "stream": True}
            with client.stream("POST", "/v1/completions", json=body) as response:
                for _ in response.iter_lines():
                    if stop.is_set():
                        return

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def choices(server: Server, stop: threading.Event) -> None:
    """One request with 1,024 prompts of one token, and 20 log-probabilities for each token of their answers."""
    body = {"prompt": [[i % 500] for i in range(1024)], "logprobs": 20, "max_tokens": 16, "ignore_eos": True}
    while not stop.is_set():
        post(server, "/v1/completions", body, 60)


ATTACKS: dict[str, tuple[int, Callable[[Server, threading.Event], None]]] = {
    "none": (0, silent),
    "trailers": (1, trailers),
    "silent": (1, silent),
    "multipleOf": (2, grammar('{"guided_json": {"type": "integer", "multipleOf": 10000@3}}')),
    "repeats": (8, grammar('{"guided_regex": "x{1000@0}"}')),
    "bounds": (
        1,
        grammar(
            '{"guided_json": {"type": "integer", "minimum": -9223372036854775808, "maximum": -9223372036854775808}}'
        ),
    ),
    "tokenize": (1, tokenize),
    "prompts": (4, prompts),
    "requests": (1, long_requests),
    "choices": (1, choices),
}


def normal(server: Server, seconds: float) -> dict[str, list[float]]:
    """Time to first token, time between tokens and time of a structured answer, in ms."""
    times: dict[str, list[float]] = {"first": [], "gap": [], "schema": []}
    deadline = time.monotonic() + seconds
    with httpx.Client(base_url=server.url, timeout=60) as client:
        while time.monotonic() < deadline and server.is_alive:
            with contextlib.suppress(httpx.HTTPError):
                last = began = time.perf_counter()
                body = {"prompt": "Once upon a time", "max_tokens": 48, "ignore_eos": True, "stream": True}
                with client.stream("POST", "/v1/completions", json=body) as response:
                    for line in response.iter_lines():
                        if line:
                            now = time.perf_counter()
                            times["first" if last == began else "gap"].append((now - last) * 1e3)
                            last = now
                began = time.perf_counter()
                answer = client.post("/v1/completions", json={"prompt": "x", "max_tokens": 12, "guided_json": SCHEMA})
                if answer.status_code == 200:
                    times["schema"].append((time.perf_counter() - began) * 1e3)
    return times


def run(name: str) -> str:
    threads, attack = ATTACKS[name]
    stop = threading.Event()
    with Server() as server:
        normal(server, 1.0)
        hostile = [threading.Thread(target=attack, args=(server, stop), daemon=True) for _ in range(threads)]
        for thread in hostile:
            thread.start()
        largest = [0.0]

        def watch() -> None:
            while not stop.wait(0.1):
                largest[0] = max(largest[0], server.memory())

        threading.Thread(target=watch, daemon=True).start()
        time.sleep(0.5)
        times = normal(server, SECONDS)
        end = "" if server.is_alive else f"  the server ended with {server.process.returncode}"
        stop.set()
    cells = [
        f"{median(t):9.1f}{quantiles(t, n=100)[98]:9.1f}" if len(t) > 1 else " " * 17 + "-" for t in times.values()
    ]
    return f"{name:12}{''.join(cells)}{largest[0]:9.0f}{end}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("attacks", nargs="*", default=list(ATTACKS), help=f"some of {', '.join(ATTACKS)}")
    args = parser.parse_args()
    if unknown := set(args.attacks) - ATTACKS.keys():
        parser.error(f"no attack {', '.join(sorted(unknown))}")
    print(f"{'attack':12}" + "".join(f"{t + ' p50':>12}{'p99':>6}" for t in ("first", "gap", "schema")) + f"{'MB':>9}")
    for name in args.attacks:
        print(run(name), flush=True)


if __name__ == "__main__":
    main()
