"""Starting children."""

from __future__ import annotations

import os
import signal

import pytest

from minisgl.process.processes import _held_interrupt


def test_a_ctrl_c_while_a_child_is_started_counts_afterwards() -> None:
    started = []

    def start() -> None:
        with _held_interrupt():
            os.kill(os.getpid(), signal.SIGINT)
            started.append(True)

    with pytest.raises(KeyboardInterrupt):
        start()
    assert started
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
