"""Compiling a library while the Nth call of the operating system fails, or is the process's last, for every N."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from minisgl.core.errors import NativeError
from minisgl.native import build
from minisgl.native.build import Target, build_library
from support.faults import failing

needs_compiler = pytest.mark.skipif(not any(map(shutil.which, ("g++", "c++", "clang++"))), reason="no C++ compiler")
MANY = 15  # calls that a build takes at least


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Target:
    """A library whose compiler copies what was compiled before."""
    source = tmp_path / "source" / "some.cpp"
    source.parent.mkdir()
    source.write_text('extern "C" int answer() { return 42; }')
    compiler = shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
    whole = tmp_path / "whole"
    subprocess.run([str(compiler), "-shared", "-fPIC", str(source), "-o", str(whole)], check=True)
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "g++").write_text(f'#!/bin/sh\nfor last; do :; done\ncat {whole} > "$last"\n')
    (folder / "g++").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setattr(build, "PREBUILT", tmp_path / "prebuilt")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Target("the answer", source, ("-shared",))


def require_whole(library: Path) -> None:
    assert ctypes.CDLL(str(library)).answer() == 42


@needs_compiler
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EMFILE])
def test_each_call_that_fails_is_told_and_the_next_build_works(target: Target, number: int) -> None:
    n, failures = 0, []
    while True:
        n += 1
        try:
            with failing(n, number) as calls:
                require_whole(build_library(target))
        except NativeError as e:
            failures.append(str(e))
        require_whole(build_library(target))
        shutil.rmtree(build.cache_dir())
        if calls.count < n:
            break
    assert n > MANY
    assert len(failures) > MANY // 2
    for message in failures:
        assert "\n" not in message
        assert os.strerror(number) in message


KILLED = """
import itertools, os, pathlib, sys
from minisgl.native import build
from support.faults import failing
build.PREBUILT = pathlib.Path('/nowhere')
target = build.Target('x', pathlib.Path(sys.argv[1]), ('-shared',))
for n in itertools.count(1):
    pid = os.fork()
    if pid == 0:
        with failing(n, act=lambda: os._exit(9)):
            build.build_library(target)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    print(build.build_library(target), flush=True)
    assert sys.stdin.readline()
    if code == 0:
        break
    assert code == 9, code
"""


@needs_compiler
def test_a_death_at_each_call_leaves_nothing_that_is_taken_for_a_library(target: Target) -> None:
    tests = Path(__file__).parents[2]
    env = os.environ | {"PYTHONPATH": os.pathsep.join((str(Path(build.__file__).parents[2]), str(tests)))}
    command = [sys.executable, "-c", KILLED, str(target.source)]
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None and child.stdout is not None
        deaths = 0
        for line in child.stdout:
            deaths += 1
            require_whole(Path(line.strip()))
            shutil.rmtree(build.cache_dir())
            child.stdin.write("\n")
            child.stdin.flush()
    assert child.returncode == 0
    assert deaths > MANY
