"""The engine: model, KV pool, attention and per-row state on one device; a plan goes in, tokens come out."""

from __future__ import annotations

import gc
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from minisgl.checkpoint.hf import fingerprint
from minisgl.core.layout import FULL, NO_INTS, SLOT_ID, STATE, STATE_LEN, WINDOW
from minisgl.core.params import MAX_LOGIT_BIASES, MAX_STOP_TOKENS, Limits
from minisgl.device.create import create_device
from minisgl.device.device import Device
from minisgl.distributed.group import Group
from minisgl.distributed.tensor_parallel import VocabParallel
from minisgl.engine.adapters import AdapterPool
from minisgl.engine.config import EngineSpec
from minisgl.engine.costs import measure_costs
from minisgl.engine.draft_model import make_draft_model
from minisgl.engine.drafting import Drafting
from minisgl.engine.memory import MemoryPlan, plan_memory
from minisgl.engine.resolve import make_mixers, resolve
from minisgl.engine.runner import NO_TOKENS, RUNNERS, ForwardOutput, Parts, Runner, RunnerFactory
from minisgl.engine.state import LogitPenalties, RowState
from minisgl.kvcache.snapshots import Bounded
from minisgl.kvcache.storage import DiskStore, HostStore, Mover
from minisgl.kvcache.store import StateStore
from minisgl.models.weight import load_model
from minisgl.ops.quantized import E4M3, target_format
from minisgl.ops.table import resolve_ops
from minisgl.process.log import Progress, tell
from minisgl.speculative import DRAFTERS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from minisgl.core.layout import Ints, Records
    from minisgl.core.plan import BatchPlan, StepCosts
    from minisgl.kvcache.storage import Store
    from minisgl.settings.options import EngineConfig

_log = logging.getLogger("minisgl.engine")


class Engine:
    """Runs plans in the order in which they are launched. It knows no requests, queues or owners of pages."""

    bounded: Sequence[Bounded] = ()  # all state lives as long as the text

    def __init__(self, spec: EngineSpec, device: Device, group: Group | None = None) -> None:
        """Load the model, size the K/V pool and make the runners. All ranks of a `group` do so at the same time."""
        factory = RUNNERS.load(device.type)(spec, device)  # refuses settings before anything is loaded
        self.spec, self.device = spec, device
        self.page_size, self.max_running_requests = spec.page_size, spec.max_running_requests
        self.eos_token_ids, self.is_async = spec.eos_token_ids, device.is_async
        self.adapter_slots = 0 if spec.adapters is None else spec.adapters.slots
        embeds, vocab_size = spec.pooling is not None, spec.model.vocab_size
        self.limits = Limits(max_model_len=spec.max_seq_len, vocab_size=vocab_size, embeds=embeds)
        self.parts = load_parts(spec, device, group or Group(spec.info), factory, self.limits)
        self.memory = self._size_store(factory)
        self.blocks = self.parts.store.blocks
        windows = {WINDOW: spec.model.window or 0, STATE: 0}
        groups = {state.spec.group for state in self.parts.model.states} - {FULL}
        self.bounded = [Bounded(group, windows[group]) for group in sorted(groups)]
        self.runners: list[Runner] = factory.make(self.parts)
        self.memory = self.memory.with_weights(self.parts.weight_bytes)  # the C++ step packs them
        self.mover = Mover(self.parts.store, self._stores(), device)
        self.tiers = [store.spec for store in self.mover.stores]
        tell("measuring steps", spec.info.rank == 0)
        self._costs = measure_costs(lambda plan: self.launch(plan).wait, spec, self.blocks, device.is_async)
        self._forget_pages()
        _log.debug("a step costs %s", self._costs)

    def _size_store(self, factory: RunnerFactory) -> MemoryPlan:
        """Warm up, measure the largest steps, and give the store the memory that is left."""
        store = self.parts.store
        store.allocate(1)
        factory.warm_up(self.parts)
        memory = plan_memory(self.parts, self.spec)
        store.allocate(memory.num_blocks)
        self.device.use_large_pages(store.memory)
        self._forget_pages()
        return memory

    @classmethod
    def from_config(cls, config: EngineConfig, max_step_tokens: int, group: Group) -> Engine:
        """Resolve the settings and load this rank's shard of the model.

        No step will compute more than `max_step_tokens` tokens. Raises `ConfigError` for settings that cannot work.
        """
        info = group.info
        device = create_device(config.device, config.threads, info.local_rank, info.local_size)
        return cls(resolve(config, device.type, max_step_tokens, info), device, group)

    def shutdown(self) -> None:
        """Leave the other ranks. The engine cannot be used afterwards."""
        self.runners = []  # NCCL waits until the graphs that contain its kernels are gone
        gc.collect()
        self.mover.stores.clear()  # unlocks their files
        self.parts.comm.close()

    @property
    def general(self) -> Any:
        """The runner that fits any plan, and folds; `logits_of` and `parts` are for checks."""
        return self.runners[-1]

    def launch(self, plan: BatchPlan) -> ForwardOutput:
        """Start a step after those launched before, with the first runner that fits; its moves come first."""
        if len(folds := plan.folds):
            self.device.submit(lambda: self._fold(folds), 0.0)
        if (pool := self.parts.adapters) is not None:
            pool.start(plan.adapters)
        others = self.mover.launch(plan.moves, self._written(plan) if self.tiers else NO_INTS)
        if len(restores := plan.restores):
            self.device.submit(lambda: self._restore(restores), 0.0)
        if not len(plan.sequences):
            return ForwardOutput(plan, lambda masks: self.device.submit(lambda: NO_TOKENS, 0.0))
        output = next(r for r in self.runners if r.fits(plan)).launch(plan)
        self.mover.start(others)  # the host need not start these before the step
        return output

    def _fold(self, folds: Records) -> torch.Tensor:
        self.general.fold(folds)
        return NO_TOKENS

    def _written(self, plan: BatchPlan) -> Ints:
        """Return the units that a step may write; of one that only moves and restores, all that it moves, too."""
        writes, copies = plan.page_writes, np.concatenate([plan.restores["target"], plan.captures["target"]])
        writes = writes[(writes["group"] != STATE) | (writes["index"] == SLOT_ID)]
        groups = [writes["page"][writes["group"] == group] for group in range(len(self.blocks.pages))]
        units = [self.blocks.units_of(group, pages).ravel() for group, pages in enumerate(groups)]
        units += [self.blocks.units_of(STATE, copies).ravel()] if len(copies) else []
        return np.concatenate([*units, plan.moves["unit"][: 0 if len(plan.sequences) else None]])

    def _restore(self, copies: Records) -> torch.Tensor:
        self.parts.store.copy(copies["source"], copies["target"])
        return NO_TOKENS

    def _forget_pages(self) -> None:
        """Let all rows point to the dummy pages."""
        for group, table in enumerate(self.parts.state.page_tables):
            table.fill_(self.parts.store.dummy(group))
            if group == STATE:
                table[:, STATE_LEN:] = 0

    def _stores(self) -> list[Store]:
        """The tiers that `--host-kv` and `--disk-kv` ask for, of which each rank takes an equal part."""
        s, pool = self.spec, self.parts.store
        stores: list[Store] = []
        if s.host_kv:
            stores.append(HostStore(pool, s.host_kv // s.info.size))
        if s.disk_kv is not None:
            folder, size = s.disk_kv
            owner = {
                "model": fingerprint(s.folder, has_weights=not s.dummy_weight),
                "page size": s.page_size,
                "ranks": s.info.size,
                "K/V in": str(pool.dtype),
                "weights in": self.parts.model.quantization,
                "layout": self.general.name,
                "dtype": str(s.dtype),
            }
            if pool.unit_bytes != pool.strides[FULL] or len(pool.strides) > 1:
                owner["bytes of a unit"] = pool.unit_bytes
            if s.draft is not None:  # its state is in the pages
                owner["drafter"] = s.draft.kind + fingerprint(s.draft.folder, has_weights=not s.dummy_weight)
            stores.append(DiskStore(pool, folder, size // s.info.size, s.info.rank, owner))
        return stores

    def read_adapter(self, source: str) -> None:
        """Read an adapter into host memory; any thread may. Raises `ConfigError` if it does not fit the model."""
        assert self.parts.adapters is not None, "the engine has no room for adapters"
        self.parts.adapters.read(source)

    def step_costs(self) -> StepCosts:
        """The cost model measured at the start."""
        return self._costs

    def describe(self) -> dict[str, str | int | float]:
        """Facts for the banner and /server_info."""
        spec = self.spec
        return {
            "architecture": spec.model.architecture,
            "parameters": self.parts.model.num_parameters,
            "dtype": str(spec.dtype).removeprefix("torch."),
            "quantization": self.parts.model.quantization,
            "device": self.device.describe(),
            "tensor_parallel": spec.info.size,
            "communicator": self.parts.comm.name,
            "ops": self.parts.ops.name,
            "attention": ", ".join(dict.fromkeys(mixer.name for mixer in self.parts.mixers)),
            "drafter": spec.drafter or "none",
            "runners": ", ".join(r.name for r in self.runners),
            "kv_cache_dtype": "fp8" if spec.fp8_cache else str(spec.dtype).removeprefix("torch."),
            "page_size": self.page_size,
            "kv_pages": self.blocks.ids(FULL),
            "kv_tokens": self.blocks.ids(FULL) * self.page_size,
            "kv_bytes": self.memory.kv_bytes,
            "memory": self.memory.describe(),
            "adapters": "none" if (pool := self.parts.adapters) is None else pool.describe(),
            "max_model_len": spec.max_seq_len,
            "max_running_requests": spec.max_running_requests,
        }


def load_parts(spec: EngineSpec, device: Device, group: Group, factory: RunnerFactory, limits: Limits) -> Parts:
    """Load the weights of this rank, and make what the runners share. The store has no pages yet."""
    m, rows, ops = spec.model, spec.max_running_requests, resolve_ops(device.type)
    comm = group.communicator(device.torch_device, spec.use_pynccl)
    if comm.is_nccl:
        from minisgl.distributed.peer import with_peers

        comm = with_peers(comm, spec.max_step_tokens, m.hidden_size, spec.dtype, ops)
    tell("loading weights", spec.info.rank == 0)
    progress = Progress("loading weights", "B", spec.info.rank == 0).update
    kind = target_format(device.type, spec.quantization or "", m.hidden_size)
    model = load_model(
        spec.folder, m, spec.dtype, device, ops, spec.dummy_weight, progress, comm, kind, factory.supports_format,
        has_adapters=spec.adapters is not None,
    )  # fmt: skip
    store = StateStore(spec.page_size, E4M3 if spec.fp8_cache else spec.dtype, device.torch_device, spec.dtype)
    store.add(model.states)
    # One row more than requests: the dummy row pads captured steps.
    state = RowState(rows + 1, spec.pages_per_row, device.torch_device, len(store.page_bytes))
    mixers = make_mixers(spec, model.mixers, device.type, ops)
    max_biases = MAX_LOGIT_BIASES + MAX_STOP_TOKENS + len(spec.eos_token_ids)
    penalties = LogitPenalties(0 if limits.embeds else rows + 1, m.vocab_size, max_biases, device)
    vocab = VocabParallel(comm, m.vocab_size)
    pool = None
    if spec.adapters is not None:
        pool = AdapterPool(model.adapted, spec.adapters, spec.dtype, device, factory.pack_adapter)
        for adapter in spec.first_adapters:
            pool.read(adapter.source)  # one that does not fit the model ends the start
    parts = Parts(device, ops, model, store, mixers, state, penalties, comm, vocab, adapters=pool)
    if spec.drafter is None:
        return parts
    has_model = spec.draft is not None
    drafter = make_draft_model(parts, spec, factory.supports_format) if has_model else DRAFTERS.load(spec.drafter)(ops)
    return replace(parts, drafting=Drafting(rows + 1, spec.max_seq_len, state.last_token, drafter, device))
