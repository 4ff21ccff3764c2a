"""Compiles the C++ step: when the package is built, or at the first start into the user's cache.

Needs only the standard library, since `hatch_build.py` uses this module before an environment exists.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from minisgl.core.errors import NativeError
from minisgl.process.log import tell

logger = logging.getLogger(__name__)

PREBUILT: Final = Path(__file__).parent / "prebuilt"
COMPILER_CPU_S: Final = 600  # about 40 are normal; CPU time, because on a busy machine wall time says little
# Runs a compiler in a process group that is killed when the pipe on stdin closes, as it does when our process ends.
_SUPERVISE: Final = """
ulimit -S -t "$0"
exec 3<&0 </dev/null
(read -r line <&3; kill -KILL 0) >/dev/null 2>&1 &
"$@" 3<&-
code=$?
kill $!
exit $code
"""


@dataclass(frozen=True)
class Target:
    """A library to compile from `source` and the headers beside it. `name` is for log lines and errors."""

    name: str
    source: Path
    flags: tuple[str, ...]

    @property
    def file_name(self) -> str:
        """The file name. It contains a digest of sources, flags and machine, so a stale library is never used."""
        sources = (self.source, *sorted(self.source.parent.glob("*.h")))
        texts = (path.read_text(encoding="utf-8") for path in sources)
        key = "\0".join((*texts, platform.machine(), *self.flags))
        return f"{self.source.stem}-{hashlib.sha256(key.encode()).hexdigest()[:24]}.so"


def cache_dir() -> Path:
    """Return the folder for libraries below $XDG_CACHE_HOME (default ~/.cache).

    It depends on the machine type and C library, because hosts may share a home directory.
    """
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "minisgl" / "lib" / "-".join((platform.machine(), *platform.libc_ver()))


def build_library(target: Target) -> Path:
    """Find or compile one library; see `build_libraries`. Raises `NativeError` if that fails."""
    try:
        (future,) = build_libraries([target])
    except OSError as e:  # no pipe
        raise NativeError(f"{target.name} cannot be compiled: {e}") from e
    return future.result()


def build_libraries(targets: Sequence[Target]) -> list[Future[Path]]:
    """Find or compile libraries, in parallel on all cores; return futures that are done.

    Prefer the prebuilt library if its digest matches, else the cached one if it is intact. If several processes need
    the same library, one compiles it and the others wait. No compiler outlives this call, however it ends. A failed
    future raises `NativeError`.
    """
    lifeline, writer = os.pipe()
    with open(lifeline), ThreadPoolExecutor(os.cpu_count()) as pool, open(writer, "w"):  # closed in reverse order
        futures = [pool.submit(_find_or_compile, target, lifeline) for target in targets]
        wait(futures)
    return futures


def _find_or_compile(target: Target, lifeline: int) -> Path:
    try:
        if (prebuilt := PREBUILT / target.file_name).exists():
            return prebuilt
        folder = _private_folder(cache_dir())
        library = folder / target.file_name
        if not _is_intact(library):
            with library.with_suffix(".lock").open("w") as lock:
                with contextlib.suppress(OSError):  # not every file system has locks; then both compile
                    fcntl.flock(lock, fcntl.LOCK_EX)
                if not _is_intact(library):
                    if library.exists():
                        logger.warning("%s is damaged and will be compiled again", library)
                    _compile(target, library, lifeline)
        return library
    except OSError as e:
        raise NativeError(f"{target.name} cannot be compiled: {e}") from e


def _is_intact(library: Path) -> bool:
    """Return whether a cached library matches its checksum: a crash or a full disk may leave half a file."""
    try:
        return _checksum_file(library).read_text(encoding="ascii") == _checksum(library)
    except (OSError, UnicodeError):
        return False


def _checksum(library: Path) -> str:
    return hashlib.sha256(library.read_bytes()).hexdigest()


def _checksum_file(library: Path) -> Path:
    return library.with_suffix(".sha256")


def _private_folder(folder: Path) -> Path:
    """Create `folder` if it is absent. Raises `PermissionError` if another user could write to it."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(f"{folder} must belong to this user and be writable by this user only")
    return folder


def find_compiler() -> str:
    """Return the path of a C++ compiler. Raises `NativeError` without one."""
    compiler = next(filter(None, map(shutil.which, ("g++", "c++", "clang++"))), None)
    if compiler is None:
        raise NativeError("no C++ compiler (g++, c++ or clang++) is on the PATH")
    return compiler


def _compile(target: Target, library: Path, lifeline: int) -> None:
    """Compile `target`. The compiler is killed when the pipe `lifeline` closes.

    Raises `NativeError` with the compiler's first error.
    """
    compiler = find_compiler()
    tell(f"compiling {target.name} with {compiler} (once, about 40 s of CPU time)")
    start = time.monotonic()
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        output = Path(scratch) / library.name
        command = [compiler, *target.flags, str(target.source), "-o", str(output)]
        result = subprocess.run(
            ["/bin/sh", "-c", _SUPERVISE, str(COMPILER_CPU_S), *command],
            stdin=lifeline,
            capture_output=True,
            text=True,
            process_group=0,
            env=os.environ | {"TMPDIR": scratch, "LC_ALL": "C"},
        )
        if result.returncode:
            errors = [line for line in result.stderr.splitlines() if "error" in line]
            raise NativeError(f"{target.name} cannot be compiled: {[*errors, f'exit code {result.returncode}'][0]}")
        _checksum_file(library).write_text(_checksum(output), encoding="ascii")
        os.replace(output, library)
    tell(f"compiled {target.name} in {time.monotonic() - start:.0f} s")
