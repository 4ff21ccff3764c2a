"""An engine without its scheduler, by default on a CPU, so that models and backends can be tested alone."""

from __future__ import annotations

from pathlib import Path

import torch

from minisgl.attention.backend import MixerSpec
from minisgl.attention.selection import resolve_attention
from minisgl.checkpoint import hf
from minisgl.core.layout import Flag
from minisgl.core.plan import Batch, BatchPlan
from minisgl.core.specs import GroupedQuery
from minisgl.device.device import CpuDevice, Device
from minisgl.distributed.communicator import Communicator, SoloCommunicator
from minisgl.distributed.info import ALONE
from minisgl.distributed.tensor_parallel import VocabParallel
from minisgl.engine import batch as engine_batch
from minisgl.engine.adapters import AdapterPool
from minisgl.engine.runner import MIXERS, EagerRunner, Parts
from minisgl.engine.state import LogitPenalties, RowState
from minisgl.kvcache.store import StateStore
from minisgl.layers.adapters import AdapterSizes
from minisgl.models.llama import LlamaForCausalLM
from minisgl.models.model_config import ModelConfig
from minisgl.models.weight import load_model
from minisgl.ops.table import load_ops
from minisgl.tools.verify.steps import Span, Stepper, span_plan

__all__ = ["CPU", "DEVICE", "MiniEngine", "Span", "make_batch"]

CPU = torch.device("cpu")
DEVICE = CpuDevice(1)
ROWS = 16


def make_batch(spans: list[Span]) -> Batch:
    """The batch of one step, without page writes."""
    return engine_batch.make_batch(span_plan(spans), DEVICE)


class MiniRunner(EagerRunner):
    """With room for adapters, any row may have one (`parts.state.adapter`)."""

    def logits_of(self, plan: BatchPlan) -> torch.Tensor:
        plan.sequences["flags"] |= Flag.ADAPTED if self.parts.adapters is not None else 0
        return super().logits_of(plan)


class MiniEngine(Stepper):
    """A loaded model with its pool, whose pages are poisoned at the start."""

    @property
    def parts(self) -> Parts:
        return self.runner.parts

    @property
    def model(self) -> LlamaForCausalLM:
        return self.parts.model

    @classmethod
    def load(
        cls,
        folder: Path,
        *,
        dtype: torch.dtype = torch.float32,
        page_size: int = 16,
        num_pages: int = 256,
        ops: str = "cpu",
        attention: str = "auto",
        dummy: bool = False,
        device: Device = DEVICE,
        comm: Communicator | None = None,
        config: ModelConfig | None = None,
        keeps_formats: bool = False,
        adapters: AdapterSizes | None = None,
    ) -> MiniEngine:
        """With `keeps_formats`, quantized matrices keep the format of the checkpoint."""
        place = device.torch_device
        comm = comm or SoloCommunicator(ALONE, place)
        config = config or ModelConfig.from_hf(hf.load_config(folder))
        table = load_ops(ops)
        options = {"dummy": dummy, "comm": comm, "supports_format": lambda kind: keeps_formats}
        model = load_model(folder, config, dtype, device, table, has_adapters=adapters is not None, **options)
        store = StateStore(page_size, dtype, place, dtype)
        store.add(model.states)
        store.allocate(num_pages)
        store.memory.fill_(0xFF)  # NaN
        groups = len(store.page_bytes)
        state = RowState(ROWS, -(-config.max_position_embeddings // page_size), place, groups)
        # Unmapped entries point at an unowned page: reading them would show up as NaN.
        for group in range(groups):
            state.page_tables[group] = store.dummy(group)
        kinds = tuple(
            resolve_attention(attention, [spec], table)[0]
            if isinstance(spec.kind, GroupedQuery)
            else MIXERS.load(type(spec.kind).__name__)(spec, table)
            for spec in (MixerSpec(place.type, dtype, kind, page_size, ROWS) for kind in model.mixers)
        )
        penalties = LogitPenalties(ROWS, config.vocab_size, 8, device)
        vocab = VocabParallel(comm, config.vocab_size)
        pool = None if adapters is None else AdapterPool(model.adapted, adapters, dtype, device, lambda weights: None)
        parts = Parts(device, table, model, store, kinds, state, penalties, comm, vocab, adapters=pool)
        return cls(MiniRunner(parts))
