"""Shared libraries of C++ sources: compiled with the package, or on first use into a cache of the user's own.

Needs nothing but the standard library: `hatch_build.py` uses it before there is an environment.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Final

logger = logging.getLogger(__name__)

# No -march=native: a home directory may be shared by machines with different processors.
FLAGS: Final = ("-O3", "-std=c++17", "-shared", "-fPIC")
TIMEOUT_S: Final = 120.0
PREBUILT: Final = Path(__file__).parent / "prebuilt"


def cache_dir() -> Path:
    """Where compiled libraries live: $XDG_CACHE_HOME/minisgl/lib, by default below ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "minisgl" / "lib"


def build_library(source: Path, flags: tuple[str, ...] = FLAGS) -> Path | None:
    """The shared library of `source`; None, with one debug line, where it cannot be built.

    That which was compiled with the package, if it is of these sources and flags, else one in the cache.
    Processes that build the same library at once each rename a complete file into place.
    """
    try:
        if (prebuilt := PREBUILT / _file_name(source, flags)).exists():
            return prebuilt
        compiler = _find_compiler()
        version = subprocess.run(
            [compiler, "--version"], capture_output=True, text=True, check=True, timeout=TIMEOUT_S
        ).stdout
        library = _private_folder(cache_dir()) / _file_name(source, flags, compiler, version)
        if not library.exists():
            _compile([compiler, *flags, str(source)], library)
        return library
    except (OSError, subprocess.SubprocessError) as e:
        logger.debug("%s is not compiled, the Python fallback runs: %s", source.name, e)
        return None


def prebuild_library(source: Path, flags: tuple[str, ...]) -> Path:
    """Compile `source` to where `build_library` looks first, unless it is there.

    Raises `OSError` or `subprocess.SubprocessError` where that cannot be done.
    """
    library = PREBUILT / _file_name(source, flags)
    if not library.exists():
        compiler = _find_compiler()
        PREBUILT.mkdir(exist_ok=True)
        _compile([compiler, *flags, str(source)], library)
    return library


def _file_name(source: Path, flags: tuple[str, ...], *compiler: str) -> str:
    """With a digest of all that the library is made of, so that a stale one is never used."""
    texts = (path.read_text(encoding="utf-8") for path in (source, *sorted(source.parent.glob("*.h"))))
    key = "\0".join((*texts, platform.machine(), *compiler, *flags))
    return f"{source.stem}-{hashlib.sha256(key.encode()).hexdigest()[:24]}.so"


def _find_compiler() -> str:
    for name in ("g++", "c++", "clang++"):
        if path := shutil.which(name):
            return path
    raise FileNotFoundError("no C++ compiler on the PATH")


def _private_folder(folder: Path) -> Path:
    """`folder`, made if absent; refused when somebody else could put a library of theirs into it."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(f"{folder} must belong to this user and be writable by nobody else")
    return folder


def _compile(command: list[str], library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        output = Path(scratch) / library.name
        result = subprocess.run([*command, "-o", str(output)], capture_output=True, text=True, timeout=TIMEOUT_S)
        if result.returncode:
            raise OSError(f"the compiler failed: {result.stderr.strip()[:500]}")
        os.replace(output, library)
