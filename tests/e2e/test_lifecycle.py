"""The server's processes around a scripted scheduler: failed starts, deaths, signals, draining."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from e2e.harness import HELD, PATIENCE_S, ROOT, STUB, ServerProcess, eventually, is_running, release, stopped
from minisgl.checkpoint.hf import BUILTIN_MODEL
from minisgl.device.machine import choose_device
from minisgl.launch.supervisor import LAST_WORDS_S

NO_LIMIT = ("--drain-timeout", "600")  # where something else must end the answers


@pytest.mark.parametrize("victim", ["minisgl-TP0-scheduler", "minisgl-detokenizer-0", "minisgl-tokenizer-0"])
def test_death_of_a_child(victim: str) -> None:
    with ServerProcess("--num-tokenizer", "1", *NO_LIMIT, stub=True) as server, server.client() as client:
        pids = server.info()["processes"]

        def require_503(method: str, path: str, **body: Any) -> None:
            try:
                assert client.request(method, path, **body).status_code == 503
            except httpx.TransportError:  # it is gone, but not before its last words
                assert time.monotonic() - killed > LAST_WORDS_S

        with client.stream("POST", "/v1/completions", json=HELD) as response:
            lines = response.iter_lines()
            next(lines)
            killed = time.monotonic()
            os.kill(pids[victim], signal.SIGKILL)
            rest = [line for line in lines if line]
        assert victim in json.loads(rest[-2].removeprefix("data: "))["error"]["message"]
        assert rest[-1] == "data: [DONE]"
        require_503("GET", "/health")
        require_503("POST", "/v1/completions", json={"prompt": "x"})
        assert server.wait() == 1
        assert not any(is_running(pid) for pid in pids.values())
        assert server.run_dirs == []


@pytest.mark.parametrize(
    ("phase", "victim"),
    [
        ("idle", "minisgl-TP0-scheduler"),
        pytest.param("idle", "minisgl-detokenizer-0", marks=pytest.mark.slow),
        pytest.param("idle", "minisgl-tokenizer-0", marks=pytest.mark.slow),
        pytest.param("prefill", "minisgl-TP0-scheduler", marks=pytest.mark.slow),
        ("prefill", "minisgl-detokenizer-0"),
        ("prefill", "minisgl-tokenizer-0"),
    ],
)
def test_death_of_a_child_before_any_token(phase: str, victim: str) -> None:
    flags = ("--num-tokenizer", "1", *NO_LIMIT)
    with ServerProcess(*flags, stub=True) as server, server.client() as client, ThreadPoolExecutor(1) as pool:
        pids = server.info()["processes"]
        if phase == "prefill":
            waiting = pool.submit(client.post, "/v1/completions", json={"prompt": "a few words !hang"})
            assert eventually(lambda: server.metrics()["frontend_entries"] == 1)
        killed = time.monotonic()
        os.kill(pids[victim], signal.SIGKILL)
        if phase == "prefill":
            response = waiting.result()
            assert response.status_code == 503 and victim in response.json()["error"]["message"]
        assert server.wait() == 1
        assert time.monotonic() - killed < 15  # 5 on a quiet machine
        assert not any(is_running(pid) for pid in pids.values())
        assert server.run_dirs == []


@pytest.mark.parametrize(
    "victim", [pytest.param("minisgl-TP0-scheduler", marks=pytest.mark.slow), "minisgl-detokenizer-0"]
)
def test_child_that_freezes_ends_open_streams(victim: str) -> None:
    with ServerProcess("--heartbeat-timeout", "4", stub=True) as server, server.client() as client:
        pids = server.info()["processes"]
        with client.stream("POST", "/v1/completions", json=HELD) as response:
            lines = response.iter_lines()
            next(lines)
            os.kill(pids[victim], signal.SIGSTOP)
            rest = [line for line in lines if line]
        assert f"{victim} hung and was killed" in json.loads(rest[-2].removeprefix("data: "))["error"]["message"]
        assert server.wait() == 1
        assert "Current thread" in server.log, "its stacks"
        assert server.run_dirs == []


@pytest.mark.parametrize(
    "victim",
    [
        "minisgl-TP0-scheduler",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("minisgl-detokenizer-0", "minisgl-tokenizer-0")),
    ],
)
def test_frozen_child_is_told_by_the_probes_and_then_ends_the_server(victim: str) -> None:
    flags = ("--heartbeat-timeout", "8", "--num-tokenizer", "1")
    with ServerProcess(*flags, stub=True) as server, server.client() as client:
        pids = server.info()["processes"]
        with stopped(pids[victim]):
            began = time.monotonic()
            assert eventually(lambda: client.get("/health").status_code == 503)
            assert time.monotonic() - began < 10
            assert victim in client.get("/health").json()["cause"]
            assert client.get("/ready").status_code == 503
        assert eventually(lambda: client.get("/ready").status_code == 200)
        assert client.post("/v1/completions", json={"prompt": "hi"}).status_code == 200
        if victim != "minisgl-tokenizer-0":
            return  # all end in one way
        os.kill(pids[victim], signal.SIGSTOP)
        assert server.wait() == 1
        assert f"{victim} hangs for" in server.log
        assert not any(is_running(pid) for pid in pids.values())
        assert server.run_dirs == []


def test_step_that_hangs_ends_the_server_with_its_stack() -> None:
    with ServerProcess("--heartbeat-timeout", "3", stub=True) as server, server.client() as client:
        pids = server.info()["processes"]
        body = {"prompt": "a few words !hang", "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 503 or b"error" in response.read()
        assert server.wait() == 1
        assert "minisgl-TP0-scheduler hangs for" in server.log
        assert "stub_server.py" in server.log and "Current thread" in server.log
        assert not any(is_running(pid) for pid in pids.values())


def test_step_that_raises_ends_the_server_with_its_cause() -> None:
    with ServerProcess(*NO_LIMIT, stub=True) as server, server.client() as client:
        with client.stream("POST", "/v1/completions", json=HELD) as response:
            lines = response.iter_lines()
            next(lines)
            with contextlib.suppress(httpx.TransportError):
                client.post("/v1/completions", json={"prompt": "a few words !raise"})
            assert "error" in [line for line in lines if line][-2]
        assert server.wait() == 1
        assert "the stub was told to fail in a step" in server.log


def test_death_of_the_parent() -> None:
    with ServerProcess("--num-tokenizer", "1", stub=True) as server:
        pids = server.info()["processes"]
        server.process.kill()
        server.process.wait()
        assert eventually(lambda: not any(is_running(pid) for pid in pids.values()))
        left = server.run_dirs
        assert len(left) == 1
        with ServerProcess(stub=True, env={"XDG_RUNTIME_DIR": server.run_base}) as second:
            assert second.run_dirs == []
            assert not left[0].exists()  # swept by its successor


def test_sigterm_drains() -> None:
    with ServerProcess(*NO_LIMIT, stub=True) as server, server.client() as client:
        with client.stream("POST", "/v1/completions", json=HELD) as response:
            lines = response.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            assert eventually(lambda: client.get("/ready").status_code == 503)
            refused = client.post("/v1/completions", json={"prompt": "x"})
            assert refused.status_code == 503
            assert refused.headers["retry-after"]
            release(server)
            rest = [line for line in lines if line]
        assert '"finish_reason":"length"' in rest[-2]
        assert server.wait() == 0
        assert "Traceback" not in server.log
        assert server.run_dirs == []


@pytest.mark.parametrize(
    ("victim", "number"),
    [
        ("minisgl-TP0-scheduler", signal.SIGKILL),
        ("minisgl-TP0-scheduler", signal.SIGSTOP),
        ("minisgl-detokenizer-0", signal.SIGKILL),
    ],
)
def test_child_that_dies_or_freezes_ends_a_server_that_drains(victim: str, number: signal.Signals) -> None:
    with ServerProcess(*NO_LIMIT, "--heartbeat-timeout", "4", stub=True) as server, server.client() as client:
        pids = server.info()["processes"]
        with client.stream("POST", "/v1/completions", json=HELD) as response:
            lines = response.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            assert eventually(lambda: client.get("/ready").status_code == 503)
            os.kill(pids[victim], number)
            rest = [line for line in lines if line]
        assert victim in json.loads(rest[-2].removeprefix("data: "))["error"]["message"]
        assert server.wait() == 1
        assert not any(is_running(pid) for pid in pids.values())
        assert server.run_dirs == []


def test_death_of_a_child_while_starting() -> None:
    server = ServerProcess(stub=True, env={"STUB_START": "hang"})
    try:
        assert eventually(lambda: "hanging" in server.log)
        children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
        names = {Path(f"/proc/{pid}/comm").read_text().strip(): int(pid) for pid in children}
        os.kill(names["minisgl-TP0-scheduler"[:15]], signal.SIGKILL)
        assert server.wait() == 1
        assert "minisgl-TP0-scheduler was killed by signal 9 (SIGKILL)" in server.log.splitlines()[-1]
        assert eventually(lambda: not any(is_running(int(pid)) for pid in children))
        assert server.run_dirs == []
    finally:
        server.kill()


@pytest.mark.parametrize("before", ["mkdir gone; cd gone; rmdir ../gone", *(f"ulimit -n {n}" for n in (12, 64, 128))])
def test_surroundings_in_which_nothing_can_start_are_told(before: str, tmp_path: Path) -> None:
    run_base = tmp_path / "run"
    run_base.mkdir()
    env = os.environ | {"PYTHONPATH": str(ROOT / "python"), "XDG_RUNTIME_DIR": str(run_base)}
    command = ["/bin/sh", "-c", f'{before}; exec "$@"', "sh", sys.executable, "-m", "minisgl", "serve", "--port", "0"]
    result = subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path, timeout=PATIENCE_S)
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert ("the current folder does not exist" if "gone" in before else f"only {before[10:]} open files") in line
    assert not [*run_base.iterdir()]


@pytest.mark.parametrize("how", ["timeout", "second signal"])
def test_drain_ends(how: str) -> None:
    flags = ("--drain-timeout", "0.5") if how == "timeout" else NO_LIMIT
    with ServerProcess(*flags, stub=True) as server, server.client() as client:
        with client.stream("POST", "/v1/completions", json=HELD) as response:
            lines = response.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            if how == "second signal":
                assert eventually(lambda: client.get("/ready").status_code == 503)
                server.process.send_signal(signal.SIGINT)
            rest = [line for line in lines if line]
        assert "shutting down" in rest[-2]
        assert rest[-1] == "data: [DONE]"
        assert server.wait() == 0
        assert "Traceback" not in server.log


def test_ctrl_c_to_the_group() -> None:
    with ServerProcess(stub=True) as server:
        pids = server.info()["processes"]
        os.killpg(server.process.pid, signal.SIGINT)
        assert server.wait() == 0
        assert "Traceback" not in server.log
        assert not any(is_running(pid) for pid in pids.values())


def run_stub(*flags: str, **env: str) -> tuple[int, str]:
    """Exit code and output of a server that is expected not to start."""
    server = ServerProcess(*flags, stub=True, env=env)
    try:
        code = server.wait()
    finally:
        server.kill()
    assert server.run_dirs == []
    return code, server.log


@pytest.mark.parametrize(
    ("mode", "code", "message"),
    [
        ("raise", 1, "minisgl-TP0-scheduler could not start: ValueError: the stub was told to fail"),
        ("exit", 1, "minisgl-TP0-scheduler ended with exit code 7"),
        ("hang", 1, "minisgl-TP0-scheduler.* not ready after 1.5 s"),
        ("config", 2, "minisgl: --made-up cannot work"),
    ],
)
def test_child_fails_at_start(mode: str, code: int, message: str) -> None:
    got, log = run_stub("--ready-timeout", "1.5" if mode == "hang" else "600", STUB_START=mode)
    assert got == code
    assert re.search(message, log.splitlines()[-1])


def test_interrupted_start() -> None:
    server = ServerProcess(stub=True, env={"STUB_START": "hang"})
    try:
        assert eventually(lambda: "hanging" in server.log)
        os.killpg(server.process.pid, signal.SIGINT)
        assert server.wait() == 130
        assert "Traceback" not in server.log
        assert server.run_dirs == []
    finally:
        server.kill()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model", "/nowhere/at/all"], "does not exist"),
        (["--model", str(ROOT / "tests")], "has no config.json"),
        (["--host", "0.0.0.0"], "--api-key"),
        (["--host", "not.a.host.invalid", "--no-auth"], "not an address"),
        (["--port", "70000"], "--port"),
        (["--max-seq-len", "x"], "'x' is not of type int"),
        (["--nonsense"], "unrecognized arguments"),
        (["--cache", "none"], "'none' is not one of radix, naive"),
        (["--api-key", ""], "--api-key"),
        (["--tp", "3"], "cannot be divided among 3 ranks"),
        (["--tp", "512"], "--tp 512"),
        (["--threads", "100000"], "--threads 100000"),
        (["--num-pages", "100000000"], "--num-pages 100000000"),
        pytest.param(
            ["--device", "cuda", "--tp", "9"],
            "needs an NVIDIA GPU",
            marks=pytest.mark.skipif(choose_device("auto") == "cuda", reason="there is a GPU"),
        ),
    ],
)
def test_bad_settings(flags: list[str], message: str) -> None:
    env = os.environ | {"PYTHONPATH": str(ROOT / "python")}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = subprocess.run(
        [sys.executable, "-m", "minisgl", "serve", *flags], capture_output=True, text=True, env=env, timeout=PATIENCE_S
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert result.returncode == 2
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 5


@pytest.mark.parametrize("command", ["generate x", "verify"])
def test_other_commands_refuse_as_early(command: str) -> None:
    code = "import sys; from minisgl.__main__ import main;print(main(sys.argv[1:]), 'torch' in sys.modules)"
    words = [sys.executable, "-c", code, *command.split(), "--tp", "3"]
    env = os.environ | {"PYTHONPATH": str(ROOT / "python")}
    result = subprocess.run(words, capture_output=True, text=True, env=env, timeout=PATIENCE_S)
    assert result.stdout == "2 False\n"
    assert "cannot be divided among 3 ranks" in result.stderr


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port: int = sock.getsockname()[1]
    return port


ODD: dict[str, str] = {
    "PYTHONIOENCODING": "ascii",
    "LC_ALL": "C",
    "PYTHONUTF8": "0",
    "PYTHONOPTIMIZE": "2",
    "MINISGL_PORT": "",
    "MINISGL_CONFIG": " ",
    "MINISGL_TP": "",
    "MINISGL_PORT_80_TCP": "tcp://10.0.0.1:80",
    "HOME": "/dev/null",
    "TMPDIR": "/nowhere",
    "TERM": "dumb",
    "COLUMNS": "0",
    "TZ": "Odd/Zone",
    "OTHER": "\udcff",
}


@pytest.mark.parametrize(
    ("streams", "odd"),
    [("", ODD), (">/dev/full", {}), (">/dev/full 2>&1", ODD), (">&-", {}), ("2>&-", {}), ("<&- >&- 2>&-", ODD)],
)
def test_odd_surroundings_do_not_end_the_server(tmp_path: Path, streams: str, odd: dict[str, str]) -> None:
    """Streams that are closed or full, what the environment says, and a folder of 60 characters or 120 bytes."""
    port, log, folder = free_port(), tmp_path / "log", tmp_path / ("ü" * 60)
    folder.mkdir()
    (folder / "grün 🙂").symlink_to(BUILTIN_MODEL)
    env = os.environ | {"XDG_RUNTIME_DIR": str(folder), "PYTHONPATH": str(ROOT / "python"), **odd}
    command = ["/bin/sh", "-c", f'exec "$@" {streams}', "sh", sys.executable, str(STUB), "--port", str(port)]
    with log.open("w") as out, httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
        process = subprocess.Popen([*command, f"{folder}/grün 🙂/"], stdout=out, stderr=out, env=env)

        def answers() -> bool:
            assert process.poll() is None, log.read_text()
            try:
                return client.get("/ready").status_code == 200
            except httpx.TransportError:
                return False

        try:
            assert eventually(answers)
            assert client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 2}).status_code == 200
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE_S) == 0
        finally:
            process.kill()
    text = log.read_text()
    assert "Traceback" not in text
    assert ("\nready on " in text) == (streams in ("", "2>&-"))
    assert ("stdout cannot be written (No space left on device)" in text) == (streams == ">/dev/full")


def test_port_in_use() -> None:
    with ServerProcess(stub=True) as server:
        port = server.url.rpartition(":")[2]
        code, log = run_stub("--port", port)
    assert code == 2
    assert f"port {port}" in log
    assert len(log.splitlines()) == 1
