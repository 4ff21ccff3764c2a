"""The real processes: killed, drained, started with bad settings. The tests with the stub engine cover the details."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from e2e.harness import OURS, PATIENCE_S, ROOT, ServerProcess, is_running

STREAM = {"prompt": "Once", "stream": True, "ignore_eos": True, "temperature": 0}
NO_LIMIT = ("--drain-timeout", "600")  # for tests in which something else ends the streams


@pytest.mark.parametrize(("victim", "streams"), [("minisgl-TP0-scheduler", 4), ("minisgl-detokenizer-0", 0)])
def test_killed_child_ends_all_streams_with_an_error(victim: str, streams: int) -> None:
    with ServerProcess("--num-pages", "1024", *NO_LIMIT) as server, server.client() as client:
        pids = server.info()["processes"]
        open_streams = [client.stream("POST", "/v1/completions", json=STREAM) for _ in range(streams)]
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
        assert "Traceback" not in server.log


def test_sigterm_lets_open_streams_finish() -> None:
    with ServerProcess("--num-pages", "1024", *NO_LIMIT) as server, server.client() as client:
        body = STREAM | {"max_tokens": 100}
        with client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert '"finish_reason":"length"' in rest[-2]
        assert server.wait() == 0
        assert "Traceback" not in server.log


def test_start_is_quick_and_prints_a_banner() -> None:
    with ServerProcess("--view-texts", python=OURS) as server, server.client() as client:
        answer = client.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 1})
        assert answer.status_code == 200
        assert server.cpu_seconds() < 20  # it takes three
        for word in ("minisgl-demo", "dtype", "KV cache", "attention", "--view-texts", "curl "):
            assert word in server.log
        said = [
            "starting 3 processes",
            "importing torch",
            "loading weights",
            "measuring",
            "ready on",
            f"{server.url}/\n",
        ]
        places = [server.log.index(words) for words in said]
        assert places == sorted(places)


def test_settings_refused_by_the_engine_end_the_start() -> None:
    """One setting stands for all: the engine's process reports every refusal in the same way."""
    result = run_cli("--port", "0", "--attn", "nonsense")
    assert result.returncode == 2
    assert "unknown attention backend" in result.stderr
    assert "Traceback" not in result.stderr


def run_cli(*arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(ROOT / "python")}
    return subprocess.run(
        [sys.executable, "-m", "minisgl", *arguments],
        input=text,
        capture_output=True,
        text=True,
        env=env,
        timeout=PATIENCE_S,
    )


def test_chat_reads_from_a_pipe() -> None:
    lines = "My name is Anna.\nWhat is my name?\n/nonsense\n/reset\nWhat is 12 + 30?\n/quit\n"
    result = run_cli("chat", "--temperature", "0", text=lines)
    assert result.returncode == 0, result.stderr
    assert "Anna" in result.stdout
    assert "starts anew" in result.stdout
    assert "42" in result.stdout
    assert "Traceback" not in result.stderr


def test_generate_answers_and_env_lists_backends() -> None:
    result = run_cli("generate", "--chat", "What is 12 + 30?", "Who are you?")
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.splitlines()) >= 2
    assert "42" in result.stdout
    result = run_cli("env")
    assert result.returncode == 0, result.stderr
    assert "torch" in result.stdout
    assert "attention " in result.stdout
