"""Chat in the terminal: answers stream in, the conversation is kept, Ctrl-C stops an answer and not the session."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

from minisgl.server.args import ServerArgs
from minisgl.server.client import ChatClient, ServerError

HELP = """\
/reset   forget the conversation
/help    this text
/quit    leave (also Ctrl-D); Ctrl-C stops an answer"""


def chat_with_own_server(args: ServerArgs, sampling: dict[str, Any], system: str | None) -> int:
    """Start a server, chat with it, stop it."""
    from minisgl.server.launch import background_server

    with background_server(args) as url:
        return chat_with_url(url, args.api_key, sampling, system)


def chat_with_url(url: str, api_key: str | None, sampling: dict[str, Any], system: str | None) -> int:
    """Chat with a running server; returns the exit code."""
    Shell(ChatClient(url, api_key), sampling, system).run(_line_reader())
    return 0


def _line_reader() -> Callable[[], str]:
    """A function that reads a line, with editing and history where the terminal and the `chat` extra allow it."""
    if not sys.stdin.isatty():
        return input
    try:
        from prompt_toolkit import PromptSession
    except ImportError:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (gives input() line editing)
        return lambda: input("> ")
    session: PromptSession[str] = PromptSession("> ")
    return session.prompt


class Shell:
    """One conversation."""

    def __init__(self, client: ChatClient, sampling: dict[str, Any], system: str | None = None) -> None:
        self._client = client
        self._sampling = sampling
        self._start = [] if system is None else [{"role": "system", "content": system}]
        self._messages = list(self._start)

    def run(self, read_line: Callable[[], str]) -> None:
        """Read and answer until the input ends or /quit."""
        if sys.stdin.isatty():
            print("Chat with the model. /help lists the commands.")
        while True:
            try:
                line = read_line().strip()
            except EOFError:
                return
            except KeyboardInterrupt:
                print("\n(/quit or Ctrl-D leaves)")
                continue
            if line == "/quit":
                return
            self._handle(line)

    def _handle(self, line: str) -> None:
        if not line:
            return
        if line == "/help":
            print(HELP)
        elif line == "/reset":
            self._messages = list(self._start)
            print("(the conversation starts anew)")
        elif line.startswith("/"):
            print(f"there is no command {line.split()[0]}; /help lists them")
        else:
            self._answer(line)

    def _answer(self, line: str) -> None:
        """Ask and print; what was said stays in the conversation also when the answer is stopped halfway."""
        self._messages.append({"role": "user", "content": line})
        answer = ""
        pieces = self._client.stream_chat(self._messages, **self._sampling)
        try:
            for piece in pieces:
                answer += piece
                print(piece, end="", flush=True)
            print()
        except KeyboardInterrupt:
            print(" (stopped)")
        except (ServerError, OSError) as e:
            print(f"\n({e})", file=sys.stderr)
        finally:
            pieces.close()
        if answer:
            self._messages.append({"role": "assistant", "content": answer})
        else:
            self._messages.pop()
