"""What an engine is built for: the settings of a user, for one checkpoint and one kind of device."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from minisgl.attention.backend import Kind, MixerSpec
from minisgl.checkpoint.embedder import Pooling
from minisgl.core.params import Adapter
from minisgl.core.rounding import ceil_div
from minisgl.distributed.info import DistributedInfo
from minisgl.layers.adapters import AdapterSizes
from minisgl.models.model_config import ModelConfig
from minisgl.speculative.source import DraftSource


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """An `EngineConfig` made concrete for one checkpoint and one kind of device."""

    folder: Path
    model: ModelConfig
    dtype: torch.dtype  # of activations, and of an unquantized KV cache and weights
    quantization: str | None  # one of `fit.QUANTIZATIONS`, applied at the start
    fp8_cache: bool
    max_seq_len: int
    page_size: int
    max_running_requests: int
    attention_backend: str
    memory_ratio: float
    num_pages: int | None
    dummy_weight: bool
    graph_rows: int  # the largest decode batch to capture, 0 = none
    max_step_tokens: int
    eos_token_ids: frozenset[int]
    info: DistributedInfo
    use_pynccl: bool
    pooling: Pooling | None  # of an embedding model
    drafter: str | None = None  # a name of `speculative.DRAFTERS`, or the kind of `draft`
    draft: DraftSource | None = None
    max_queries: int = 1  # tokens of a decoding sequence in a step, at most: the newest one and drafts
    host_kv: int = 0  # bytes, over all ranks
    disk_kv: tuple[Path, int] | None = None  # a folder, and bytes over all ranks
    adapters: AdapterSizes | None = None
    first_adapters: tuple[Adapter, ...] = ()  # read at the start

    @property
    def pages_per_row(self) -> int:
        return ceil_div(self.max_seq_len, self.page_size)

    def mixer_spec(self, kind: Kind, device_type: str) -> MixerSpec[Kind]:
        """Return what a mixer for layers of this kind is built for."""
        rows = self.max_running_requests + 1
        return MixerSpec(device_type, self.dtype, kind, self.page_size, rows, self.max_queries, self.fp8_cache)
