"""From what the user asked for to what will be done: one pure function, its result frozen."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from minisgl.models.config import ModelConfig
from minisgl.utils import hf
from minisgl.utils.errors import ConfigError

if TYPE_CHECKING:
    from minisgl.config import EngineConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MAX_PAGE_SIZE = 128


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """An `EngineConfig` made concrete for one checkpoint and one kind of device."""

    folder: Path
    model: ModelConfig
    dtype: torch.dtype
    max_seq_len: int
    page_size: int
    max_running_requests: int
    attention_backend: str
    memory_ratio: float
    num_pages: int | None
    dummy_weight: bool
    eos_token_ids: frozenset[int]

    @property
    def pages_per_row(self) -> int:
        return -(-self.max_seq_len // self.page_size)


def resolve(config: EngineConfig, device_type: str) -> EngineSpec:
    """Complete `config`; raises `ConfigError` with advice for whatever cannot work."""
    folder = hf.resolve_model(config.model)
    raw = hf.load_config(folder)
    model = ModelConfig.from_hf(raw)
    size = config.page_size
    if not 1 <= size <= MAX_PAGE_SIZE or size & (size - 1):
        raise ConfigError(f"--page-size {size} is not a power of two from 1 to {MAX_PAGE_SIZE}")
    longest = hf.max_model_len(raw)
    if config.max_seq_len is not None and not 2 <= config.max_seq_len <= longest:
        raise ConfigError(f"--max-seq-len {config.max_seq_len} is not between 2 and the model's {longest}")
    if config.max_running_requests < 1:
        raise ConfigError("--max-running-requests must be at least 1")
    if config.num_pages is not None and config.num_pages < 1:
        raise ConfigError("--num-pages must be at least 1")
    ratio = config.memory_ratio if config.memory_ratio is not None else (0.1 if device_type == "cpu" else 0.9)
    if not 0 < ratio <= 1:
        raise ConfigError(f"--memory-ratio {ratio} is not above 0 and at most 1")
    dtype = config.dtype if config.dtype != "auto" else ("float32" if device_type == "cpu" else model.dtype)
    if dtype not in DTYPES:
        raise ConfigError(f"--dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    return EngineSpec(
        folder=folder,
        model=model,
        dtype=DTYPES[dtype],
        max_seq_len=config.max_seq_len or longest,
        page_size=size,
        max_running_requests=config.max_running_requests,
        attention_backend=config.attention_backend,
        memory_ratio=ratio,
        num_pages=config.num_pages,
        dummy_weight=config.dummy_weight,
        eos_token_ids=frozenset(hf.eos_token_ids(folder)),
    )
