"""The real server around a scripted scheduler: answers with the prompt's own tokens. Run as a program by the tests.

    STUB_DELAY   seconds for each step (all running requests advance by one token)
    STUB_START   ok | raise | exit | hang | config: what happens at the start
    STUB_QUEUE   requests beyond which new ones are refused with 429
    STUB_SNDBUF  bytes of the kernel's send buffer of each connection, which else grows to megabytes

The template variables `calls` and `thoughts` of a chat request name the parsers of its answer.
A prompt that contains a trigger text makes the request fail: "!error-first" before, "!error-later" after some tokens.
After the first token of one with "!hold" nothing comes until there is a file `go` in the folder XDG_RUNTIME_DIR.
One with "!hang" blocks the scheduler, one with "!raise" is an error of ours in it.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from minisgl.__main__ import COMMANDS, main
from minisgl.api.parsers.forms import TOOL_FORMS
from minisgl.api.parsers.output import OutputForms, OutputParser
from minisgl.api.parsers.reasoning import REASONING_FORMS
from minisgl.api.protocol import ChatCompletionRequest
from minisgl.checkpoint import hf
from minisgl.core.errors import ConfigError
from minisgl.core.message import (
    AbortMsg,
    BackendMsg,
    DetokenizeMsg,
    ExitMsg,
    Failure,
    Finished,
    FrontendMsg,
    Started,
    StatsMsg,
    TokenizeMsg,
    TokenizerMsg,
    UserMsg,
    ids_from_bytes,
    ids_to_bytes,
)
from minisgl.core.plan import FinishReason
from minisgl.launch import launch
from minisgl.launch.launch import bind_socket, launch_server
from minisgl.process.processes import Ready
from minisgl.process.queues import Codec, ZmqPullQueue, ZmqPushQueue
from minisgl.settings.options import ServerArgs
from minisgl.settings.sources import args_from_options, given_options
from minisgl.tokenizer.folder import load_tokenizer


@dataclass
class Stub:
    """A request being answered."""

    msg: UserMsg
    tokens: list[int]
    done: int = 0
    fails_at: int | None = None
    is_held: bool = False


def run(args: ServerArgs, ready: Ready) -> None:
    """The scheduler's process."""
    match os.environ.get("STUB_START", "ok"):
        case "raise":
            raise ValueError("the stub was told to fail")
        case "config":
            raise ConfigError("--made-up cannot work")
        case "exit":
            os._exit(7)
        case "hang":
            print("hanging", flush=True)
            time.sleep(600)
    delay = float(os.environ.get("STUB_DELAY", "0.001"))
    queue_limit = int(os.environ.get("STUB_QUEUE", "1000000"))
    tokenizer = load_tokenizer(hf.resolve_model(args.scheduler.engine.model))
    inbox: ZmqPullQueue[BackendMsg] = ZmqPullQueue(args.zmq_backend_addr, Codec(BackendMsg))
    tokens: ZmqPushQueue[TokenizerMsg] = ZmqPushQueue(args.zmq_detokenizer_addr, Codec(TokenizerMsg))
    stats: ZmqPushQueue[FrontendMsg] = ZmqPushQueue(args.zmq_frontend_addr, Codec(FrontendMsg))
    ready({"dtype": "stub", "device": "cpu", "kv_tokens": 64, "page_size": 16})
    go = Path(os.environ["XDG_RUNTIME_DIR"]) / "go"
    running: dict[int, Stub] = {}
    while True:
        finished: list[Finished] = []
        for msg in inbox.get(timeout=0.0 if running else 0.2):
            match msg:
                case UserMsg() if len(running) >= queue_limit:
                    full = Failure(message="the queue is full", code="queue_full", status=429)
                    finished.append(Finished(uid=msg.uid, reason=FinishReason.ERROR, failure=full))
                case UserMsg():
                    ids = ids_from_bytes(msg.input_ids).tolist()
                    text = tokenizer.decode(ids)
                    stub = Stub(msg, ids[: msg.sampling_params.max_tokens])
                    stub.fails_at = 0 if "!error-first" in text else 3 if "!error-later" in text else None
                    stub.is_held = "!hold" in text
                    if "!hang" in text:
                        time.sleep(600)
                    if "!raise" in text:
                        raise RuntimeError("the stub was told to fail in a step")
                    running[msg.uid] = stub
                case AbortMsg(uid):
                    if running.pop(uid, None) is not None:
                        finished.append(Finished(uid=uid, reason=FinishReason.ABORT))
                case ExitMsg():
                    return
        uids, shown, started = [], [], []
        may_go = go.exists()
        for uid, stub in list(running.items()):
            if stub.is_held and stub.done and not may_go:
                continue
            if stub.done == stub.fails_at:
                finished.append(
                    Finished(uid=uid, reason=FinishReason.ERROR, failure=Failure(message="the stub failed"))
                )
                del running[uid]
                continue
            if stub.done == 0:
                started.append(
                    Started(
                        uid=uid,
                        prompt_tokens=len(stub.tokens),
                        cached_tokens=0,
                        sampling_params=stub.msg.sampling_params,
                    )
                )
            uids.append(uid)
            shown.append(stub.tokens[stub.done])
            stub.done += 1
            if stub.done == len(stub.tokens):
                finished.append(Finished(uid=uid, reason=FinishReason.LENGTH))
                del running[uid]
        if uids or finished:
            packed = b"".join(u.to_bytes(8, "little") for u in uids)
            tokens.put([DetokenizeMsg(uids=packed, tokens=ids_to_bytes(shown), started=started, finished=finished)])
        n = len(running)
        stats.put([StatsMsg(running=n, pages_total=64, pages_free=64 - n, pages_held=n)])
        if running:
            time.sleep(delay)


def prepare(
    forms: OutputForms,
    request: ChatCompletionRequest,
    message: TokenizeMsg,
    customs: frozenset[str] = frozenset(),
    budget: int | None = None,
) -> tuple[TokenizeMsg, Callable[[], OutputParser]]:
    """`OutputForms.prepare` for the parsers that the request names, so that one server has all of them."""
    names = message.template_kwargs
    tools, reasoning = TOOL_FORMS.get(names.get("calls", "")), REASONING_FORMS.get(names.get("thoughts", ""))
    chosen = replace(forms, tools=tools or forms.tools)
    if reasoning is not None:
        chosen = replace(chosen, reasoning=reasoning, opened={None: reasoning.starts_open})
    return PREPARE(chosen, request, message, customs, budget)


PREPARE = OutputForms.prepare


def bind_small(args: ServerArgs) -> socket.socket:
    """A listening socket whose connections inherit a small send buffer."""
    sock = bind_socket(args)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, int(os.environ["STUB_SNDBUF"]))
    return sock


if __name__ == "__main__":
    import stub_server  # by name, so that the spawned child finds the function

    OutputForms.prepare = prepare  # type: ignore[method-assign]
    if "STUB_SNDBUF" in os.environ:
        launch.bind_socket = bind_small
    COMMANDS["serve"] = lambda given: launch_server(args_from_options(given_options(given)), stub_server.run)
    sys.exit(main(["serve", *sys.argv[1:]]))
