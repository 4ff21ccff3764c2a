"""The life of a server: check the settings, bind the socket, spawn processes, serve, drain, clean up."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import ssl
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

import minisgl
from minisgl.checkpoint import hf
from minisgl.checkpoint.adapter import adapters_of
from minisgl.checkpoint.embedder import read_embedder
from minisgl.core.errors import ConfigError, StartupError
from minisgl.core.params import Adapter, Limits
from minisgl.distributed.info import Rendezvous
from minisgl.engine.fit import Checkpoint, check_fit
from minisgl.launch.children import SchedulerTarget, divided, replica_children, run_scheduler, tokenizer_children
from minisgl.process.log import announce, configure_logging, log_format, log_level, tell
from minisgl.process.processes import Facts, Processes, run_dir, signal_handler
from minisgl.settings.options import ServerArgs, split_list

if TYPE_CHECKING:
    from minisgl.api.requests import ServedModel
    from minisgl.launch.supervisor import Supervisor
    from minisgl.tokenizer.template import ChatTemplate

logger = logging.getLogger(__name__)

MAX_SHOWN: Final = 8  # adapters in the banner


def launch_server(args: ServerArgs, scheduler: SchedulerTarget = run_scheduler) -> int:
    """Run a server until it is told to stop; return the exit code.

    Raises `ConfigError` or `StartupError` if it cannot start.
    """
    configure_logging("minisgl-api", args.log_level, args.log_format)
    checked = check_args(args)
    with signal_handler(signal.SIGTERM, lambda *_: sys.exit(0)):  # during the start: clean up and exit
        try:
            if args.scheduler.engine.node_rank:
                return _run_other_host(args, checked, scheduler)
            with supervised(args, checked, scheduler) as (server, sock, facts):
                url = _url(sock, checked.tls is not None)
                server.run(sock, lambda: announce(banner(args, checked, facts, url)))
                return server.exit_code
        except KeyboardInterrupt:
            return 130


@contextlib.contextmanager
def background_server(args: ServerArgs) -> Iterator[str]:
    """Run a server whose HTTP side is a thread of this process; yield its URL. For `minisgl chat` and `--shell`."""
    configure_logging("minisgl-api", args.log_level or "WARNING", args.log_format)
    checked = check_args(args)
    if args.scheduler.engine.node_rank:
        raise ConfigError("the chat runs on node 0: start `minisgl serve` with the same settings on the other nodes")
    is_up = threading.Event()
    with supervised(args, checked, run_scheduler) as (server, sock, _):
        thread = threading.Thread(target=server.run, args=(sock, is_up.set), name="http")
        thread.start()
        try:
            while not is_up.wait(0.1):
                if not thread.is_alive():
                    raise StartupError("the HTTP server could not start")
            yield _url(sock, checked.tls is not None)
        finally:
            server.stop_from_other_thread()
            thread.join()


def _run_other_host(args: ServerArgs, checked: Checked, scheduler: SchedulerTarget) -> int:
    """Run the ranks of a host without HTTP until one of them ends. All ranks end when rank 0 does."""
    with running_children(args, checked, scheduler) as (_, processes, _):
        announce(f"ready: {', '.join(processes.pids)}")
        name = processes.wait_end()
        cause = processes.describe_end(name)
        if processes.exit_code(name) == 0:
            return 0
        logger.error("%s; the other ranks stop", cause)
        return 1


# -- check


@dataclass(frozen=True)
class Checked:
    """The results of the cheap checks before anything heavy starts."""

    folder: Path
    limits: Limits
    name: str
    generation_config: dict[str, Any]
    template: ChatTemplate
    parsers: tuple[str, str]  # the names of those of tool calls and reasoning
    tls: ssl.SSLContext | None
    adapters: dict[str, Adapter]


def check_args(args: ServerArgs) -> Checked:
    """Check settings, model and memory in less than a second, without torch.

    Raises `ConfigError` for settings that cannot work, and for a model that is missing, broken or too large.
    """
    from minisgl.api.tracing import is_traced
    from minisgl.launch.http_protocol import connection_limit

    connection_limit()
    log_level()
    log_format()
    divided(args)
    if args.otlp_endpoint is not None:
        is_traced(args)
    engine = args.scheduler.engine
    Rendezvous.of_local_ranks(engine, "")
    check_fit(engine, args.dp)
    return check_model(args)


def check_model(args: ServerArgs) -> Checked:
    """Do the part of `check_args` that needs the model's files but no device, for a machine without ranks."""
    from minisgl.api.parsers.output import parser_names
    from minisgl.tokenizer.end_tokens import EndTokens
    from minisgl.tokenizer.template import ChatTemplate
    from minisgl.tokenizer.tokenize import TokenizeManager, model_limits

    engine = args.scheduler.engine
    checkpoint = Checkpoint.read(engine)
    folder = checkpoint.folder
    for path in [] if engine.dummy_weight else hf.weight_files(folder):
        hf.require_complete(path)
    has_snapshots = checkpoint.model.window is not None
    limits = msgspec.structs.replace(model_limits(folder, engine.max_seq_len), has_snapshots=has_snapshots)
    template = ChatTemplate.of_folder(folder, engine.load_chat_template(), engine.template_kwargs)
    tokenizer = TokenizeManager(folder, limits, template).tokenizer
    if beyond := [t.content for i, t in tokenizer.get_added_tokens_decoder().items() if i >= limits.vocab_size]:
        more = f"{len(beyond)} tokens beyond the vocab_size of config.json, such as {beyond[0]!r}"
        logger.warning("tokenizer.json has %s: prompts with them are refused", more)
    for problem in [] if limits.embeds else EndTokens.of_folder(folder, template).problems:
        logger.warning("%s", problem)
    for name, error in template.problems.items():
        logger.warning("the chat template %r cannot be used: %s; requests that need it are refused", name, error)
    name = next(iter(split_list(args.served_model_name)), "") or hf.model_name(engine.model)
    parsers = parser_names(template, args.tool_call_parser, args.reasoning_parser)
    if args.thinking_budget >= 0 and parsers[1] == "none":
        raise ConfigError("--thinking-budget: no markers of this model's reasoning are known; see --reasoning-parser")
    if args.tool_call_parser == "auto" and parsers[0] == "none" and "tools" in template.variables:
        logger.warning("no parser knows the tool calls of this chat template: they stay text (see --tool-call-parser)")
    return Checked(
        folder, limits, name, hf.load_generation_config(folder), template, parsers, _tls(args), _adapters(args, name)
    )


def _adapters(args: ServerArgs, model: str) -> dict[str, Adapter]:
    """Return the adapters of `--lora` by name. Raises `ConfigError` for the name of the base."""
    engine = args.scheduler.engine
    if engine.lora_dynamic is not None and not Path(engine.lora_dynamic).expanduser().is_dir():
        raise ConfigError(f"--lora-dynamic {engine.lora_dynamic} is not a folder")
    adapters = {adapter.name: adapter for adapter in adapters_of(engine.lora)}
    if taken := adapters.keys() & {model, *split_list(args.served_model_name)}:
        raise ConfigError(f"--lora {min(taken)}: the model has this name; give the adapter another, as NAME=PATH")
    return adapters


def _tls(args: ServerArgs) -> ssl.SSLContext | None:
    """Return the TLS context, or None without a certificate. Raises `ConfigError` if certificate or key is unusable."""
    if args.ssl_certfile is None and args.ssl_keyfile is None:
        return None
    if args.ssl_certfile is None or args.ssl_keyfile is None:
        raise ConfigError("HTTPS needs both --ssl-certfile and --ssl-keyfile: give the other one, too")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(args.ssl_certfile, args.ssl_keyfile, lambda: "")  # no prompt for a passphrase
    except OSError as e:  # ssl.SSLError is one
        files = f"--ssl-certfile {args.ssl_certfile} and --ssl-keyfile {args.ssl_keyfile}"
        raise ConfigError(f"{files} cannot be used: {e}") from e
    return context


# -- bind


@contextlib.contextmanager
def listening_socket(args: ServerArgs) -> Iterator[socket.socket]:
    """Yield a socket that listens where the options say; close it afterwards. Raises `ConfigError` if it cannot."""
    if args.uds is None:
        with bind_socket(args) as sock:
            yield sock
        return
    try:
        with socket.socket(socket.AF_UNIX) as probe:
            if Path(args.uds).is_socket() and probe.connect_ex(args.uds):
                os.unlink(args.uds)  # left by a server that has ended
        sock = socket.create_server(args.uds, family=socket.AF_UNIX)
    except OSError as e:
        raise ConfigError(f"cannot listen on --uds {args.uds}: {e.__context__ or e}") from e
    try:
        with sock:
            yield sock
    finally:
        Path(args.uds).unlink(missing_ok=True)


def bind_socket(args: ServerArgs) -> socket.socket:
    """Bind and listen on a TCP socket. Raises `ConfigError` if the address is not available."""
    host, port = args.host, args.port
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as e:
        raise ConfigError(f"--host {host} is not an address of this machine ({e.strerror})") from e
    try:
        is_dual = family == socket.AF_INET6 and socket.has_dualstack_ipv6()  # :: serves IPv4, too
        sock = socket.create_server(address, family=family, dualstack_ipv6=is_dual)
    except OSError as e:
        raise ConfigError(
            f"cannot listen on {host} port {port}: {os.strerror(e.errno or 0)}; give another --port (0 = any free one)"
        ) from e
    # Accepted connections inherit this: the kernel ends one whose client acknowledges nothing, even after `close`.
    if sys.platform == "linux":
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, round(args.write_timeout * 1000)))
    return sock


def _url(sock: socket.socket, is_tls: bool) -> str:
    if sock.family == socket.AF_UNIX:
        return "http://localhost"
    scheme, (host, port) = "https" if is_tls else "http", sock.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


# -- spawn


@contextlib.contextmanager
def running_children(
    args: ServerArgs, checked: Checked, scheduler: SchedulerTarget
) -> Iterator[tuple[ServerArgs, Processes, Facts]]:
    """Start the child processes in a new run directory; end them afterwards.

    When all are ready, yield `args` with that directory, the processes and their facts. Host 0 has its ranks, the
    tokenizers and the detokenizer. Other hosts have only ranks.
    """
    with run_dir() as folder:
        args = replace(args, run_dir=str(folder))
        children = [rank for index in range(args.dp) for rank in replica_children(args, scheduler, index, index)]
        if args.scheduler.engine.node_rank == 0:
            children += tokenizer_children(args, checked.folder, checked.limits, checked.template)
        tell(f"starting {len(children)} processes for {checked.name}")
        processes = Processes()
        try:
            processes.start(*children)
            yield args, processes, processes.wait_ready(args.ready_timeout)
        finally:
            processes.stop()


# -- serve


@contextlib.contextmanager
def supervised(
    args: ServerArgs, checked: Checked, scheduler: SchedulerTarget
) -> Iterator[tuple[Supervisor, socket.socket, Facts]]:
    """Start all children and yield the supervisor, ready to run with its socket, and the children's facts."""
    from minisgl.api.app import create_app
    from minisgl.launch.supervisor import Supervisor

    with listening_socket(args) as sock, running_children(args, checked, scheduler) as (args, processes, facts):
        app = create_app(args, served_model(args, checked, facts, processes))
        make_replica = partial(replica_children, args, scheduler)
        yield Supervisor(app, processes, args, make_replica, checked.tls), sock, facts


def served_model(args: ServerArgs, checked: Checked, facts: Facts, processes: Processes) -> ServedModel:
    """Return what the API knows about the model and the processes behind it."""
    from minisgl.api.parsers.output import OutputForms
    from minisgl.api.requests import SamplingDefaults, ServedAdapter, ServedModel

    return ServedModel(
        checked.name,
        checked.limits,
        SamplingDefaults.from_generation_config(checked.generation_config),
        OutputForms.of_model(checked.template, *checked.parsers),
        facts,
        lambda: processes.pids,
        read_embedder(checked.folder),
        checked.template.variables,
        {name: ServedAdapter(adapter, int(time.time())) for name, adapter in checked.adapters.items()},
    )


def banner(args: ServerArgs, checked: Checked, facts: Facts, url: str) -> str:
    """Return the lines to print at the start: facts of the server, and a command to try."""
    path, body = "chat/completions", json.dumps({"messages": [{"role": "user", "content": "Hello! Who are you?"}]})
    if checked.limits.embeds:
        path, body = "embeddings", json.dumps({"input": "Hello!"})
    ranks = facts.get("tensor_parallel", 1)
    shown = {
        "model": checked.name,
        "dtype": facts.get("dtype", "?"),
        "device": facts.get("device", "?"),
        "KV cache": f"{facts.get('kv_tokens', '?')} tokens in pages of {facts.get('page_size', '?')}",
        "context": facts.get("max_model_len", checked.limits.max_model_len),
        "attention": facts.get("attention", "?"),
        "step": facts.get("runners", "?"),
        "TP": ranks if ranks == 1 else f"{ranks} ({facts['communicator']})",
    }
    if args.dp > 1:
        shown["replicas"] = args.dp
    shown |= {
        kind: name for kind, name in zip(("tool calls", "reasoning"), checked.parsers, strict=True) if name != "none"
    }
    if (sizes := facts.get("adapters", "none")) != "none":
        shown["adapters"] = f"{', '.join([*checked.adapters][:MAX_SHOWN]) or 'none yet'} ({sizes})"
    lines = [f"minisgl {minisgl.__version__} · " + " · ".join(f"{name} {value}" for name, value in shown.items())]
    if "memory" in facts:
        lines.append(f"memory: {facts['memory']}")
    if args.scheduler.view_texts:
        lines.append("the Engine view shows texts of requests (--view-texts)")
    where = "" if args.uds is None else f" --unix-socket {args.uds}"
    lines.append(f"ready on {url if args.uds is None else args.uds}")
    if args.ui and args.uds is None:
        lines.append(f"  chat, engine view and API documentation in a browser: {url}/")
    lines.append(f"  curl{where} {url}/v1/{path} -H 'Content-Type: application/json' -d '{body}'")
    return "\n".join(lines)
