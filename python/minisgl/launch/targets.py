"""The entry points of a server's child processes."""

from __future__ import annotations

import gc
import logging
import os
import time
from typing import Final

from minisgl.distributed.info import Rendezvous
from minisgl.errors import RankError
from minisgl.process.log import tell
from minisgl.process.processes import Ready
from minisgl.settings.options import ServerArgs

logger = logging.getLogger(__name__)

CAUSE_FIRST_S: Final = 0.3  # lets the parent see the rank that failed first, before the ranks that end because of it


def run_scheduler(args: ServerArgs, ready: Ready) -> None:
    """Run rank 0, which schedules."""
    tell("importing torch")
    import torch

    from minisgl.scheduler.follower import meet_ranks
    from minisgl.scheduler.io import ZmqIO
    from minisgl.scheduler.scheduler import Scheduler

    try:
        with torch.inference_mode():
            group = meet_ranks(args.scheduler, local_ranks(args)[0])
            io = ZmqIO(args.zmq_scheduler_addr, args.zmq_detokenizer_addr, args.zmq_frontend_addr, args.life)
            scheduler = Scheduler.from_config(args.scheduler, io, group)
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
    folder = args.run_dir if args.dp == 1 else f"{args.run_dir}/life-{args.life}"
    return Rendezvous.of_local_ranks(args.scheduler.engine, folder)
