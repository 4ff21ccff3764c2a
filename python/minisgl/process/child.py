"""What runs inside a child process before and around its work."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Final

import msgspec

from minisgl.errors import ConfigError, RankError
from minisgl.process.logger import configure_logging

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_NAME: Final = 15


class Report(msgspec.Struct, frozen=True):
    """A child's one word about its start: facts when it is ready, or what went wrong."""

    facts: dict[str, str | int | float] = {}
    error: str = ""
    is_config_error: bool = False


Ready = Callable[[dict[str, str | int | float]], None]


def child_main(
    name: str,
    parent_pid: int,
    death: Connection,
    report: Connection,
    target: Callable[..., None],
    args: tuple[Any, ...],
) -> None:
    """Run `target(*args, ready)` in this process until it returns or the parent is gone; the process's entry point."""
    # The parent decides when a child ends: a Ctrl-C or SIGTERM to the whole group must not cut its streams.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _end_with_parent(name, parent_pid, death)
    configure_logging(name)

    def ready(facts: dict[str, str | int | float]) -> None:
        report.send_bytes(msgspec.msgpack.encode(Report(facts)))

    try:
        target(*args, ready)
    except BaseException as e:
        is_config_error = isinstance(e, ConfigError)
        if isinstance(e, RankError):
            logger.error("%s ends: %s", name, e)
        elif not is_config_error:
            logger.exception("%s ends", name)
        cause = str(e) if is_config_error else f"{type(e).__name__}: {e}"
        # Once the start is over nobody listens any more; the exit code says enough.
        with contextlib.suppress(OSError):
            report.send_bytes(msgspec.msgpack.encode(Report(error=cause, is_config_error=is_config_error)))
        sys.exit(1)


def _end_with_parent(name: str, parent_pid: int, death: Connection) -> None:
    """Leave no orphan: the kernel kills us with the parent (Linux), and the end of the death pipe does everywhere."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        libc.prctl(_PR_SET_NAME, name.encode()[:15])
    if os.getppid() != parent_pid:
        os._exit(1)  # it died before the line above

    def watch() -> None:
        with contextlib.suppress(EOFError, OSError):
            death.recv_bytes()
        os._exit(0)

    threading.Thread(target=watch, name="death-pipe", daemon=True).start()
