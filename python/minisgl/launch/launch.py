"""From `ServerArgs` to a running server and back: check, bind, spawn, serve, drain, clean up."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import minisgl
from minisgl.checkpoint import hf
from minisgl.checkpoint.embedder import read_embedder
from minisgl.device.driver import check_driver
from minisgl.distributed.info import Rendezvous
from minisgl.errors import ConfigError, StartupError
from minisgl.launch.targets import local_ranks, run_follower_rank, run_scheduler, run_tokenizer
from minisgl.message import BackendMsg, ExitMsg
from minisgl.params import Limits
from minisgl.process.child import Ready
from minisgl.process.logger import configure_logging, log_level
from minisgl.process.processes import Child, Facts, Processes
from minisgl.process.queues import Codec, ZmqPushQueue
from minisgl.process.rundir import RunDir
from minisgl.settings.options import ServerArgs

if TYPE_CHECKING:
    from minisgl.launch.supervisor import Supervisor

logger = logging.getLogger(__name__)

SchedulerTarget = Callable[[ServerArgs, Ready], None]


@dataclass(frozen=True)
class Checked:
    """What the cheap checks have found out before anything heavy starts."""

    folder: Path
    limits: Limits
    name: str
    generation_config: dict[str, Any]


def check_args(args: ServerArgs) -> Checked:
    """Raises `ConfigError` for a model that is missing or broken; imports no torch and takes well under a second."""
    from minisgl.tokenizer.tokenize import TokenizeManager, model_limits

    log_level()
    engine = args.scheduler.engine
    Rendezvous.of_local_ranks(engine, "")
    check_driver(engine.device)
    folder = hf.resolve_model(engine.model, engine.download_source)
    hf.eos_token_ids(folder)
    if not engine.dummy_weight:
        hf.weight_files(folder)
    limits = model_limits(folder, engine.max_seq_len)
    TokenizeManager(folder, limits)
    name = args.served_model_name or hf.model_name(engine.model)
    return Checked(folder, limits, name, hf.load_generation_config(folder))


def bind_socket(host: str, port: int) -> socket.socket:
    """A bound TCP socket, not listening yet; raises `ConfigError` when the address cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as e:
        raise ConfigError(f"--host {host} is not an address of this machine ({e.strerror})") from e
    sock = socket.socket(family, kind, protocol)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
        sock.listen(1)  # two sockets may be bound with SO_REUSEADDR, but only one can listen
    except OSError as e:
        sock.close()
        raise ConfigError(
            f"cannot listen on {host} port {port}: {e.strerror}; give another --port (0 = any free one)"
        ) from e
    return sock


def _children(args: ServerArgs, checked: Checked, scheduler: SchedulerTarget) -> list[Child]:
    # OpenMP's threads wait for each other by spinning for milliseconds: when the API server or a client wants the same
    # core, every step of the engine waits for the spinner. A short spin costs nothing on idle cores; the figures are
    # in docs/performance.md.
    scheduler_env = {"GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", "2000")}
    if (threads := args.scheduler.engine.threads) is not None:
        scheduler_env["OMP_NUM_THREADS"] = str(threads)
    children = []
    for index, rank in enumerate(local_ranks(args)):
        target, arguments = (run_follower_rank, (args, index)) if rank.info.rank else (scheduler, (args,))
        name = f"minisgl-TP{rank.info.rank}-scheduler"
        children.append(Child(name, target, arguments, scheduler_env, leaves_when_told=True))
    if args.scheduler.engine.node_rank:
        return children
    worker_env = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1") | {"TOKENIZERS_PARALLELISM": "false"}
    addrs = {"minisgl-detokenizer-0": args.zmq_detokenizer_addr}
    if args.num_tokenizer:
        addrs |= {f"minisgl-tokenizer-{i}": addr for i, addr in enumerate(args.zmq_tokenizer_addrs)}
    children += [
        Child(name, run_tokenizer, (args, checked.folder, checked.limits, addr), worker_env)
        for name, addr in addrs.items()
    ]
    return children


def banner(checked: Checked, facts: Facts, url: str) -> str:
    """What a person wants to know at the start, and a command to try."""
    path, body = "chat/completions", json.dumps({"messages": [{"role": "user", "content": "Hello! Who are you?"}]})
    if checked.limits.embeds:
        path, body = "embeddings", json.dumps({"input": "Hello!"})
    shown = {
        "model": checked.name,
        "dtype": facts.get("dtype", "?"),
        "device": facts.get("device", "?"),
        "KV cache": f"{facts.get('kv_tokens', '?')} tokens in pages of {facts.get('page_size', '?')}",
        "context": facts.get("max_model_len", checked.limits.max_model_len),
        "attention": facts.get("attention", "?"),
        "step": facts.get("runners", "?"),
    }
    ranks = facts.get("tensor_parallel", 1)
    shown["TP"] = ranks if ranks == 1 else f"{ranks} ({facts['communicator']})"
    lines = [f"minisgl {minisgl.__version__} · " + " · ".join(f"{k} {v}" for k, v in shown.items())]
    if "memory" in facts:
        lines.append(f"memory: {facts['memory']}")
    lines.append(f"ready on {url}")
    lines.append(f"  curl {url}/v1/{path} -H 'Content-Type: application/json' -d '{body}'")
    return "\n".join(lines)


@dataclass(frozen=True)
class Running:
    """The child processes when they are ready."""

    args: ServerArgs  # with the run directory
    processes: Processes
    facts: Facts


@contextlib.contextmanager
def running_children(args: ServerArgs, checked: Checked, scheduler: SchedulerTarget) -> Iterator[Running]:
    """The child processes, ready, in a run directory of their own; none of either is left afterwards.

    On host 0 these are the ranks there, tokenizers and detokenizer; on the others the ranks.
    """
    with RunDir() as run_dir:
        args = replace(args, run_dir=str(run_dir.path))
        processes = Processes(_children(args, checked, scheduler))
        try:
            yield Running(args, processes, processes.start(args.ready_timeout))
        finally:
            processes.stop()


def _tell_scheduler_to_leave(args: ServerArgs) -> None:
    backend: ZmqPushQueue[BackendMsg] = ZmqPushQueue(args.zmq_backend_addr, Codec(BackendMsg))
    backend.put([ExitMsg()])
    backend.close()


def launch_server(args: ServerArgs, scheduler: SchedulerTarget = run_scheduler) -> int:
    """Run the server until it is told to stop; returns the process's exit code.

    Raises `ConfigError` or `StartupError` when it cannot start.
    """
    configure_logging("minisgl-api")
    checked = check_args(args)
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # during the start: clean up and go
    try:
        if args.scheduler.engine.node_rank:
            return _run_other_host(args, checked, scheduler)
        with (
            contextlib.closing(bind_socket(args.host, args.port)) as sock,
            running_children(args, checked, scheduler) as up,
            _supervised(up, checked) as supervisor,
        ):
            url = _url(sock)
            _serve(supervisor, sock, lambda: print(banner(checked, up.facts, url), flush=True))
            return supervisor.exit_code
    except KeyboardInterrupt:
        return 130
    finally:
        signal.signal(signal.SIGTERM, previous)


def _run_other_host(args: ServerArgs, checked: Checked, scheduler: SchedulerTarget) -> int:
    """The ranks of a host that serves nobody itself, until one of them ends: all do when rank 0 does."""
    with running_children(args, checked, scheduler) as up:
        processes = up.processes
        print(f"ready: {', '.join(processes.pids)}", flush=True)
        name = processes.wait_end()
        cause = processes.describe_end(name)
        if processes.exit_code(name) == 0:
            return 0
        logger.error("%s; the other ranks stop", cause)
        return 1


def _url(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextlib.contextmanager
def _supervised(up: Running, checked: Checked) -> Iterator[Supervisor]:
    """The API server, ready to run; tells the scheduler to leave afterwards."""
    from minisgl.api.api_server import create_app
    from minisgl.api.parsers.choose import OutputForms
    from minisgl.api.prepare import SamplingDefaults
    from minisgl.api.served import ServedModel
    from minisgl.launch.http_server import Service
    from minisgl.launch.supervisor import Supervisor

    defaults = SamplingDefaults.from_generation_config(checked.generation_config)
    forms = OutputForms.of_model(checked.folder, up.args.tool_call_parser, up.args.reasoning_parser)
    embedder = read_embedder(checked.folder)
    model = ServedModel(checked.name, checked.limits, defaults, forms, up.facts, up.processes.pids, embedder)
    try:
        yield Supervisor(Service(create_app(up.args, model)), up.args.drain_timeout, up.processes)
    finally:
        _tell_scheduler_to_leave(up.args)


def _serve(supervisor: Supervisor, sock: socket.socket, on_ready: Callable[[], None]) -> None:
    from minisgl.launch.http_server import run_service

    run_service(supervisor.run(sock, on_ready))


@contextlib.contextmanager
def background_server(args: ServerArgs, scheduler: SchedulerTarget = run_scheduler) -> Iterator[str]:
    """A server whose HTTP side runs in a thread of this process; yields its URL. For `minisgl chat` and `--shell`."""
    configure_logging("minisgl-api", "WARNING")
    checked = check_args(args)
    if args.scheduler.engine.node_rank:
        raise ConfigError("the chat is on host 0; start `minisgl serve` with the same settings on the others")
    is_up = threading.Event()
    with (
        contextlib.closing(bind_socket(args.host, args.port)) as sock,
        running_children(args, checked, scheduler) as up,
        _supervised(up, checked) as supervisor,
    ):
        url = _url(sock)
        thread = threading.Thread(target=_serve, args=(supervisor, sock, is_up.set), name="http")
        thread.start()
        try:
            while not is_up.wait(0.1):
                if not thread.is_alive():
                    raise StartupError("the HTTP server could not start")
            yield url
        finally:
            supervisor.stop_from_other_thread()
            thread.join()
