"""The private folder that holds the ipc sockets of one server."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Final

PREFIX: Final = "minisgl-"
_MAX_BASE: Final = 60  # a unix socket's path may have about 107 bytes


def _base() -> Path:
    for candidate in (os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir()):
        if candidate and len(candidate) <= _MAX_BASE and os.access(candidate, os.W_OK | os.X_OK):
            return Path(candidate)
    return Path("/tmp")


class RunDir:
    """A folder of mode 0700 under a unique name, removed at the end.

    A locked file inside says that its server is alive: the lock ends with the process, however it dies, so the next
    server can sweep what a crash has left. (A process id would not do: ids are reused, and differ between containers.)
    """

    def __init__(self) -> None:
        base = _base()
        _sweep(base)
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
        # Locked first, named after: a sweeping neighbour never sees an unlocked "lock".
        self._lock = os.open(self.path / "lock.new", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        os.rename(self.path / "lock.new", self.path / "lock")

    def __enter__(self) -> RunDir:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _sweep(base: Path) -> None:
    """Remove the folders of our own dead servers."""
    for folder in base.glob(PREFIX + "*"):
        try:
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            lock = os.open(folder / "lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:  # gone meanwhile, not ours, or just being made
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            pass  # alive
        finally:
            os.close(lock)
