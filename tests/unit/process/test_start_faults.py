"""The start of a server while the Nth call of the operating system fails, for every N."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import shutil
import time
from pathlib import Path

import pytest

from minisgl import __main__ as cli
from minisgl.launch import launch
from minisgl.process.processes import DIR_PREFIX, Child, Processes, Ready, run_dir
from support.faults import failing
from support.processes import PATIENCE_S, is_running


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr("minisgl.process.processes.MAX_BASE", 1000)
    return tmp_path


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EMFILE])
def test_a_run_directory_that_cannot_be_made_leaves_nothing_that_stays(base: Path, number: int) -> None:
    n, numbers = 0, []
    while True:
        n += 1
        try:
            with failing(n, number) as calls, run_dir() as folder:
                assert folder.is_dir()
        except OSError as e:
            numbers.append(e.errno)
        with run_dir() as folder:  # the next start works, and sweeps what the last one left
            assert folder.is_dir()
        # A call that fails while the folder is being removed may leave it empty, until it is older.
        assert not [*base.glob(DIR_PREFIX + "*/*")], calls.failed
        for left in base.glob(DIR_PREFIX + "*"):
            os.utime(left, (0, 0))
        with run_dir() as own:
            assert [*base.glob(DIR_PREFIX + "*")] == [own], calls.failed
        shutil.rmtree(base)
        base.mkdir()
        if calls.count < n:
            break
    assert len(numbers) >= 3
    assert set(numbers) == {number}


def test_a_server_that_is_killed_while_it_makes_its_run_directory_leaves_nothing_that_stays(base: Path) -> None:
    n, left = 0, 0
    while True:
        n += 1
        if (pid := os.fork()) == 0:
            try:
                with failing(n, act=lambda: os._exit(1)), run_dir():
                    os._exit(0)
            finally:
                os._exit(2)
        _, status = os.waitpid(pid, 0)
        unlocked = [*base.glob(DIR_PREFIX + "*")]
        left += len(unlocked)
        with run_dir():
            assert all(folder.exists() for folder in unlocked), "which may be just being made"
        for folder in unlocked:
            os.utime(folder, (0, 0))
        with run_dir() as own:
            assert [*base.glob(DIR_PREFIX + "*")] == [own]
        if os.waitstatus_to_exitcode(status) == 0:
            break
        assert os.waitstatus_to_exitcode(status) == 1
    assert left >= 2


@pytest.mark.slow
def test_children_that_cannot_all_be_started_leave_none() -> None:
    n, numbers, pids = 0, [], []
    while True:
        n += 1
        processes = Processes()
        try:
            with failing(n, errno.EAGAIN) as calls:
                processes.start(*(Child(name, report_and_wait, (), {}) for name in ("a", "b")))
            processes.wait_ready(PATIENCE_S)
        except OSError as e:
            numbers.append(e.errno)
        finally:
            pids += processes.pids.values()
            processes.stop()
        assert not any(is_running(pid) for pid in pids), calls.failed
        if calls.count < n:
            break
    assert len(numbers) > 5
    assert set(numbers) == {errno.EAGAIN}


def report_and_wait(ready: Ready) -> None:
    ready({})
    time.sleep(PATIENCE_S)


def test_the_command_tells_a_failed_call_in_one_line(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "configure_logging", lambda *_: None)
    monkeypatch.setattr(launch.Processes, "start", lambda *_: os.mkdir(base / "absent" / "folder"))
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        code = cli.main(["serve", "--port", "0"])
    assert code == 1
    (line,) = errors.getvalue().splitlines()
    assert line.startswith("minisgl: ") and "No such file or directory" in line and "absent/folder" in line
