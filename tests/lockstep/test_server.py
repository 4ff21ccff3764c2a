"""Ranks behind a real server: on one host and on two, and what happens when one is killed."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from e2e.harness import PATIENCE_S, ROOT, ServerProcess, is_running

STREAM = {"prompt": "Once", "stream": True, "ignore_eos": True, "temperature": 0}
QUESTION = {"messages": [{"role": "user", "content": "What is 12 + 30?"}], "temperature": 0, "max_tokens": 30}
# Few rows make the start quick: fewer sizes of steps are timed.
SMALL = ("--num-pages", "512", "--threads", "1", "--max-running-requests", "4")


def ask(client: httpx.Client) -> str:
    return client.post("/v1/chat/completions", json=QUESTION).json()["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    "victim", ["minisgl-TP1-scheduler", pytest.param("minisgl-TP0-scheduler", marks=pytest.mark.slow)]
)
def test_server_ends_when_a_rank_is_killed(victim: str) -> None:
    with ServerProcess("--tp", "2", "--drain-timeout", "600", *SMALL) as server, server.client() as client:
        assert "TP 2 (gloo)" in server.log
        assert "42" in ask(client)
        pids = server.info()["processes"]
        open_streams = [client.stream("POST", "/v1/completions", json=STREAM) for _ in range(3)]
        responses = [s.__enter__() for s in open_streams]
        lines = [r.iter_lines() for r in responses]
        for each in lines:
            next(each)
        os.kill(pids[victim], signal.SIGKILL)
        for each in lines:
            rest = [line for line in each if line]
            assert "error" in json.loads(rest[-2].removeprefix("data: "))
            assert rest[-1] == "data: [DONE]"
        for s in open_streams:
            s.__exit__(None, None, None)
        assert server.wait() == 1
        assert not any(is_running(pid) for pid in pids.values())
        assert server.run_dirs == []
        assert f"{victim} was killed by signal 9" in server.log
        assert "Traceback" not in server.log


class Hosts:
    """Two "hosts": network namespaces joined by a cable where this user may make them, else addresses of one."""

    def __init__(self, are_namespaces: bool) -> None:
        self.prefixes: list[list[str]] = [[], []]
        self.address = "127.0.0.2"
        self.names: list[str] = []
        if are_namespaces:
            self.address = "10.99.0.1"
            self.names = [f"mt{os.getpid()}{side}" for side in "ab"]
            self.prefixes = [["ip", "netns", "exec", name] for name in self.names]

    def __enter__(self) -> Hosts:
        if self.names:
            a, b = self.names
            commands = [f"ip netns add {a}", f"ip netns add {b}"]
            commands.append(f"ip link add v{a} netns {a} type veth peer name v{b} netns {b}")
            for i, name in enumerate(self.names, 1):
                commands += [f"ip -n {name} addr add 10.99.0.{i}/24 dev v{name}", f"ip -n {name} link set v{name} up"]
                commands += [f"ip -n {name} link set lo up"]
            for command in commands:
                subprocess.run(command.split(), check=True)
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], check=False)

    def listening(self, host: int) -> set[str]:
        """The addresses at which something listens there."""
        out = subprocess.run([*self.prefixes[host], "ss", "-Hltn"], capture_output=True, text=True, check=True).stdout
        return {line.split()[3].rpartition(":")[0] for line in out.splitlines()}


def may_make_namespaces() -> bool:
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("ss") is None:
        return False
    name = f"mt{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode == 0
    if made:
        subprocess.run(["ip", "netns", "del", name], check=False)
    return made


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Hosts(may_make_namespaces()) as hosts:
        yield hosts


@pytest.fixture
def run_base() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="mt-", dir="/tmp") as folder:
        yield folder


def serve(prefix: list[str], log: Path, run_base: str, *flags: str) -> subprocess.Popen[bytes]:
    env = os.environ | {"PYTHONPATH": str(ROOT / "python"), "MINISGL_CHECK": "1", "XDG_RUNTIME_DIR": run_base}
    command = [*prefix, sys.executable, "-m", "minisgl", "--port", "0", *SMALL, *flags]
    with log.open("wb") as out:
        return subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=env)


def wait_for(pattern: str, log: Path, process: subprocess.Popen[bytes]) -> str:
    deadline = time.monotonic() + PATIENCE_S
    while (found := re.search(pattern, log.read_text())) is None:
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)
    return found.group(1)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.2", 0))
        port: int = sock.getsockname()[1]
    return port


ASK = """
import sys, urllib.request
url, body = sys.argv[1:]
request = urllib.request.Request(url + "/v1/chat/completions", body.encode(), {"Content-Type": "application/json"})
print(urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request).read().decode())
"""


@pytest.mark.parametrize("end", ["sigterm", pytest.param("kill", marks=pytest.mark.slow)])
def test_two_hosts(hosts: Hosts, tmp_path: Path, run_base: str, end: str) -> None:
    """They answer as one host does, listen nowhere else than told, and end together."""
    flags = ["--tp", "2", "--nnodes", "2", "--dist-init-addr", f"{hosts.address}:{free_port()}"]
    logs = [tmp_path / "0", tmp_path / "1"]
    first = serve(hosts.prefixes[0], logs[0], run_base, *flags)
    second = serve(hosts.prefixes[1], logs[1], run_base, *flags, "--node-rank", "1")
    try:
        url = wait_for(r"ready on (\S+)", logs[0], first)
        assert wait_for(r"ready: (\S+)", logs[1], second) == "minisgl-TP1-scheduler"
        command = [*hosts.prefixes[0], sys.executable, "-c", ASK, url, json.dumps(QUESTION)]
        answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert "42" in json.loads(answer)["choices"][0]["message"]["content"]
        if hosts.names:
            assert hosts.listening(0) == {"127.0.0.1", hosts.address}  # HTTP; the ranks
            assert hosts.listening(1) == {"10.99.0.2"}
        (second if end == "kill" else first).send_signal(signal.SIGKILL if end == "kill" else signal.SIGTERM)
        codes = first.wait(PATIENCE_S), second.wait(PATIENCE_S)
        assert codes == ((1, -signal.SIGKILL) if end == "kill" else (0, 0)), logs[0].read_text() + logs[1].read_text()
        assert not any("Traceback" in log.read_text() for log in logs)
    finally:
        for process in (first, second):
            process.kill()
            process.wait()
