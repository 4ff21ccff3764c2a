"""The terminal chat through a real terminal, against a running server."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.harness import PATIENCE_S, ROOT, ServerProcess, require_no_leak

CTRL_C, CTRL_D, ESCAPE, UP = "\x03", "\x04", "\x1b", "\x1b[A"


class Terminal:
    """`minisgl chat --url` with a terminal of its own."""

    def __init__(self, url: str, home: Path, *flags: str) -> None:
        self.main, child = pty.openpty()
        env = os.environ | {
            "XDG_STATE_HOME": str(home),
            "PROMPT_TOOLKIT_NO_CPR": "1",
            "TERM": "xterm",
            "COLUMNS": "200",
        }
        env["PYTHONPATH"] = os.pathsep.join([str(ROOT / "python"), os.environ.get("PYTHONPATH", "")])
        self.process = subprocess.Popen(
            [sys.executable, "-m", "minisgl", "chat", "--url", url, *flags],
            stdin=child,
            stdout=child,
            stderr=child,
            env=env,
            start_new_session=True,
            preexec_fn=lambda: os.close(os.open(os.ttyname(0), os.O_RDWR)),  # makes it the controlling terminal
        )
        os.close(child)
        self._unread = ""

    def type(self, text: str) -> None:
        os.write(self.main, text.encode())

    def say(self, text: str) -> None:
        """Type at the prompt; earlier input would meet a terminal in another mode."""
        self.expect(r"(^|\n)>[^\n\w]*$")
        self.type(text)

    def expect(self, pattern: str) -> str:
        """Read on until the pattern matches; return the output so far without control sequences."""
        deadline = time.monotonic() + PATIENCE_S
        while (match := re.search(pattern, self._unread)) is None:
            ready, _, _ = select.select([self.main], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"no {pattern!r} in {self._unread!r}"
            data = os.read(self.main, 1 << 16).decode(errors="replace")
            self._unread += re.sub(r"\x1b(\[[0-9;?]*[A-Za-z]|[=>])", "", data)
        seen, self._unread = self._unread[: match.end()], self._unread[match.end() :]
        return seen

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.main)


@pytest.fixture
def terminal(server: ServerProcess, tmp_path: Path) -> Iterator[Terminal]:
    terminal = Terminal(server.url, tmp_path, "--temperature", "0")
    yield terminal
    terminal.close()


def test_session_with_commands_and_interrupts(terminal: Terminal, server: ServerProcess, tmp_path: Path) -> None:
    terminal.expect(rf"Chat with minisgl-demo on {server.url}\. /help lists")
    terminal.say("My name is Anna.\r")
    terminal.expect("\n.*Anna")
    terminal.expect(r"\(\d+ tokens, \d+ tokens/s, first token after \d+ ms\)")
    terminal.say("What is my name?\r")
    terminal.expect(r"\?[^?]*Anna")  # the echo of the question has none
    terminal.say("/stats\r")
    assert re.search(r"cached tokens [1-9]", terminal.expect("engine: .*generation tokens \\d+"))
    terminal.say("/tree\r")
    assert "My name is Anna" in terminal.expect(r"nodes; [\s\S]*Anna[\s\S]*tokens")
    terminal.say("/params ignore_eos=true max_tokens=0\r")
    terminal.expect(r"\(max_tokens must be 1")  # a refusal is shown, and the session goes on
    terminal.say("/params ignore_eos=true\r")
    terminal.expect(r"temperature +0.0 +set by you\s+top_p +1.0 +default[\s\S]*ignore_eos +true +set by you")
    terminal.say("Tell me a story about a fox named Lily.\r")
    terminal.expect(r"Lily\.\s*\n\w")
    terminal.type("/params min_tokens=7")  # while the answer streams: not shown in it, but at the next prompt
    time.sleep(0.3)
    terminal.type(CTRL_C)
    assert "min_tokens" not in terminal.expect(r"\(stopped\)")
    terminal.expect(r">[^\n]*/params min_tokens=7")
    terminal.type("\r")
    terminal.expect("min_tokens +7 +set by you")
    require_no_leak(server)
    terminal.say("/params temprature=1\r")
    terminal.expect("did you mean temperature")
    terminal.say("/tr\t\r")  # completed
    terminal.expect(r"nodes; \d+ pages")
    terminal.say("one\\\rtwo" + ESCAPE + "\rthree\r")  # a continued line, and Alt-Enter inside the second line
    terminal.expect(r"three\s*\n\w")
    terminal.type(CTRL_C)
    terminal.expect(r"\(stopped\)")
    file = tmp_path / "saved.json"
    terminal.say(f"/save {file}\r")
    terminal.expect("saved 8 messages")
    messages = json.loads(file.read_text())["messages"]
    assert messages[-2] == {"role": "user", "content": "one\ntwo\nthree"}
    terminal.say(CTRL_C)
    terminal.expect(r"Ctrl-D leaves\)")
    terminal.say(CTRL_D)
    assert terminal.process.wait(PATIENCE_S) == 0
    require_no_leak(server)


def test_history_outlives_the_session(server: ServerProcess, tmp_path: Path) -> None:
    pytest.importorskip("prompt_toolkit")
    first = Terminal(server.url, tmp_path)
    first.expect("commands")
    first.say("/system be kind\r")
    first.expect("system prompt: be kind")
    first.say("/bye\r")
    assert first.process.wait(PATIENCE_S) == 0
    first.close()
    second = Terminal(server.url, tmp_path)
    second.expect("commands")
    second.say(UP + UP + "\r")
    second.expect("system prompt: be kind")
    second.process.send_signal(signal.SIGKILL)
    second.close()
    (history,) = tmp_path.rglob("chat_history")
    assert history.stat().st_mode & 0o777 == 0o600
