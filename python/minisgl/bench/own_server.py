"""A server for one benchmark, in processes of its own: in this one it would share the interpreter with the client."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from minisgl.errors import ConfigError, StartupError
from minisgl.settings.sources import args_from_options

EXIT_S: Final = 15.0
POLL_S: Final = 0.05


def server_flags(options: dict[str, Any]) -> list[str]:
    """The command-line flags that set `options`."""
    flags = []
    for name, value in options.items():
        dashed = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{dashed}" if value else f"--no-{dashed}")
        else:
            flags.append(f"--{dashed}={value}")
    return flags


@contextmanager
def own_server(options: dict[str, Any]) -> Iterator[str]:
    """`minisgl serve` with `options` on a free port; yields its URL.

    Raises `ConfigError` for options that cannot work and `StartupError`, with what it wrote, when it does not start.
    """
    options = {"port": 0, **options}
    ready_s = args_from_options(options).ready_timeout
    with tempfile.TemporaryDirectory(prefix="minisgl-bench-") as folder:
        log = Path(folder) / "log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "minisgl", "serve", *server_flags(options)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=os.environ | {"PYTHONPATH": _python_path()},
            )
        try:
            yield _wait_ready(process, log, ready_s)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(EXIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _python_path() -> str:
    """This package's folder first, so that the server is the same code as the benchmark."""
    root = str(Path(__file__).resolve().parents[2])
    return os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH", "")) if p)


def _wait_ready(process: subprocess.Popen[bytes], log: Path, seconds: float) -> str:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        _, found, rest = log.read_text(errors="replace").partition("\nready on ")
        if found and "\n" in rest:
            return rest.split()[0]
        if process.poll() is not None:
            said = log.read_text(errors="replace").strip().splitlines() or [f"exit code {process.returncode}"]
            cause = said[-1].removeprefix("minisgl: ")
            raise ConfigError(cause) if process.returncode == 2 else StartupError(f"the server did not start: {cause}")
        time.sleep(POLL_S)
    raise StartupError(f"the server is not ready after {seconds:g} s (--ready-timeout)")
