"""A real server in processes of its own, for tests to talk to, hurt and stop."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from support.processes import PATIENCE_S, eventually, is_running

__all__ = [
    "HELD",
    "OURS",
    "PATIENCE_S",
    "ROOT",
    "ServerProcess",
    "eventually",
    "is_running",
    "release",
    "require_no_leak",
    "stopped",
]

ROOT = Path(__file__).resolve().parents[2]
STUB, UNTIMED = (str(ROOT / "tests" / "e2e" / f"{name}_server.py") for name in ("stub", "untimed"))
OURS = Path(sys.executable)
HELD: dict[str, Any] = {"prompt": "a few words !hold", "stream": True}  # not answered by the stub before `release`


class ServerProcess:
    """The server with `--port 0 FLAGS` until `with` ends: the real one without timed steps, or the stub server.

    With `python`, it is `python -m minisgl`: of this checkout with our own, else of the environment's package.
    """

    def __init__(
        self, *flags: str, stub: bool = False, env: dict[str, str] | None = None, python: Path | None = None
    ) -> None:
        command = [str(python), "-m", "minisgl"] if python else [sys.executable, STUB if stub else UNTIMED]
        self.run_base = tempfile.mkdtemp(prefix="mt-", dir="/tmp")
        weakref.finalize(self, shutil.rmtree, self.run_base, True)
        self._log = Path(self.run_base) / "log"
        variables = os.environ | {"MINISGL_CHECK": "1", "XDG_RUNTIME_DIR": self.run_base} | (env or {})
        is_ours = python in (None, OURS)
        path = [str(ROOT / "python"), os.environ.get("PYTHONPATH", "")] if is_ours else []
        variables["PYTHONPATH"] = os.pathsep.join(path)
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, "--port", "0", *flags],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=variables,
                start_new_session=True,
            )
        self.url = ""
        self._pids: list[int] = []

    @property
    def log(self) -> str:
        """Everything the server has written."""
        return self._log.read_text()

    @property
    def run_dirs(self) -> list[Path]:
        return list(Path(self.run_base).glob("minisgl-*"))

    def wait_ready(self) -> ServerProcess:
        deadline = time.monotonic() + PATIENCE_S
        while "\nready on " not in self.log:
            assert self.process.poll() is None, f"the server ended with {self.process.returncode}:\n{self.log}"
            assert time.monotonic() < deadline, f"the server is not ready:\n{self.log}"
            time.sleep(0.02)
        self.url = self.log.partition("\nready on ")[2].split()[0]
        return self

    def __enter__(self) -> ServerProcess:
        try:
            return self.wait_ready()
        except BaseException:
            self.kill()
            raise

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.wait()
            except subprocess.TimeoutExpired:
                print(self.log)
        self.kill()

    def wait(self) -> int:
        """The exit code."""
        return self.process.wait(PATIENCE_S)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=PATIENCE_S, trust_env=False, **options)

    def cpu_seconds(self) -> float:
        """What its processes have computed. Unlike a clock this stands still while others have the cores."""
        self._pids = self._pids or list(self.info()["processes"].values())
        stats = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in self._pids]
        return sum(int(stat[11]) + int(stat[12]) for stat in stats) / os.sysconf("SC_CLK_TCK")

    def info(self) -> dict[str, Any]:
        with self.client() as client:
            result: dict[str, Any] = client.get("/server_info").json()
        return result

    def metrics(self) -> dict[str, float]:
        """The gauges and counters without labels, by their short name."""
        with self.client() as client:
            text = client.get("/metrics").text
        values = {}
        for line in text.splitlines():
            if line.startswith("minisgl:") and "le=" not in line:
                name, _, value = line.rpartition(" ")
                values[name.removeprefix("minisgl:").partition("{")[0]] = float(value)
        return values


def release(server: ServerProcess) -> None:
    """The stub may end its answers to `HELD`."""
    (Path(server.run_base) / "go").touch()


@contextlib.contextmanager
def stopped(*pids: int) -> Iterator[None]:
    """These processes do nothing meanwhile."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def require_no_leak(server: ServerProcess) -> None:
    """LEAK0: after the last request every page is free or evictable and no request is remembered."""
    seen: dict[str, float] = {}

    def is_clean() -> bool:
        seen.update(server.metrics())
        pages = seen["kv_pages_free"] + seen["kv_pages_evictable"]
        tracked = (
            "kv_pages_held",
            "num_requests_running",
            "num_requests_waiting",
            "frontend_entries",
            "detokenizer_entries",
        )
        return pages == seen["kv_pages_total"] and not any(seen[name] for name in tracked)

    assert eventually(is_clean), f"something leaks: {seen}"
