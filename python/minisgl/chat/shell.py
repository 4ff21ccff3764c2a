"""Chat in the terminal: answers stream in, the conversation is kept, Ctrl-C stops an answer and not the session."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from minisgl.chat.client import ChatClient, ServerError
from minisgl.errors import ConfigError
from minisgl.settings.options import ServerArgs

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession

HELP: Final = '''\
/reset                 forget the conversation
/system [TEXT]         show the system prompt, or set it; /system - removes it
/params [NAME=VALUE]   show the sampling parameters, or set some: /params temperature=0 top_p=0.9; NAME= unsets
/stats                 statistics of the last answer and of the engine
/tree                  show the prefix cache
/save FILE             write the conversation as JSON
/help                  show this text
/quit                  leave (also Ctrl-D); Ctrl-C stops an answer
A line that ends with \\ continues on the next one, and """ begins and ends a text of several lines.'''
BLOCK: Final = '"""'

LineReader = Callable[[str], str]  # prompt -> the typed line; raises EOFError at the end, and KeyboardInterrupt


def chat_with_own_server(args: ServerArgs, sampling: dict[str, Any], system: str | None) -> int:
    """Start a server, chat with it, stop it."""
    from minisgl.launch.launch import background_server

    if args.uds is not None or args.ssl_certfile is not None:
        raise ConfigError("the chat talks to a port without TLS; leave out --uds and --ssl-certfile")
    with background_server(args) as url:
        return chat_with_url(url, next(iter(args.load_keys() or []), None), sampling, system)


def chat_with_url(url: str, api_key: str | None, sampling: dict[str, Any], system: str | None) -> int:
    """Chat with a running server; returns the exit code."""
    Shell(ChatClient(url, api_key), sampling, system).run(line_reader())
    return 0


class Shell:
    """One conversation."""

    def __init__(self, client: ChatClient, sampling: dict[str, Any], system: str | None = None) -> None:
        self._client = client
        self._params = dict(sampling)
        self._system = system or ""
        self._turns: list[dict[str, Any]] = []
        self._commands: dict[str, Callable[[str], None]] = {
            "/reset": self._reset,
            "/system": self._set_system,
            "/params": self._set_params,
            "/stats": self._show_stats,
            "/tree": lambda _: print("\n".join(tree_lines(client.get("/engine_view")["view"]))),
            "/save": self._save,
            "/help": lambda _: print(HELP),
        }

    def run(self, read_line: LineReader) -> None:
        """Read and answer until the input ends or /quit."""
        if sys.stdin.isatty():
            print("Chat with the model. /help lists the commands.")
        with interrupt_handler(lambda *_: None):  # Ctrl-C counts only where `interruptible` says so
            while True:
                try:
                    text = read_message(read_line)
                except EOFError:
                    return
                except KeyboardInterrupt:
                    print("\n(/quit or Ctrl-D leaves)")
                    continue
                if text == "/quit":
                    return
                if text.startswith("/"):
                    self._run_command(text)
                elif text:
                    self._answer(text)

    def _run_command(self, text: str) -> None:
        name, _, argument = text.partition(" ")
        if (command := self._commands.get(name)) is None:
            print(f"there is no command {name}; /help lists them")
            return
        try:
            with interruptible():
                command(argument.strip())
        except (ServerError, OSError, ValueError) as e:
            print(f"({e})", file=sys.stderr)
        except KeyboardInterrupt:
            print(" (stopped)")

    def _messages(self) -> list[dict[str, Any]]:
        return ([{"role": "system", "content": self._system}] if self._system else []) + self._turns

    def _answer(self, text: str) -> None:
        """Ask and print the answer; the text of a stopped answer stays in the conversation.

        The model's reasoning is shown and then forgotten.
        """
        self._turns.append({"role": "user", "content": text})
        answer = ""
        dim, plain = ("\x1b[2m", "\x1b[0m") if sys.stdout.isatty() else ("", "")
        is_reasoning = False
        deltas = self._client.stream_chat(self._messages(), **self._params)
        try:
            with interruptible():
                for delta in deltas:
                    if delta.is_reasoning != is_reasoning:
                        is_reasoning = delta.is_reasoning
                        print(dim if is_reasoning else f"{plain}\n", end="")
                    answer += "" if is_reasoning else delta.text
                    print(delta.text, end="", flush=True)
            print()
        except KeyboardInterrupt:
            print(" (stopped)")
        except (ServerError, OSError) as e:
            print(f"\n({e})", file=sys.stderr)
        finally:
            deltas.close()
            if is_reasoning:
                print(plain, end="", flush=True)
        if answer:
            self._turns.append({"role": "assistant", "content": answer})
        else:
            self._turns.pop()

    # -- commands

    def _reset(self, _: str) -> None:
        self._turns = []
        print("(the conversation starts anew)")

    def _set_system(self, text: str) -> None:
        if text:
            self._system = "" if text == "-" else text
        print(f"system prompt: {self._system or 'none'}")

    def _set_params(self, text: str) -> None:
        for pair in text.split():
            name, equals, value = pair.partition("=")
            if not equals or not name.isidentifier():
                raise ValueError(f"{pair} is not NAME=VALUE")
            self._params.pop(name, None)
            if value:
                try:
                    self._params[name] = json.loads(value)
                except ValueError:
                    self._params[name] = value
        shown = " ".join(f"{name}={json.dumps(value)}" for name, value in self._params.items())
        print(f"parameters: {shown or 'those of the model'}")

    def _show_stats(self, _: str) -> None:
        account = self._client.account
        facts = account.get("usage", {}) | account.get("timing", {})
        facts = (facts.pop("prompt_tokens_details", None) or {}) | facts
        print("last answer:", _pairs(facts) or "none yet")
        print("engine:     ", _pairs(self._client.get("/server_info")["stats"]))

    def _save(self, name: str) -> None:
        if not name:
            raise ValueError("/save needs the name of a file")
        with Path(name).expanduser().open("x", encoding="utf-8") as file:  # never over an existing file
            json.dump({"messages": self._messages(), **self._params}, file, ensure_ascii=False, indent=1)
        print(f"(saved {len(self._turns)} messages to {name})")


def _pairs(facts: dict[str, Any]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in facts.items() if value is not None)


def tree_lines(view: dict[str, Any]) -> list[str]:
    """The radix tree of an `EngineView` as text, children below their parents."""
    nodes = view["nodes"]
    requests: dict[int, str] = {}  # node -> the requests that end there
    for request in view["requests"]:
        requests[request["node"]] = f"{requests.get(request['node'], '')} #{request['uid']}"
    pages = ", ".join(f"{view[f'pages_{name}']} {name}" for name in ("private", "locked", "cached", "free"))
    lines = [f"{len(nodes)} of {view['nodes_total']} nodes; {view['pages_total']} pages: {pages}"]

    def walk(parent: int, depth: int, hidden: int) -> None:
        for i, node in enumerate(nodes):
            if node["parent"] == parent:
                text = node["text"].replace("\n", "↵") or "·" * min(node["tokens"], 40)
                used = f", used by {node['ref_count']}" if node["ref_count"] else ""
                size = f"{node['tokens']} tokens, {node['pages']} page{'s' * (node['pages'] != 1)}"
                lines.append(f"{'  ' * depth}{text[:60]}  [{size}{used}]{requests.get(i, '')}")
                walk(i, depth + 1, node["hidden"])
        if hidden:
            lines.append(f"{'  ' * depth}… {hidden} more")

    walk(-1, 0, view["nodes_hidden"])
    return lines


# -- input


@contextlib.contextmanager
def interrupt_handler(handler: Callable[..., Any]) -> Iterator[None]:
    """Call `handler` for SIGINT within the block; for the main thread."""
    old = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, old)


def interruptible() -> contextlib.AbstractContextManager[None]:
    """Raise KeyboardInterrupt for SIGINT within the block."""
    return interrupt_handler(signal.default_int_handler)


def read_message(read_line: LineReader) -> str:
    """One message: a line, lines that each end with a backslash except the last, or a text between triple quotes."""
    line = read_line("> ")
    if line.strip().startswith(BLOCK):
        lines = [line.strip().removeprefix(BLOCK)]
        while not lines[-1].rstrip().endswith(BLOCK):
            lines.append(read_line("… "))
        lines[-1] = lines[-1].rstrip().removesuffix(BLOCK)
        return "\n".join(lines).strip("\n")
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(read_line("… "))
    return "\n".join(lines).strip()


def line_reader() -> LineReader:
    """The best reader that the terminal and the installed packages allow."""
    if not sys.stdin.isatty():
        return lambda _: _interruptible_input("")
    try:
        return _session().prompt
    except ImportError:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (gives input() line editing, and the history of this session)
        return _interruptible_input


def _interruptible_input(prompt: str) -> str:
    with interruptible():
        return input(prompt)


def _session() -> PromptSession[str]:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    path = _history_file()
    return PromptSession(history=InMemoryHistory() if path is None else FileHistory(path), key_bindings=keys)


def _history_file() -> Path | None:
    """The file that keeps the history between sessions, readable by this user only; None if it cannot be made."""
    folder = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "minisgl"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = folder / "chat_history"
        path.touch(mode=0o600)
    except OSError:
        return None
    return path
