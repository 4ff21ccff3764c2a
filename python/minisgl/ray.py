"""`minisgl.ray:app`, a Ray Serve application: one API process, and replicas of the model that Ray places and scales.

    serve run minisgl.ray:app model=Qwen/Qwen3-8B tp=2 max_replicas=4 api_key_file=KEYS

Requests are not calls of Ray. The API process has one *link* to each replica. A link carries the messages that
`minisgl serve --dp` sends over sockets: one packed message per step for all streams. So the same `Dispatcher` sends
requests to the replica that has their prefix in its cache, and moves them when a replica is lost or removed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
import socket
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf
from typing import Any, Final

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy, RequestRouterConfig
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from starlette.applications import Starlette

from minisgl.api.app import create_app
from minisgl.api.dispatch import Dispatcher
from minisgl.core.errors import ConfigError
from minisgl.core.message import (
    AbortMsg,
    BackendMsg,
    DetokenizeMsg,
    FrontendMsg,
    StatsMsg,
    TellPrefixesMsg,
    TokenizerMsg,
    UserMsg,
)
from minisgl.launch.children import replica_children, run_scheduler, tokenizer_children
from minisgl.launch.launch import check_model, served_model
from minisgl.process.log import configure_logging
from minisgl.process.processes import Facts, Processes, run_dir
from minisgl.process.queues import Codec, ZmqAsyncPullQueue, ZmqPushQueue
from minisgl.settings.options import ServerArgs, Settings, build_config, named_values, option, options_of, seconds
from minisgl.settings.sources import server_options

logger = logging.getLogger(__name__)

OF_RAY: Final = {"host", "port", "uds", "ssl_certfile", "ssl_keyfile", "dp", "node_rank", "dist_init_addr", "record"}
UNLIMITED: Final = 1 << 20  # concurrent calls: the API process has its own limits
INCARNATION_BITS: Final = 30
RETRY_S: Final = 1.0
UNLINKED_S: Final = 60.0  # a replica that has lost its link is replaced after this time
LEAVE_S: Final = 30.0  # for the shutdown after the last request has ended

Frames = list[tuple[bool, bytes]]  # (whether it is for the detokenizer instead of the API, frame), from a scheduler


@dataclass(frozen=True, kw_only=True)
class Scale(Settings):
    """The options that decide how many replicas there are."""

    min_replicas: int = option(1, "minimum number of replicas", minimum=1)
    max_replicas: int = option(1, "maximum number of replicas", minimum=1)
    target_requests: float = option(64.0, "target number of open requests per replica", above=0)
    upscale_delay: float = seconds(10.0, "upscale delay in seconds")
    downscale_delay: float = seconds(300.0, "downscale delay in seconds")


def app(options: Mapping[str, Any]) -> serve.Application:
    """Return the application. Its options are those of `Scale` and, in any spelling, those of `minisgl serve`.

    Raises `ConfigError` for options that cannot work.
    """
    scale = build_config(Scale, _values(options, options.keys() & options_of(Scale).keys(), Scale))
    if scale.max_replicas < scale.min_replicas:
        raise ConfigError(f"max_replicas={scale.max_replicas} is below min_replicas={scale.min_replicas}")
    given = _values(options, options.keys() - options_of(Scale).keys(), ServerArgs)
    for name in sorted(given.keys() & OF_RAY):
        raise ConfigError(f"{name}: leave this option out; Ray Serve listens for requests and places the replicas")
    if not given.keys() & {"api_key", "api_key_file"} and given.get("auth", True):
        raise ConfigError(
            "give api_key_file=FILE or api_key=KEY, or auth=false to allow everyone who can reach Ray Serve"
        )
    args = build_config(ServerArgs, server_options(given) | {"host": "0.0.0.0", "dp": 1})
    engine = args.scheduler.engine
    engine = replace(engine, device="cpu" if engine.device == "cpu" else "cuda", dist_init_addr="")
    if engine.device == "cpu" and engine.threads is None:
        raise ConfigError("give threads=N with device=cpu: Ray reserves N CPUs for each rank")
    if engine.disk_kv is not None and scale.max_replicas > 1:
        raise ConfigError("disk_kv needs max_replicas=1: two replicas on a node would share its folder")
    if engine.tp % engine.nnodes:
        raise ConfigError(f"--tp {engine.tp} ranks cannot be spread evenly over --nnodes {engine.nnodes} hosts")
    args = replace(args, scheduler=replace(args.scheduler, engine=engine))
    ranks = engine.tp // engine.nnodes
    bundle = {"CPU": float(ranks * (engine.threads or 1))} | ({"GPU": float(ranks)} if engine.device == "cuda" else {})
    replicas = serve.deployment(
        Replica,
        name="Replica",
        ray_actor_options={"num_cpus": 0},
        placement_group_bundles=[bundle] * engine.nnodes,
        placement_group_strategy="STRICT_SPREAD" if engine.nnodes > 1 else "PACK",
        max_ongoing_requests=UNLIMITED,
        health_check_period_s=2,
        graceful_shutdown_timeout_s=args.drain_timeout + LEAVE_S,
        graceful_shutdown_wait_loop_s=0.5,
        request_router_config=RequestRouterConfig(request_router_class=f"{__name__}:Members"),
        autoscaling_config=AutoscalingConfig(
            min_replicas=scale.min_replicas,
            max_replicas=scale.max_replicas,
            target_ongoing_requests=scale.target_requests,
            upscale_delay_s=scale.upscale_delay,
            downscale_delay_s=scale.downscale_delay,
            metrics_interval_s=1,
            look_back_period_s=2,
            policy=AutoscalingPolicy(policy_function=f"{__name__}:wanted_replicas"),
        ),
    )
    api = serve.deployment(
        serve.ingress()(Api),
        name="Api",
        num_replicas=1,
        max_ongoing_requests=UNLIMITED,
        health_check_period_s=2,
        graceful_shutdown_timeout_s=args.drain_timeout,
    )
    return api.bind(replace(args, replicas_join=True), replicas.bind(args))


def _values(options: Mapping[str, Any], names: set[str], cls: type) -> dict[str, Any]:
    """Return the values of the options `names` by our names. They are strings from a command line, typed from YAML."""
    given = {name: options[name] for name in names if options[name] is not None}
    texts = {name: ",".join(map(str, v)) if isinstance(v, list) else str(v) for name, v in given.items()}
    return named_values([(name, text, f"{name}=") for name, text in texts.items()], cls, is_text=True)


def wanted_replicas(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """Return the number of replicas for the open requests of all replicas. Ray applies the bounds and delays."""
    requests = sum((context.aggregated_metrics or {}).get("open_requests", {}).values())
    return max(1, ceil(requests / context.config.target_ongoing_requests)), {}


class Members(RequestRouter):  # type: ignore[misc]
    """Gives each link its own replica, and informs the link when Ray takes that replica out of service."""

    def initialize_state(self) -> None:
        self._linked: dict[ReplicaID, LinkHandle] = {}

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # or Ray would ask again without a pause
        linked = {replica_id for replica_id, handle in self._linked.items() if not handle.has_failed}
        return [[r for r in candidate_replicas if r.replica_id not in linked]]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        self._linked[replica_id] = pending_request.args[0]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        for replica_id in self._linked.keys() - {r.replica_id for r in replicas}:
            self._linked.pop(replica_id).leave()


class LinkHandle:
    """Identifies a link to `Members`, in the same process. A replica receives None instead."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.leaving: asyncio.Future[None] = self._loop.create_future()
        self.has_failed = False

    def leave(self) -> None:
        """Set `leaving`. Callable from any thread."""
        self._loop.call_soon_threadsafe(self.leaving.set_result, None)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


# -- the API process


class Api:
    """The HTTP API with its tokenizers and detokenizer, and a link to each replica."""

    async def __init__(self, args: ServerArgs, replicas: DeploymentHandle) -> None:  # type: ignore[misc]
        configure_logging("minisgl-api", args.log_level, args.log_format)
        self._resources = contextlib.ExitStack()
        folder = self._resources.enter_context(run_dir())
        # Random, so that uids differ from those of the previous API process: replicas may still work for it.
        args = self._args = replace(args, run_dir=str(folder), incarnation=random.getrandbits(INCARNATION_BITS))
        self._replicas = replicas.options(stream=True)
        checked = check_model(args)
        self._processes = Processes()
        self._resources.callback(self._processes.stop)
        self._processes.start(*tokenizer_children(args, checked.folder, checked.limits, checked.template))
        await asyncio.to_thread(self._processes.wait_ready, args.ready_timeout)
        self._facts: Facts = {}
        self._app = create_app(args, served_model(args, checked, self._facts, self._processes))
        self._links: dict[int, asyncio.Task[None]] = {}  # by the index of the replica

    def __serve_build_asgi_app__(self) -> Starlette:
        inner = self._app.router.lifespan_context

        @contextlib.asynccontextmanager
        async def lifespan(app: Starlette) -> AsyncIterator[None]:
            with self._resources:
                async with inner(app):
                    tasks = [asyncio.create_task(self._open_links()), asyncio.create_task(self._watch())]
                    yield
                    await _end(*tasks, *self._links.values())

        self._app.router.lifespan_context = lifespan
        return self._app

    def check_health(self) -> None:
        """Raise if this process can no longer serve; Ray then replaces it."""
        if problem := self._app.state.frontend.failure:
            raise RuntimeError(problem)

    async def _watch(self) -> None:
        name = await asyncio.to_thread(self._processes.wait_end)
        self._app.state.frontend.fail(f"the server failed: {self._processes.describe_end(name)}")

    async def _open_links(self) -> None:
        """Link all replicas, and each new one."""
        while True:
            handle = LinkHandle()
            call = self._replicas.link.remote(handle)
            try:
                host, incarnation, facts = await anext(call)
            except Exception as e:  # the replica has just died
                logger.warning("a replica could not be linked: %s", e)
                handle.has_failed = True
                await asyncio.sleep(RETRY_S)
                continue
            self._facts.update(facts)
            index = next(i for i in itertools.count() if i not in self._links)
            self._links[index] = asyncio.create_task(self._keep(index, handle, call, host, incarnation))

    async def _keep(
        self, index: int, handle: LinkHandle, call: DeploymentResponseGenerator, host: Any, incarnation: int
    ) -> None:
        """Carry messages to and from a replica until its incarnation is over."""
        dispatcher: Dispatcher = self._app.state.frontend.dispatcher
        inbox: ZmqAsyncPullQueue[bytes] = ZmqAsyncPullQueue(
            replace(self._args, incarnation=incarnation).zmq_scheduler_addr, FrameCodec()
        )
        logger.info("replica %d is linked", index)
        dispatcher.open(incarnation, index)
        carrying = asyncio.create_task(self._carry(host, inbox))
        try:
            if await dispatcher.serve(incarnation, carrying, handle.leaving, self._args.drain_timeout):
                logger.error("replica %d is lost; other replicas take over its requests", index)
        finally:
            await _end(carrying)
            call.cancel()
            inbox.close()
            del self._links[index]
        logger.info("replica %d has left", index)

    async def _carry(self, host: Any, inbox: ZmqAsyncPullQueue[bytes]) -> None:
        """Forward messages from and to the scheduler. Raises when it or its host has ended."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._receive(host))
            group.create_task(_send(host, inbox))

    async def _receive(self, host: Any) -> None:
        addrs = self._args.zmq_frontend_addr, self._args.zmq_detokenizer_addr
        queues: list[ZmqPushQueue[bytes]] = [ZmqPushQueue(addr, FrameCodec()) for addr in addrs]
        try:
            async for item in host.receive.remote():
                for is_tokens, frame in await item:
                    queues[is_tokens].put([frame])
            raise ConnectionError("the scheduler has ended")
        finally:
            for queue in queues:
                queue.close()


async def _send(host: Any, inbox: ZmqAsyncPullQueue[bytes]) -> None:
    """Forward messages to the scheduler, in order, until its host ends."""
    while True:
        await host.send.remote(await inbox.get())


async def _end(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class FrameCodec(Codec[bytes]):
    """Passes frames through unchanged."""

    def __init__(self) -> None:
        pass

    def encode(self, messages: Sequence[bytes]) -> bytes:
        (frame,) = messages
        return frame

    def decode(self, frame: bytes | memoryview) -> list[bytes]:
        return [bytes(frame)]


# -- a replica


class Replica:
    """One copy of the model on the hosts of a placement group. Ray starts, checks and ends it; it sees no messages."""

    async def __init__(self, args: ServerArgs) -> None:  # type: ignore[misc]
        engine, group = args.scheduler.engine, ray.util.get_current_placement_group()
        self._incarnation = random.getrandbits(INCARNATION_BITS)
        self._over = asyncio.Event()
        self._unlinked: float | None = None  # when the link was lost
        self._hosts = []
        for index, bundle in enumerate(group.bundle_specs):
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
            resources = {"num_cpus": bundle.get("CPU", 0), "num_gpus": bundle.get("GPU", 0)}
            self._hosts.append(ray.remote(Host).options(scheduling_strategy=strategy, **resources).remote())
        addr = await self._hosts[0].free_address.remote() if engine.nnodes > 1 else ""
        starts = []
        for rank, host in enumerate(self._hosts):
            scheduler = replace(args.scheduler, engine=replace(engine, node_rank=rank, dist_init_addr=addr))
            starts.append(host.start.remote(replace(args, incarnation=self._incarnation, scheduler=scheduler)))
        self._facts = (await asyncio.gather(*starts))[0]

    async def link(self, handle: None) -> AsyncIterator[tuple[Any, int, Facts]]:
        """Yield (host of rank 0, incarnation, facts) to the API process; the replica is in use until the call ends."""
        self._over.set()  # end the link of the previous API process
        over = self._over = asyncio.Event()
        self._unlinked = None
        try:
            yield self._hosts[0], self._incarnation, self._facts
            await over.wait()
        finally:
            if over is self._over:
                self._unlinked = time.monotonic()

    async def check_health(self) -> None:
        """Raise if a rank has ended or hangs, or if the link is lost; Ray then replaces the replica."""
        if self._unlinked is not None and time.monotonic() - self._unlinked > UNLINKED_S:
            raise RuntimeError("the API process has no link to this replica")
        await asyncio.gather(*(host.check.remote() for host in self._hosts))

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """The metric of `wanted_replicas`."""
        return {"open_requests": await self._hosts[0].open_requests.remote()}


class Host:
    """The ranks of a replica on one host, and the sockets of its scheduler."""

    def __init__(self) -> None:
        self._resources = contextlib.ExitStack()
        self._cause = ""
        self._frames: Frames = []
        self._news = asyncio.Event()
        self._turn = 0
        self._heard = self._patience = inf  # until rank 0 is ready; other ranks send no heartbeats
        self._open: set[int] = set()  # uids of the requests that the scheduler has
        self._stats = StatsMsg()
        self._codec: Codec[BackendMsg] = Codec(BackendMsg)

    def free_address(self) -> str:
        """Return an address to which the other hosts can connect."""
        with socket.create_server(("", 0)) as s:
            return f"{ray.util.get_node_ip_address()}:{s.getsockname()[1]}"

    async def start(self, args: ServerArgs) -> Facts:
        """Start the ranks, and wait until they are ready."""
        configure_logging("minisgl-host", args.log_level, args.log_format)
        args = replace(args, run_dir=str(self._resources.enter_context(run_dir())))
        self._tasks = [
            asyncio.create_task(self._pump(args.zmq_detokenizer_addr, Codec(TokenizerMsg), True)),
            asyncio.create_task(self._pump(args.zmq_frontend_addr, Codec(FrontendMsg), False)),
        ]
        self._backend: ZmqPushQueue[BackendMsg] = ZmqPushQueue(args.zmq_scheduler_addr, Codec(BackendMsg))
        self._processes = Processes()
        self._processes.start(*replica_children(args, run_scheduler, 0, args.incarnation))
        facts = await asyncio.to_thread(self._processes.wait_ready, args.ready_timeout)
        if args.scheduler.engine.node_rank == 0:
            self._heard, self._patience = time.monotonic(), args.heartbeat_timeout
        self._tasks.append(asyncio.create_task(self._watch()))
        return facts

    async def _watch(self) -> None:
        name = await asyncio.to_thread(self._processes.wait_end)
        self._cause = self._processes.describe_end(name)
        logger.error("%s", self._cause)
        self._news.set()

    async def _pump(self, addr: str, codec: Codec[Any], is_tokens: bool) -> None:
        inbox: ZmqAsyncPullQueue[bytes] = ZmqAsyncPullQueue(addr, FrameCodec())
        while True:
            frames = await inbox.get()
            for msg in itertools.chain.from_iterable(map(codec.decode, frames)):
                if isinstance(msg, DetokenizeMsg):
                    self._open.difference_update(f.uid for f in msg.finished)
                elif isinstance(msg, StatsMsg):
                    self._stats, self._heard = msg, time.monotonic()
            self._frames += [(is_tokens, frame) for frame in frames]
            self._news.set()

    async def receive(self) -> AsyncIterator[Frames]:
        """Yield what the scheduler sends, until a rank ends or another API process calls this."""
        self._turn += 1
        if (turn := self._turn) > 1:
            # The previous API process has died: abort its requests, and report all cached prefixes to the new one.
            self._frames = []
            self._backend.put([*map(AbortMsg, self._open), TellPrefixesMsg()])
        while not self._cause:
            await self._news.wait()
            if turn != self._turn:
                return
            self._news.clear()
            frames, self._frames = self._frames, []
            yield frames

    async def send(self, frames: list[bytes]) -> None:
        """Send frames to the scheduler."""
        for frame in frames:
            messages = self._codec.decode(frame)
            self._open.update(m.uid for m in messages if isinstance(m, UserMsg))
            self._backend.put(messages)

    def check(self) -> None:
        """Raise if a rank has ended, or if rank 0 sends no heartbeat. Other ranks send none."""
        if self._cause:
            raise RuntimeError(self._cause)
        if (silent := time.monotonic() - self._heard) > self._patience:
            raise RuntimeError(f"no heartbeat from the scheduler for {silent:.0f} s")

    def open_requests(self) -> int:
        return self._stats.running + self._stats.waiting
