"""Compiled libraries are shared safely, rebuilt when their sources change, and optional."""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from minisgl.core.errors import NativeError
from minisgl.native import build
from minisgl.native.build import Target, build_libraries, build_library
from support.processes import PATIENCE_S, eventually, is_running

FLAGS = ("-std=c++17", "-shared", "-fPIC")
needs_compiler = pytest.mark.skipif(not any(map(shutil.which, ("g++", "c++", "clang++"))), reason="no C++ compiler")


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "PREBUILT", tmp_path / "prebuilt")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def target(tmp_path: Path) -> Target:
    source = tmp_path / "source" / "some.cpp"
    source.parent.mkdir()
    source.write_text('extern "C" int answer() { return 42; }')
    return Target("the answer", source, FLAGS)


def fake_compiler(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Put a g++ of our own on the PATH, alone."""
    folder.mkdir()
    (folder / "g++").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "g++").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def python(code: str) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": str(Path(build.__file__).parents[2])}
    return subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True)


def built_by_child(target: Target) -> str:
    return (
        "import pathlib; from minisgl.native import build; build.PREBUILT = pathlib.Path('/nowhere');"
        f"print(build.build_library(build.Target('x', pathlib.Path({str(target.source)!r}), {target.flags!r})))"
    )


@needs_compiler
def test_processes_that_want_one_library_compile_it_once(tmp_path: Path, target: Target, monkeypatch):
    real = shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
    fake_compiler(tmp_path / "bin", monkeypatch, f'echo >> {tmp_path}/calls; exec {real} "$@"')
    children = [python(built_by_child(target)) for _ in range(3)]
    found = {child.communicate(timeout=PATIENCE_S)[0].strip() for child in children}
    assert found == {str(path) for path in (tmp_path / "cache").rglob("*.so")} and len(found) == 1
    assert (tmp_path / "calls").read_text() == "\n"


def test_without_a_compiler_the_reason_is_told(target: Target, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(NativeError, match="no C\\+\\+ compiler"):
        build_library(target)


def test_a_folder_that_others_can_write_is_refused(target: Target):
    build.cache_dir().mkdir(parents=True)
    build.cache_dir().chmod(0o777)
    with pytest.raises(NativeError, match="writable by this user only"):
        build_library(target)


@needs_compiler
def test_the_prebuilt_library_is_preferred_until_its_sources_change(target: Target, monkeypatch, caplog):
    with caplog.at_level(logging.INFO, logger="minisgl"):
        cached = build_library(target)
    assert [r.getMessage().split(" ")[0] for r in caplog.records] == ["compiling", "compiled"]
    build.PREBUILT.mkdir()
    prebuilt = Path(shutil.copy2(cached, build.PREBUILT))
    with monkeypatch.context() as patch:
        patch.setenv("PATH", "")
        assert build_library(target) == prebuilt
        prebuilt.unlink()
        assert build_library(target) == cached
        with pytest.raises(NativeError):
            build_library(Target("other flags", target.source, (*FLAGS, "-g")))
        (target.source.parent / "some.h").write_text("#define ANSWER 43")
        with pytest.raises(NativeError):
            build_library(target)
    assert build_library(target).parent == cached.parent


@needs_compiler
@pytest.mark.parametrize("damage", ["empty", "half", "flipped"])
def test_a_damaged_library_is_compiled_again(target: Target, damage: str, caplog):
    library = build_library(target)
    content = library.read_bytes()
    flipped = content[:100] + bytes([content[100] ^ 1]) + content[101:]
    library.write_bytes({"empty": b"", "half": content[: len(content) // 2], "flipped": flipped}[damage])
    with caplog.at_level(logging.INFO, logger="minisgl"):
        assert build_library(target) == library
        assert build_library(target) == library
    assert ctypes.CDLL(str(library)).answer() == 42
    assert [r.getMessage().split(" ")[-1] for r in caplog.records if r.levelno == logging.WARNING] == ["again"]
    assert len(caplog.records) == 3


@needs_compiler
def test_a_compile_error_is_told_and_costs_only_its_own_library(tmp_path: Path, target: Target):
    bad = tmp_path / "bad.cpp"
    bad.write_text("this is not C++")
    failed, fine = build_libraries([Target("the bad one", bad, FLAGS), target])
    assert fine.result().exists()
    with pytest.raises(NativeError, match=r"the bad one cannot be compiled: .*bad.cpp"):
        failed.result()


@pytest.fixture
def endless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A compiler with a child that computes for ever, whose id is written to this file."""
    file = tmp_path / "pid"
    fake_compiler(
        tmp_path / "bin", monkeypatch, f"sh -c 'echo $$ > {file}.new; mv {file}.new {file}; while :; do :; done'"
    )
    yield file
    if file.exists() and is_running(pid := int(file.read_text())):
        os.kill(pid, signal.SIGKILL)


def test_a_compiler_that_computes_too_long_is_ended(target: Target, endless: Path, monkeypatch):
    monkeypatch.setattr(build, "COMPILER_CPU_S", 1)
    with pytest.raises(NativeError, match="the answer cannot be compiled"):
        build_library(target)
    assert not is_running(int(endless.read_text()))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_compiler_ends_with_the_process_that_wants_the_library(target: Target, endless: Path, number: int):
    with python(built_by_child(target)) as child:
        assert eventually(endless.exists)
        compiler = int(endless.read_text())
        child.send_signal(number)
        child.wait(PATIENCE_S)
        assert eventually(lambda: not is_running(compiler))
