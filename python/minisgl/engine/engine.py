"""The engine: model, KV pool, attention and per-row state on one device; a plan goes in, tokens come out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from minisgl.attention import resolve_attention
from minisgl.core import Batch, BatchPlan, Context
from minisgl.engine.adjust import LogitAdjuster
from minisgl.engine.config import EngineSpec, resolve
from minisgl.engine.memory import plan_num_pages
from minisgl.engine.prepare import prepare_batch
from minisgl.engine.state import RowState
from minisgl.kernel.ops import resolve_ops
from minisgl.kvcache.mha_pool import MHAKVPool
from minisgl.models import load_model
from minisgl.params import Limits
from minisgl.utils.device import Device, Pending, create_device

if TYPE_CHECKING:
    from minisgl.config import EngineConfig
    from minisgl.core import Ints


class ForwardOutput:
    """The tokens of a launched batch, on their way to the host."""

    def __init__(self, pending: Pending) -> None:
        self._pending = pending

    def wait(self) -> tuple[Ints, Ints]:
        """Sampled tokens [S] and 0/1 flags "the logits were finite" [S], in slot order."""
        tokens, finite = self._pending.wait()
        return tokens, finite


class Engine:
    """Runs batches in the order in which they are launched; knows nothing of requests, queues or ownership."""

    def __init__(self, spec: EngineSpec, device: Device) -> None:
        self.spec = spec
        self.device = device
        self.ops = resolve_ops(device.type)
        self.model = load_model(
            spec.folder, spec.model, spec.dtype, device.torch_device, self.ops, dummy=spec.dummy_weight
        )
        self.page_size = spec.page_size
        self.max_running_requests = spec.max_running_requests
        self.num_pages = plan_num_pages(spec, device)
        m = spec.model
        self.kv_cache = MHAKVPool(
            m.num_layers, self.num_pages, m.num_kv_heads, spec.page_size, m.head_dim, spec.dtype, device.torch_device
        )
        self.attention = resolve_attention(spec.attention_backend, self.kv_cache, m, self.ops)
        self.state = RowState(spec.max_running_requests, spec.pages_per_row, device.torch_device)
        self.adjuster = LogitAdjuster(spec.max_running_requests, m.vocab_size, device.torch_device)
        self.limits = Limits(max_model_len=spec.max_seq_len, vocab_size=m.vocab_size)
        self.eos_token_ids = spec.eos_token_ids
        self.is_async = device.is_async

    @classmethod
    def from_config(cls, config: EngineConfig) -> Engine:
        """Resolve the settings and load the model; raises `ConfigError` when they cannot work."""
        device = create_device(config.device, config.threads)
        return cls(resolve(config, device.type), device)

    def prepare(self, plan: BatchPlan) -> Batch:
        """Upload a plan."""
        return prepare_batch(plan, self.device)

    def launch(self, batch: Batch) -> ForwardOutput:
        """Start a batch behind those launched before."""
        flops = 2.0 * self.model.num_parameters * batch.num_tokens
        return ForwardOutput(self.device.submit(lambda: self._step(batch), flops))

    @torch.inference_mode()
    def _step(self, batch: Batch) -> torch.Tensor:
        """The device's part of a step; returns [2, S] int32: tokens and finite flags."""
        state = self.state
        state.apply(batch)
        self.adjuster.apply(batch.adjusts)
        input_ids = batch.input_ids
        if len(batch.device_tokens):
            rows = batch.token_rows[batch.device_tokens].long()
            input_ids = input_ids.index_copy(0, batch.device_tokens, state.last_token[rows])
        logits = self.model.forward(input_ids, self._context(batch))
        rows = batch.sample_rows
        if not len(rows):
            return torch.empty(2, 0, dtype=torch.int32)
        if len(batch.adjusted):
            logits = self.adjuster.adjust(logits, batch)
        out = self.ops.sample_rows(logits, rows, batch.sample_positions, state, batch.is_filtered)
        if len(batch.adjusted):
            self.adjuster.count(out[0], batch)
        return out

    def _context(self, batch: Batch) -> Context:
        table = self.state.page_table
        pages = table[batch.token_rows.long(), (batch.positions // self.page_size).long()]
        out_loc = pages.long() * self.page_size + batch.positions % self.page_size
        metadata = self.attention.prepare(batch, table)
        return Context(batch, table, self.kv_cache, self.attention, metadata, out_loc)

    def describe(self) -> dict[str, str | int | float]:
        """Facts for the banner and /server_info."""
        spec = self.spec
        return {
            "architecture": spec.model.architecture,
            "parameters": self.model.num_parameters,
            "dtype": str(spec.dtype).removeprefix("torch."),
            "device": self.device.describe(),
            "attention": self.attention.name,
            "page_size": self.page_size,
            "kv_pages": self.num_pages,
            "kv_tokens": self.num_pages * self.page_size,
            "kv_bytes": self.num_pages * self.kv_cache.page_bytes,
            "max_model_len": spec.max_seq_len,
            "max_running_requests": spec.max_running_requests,
        }
