"""Chat in the terminal: answers stream in, the conversation is kept, Ctrl-C stops an answer and not the session."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from minisgl.chat.client import ChatClient, ServerError
from minisgl.chat.interrupt import interruptible, interrupts_ignored
from minisgl.chat.line_reader import LineReader, line_reader, read_message
from minisgl.settings.options import ServerArgs

HELP: Final = '''\
/reset                 forget the conversation
/system [TEXT]         show the system prompt, or set it; /system - removes it
/params [NAME=VALUE]   show the sampling parameters, or set some: /params temperature=0 top_p=0.9; NAME= unsets
/stats                 the last answer and the engine in figures
/tree                  the prefix cache as it is now
/save FILE             write the conversation as JSON
/help                  this text
/quit                  leave (also Ctrl-D); Ctrl-C stops an answer
A line that ends with \\ goes on in the next one, and """ begins and ends a text of several lines.'''


def chat_with_own_server(args: ServerArgs, sampling: dict[str, Any], system: str | None) -> int:
    """Start a server, chat with it, stop it."""
    from minisgl.launch.launch import background_server

    with background_server(args) as url:
        return chat_with_url(url, args.api_key, sampling, system)


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
            "/tree": self._show_tree,
            "/save": self._save,
            "/help": lambda _: print(HELP),
        }

    def run(self, read_line: LineReader) -> None:
        """Read and answer until the input ends or /quit."""
        if sys.stdin.isatty():
            print("Chat with the model. /help lists the commands.")
        while True:
            with interrupts_ignored():
                try:
                    text = read_message(read_line)
                except EOFError:
                    return
                except KeyboardInterrupt:
                    print("\n(/quit or Ctrl-D leaves)")
                    continue
                if text == "/quit":
                    return
                self._handle(text)

    def _handle(self, text: str) -> None:
        if not text.startswith("/"):
            if text:
                self._answer(text)
            return
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
        """Ask and print; what was said stays in the conversation also when the answer is stopped halfway.

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
                self._params[name] = _parsed(value)
        shown = " ".join(f"{name}={json.dumps(value)}" for name, value in self._params.items())
        print(f"parameters: {shown or 'those of the model'}")

    def _show_stats(self, _: str) -> None:
        account = self._client.account
        facts = account.get("usage", {}) | account.get("timing", {})
        details = facts.pop("prompt_tokens_details", None) or {}
        facts = {name: value for name, value in (details | facts).items() if value is not None}
        print("last answer:", ", ".join(f"{n.replace('_', ' ')} {v}" for n, v in facts.items()) or "none yet")
        stats = self._client.get("/server_info")["stats"]
        print("engine:     ", ", ".join(f"{n.replace('_', ' ')} {v}" for n, v in stats.items()))

    def _show_tree(self, _: str) -> None:
        for line in tree_lines(self._client.get("/engine_view")["view"]):
            print(line)

    def _save(self, name: str) -> None:
        if not name:
            raise ValueError("/save needs the name of a file")
        with Path(name).expanduser().open("x", encoding="utf-8") as file:  # never over another one
            json.dump({"messages": self._messages(), **self._params}, file, ensure_ascii=False, indent=1)
        print(f"(saved {len(self._turns)} messages to {name})")


def _parsed(value: str) -> Any:
    """A number, boolean or list where it is one, else a text."""
    try:
        return json.loads(value)
    except ValueError:
        return value


def tree_lines(view: dict[str, Any]) -> list[str]:
    """The radix tree of an `EngineView` as text, children below their parents."""
    nodes = view["nodes"]
    ends: dict[int, str] = {}
    for request in view["requests"]:
        ends[request["node"]] = f"{ends.get(request['node'], '')} #{request['uid']}"
    pages = {name: view[f"pages_{name}"] for name in ("private", "locked", "cached", "free")}
    head = ", ".join(f"{count} {name}" for name, count in pages.items())
    lines = [f"{len(nodes)} of {view['nodes_total']} nodes; {view['pages_total']} pages: {head}"]

    def walk(parent: int, depth: int, hidden: int) -> None:
        for i, node in enumerate(nodes):
            if node["parent"] == parent:
                text = node["text"].replace("\n", "↵")
                used = f", used by {node['ref_count']}" if node["ref_count"] else ""
                size = f"{node['tokens']} tokens, {node['pages']} page{'s' * (node['pages'] != 1)}"
                lines.append(f"{'  ' * depth}{text[:60]}  [{size}{used}]{ends.get(i, '')}")
                walk(i, depth + 1, node["hidden"])
        if hidden:
            lines.append(f"{'  ' * depth}… {hidden} more")

    walk(-1, 0, view["nodes_hidden"])
    return lines
