"""A chat in the terminal: answers stream in, and Ctrl-C stops an answer but not the session."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from minisgl.api.fields import read_body
from minisgl.api.protocol import ChatCompletionRequest
from minisgl.api.requests import SamplingDefaults, chat_message
from minisgl.core.errors import ConfigError
from minisgl.core.params import Limits
from minisgl.process.processes import signal_handler
from minisgl.settings.options import ServerArgs
from minisgl.tools.chat.client import ChatClient, ServerError
from minisgl.tools.chat.terminal import LineReader, WordWrap, interruptible, line_reader, no_echo

HELP: Final = '''\
/reset                 forget the conversation
/system [TEXT]         show the system prompt, or set it; /system - removes it
/params [NAME=VALUE]   show the sampling parameters, or set some: /params temperature=0 top_p=0.9; NAME= unsets
/lora [NAME]           list the adapters, or answer with one; /lora off answers with the model alone
/stats                 statistics of the last answer and of the engine
/tree                  show the prefix cache
/save FILE             write the conversation as JSON
/help                  show this text
/quit, /exit, /bye     leave (also Ctrl-D); Ctrl-C stops an answer
A line that ends with \\ continues on the next one, and """ begins and ends a text of several lines.'''
BLOCK: Final = '"""'
OUR_FIELDS: Final = {"messages", "n", "stream", "stream_options", "return_timing"}  # set by the chat itself
LEAVE: Final = ("/quit", "/exit", "/bye")
FIELDS: Final = sorted({*ChatCompletionRequest.__struct_fields__} - OUR_FIELDS)
MODELS: Final = "the model's generation_config"


def chat_with_own_server(args: ServerArgs, sampling: dict[str, Any], system: str | None) -> int:
    """Start a server, chat with it, and stop it. Return the exit code."""
    from minisgl.launch.launch import background_server

    if args.uds is not None or args.ssl_certfile is not None:
        raise ConfigError("the chat needs a port without TLS: leave out --uds and --ssl-certfile")
    with background_server(args) as url:
        return chat_with_url(url, next(iter(args.load_keys() or []), None), sampling, system)


def chat_with_url(url: str, api_key: str | None, sampling: dict[str, Any], system: str | None) -> int:
    """Chat with a running server; return the exit code. Raises `StartupError` if there is none."""
    client = ChatClient(url, api_key)
    try:
        name = client.model()
    except ServerError:  # it will also refuse messages, and say why
        name = "the model"
    if sys.stdin.isatty():
        print(f"Chat with {name} on {url}. /help lists the commands.")
    shell = Shell(client, sampling, system)
    if sampling:
        shell.check(sampling)
    shell.run(line_reader(shell.completions() if sys.stdin.isatty() else ()))
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
            "/lora": self._set_lora,
            "/stats": self._show_stats,
            "/tree": lambda _: print("\n".join(tree_lines(client.get("/engine_view")["view"]))),
            "/save": self._save,
            "/help": lambda _: print(HELP),
        }

    @cached_property
    def _info(self) -> dict[str, Any]:
        """The description of the model by a minisgl server; {} from another one."""
        try:
            info = self._client.get("/model_info")
        except (ServerError, OSError):
            return {}
        return info if "default_sampling_params" in info else {}

    def completions(self) -> list[str]:
        """The texts that Tab completes."""
        adapters = (f"/lora {name}" for name in ("off", *self._adapters()))
        return [*self._commands, *LEAVE, *(f"/params {name}=" for name in FIELDS), *adapters]

    def _adapters(self) -> list[str]:
        """The names of the server's adapters; none if it does not list them."""
        with contextlib.suppress(ServerError, OSError):
            return [model["id"] for model in self._client.get("/v1/models").get("data", ()) if model.get("parent")]
        return []

    def run(self, read_line: LineReader) -> None:
        """Read messages and print answers, until the input ends or /quit."""
        with signal_handler(signal.SIGINT, lambda *_: None):  # Ctrl-C counts only where `interruptible` says so
            while True:
                try:
                    text = read_message(read_line)
                except EOFError:
                    return
                except KeyboardInterrupt:
                    print("\n(/quit or Ctrl-D leaves)")
                    continue
                if text in LEAVE:
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
        """Send a message and print the answer. The text of a stopped answer stays in the conversation.

        The model's reasoning is shown, but not kept.
        """
        self._turns.append({"role": "user", "content": text})
        answer = ""
        wrap = WordWrap.of_stdout()
        dim, plain = ("\x1b[2m", "\x1b[0m") if sys.stdout.isatty() else ("", "")
        is_reasoning = False
        deltas = self._client.stream_chat(self._messages(), **self._params)
        try:
            with interruptible(), no_echo():
                for delta in deltas:
                    if delta.is_reasoning != is_reasoning:
                        is_reasoning = delta.is_reasoning
                        print(dim if is_reasoning else wrap.flush() + plain + wrap.feed("\n"), end="")
                    answer += "" if is_reasoning else delta.text
                    print(wrap.feed(delta.text), end="", flush=True)
            print(wrap.flush())
            if sys.stdout.isatty() and (speed := self._speed()):
                print(f"{dim}({speed}){plain}")
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

    def _speed(self) -> str:
        """Return length and speed of the last answer by the server's clock, if the server reports them."""
        usage, timing = (self._client.account.get(name, {}) for name in ("usage", "timing"))
        facts = {
            "{} tokens": usage.get("completion_tokens"),
            "{:.0f} tokens/s": timing.get("tokens_per_s"),
            "first token after {:.0f} ms": timing.get("ttft_ms"),
        }
        return ", ".join(text.format(value) for text, value in facts.items() if value is not None)

    # -- commands

    def _reset(self, _: str) -> None:
        self._turns = []
        print("(the conversation starts anew)")

    def _set_system(self, text: str) -> None:
        if text:
            self._system = "" if text == "-" else text
        print(f"system prompt: {self._system or 'none'}")

    def _set_params(self, text: str) -> None:
        params = dict(self._params)
        for pair in text.split():
            name, equals, value = pair.partition("=")
            if not equals or not name.isidentifier():
                raise ValueError(f"{pair} is not NAME=VALUE")
            if name in OUR_FIELDS:
                raise ValueError(f"{name} is set by the chat itself")
            try:
                params[name] = json.loads(value or "null")
            except ValueError:
                params[name] = value
            if not value:
                del params[name]
        self.check(params)
        self._params = params
        theirs, own = self._info.get("default_sampling_params", {}), asdict(SamplingDefaults())
        origins = {name: "default" if value == own.get(name) else MODELS for name, value in theirs.items()}
        for name, origin in (origins | dict.fromkeys(params, "set by you")).items():
            print(f"{name:<22}{json.dumps((theirs | params)[name]):<12}{origin}")
        if not origins:
            print("other parameters: as the server likes")

    def _set_lora(self, name: str) -> None:
        adapters = self._adapters()
        if name == "off":
            self._params.pop("model", None)
        elif name in adapters:
            self._params["model"] = name
        elif name:
            raise ValueError(f"there is no adapter {name!r}; /lora lists them")
        chosen = self._params.get("model")
        print("\n".join(f"{'*' if one == chosen else ' '} {one}" for one in adapters) or "the server has no adapters")

    def check(self, params: dict[str, Any]) -> None:
        """Raise `ValueError` for what a minisgl server would refuse, in its words. Other servers check on their own."""
        if not self._info:
            return
        limits = Limits(max_model_len=self._info["max_model_len"], vocab_size=self._info["vocab_size"])
        body = json.dumps({"messages": [{"role": "user", "content": ""}], **params}).encode()
        chat, _, ignored = read_body(body, ChatCompletionRequest)
        chat_message(chat, SamplingDefaults(), limits)
        for name in ignored:
            raise ValueError(f"{name} is not a field of a chat request")

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
    """Return the radix tree of an `EngineView` as lines of text, children below their parents."""
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
                tier = "" if node["place"] == "device" else f", on the {node['place']}"
                lines.append(f"{'  ' * depth}{text[:60]}  [{size}{tier}{used}]{requests.get(i, '')}")
                walk(i, depth + 1, node["hidden"])
        if hidden:
            lines.append(f"{'  ' * depth}… {hidden} more")

    walk(-1, 0, view["nodes_hidden"])
    return lines


def read_message(read_line: LineReader) -> str:
    """Read a message: a line, several lines that end with a backslash except the last, or text in triple quotes."""
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
