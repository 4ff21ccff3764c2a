"""CPU time of the API process for an answer of one token, without and with a line in the request log.

    PYTHONPATH=python python benchmark/request_log.py [--requests 2000]

A server for each kind of log answers the built-in model's shortest chats, whole, over one connection. They take turns,
and the least time of each counts.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from minisgl.tools.bench.online import own_server
from minisgl.tools.bench.report import format_table, origin, provenance
from minisgl.tools.chat.client import ChatClient

KINDS = {"off": {}, "text": {"log_requests": True}, "json": {"log_requests": True, "log_format": "json"}}
BODY = json.dumps({"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1})
TURNS = 4


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def ask(url: str, pid: int, count: int) -> float:
    """Microseconds of CPU time of process `pid` for each of `count` answers."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc)
    began = cpu_seconds(pid)
    for _ in range(count):
        connection.request("POST", "/v1/chat/completions", BODY, {"content-type": "application/json"})
        assert json.loads(connection.getresponse().read())["usage"]["completion_tokens"] == 1
    connection.close()
    return 1e6 * (cpu_seconds(pid) - began) / count


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000, help="of each turn (default: 2000)")
    args = parser.parse_args(argv)
    with contextlib.ExitStack() as stack:
        urls = {name: stack.enter_context(own_server({"num_pages": 256, **more})) for name, more in KINDS.items()}
        pids = {name: ChatClient(url).get("/server_info")["processes"]["minisgl-api"] for name, url in urls.items()}
        turns = [{n: ask(url, pids[n], args.requests) for n, url in urls.items()} for _ in range(TURNS)]
    times = {name: min(turn[name] for turn in turns) for name in KINDS}
    print(origin(provenance()))
    print(format_table(["log", "CPU us/answer", "more"], [[n, t, t - times["off"]] for n, t in times.items()]))


if __name__ == "__main__":
    main()
