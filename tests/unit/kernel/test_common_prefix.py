"""Native and numpy key comparison agree with the definition, and the build is safe to race."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from e2e.harness import PATIENCE_S
from minisgl.kernel import build, common_prefix
from minisgl.kernel.common_prefix import (
    NATIVE_FROM,
    common_prefix_len,
    common_prefix_native,
    common_prefix_numpy,
    load_native,
)

SOURCE = Path(common_prefix.__file__).parent / "csrc" / "common_prefix.cpp"


def native(a: np.ndarray, b: np.ndarray) -> int:
    function = load_native()
    if function is None:
        pytest.skip("no C++ compiler")
    return common_prefix_native(function, a, b)


@pytest.mark.parametrize("compare", [common_prefix_len, common_prefix_numpy, native])
@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 200, 4096, 4097, NATIVE_FROM, NATIVE_FROM + 70])
def test_all_agree(compare, length: int):
    a = np.random.default_rng(length).integers(0, 2**31 - 1, length, dtype=np.int32)
    assert compare(a, a.copy()) == length
    assert compare(a, a[: length // 2]) == length // 2
    assert compare(a, np.append(a, np.int32(1))) == length
    for at in {0, 1, 62, 63, 64, length // 2, length - 1}:
        if 0 <= at < length:
            b = a.copy()
            b[at] ^= 1
            assert compare(a, b) == at == compare(b, a)


@pytest.mark.parametrize("compare", [common_prefix_len, common_prefix_numpy, native])
def test_strided_and_read_only(compare):
    a = np.arange(3 * NATIVE_FROM, dtype=np.int32)
    b = a[::2].copy()
    b.flags.writeable = False
    assert compare(a[::2], b) == len(b)
    assert compare(a[::-1], a[::-1].copy()) == len(a)
    assert compare(a[::2], a) == 1


def test_concurrent_builds_make_one_library(tmp_path: Path):
    if load_native() is None:
        pytest.skip("no C++ compiler")
    code = (
        "from pathlib import Path; from minisgl.kernel import build; build.PREBUILT = Path('/nowhere'); "
        f"print(build.build_library(Path({str(SOURCE)!r})))"
    )
    package = str(SOURCE.parents[3])
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": package}
    command = [sys.executable, "-c", code]
    workers = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    found = {worker.communicate(timeout=PATIENCE_S)[0].strip() for worker in workers}
    assert [str(p) for p in (tmp_path / "minisgl" / "lib").iterdir()] == list(found)


def test_without_a_compiler_there_is_no_library(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "PREBUILT", tmp_path / "prebuilt")
    with caplog.at_level(logging.DEBUG, logger="minisgl.kernel.build"):
        assert build.build_library(SOURCE) is None
    assert len(caplog.records) == 1 and "no C++ compiler" in caplog.text


def test_a_folder_that_others_can_write_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(build, "PREBUILT", tmp_path / "prebuilt")
    tmp_path.chmod(0o777)
    assert build.build_library(SOURCE) is None


def test_what_was_compiled_with_the_package_is_taken_until_its_sources_change(tmp_path, monkeypatch):
    if load_native() is None:
        pytest.skip("no C++ compiler")
    monkeypatch.setattr(build, "PREBUILT", tmp_path / "prebuilt")
    monkeypatch.setattr(build, "cache_dir", lambda: tmp_path / "cache")
    source = tmp_path / "some.cpp"
    source.write_text('extern "C" int answer() { return 42; }')
    library = build.prebuild_library(source, build.FLAGS)
    assert build.build_library(source) == library and library.parent == build.PREBUILT
    with monkeypatch.context() as patch:
        patch.setenv("PATH", "")
        assert build.build_library(source) == library == build.prebuild_library(source, build.FLAGS)
        assert build.build_library(source, (*build.FLAGS, "-g")) is None
        (tmp_path / "some.h").write_text("#define ANSWER 43")
        assert build.build_library(source) is None
    fresh = build.build_library(source)
    assert fresh is not None and fresh.parent == tmp_path / "cache"


def test_a_compile_error_is_a_fallback(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "cache_dir", lambda: tmp_path / "lib")
    bad = tmp_path / "bad.cpp"
    bad.write_text("this is not C++")
    assert build.build_library(bad) is None
