"""Calls of the operating system that fail: the Nth of all, for N = 1, 2, 3 and so on (as SQLite is tested)."""

from __future__ import annotations

import builtins
import errno
import io
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

CALLS = [
    *((os, name) for name in ("open", "mkdir", "replace", "rename", "unlink", "rmdir", "stat", "lstat", "pipe")),
    *((os, name) for name in ("listdir", "scandir", "access", "chmod")),
    (io, "open"),
    (builtins, "open"),
    (subprocess, "Popen"),
]


class Calls:
    """Counts the calls, and lets number `fatal` fail, or end in `act`."""

    def __init__(self, fatal: int, number: int, act: Callable[[], None] | None = None) -> None:
        self.count = 0
        self.failed = ""
        self._fatal = fatal
        self._number = number
        self._act = act
        self._lock = threading.Lock()

    def wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                self.count += 1
                is_fatal = self.count == self._fatal
            if is_fatal:
                self.failed = f"{name}{args[:2]}"
                if self._act is not None:
                    self._act()
                raise OSError(self._number, os.strerror(self._number), *args[:1])
            return call(*args, **kwargs)

        return counted


@contextmanager
def failing(fatal: int, number: int = errno.ENOSPC, act: Callable[[], None] | None = None) -> Iterator[Calls]:
    """Let call number `fatal` fail with the error `number`, or do `act` first."""
    calls = Calls(fatal, number, act)
    with ExitStack() as stack:
        for owner, name in CALLS:
            stack.enter_context(patch.object(owner, name, calls.wrap(name, getattr(owner, name))))
        yield calls
