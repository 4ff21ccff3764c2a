"""Ctrl-C in a session that it must not end: it counts while there is something to stop, and is nothing otherwise."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def interrupts_ignored() -> Iterator[None]:
    """Within, SIGINT does nothing, not even between two statements; for the main thread."""
    old = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, old)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """A part of such a session in which SIGINT raises KeyboardInterrupt."""
    old = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, old)
