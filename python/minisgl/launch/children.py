"""The child processes of a server: which ones there are, and what runs in those with ranks."""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from minisgl.core.errors import ConfigError, RankError
from minisgl.device.machine import choose_device, gpu_memory, usable_cores
from minisgl.distributed.info import Rendezvous
from minisgl.process.log import log_format, log_level, tell
from minisgl.process.processes import Child, Ready
from minisgl.settings.options import MEMORY_RATIOS, ServerArgs

if TYPE_CHECKING:
    from minisgl.core.params import Limits
    from minisgl.tokenizer.template import ChatTemplate

logger = logging.getLogger(__name__)

SchedulerTarget = Callable[[ServerArgs, Ready], None]

CAUSE_FIRST_S: Final = 0.3  # lets the parent see the rank that failed first, before the ranks that end because of it


def divided(args: ServerArgs, index: int = 0) -> ServerArgs:
    """Return `args` for replica `index` of `--dp`: with its part of the tiers and, on a CPU, of cores and memory.

    Raises `ConfigError` for options that replicas do not support.
    """
    engine = args.scheduler.engine
    if args.dp == 1:
        return args
    if engine.nnodes > 1:
        raise ConfigError("--dp works on one host only: start a server on each host instead of giving --nnodes")
    if args.scheduler.record is not None:
        raise ConfigError("--record works with one replica only: start without --dp")
    engine = replace(engine, host_kv=engine.host_kv // args.dp)
    if engine.disk_tier is not None:
        folder, size = engine.disk_tier
        engine = replace(engine, disk_kv=f"{folder}/replica-{index}:{size // args.dp}")
    if choose_device(engine.device) != "cuda":
        threads = engine.threads or max(1, usable_cores() // (args.dp * engine.tp))
        ratio = (engine.memory_ratio or MEMORY_RATIOS["cpu"]) / args.dp
        engine = replace(engine, threads=threads, memory_ratio=ratio)
    return replace(args, scheduler=replace(args.scheduler, engine=engine))


def visible_gpus(args: ServerArgs, index: int) -> dict[str, str]:
    """Return environment variables that make only the replica's own GPUs visible to it."""
    engine = args.scheduler.engine
    if choose_device(engine.device) != "cuda":
        return {}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(len(gpu_memory()))))).split(",")
    return {"CUDA_VISIBLE_DEVICES": ",".join(visible[index * engine.tp : (index + 1) * engine.tp])}


def _log_env(args: ServerArgs) -> dict[str, str]:
    return {"LOG_LEVEL": args.log_level or log_level(), "LOG_FORMAT": args.log_format or log_format()}


def replica_children(args: ServerArgs, scheduler: SchedulerTarget, index: int, incarnation: int) -> list[Child]:
    """Return the processes to start for this host's ranks of replica number `index`, in its `incarnation`."""
    # By default, OpenMP's threads spin for milliseconds while they wait. If the API server or a client needs the same
    # core, each step of the engine then waits for a spinning thread. A short spin costs nothing on idle cores;
    # measured in docs/notebook/cpu-step.md.
    scheduler_env = _log_env(args) | {"GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", "2000")}
    prefix = "minisgl"
    if args.dp > 1:
        prefix = f"minisgl-DP{index}"
        args = replace(divided(args, index), incarnation=incarnation)
        scheduler_env |= visible_gpus(args, index)
        Path(f"{args.run_dir}/run-{incarnation}").mkdir(mode=0o700)
    if (threads := args.scheduler.engine.threads) is not None:
        scheduler_env["OMP_NUM_THREADS"] = str(threads)
    children = []
    for number, rank in enumerate(local_ranks(args)):
        target, arguments = (run_follower_rank, (args, number)) if rank.info.rank else (scheduler, (args,))
        name = f"{prefix}-TP{rank.info.rank}-scheduler"
        children.append(Child(name, target, arguments, scheduler_env, leaves_when_told=True))
    return children


def tokenizer_children(args: ServerArgs, folder: Path, limits: Limits, template: ChatTemplate) -> list[Child]:
    """Return the processes to start for the detokenizer and the tokenizers."""
    from minisgl.tokenizer.server import tokenize_worker

    worker_env = _log_env(args) | dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    worker_env["TOKENIZERS_PARALLELISM"] = "false"
    addrs = {"minisgl-detokenizer-0": args.zmq_detokenizer_addr}
    if args.num_tokenizer:
        addrs |= {f"minisgl-tokenizer-{i}": addr for i, addr in enumerate(args.zmq_tokenizer_addrs)}
    model, outputs = (folder, limits, template), (args.zmq_backend_addr, args.zmq_frontend_addr)
    return [Child(name, tokenize_worker, (*model, addr, *outputs), worker_env) for name, addr in addrs.items()]


# -- in the processes of ranks


def run_scheduler(args: ServerArgs, ready: Ready) -> None:
    """Run rank 0, which schedules."""
    tell("importing torch")
    import torch

    from minisgl.scheduler.create import create_scheduler
    from minisgl.scheduler.follower import meet_ranks
    from minisgl.scheduler.io import ZmqIO

    try:
        with torch.inference_mode():
            group = meet_ranks(args.scheduler, local_ranks(args)[0])
            io = ZmqIO(args.zmq_scheduler_addr, args.zmq_detokenizer_addr, args.zmq_frontend_addr, args.incarnation)
            scheduler = create_scheduler(args.scheduler, io, group)
            gc.collect()
            gc.freeze()  # or full collections would scan the model and its graphs during steps
            group.bus.watch(_end_after)
            ready(scheduler.describe())
            scheduler.run_forever()
            group.bus.close()
            scheduler.engine.shutdown()
    except RankError:
        time.sleep(CAUSE_FIRST_S)
        raise


def _end_after(rank: int) -> None:
    """End this process, since its device may wait forever for the lost `rank`."""
    logger.error("rank %d is gone", rank)
    time.sleep(CAUSE_FIRST_S)
    os._exit(1)


def run_follower_rank(args: ServerArgs, index: int, ready: Ready) -> None:
    """Run a follower: number `index` of the ranks on this host."""
    from minisgl.scheduler.follower import run_follower

    run_follower(args.scheduler, local_ranks(args)[index], ready)


def local_ranks(args: ServerArgs) -> list[Rendezvous]:
    """Return the rendezvous of each rank on this host, in order."""
    folder = args.run_dir if args.dp == 1 else f"{args.run_dir}/run-{args.incarnation}"
    return Rendezvous.of_local_ranks(args.scheduler.engine, folder)
