"""`minisgl doctor` tells what a start would find."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys

from e2e.harness import PATIENCE_S, ROOT


def run(*words: str, **env: str) -> tuple[int, dict[str, str]]:
    """The exit code and the facts by name."""
    result = subprocess.run(
        [sys.executable, "-m", "minisgl", *words],
        env={**os.environ, "PYTHONPATH": str(ROOT / "python"), **env},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert "Traceback" not in result.stderr
    return result.returncode, {line[:18].strip(): line[18:] for line in result.stdout.splitlines()}


def test_facts_of_a_machine_that_can_serve() -> None:
    code, facts = run("doctor", "--device", "cpu", "--port", "0", "--num-pages", "1000", "--page-size", "16")
    assert code == 0, facts
    assert facts["start"].startswith("nothing is in the way")
    assert re.search(r"\w+, a step of the built-in model takes \d+\.\d\d ms|none, so steps .*: \w+", facts["CPU step"])
    assert facts["its steps"].startswith("in C++")
    backends = dict(part.split(": ", 1) for part in facts["attention"].split("; "))
    assert backends["cpu"] == backends["reference"] == "usable"
    assert backends["fi"] == backends["triton"] == "device cpu is not one of cuda"
    assert "weights 0.03, " in facts["memory plan"]
    assert facts["requests at once"] == "15 of 1024 tokens, or 3 of 4096 tokens"  # of 1,000 pages of 16
    assert "generic: usable" in facts["instruction sets"]


def test_what_is_in_the_way_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = str(sock.getsockname()[1])
        code, facts = run("env", "--device", "cpu", "--tp", "3", "--port", port, MINISGL_CPU_ISA="none")
    assert code == 1
    assert "cannot be divided among 3 ranks" in facts["model"]
    assert "cannot be divided among 3 ranks" in facts["start"]
    assert f"port {port}: Address already in use" in facts["start"]
    assert facts["CPU step"].endswith("several times slower: MINISGL_CPU_ISA=none")
