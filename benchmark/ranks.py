"""Runs a measurement on several GPUs of this host, one process each: the part that `nccl.py` and `peer.py` share."""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPORT_S = 3  # for the other ranks to report after one has failed

Work = Callable[[int, argparse.Namespace, str], None]
"""What each rank runs: (rank, arguments, folder). Rank 0 calls `save` with that folder."""


def parse_args(parser: argparse.ArgumentParser, seconds: float) -> argparse.Namespace:
    """Add the options of every such script and parse; end with status 2 if this host has too few GPUs."""
    import torch

    gpus = torch.cuda.device_count()
    parser.add_argument("--ranks", type=int, default=gpus, help="default: all GPUs")
    parser.add_argument("--seconds", type=float, default=seconds, help="kill everything after this long")
    parser.add_argument("--json", type=Path, default=None, help="write all figures to this file")
    args = parser.parse_args()
    if not 2 <= args.ranks <= gpus:
        parser.error(f"needs 2 to {gpus} ranks on the GPUs of this host, not {args.ranks}")
    return args


def save(folder: str, state: dict[str, Any]) -> None:
    """Write `state`, which replaces what was saved before; a rank that is killed meanwhile leaves the old one."""
    new = Path(folder) / "new"
    new.write_text(json.dumps(state))
    new.rename(Path(folder) / "state")


def run_ranks(work: Work, args: argparse.Namespace) -> tuple[dict[str, Any] | None, str | None]:
    """Run `work` on every rank; return the state that rank 0 saved last, and a description of the failure, if any."""
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # multicast can harm a host whose GPUs are shared
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    with tempfile.TemporaryDirectory() as folder:
        failure = _wait(work, args, folder)
        state = Path(folder) / "state"
        return json.loads(state.read_text()) if state.exists() else None, failure


def _wait(work: Work, args: argparse.Namespace, folder: str) -> str | None:
    context = mp.get_context("spawn")
    ranks = [context.Process(target=_run_rank, args=(work, rank, args, folder)) for rank in range(args.ranks)]
    end = time.monotonic() + args.seconds
    try:
        for process in ranks:
            process.start()
        while any(process.is_alive() for process in ranks):
            time.sleep(0.1)
            if any(process.exitcode for process in ranks):
                time.sleep(REPORT_S)
                break
            if time.monotonic() > end:
                return f"not done after {args.seconds:g} s"
        failed = {rank: process.exitcode for rank, process in enumerate(ranks) if process.exitcode}
        return f"ranks ended with codes {failed}" if failed else None
    finally:
        for process in ranks:
            if process.pid is not None:
                process.kill()


def _run_rank(work: Work, rank: int, args: argparse.Namespace, folder: str) -> None:
    try:
        work(rank, args, folder)
    except BaseException:
        print(f"rank {rank}:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        os._exit(1)  # do not wait for collectives that never end
    os._exit(0)
