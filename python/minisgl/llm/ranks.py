"""The ranks of an offline engine: rank 0 is this process, the others are child processes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeVar

from minisgl.core.errors import ConfigError, RankError
from minisgl.distributed.info import Rendezvous
from minisgl.engine.fit import Checkpoint, check_fit
from minisgl.process.processes import Child, Processes, run_dir
from minisgl.scheduler.follower import meet_ranks, run_follower
from minisgl.settings.options import SchedulerConfig

if TYPE_CHECKING:
    from minisgl.distributed.group import Group

T = TypeVar("T")

READY_S: Final = 600.0  # for the other ranks to become ready after rank 0
CAUSE_S: Final = 0.5  # for another rank to report why it has ended


@dataclass(frozen=True)
class Ranks:
    """All ranks, once they have met."""

    group: Group
    followers: Processes

    def start(self, build: Callable[[], T]) -> T:
        """Run `build` on rank 0 while the other ranks do the same; return its result. Raises errors of any rank."""
        try:
            result = build()
        except RankError:
            time.sleep(CAUSE_S)
            self.followers.check()  # raises the cause if a child has it
            raise
        self.followers.wait_ready(READY_S)
        return result


@contextlib.contextmanager
def running_ranks(config: SchedulerConfig) -> Iterator[Ranks]:
    """Start the ranks of `config`; end all of them on leaving the block. Raises `ConfigError` if they do not fit."""
    if config.engine.node_rank:
        raise ConfigError(
            "the offline engine runs on node 0: start `minisgl serve` with the same settings on the other nodes"
        )
    check_fit(config.engine)
    Checkpoint.read(config.engine)  # downloads the weights once for all ranks
    if config.engine.tp == 1:
        (alone,) = Rendezvous.of_local_ranks(config.engine, "")
        yield Ranks(meet_ranks(config, alone), Processes())
        return
    with run_dir() as folder:
        first, *others = Rendezvous.of_local_ranks(config.engine, str(folder))
        names = [f"minisgl-TP{other.info.rank}" for other in others]
        followers = Processes()
        try:
            for name, other in zip(names, others, strict=True):
                followers.start(Child(name, run_follower, (config, other), {}, leaves_when_told=True))
            group = meet_ranks(config, first, followers.check)
            with contextlib.closing(group.bus):
                yield Ranks(group, followers)
        finally:
            followers.stop()
