"""The package as it is installed: with the C++ libraries in it where there is a compiler, and without."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from e2e.harness import ROOT, ServerProcess
from minisgl.native import library as native

pytestmark = pytest.mark.slow

NOTHING_BUILT = "no C++ compiler"


def run(*command: str | Path, cwd: Path, **env: str) -> str:
    result = subprocess.run(command, cwd=cwd, env=os.environ | env, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout + result.stderr


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("sdist")
    run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", folder, cwd=ROOT)
    (archive,) = folder.glob("*.tar.gz")
    return archive


def unpacked(sdist: Path, folder: Path) -> Path:
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (tree,) = folder.iterdir()
    return tree


def environment(folder: Path) -> Path:
    """The Python of a new environment that has this one's packages, but for ours."""
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=ROOT)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "others.pth").write_text("\n".join(p for p in sys.path if p.endswith("site-packages")))
    return folder / "bin" / "python"


def install(python: Path, *what: str | Path) -> None:
    pip = ("pip", "--python", python, "install", "--no-index", "--no-deps", "--no-build-isolation")
    run(sys.executable, "-m", *pip, "--force-reinstall", *what, cwd=python.parent)


def served(python: Path, home: Path) -> str:
    """What a server of the installed package says at the start and to one question, on a machine without a compiler."""
    home.mkdir()
    server = ServerProcess(python=python, env={"PATH": "", "XDG_CACHE_HOME": str(home)})
    with server, server.client() as client:
        body = {"messages": [{"role": "user", "content": "What is 12 + 30?"}], "temperature": 0}
        answer = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    assert not any(home.rglob("*.so")), "something was compiled at the start"
    return f"{server.log}\n{answer}"


def test_with_a_compiler_nothing_is_compiled_later(sdist: Path, tmp_path: Path) -> None:
    """An editable installation with one library, then a wheel with all, both from the source distribution."""
    if not any(map(shutil.which, ("g++", "c++", "clang++"))):
        pytest.skip("no C++ compiler")
    tree = unpacked(sdist, tmp_path / "tree")
    prebuilt = tree / "python" / "minisgl" / "native" / "prebuilt"
    assert not prebuilt.exists()
    python = environment(tmp_path / "env")
    install(python, "-e", tree)
    libraries = {path.name for path in prebuilt.iterdir()}
    assert libraries == {native.target(native.usable_isas()[0]).file_name}
    step = f"step native ({native.usable_isas()[0]})"
    assert step in (said := served(python, tmp_path / "home-1")) and "42" in said

    (prebuilt / "stale.so").touch()
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path, cwd=tree)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith(f"-py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}.whl")
    names = {Path(name).name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")}
    assert names == {native.target(isa).file_name for isa in native.isas_of(platform.machine())}
    install(python, wheel)
    assert step in (said := served(python, tmp_path / "home-2")) and "42" in said


def test_without_a_compiler_the_wheel_is_pure(sdist: Path, tmp_path: Path) -> None:
    tree = unpacked(sdist, tmp_path / "tree")
    said = run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path, cwd=tree, PATH="")
    assert "no C++ compiler" in said
    (wheel,) = tmp_path.glob("*-py3-none-any.whl")
    python = environment(tmp_path / "env")
    install(python, wheel)
    said = served(python, tmp_path / "home")
    assert NOTHING_BUILT in said and "step eager" in said and "42" in said
