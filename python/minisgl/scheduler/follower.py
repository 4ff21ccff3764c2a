"""Every rank but the first: replays the plans of rank 0, in their order."""

from __future__ import annotations

import json
import os
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING

import numpy as np
import torch

from minisgl.checkpoint import hf
from minisgl.core.errors import InvariantError
from minisgl.core.plan import BatchPlan
from minisgl.core.rounding import ceil_div
from minisgl.distributed.control import Digest
from minisgl.distributed.group import Group, meet
from minisgl.settings.sources import is_check_mode

if TYPE_CHECKING:
    from minisgl.distributed.control import Frame, PlanFeed
    from minisgl.distributed.info import Rendezvous
    from minisgl.process.processes import Ready
    from minisgl.scheduler.plan import StepEngine, StepOutput
    from minisgl.settings.options import SchedulerConfig

OWN_SETTINGS = ("model", "node_rank", "threads", "chat_template")  # may differ between hosts


def meet_ranks(config: SchedulerConfig, rendezvous: Rendezvous, check: Callable[[], None] = lambda: None) -> Group:
    """Meet the other ranks; all must have the same engine settings and the same config.json of the model."""
    engine = asdict(config.engine)
    settings = {name: str(value) for name, value in engine.items() if name not in OWN_SETTINGS}
    settings["max_prefill_length"] = str(config.max_prefill_length)
    own = config.engine
    folder = hf.resolve_model(own.model, own.download_source, weights=False, revision=own.revision)
    raw = json.dumps(hf.load_config(folder), sort_keys=True)
    settings["model (checksum of config.json)"] = f"{zlib.crc32(raw.encode()):08x}"
    return meet(rendezvous, settings, is_check_mode(), check)


@torch.inference_mode()
def run_follower(config: SchedulerConfig, rendezvous: Rendezvous, ready: Ready) -> None:
    """Run one rank until rank 0 ends, then end this process; calls `ready` when the model is loaded."""
    from minisgl.engine.engine import Engine

    group = meet_ranks(config, rendezvous)
    assert group.feed is not None, "rank 0 cannot be a follower"
    engine = Engine.from_config(config.engine, config.max_prefill_length, group)
    ready({})
    replay(engine, group.feed)
    engine.shutdown()
    os._exit(0)  # nothing is left to do, and tearing torch down takes a second


def replay(engine: StepEngine, feed: PlanFeed) -> None:
    """Launch the plans of `feed` until the stream ends.

    Raises `InvariantError` in the invariant mode if this rank has sampled other tokens than rank 0.
    """
    outputs: deque[tuple[int, StepOutput]] = deque()  # to be compared
    results = Digest()
    newest: StepOutput | None = None
    while True:
        frame = feed.receive()
        if frame.digest:
            _compare(frame, outputs, results)
        if frame.masks:
            assert newest is not None, "masks arrived before the first plan"
            words = ceil_div(engine.limits.vocab_size, 32)
            newest.sample(np.frombuffer(frame.masks, np.int32).reshape(-1, words))
            continue
        if frame.plan is None:
            return
        plan = BatchPlan.unpack(np.frombuffer(frame.plan, np.int32))
        newest = engine.launch(plan)
        if frame.digest:
            outputs.append((plan.step, newest))


def _compare(frame: Frame, outputs: deque[tuple[int, StepOutput]], results: Digest) -> None:
    step = 0
    while results.count < frame.collected:
        step, output = outputs.popleft()
        results.add(output.wait().tokens.tobytes())
    if results.count and results.value != frame.results:
        raise InvariantError(f"up to step {step} this rank has sampled other tokens than rank 0")
