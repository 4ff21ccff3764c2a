"""Creates the scheduler of an engine, which may record what it does."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from minisgl.core.errors import ConfigError
from minisgl.engine.engine import Engine
from minisgl.grammar.trial import TriedCompiler
from minisgl.scheduler.grammars import Grammars
from minisgl.scheduler.record import recorded
from minisgl.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from minisgl.distributed.group import Group
    from minisgl.scheduler.io import SchedulerIO
    from minisgl.settings.options import SchedulerConfig


def create_scheduler(config: SchedulerConfig, io: SchedulerIO, group: Group) -> Scheduler:
    """Load the model as rank 0 of `group`, and return a scheduler of that engine."""
    if config.cache_type != "radix" and (config.engine.host_kv or config.engine.disk_kv):
        raise ConfigError(f"--host-kv and --disk-kv keep cached prefixes, and --cache {config.cache_type} has none")
    engine = Engine.from_config(config.engine, config.max_prefill_length, group)
    if engine.spec.pooling == "mean":
        config = replace(config, cache_type="naive")  # a cached prefix has no hidden states to pool
    compiler = TriedCompiler(engine.spec.folder, engine.limits.vocab_size, engine.eos_token_ids)
    make = Scheduler if config.record is None else recorded
    return make(config, engine, io, Grammars(compiler), group.bus)
