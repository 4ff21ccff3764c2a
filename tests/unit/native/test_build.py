"""Compiled libraries are shared safely, rebuilt when their sources change, and optional."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from e2e.harness import PATIENCE_S
from minisgl.native import build


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    path = folder / "some.cpp"
    path.write_text('extern "C" int answer() { return 42; }')
    return path


def has_compiler() -> bool:
    return any(shutil.which(name) for name in ("c++", "g++", "clang++"))


def test_concurrent_builds_make_one_library(tmp_path: Path, source: Path):
    if not has_compiler():
        pytest.skip("no C++ compiler")
    code = (
        "from pathlib import Path; from minisgl.native import build; build.PREBUILT = Path('/nowhere'); "
        f"print(build.build_library(Path({str(source)!r})))"
    )
    package = str(Path(build.__file__).parents[2])
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": package}
    command = [sys.executable, "-c", code]
    workers = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    found = {worker.communicate(timeout=PATIENCE_S)[0].strip() for worker in workers}
    assert [str(p) for p in (tmp_path / "minisgl" / "lib").iterdir()] == list(found)


def test_without_a_compiler_there_is_no_library(tmp_path, source, monkeypatch, caplog):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "PREBUILT", tmp_path / "prebuilt")
    with caplog.at_level(logging.DEBUG, logger="minisgl.native.build"):
        assert build.build_library(source) is None
    assert len(caplog.records) == 1 and "no C++ compiler" in caplog.text


def test_a_folder_that_others_can_write_is_refused(tmp_path, source, monkeypatch):
    monkeypatch.setattr(build, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(build, "PREBUILT", tmp_path / "prebuilt")
    tmp_path.chmod(0o777)
    assert build.build_library(source) is None


def test_what_was_compiled_with_the_package_is_taken_until_its_sources_change(tmp_path, source, monkeypatch):
    if not has_compiler():
        pytest.skip("no C++ compiler")
    monkeypatch.setattr(build, "PREBUILT", tmp_path / "prebuilt")
    monkeypatch.setattr(build, "cache_dir", lambda: tmp_path / "cache")
    library = build.prebuild_library(source, build.FLAGS)
    assert build.build_library(source) == library and library.parent == build.PREBUILT
    with monkeypatch.context() as patch:
        patch.setenv("PATH", "")
        assert build.build_library(source) == library == build.prebuild_library(source, build.FLAGS)
        assert build.build_library(source, (*build.FLAGS, "-g")) is None
        (source.parent / "some.h").write_text("#define ANSWER 43")
        assert build.build_library(source) is None
    fresh = build.build_library(source)
    assert fresh is not None and fresh.parent == tmp_path / "cache"


def test_a_compile_error_is_a_fallback(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "cache_dir", lambda: tmp_path / "lib")
    bad = tmp_path / "bad.cpp"
    bad.write_text("this is not C++")
    assert build.build_library(bad) is None
