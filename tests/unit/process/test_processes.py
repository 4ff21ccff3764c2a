"""The start of child processes, and the run directory."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import tempfile
import time
from pathlib import Path

import pytest

from minisgl.core.errors import ConfigError
from minisgl.process import processes
from minisgl.process.processes import Child, Processes, Ready, _blocked_interrupt, held_interrupt, run_dir
from support.processes import PATIENCE_S, eventually

AT_IMPORT = os.environ.get("OF_A_CHILD", "")


def report(answer: str, ready: Ready) -> None:
    if not answer:
        raise ConfigError("no answer is given")
    ready({answer: AT_IMPORT})
    time.sleep(PATIENCE_S)


def test_children_report_what_they_import_with_their_environment_and_send_heartbeats() -> None:
    running = Processes()
    assert running.wait_ready(0.0) == {}, "nothing to wait for"
    try:
        running.start(*(Child(name, report, (name,), {"OF_A_CHILD": name * 2}) for name in ("a", "b")))
        assert running.wait_ready(PATIENCE_S) == {"a": "aa", "b": "bb"}
        os.kill(running.pids["b"], signal.SIGSTOP)
        assert eventually(lambda: running.silence()["b"] > 3)
        assert eventually(lambda: running.silence()["a"] < 2)
        os.kill(running.pids["b"], signal.SIGKILL)
        assert running.wait_end() == "b"
        assert running.describe_end("b") == "b was killed by signal 9 (SIGKILL)"
        running.end(["b"], 0.0)
        running.start(Child("b", report, ("",), {}))
        with pytest.raises(ConfigError, match="no answer is given"):
            running.wait_ready(PATIENCE_S)
    finally:
        running.stop()
    assert not running.pids


def test_ctrl_c_during_a_spawn_is_raised_afterwards() -> None:
    started = []

    def start() -> None:
        with held_interrupt(), _blocked_interrupt():
            os.kill(os.getpid(), signal.SIGINT)
            started.append(True)

    with pytest.raises(KeyboardInterrupt):
        start()
    assert started
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_run_dirs_are_private_and_stale_ones_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = Path(tempfile.mkdtemp(prefix="mt-", dir="/tmp"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(base))
    try:
        stale, fresh, foreign = (base / f"{processes.DIR_PREFIX}{n}" for n in ("stale", "fresh", "foreign"))
        for folder in (stale, fresh):
            folder.mkdir()
        (stale / "socket").touch()
        foreign.symlink_to(tmp_path)
        (tmp_path / "socket").touch()
        with run_dir() as one, run_dir() as two:
            assert one != two
            assert one.exists()  # the second has not swept it
            assert stat.S_IMODE(one.stat().st_mode) == 0o700
            assert not stale.exists()
            assert fresh.exists()
            assert (tmp_path / "socket").exists()
        assert not one.exists()
    finally:
        shutil.rmtree(base)


def test_run_dir_path_is_short_enough(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    long = tmp_path / ("x" * 80)
    long.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    monkeypatch.setattr(processes.tempfile, "gettempdir", lambda: str(long))
    with run_dir() as folder:
        assert len(str(folder)) < 60
