"""Turns the settings that a user asked for into what one checkpoint and device will do, by one pure function."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from minisgl.checkpoint import hf
from minisgl.checkpoint.embedder import Pooling, decoder_config, read_embedder
from minisgl.distributed.info import ALONE, DistributedInfo
from minisgl.engine.runner import RUNNERS
from minisgl.errors import ConfigError
from minisgl.models.model_config import ModelConfig
from minisgl.models.weight import has_own_head
from minisgl.rounding import ceil_div
from minisgl.settings.options import MEMORY_RATIOS, PAGE_SIZES, EngineConfig

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Defaults:
    """What "auto" means on one kind of device. `dtype` None is the checkpoint's."""

    dtype: str | None
    cuda_graph: bool


DEFAULTS = {"cpu": Defaults(dtype="float32", cuda_graph=False), "cuda": Defaults(dtype=None, cuda_graph=True)}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """An `EngineConfig` made concrete for one checkpoint and one kind of device."""

    folder: Path
    model: ModelConfig
    dtype: torch.dtype  # of activations, K/V cache and weights that are not quantized
    quantization: str | None  # None or int8
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

    @property
    def pages_per_row(self) -> int:
        return ceil_div(self.max_seq_len, self.page_size)

    @property
    def num_heads(self) -> int:
        """Attention heads of this rank."""
        return len(self.info.shard(self.model.num_heads, "attention heads"))

    @property
    def num_kv_heads(self) -> int:
        """KV heads of this rank."""
        return len(self.info.shard_or_replicate(self.model.num_kv_heads, "KV heads"))


def resolve(
    config: EngineConfig, device_type: str, max_step_tokens: int = 8192, info: DistributedInfo = ALONE
) -> EngineSpec:
    """Complete `config` for rank `info`. Raises `ConfigError` with advice for settings that cannot work."""
    folder = hf.resolve_model(config.model, config.download_source)
    raw = hf.load_config(folder)
    embedder = read_embedder(folder)
    model = ModelConfig.from_hf(raw if embedder is None else decoder_config(raw))
    if embedder is None and model.tie_word_embeddings and not config.dummy_weight and has_own_head(folder):
        if info.rank == 0:
            _log.warning("config.json ties lm_head.weight to the embedding, but it differs in the checkpoint: not tied")
        model = replace(model, tie_word_embeddings=False)
    defaults = DEFAULTS[device_type]
    longest = hf.max_model_len(raw)
    if config.max_seq_len is not None and config.max_seq_len > longest:
        raise ConfigError(f"--max-seq-len {config.max_seq_len} is more than the model's {longest}")
    dtype = config.dtype if config.dtype != "auto" else (defaults.dtype or model.dtype)
    if dtype not in DTYPES:
        raise ConfigError(f"the checkpoint's dtype {dtype!r} is not one of {', '.join(DTYPES)}; give --dtype")
    has_graphs = defaults.cuda_graph and embedder is None  # graphs are for steps that sample
    if config.cuda_graph_max_bs and not defaults.cuda_graph:
        raise ConfigError(f"--cuda-graph-max-bs needs an NVIDIA GPU, and the device is {device_type}")
    if config.cuda_graph_max_bs and embedder is not None:
        raise ConfigError("--cuda-graph-max-bs is not for an embedding model: its steps are not captured")
    wanted = config.max_running_requests if config.cuda_graph_max_bs is None else config.cuda_graph_max_bs
    graph_rows = min(wanted, config.max_running_requests) if has_graphs else 0
    spec = EngineSpec(
        folder=folder,
        model=model,
        dtype=DTYPES[dtype],
        quantization=config.quantization,
        max_seq_len=config.max_seq_len or longest,
        page_size=PAGE_SIZES[device_type] if config.page_size is None else config.page_size,
        max_running_requests=config.max_running_requests,
        attention_backend=config.attention_backend,
        memory_ratio=MEMORY_RATIOS[device_type] if config.memory_ratio is None else config.memory_ratio,
        num_pages=config.num_pages,
        dummy_weight=config.dummy_weight,
        graph_rows=graph_rows,
        max_step_tokens=max_step_tokens,
        eos_token_ids=frozenset(hf.eos_token_ids(folder)),
        info=info,
        use_pynccl=not config.disable_pynccl,
        pooling=None if embedder is None else embedder.pooling,
    )
    return spec if config.dtype != "auto" else RUNNERS.load(device_type).choose_dtype(spec)
