"""Completes the settings of an engine, and chooses its attention."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch

from minisgl.attention.selection import resolve_attention
from minisgl.checkpoint.adapter import adapters_of
from minisgl.core import specs
from minisgl.core.rounding import round_up
from minisgl.core.specs import GroupedQuery
from minisgl.distributed.info import ALONE, DistributedInfo
from minisgl.engine.config import EngineSpec
from minisgl.engine.fit import Checkpoint, adapter_rank, check_settings
from minisgl.engine.runner import MIXERS, RUNNERS, Mixer
from minisgl.layers.adapters import RANK_STEP, AdapterSizes
from minisgl.models.weight import has_own_head
from minisgl.ops.table import OpTable
from minisgl.settings.options import MEMORY_RATIOS, EngineConfig
from minisgl.speculative import DRAFTERS
from minisgl.tokenizer.end_tokens import EndTokens
from minisgl.tokenizer.template import ChatTemplate

_log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def make_mixers(spec: EngineSpec, kinds: Sequence[specs.Mixer], device_type: str, ops: OpTable) -> tuple[Mixer, ...]:
    """Return a mixer of each kind. Raises `ConfigError` if no attention backend works."""
    wanted = [spec.mixer_spec(kind, device_type) for kind in kinds if isinstance(kind, GroupedQuery)]
    attention = iter(resolve_attention(spec.attention_backend, wanted, ops))
    return tuple(
        next(attention)
        if isinstance(kind, GroupedQuery)
        else MIXERS.load(type(kind).__name__)(spec.mixer_spec(kind, device_type), ops)
        for kind in kinds
    )


def _drafter(asked: str | None, checkpoint: Checkpoint) -> str | None:
    if checkpoint.draft is not None:
        return checkpoint.draft.kind
    return None if asked in (None, "off") or checkpoint.embedder is not None else DRAFTERS.choose(asked)


def resolve(
    config: EngineConfig, device_type: str, max_step_tokens: int = 8192, info: DistributedInfo = ALONE
) -> EngineSpec:
    """Complete `config` for rank `info`. Raises `ConfigError` with advice for settings that cannot work."""
    checkpoint = Checkpoint.read(config)
    check_settings(checkpoint, config, device_type)
    model, embedder = checkpoint.model, checkpoint.embedder
    is_own = embedder is None and not model.is_fallback
    if is_own and model.tie_word_embeddings and not config.dummy_weight and has_own_head(checkpoint.folder):
        if info.rank == 0:
            _log.warning("lm_head.weight is not tied to the embedding, from which it differs in the checkpoint")
        model = replace(model, tie_word_embeddings=False)
    dtype = config.dtype if config.dtype != "auto" else "float32" if device_type == "cpu" else model.dtype
    has_graphs = device_type == "cuda" and embedder is None and not model.is_fallback  # only steps that sample
    wanted = config.max_running_requests if config.cuda_graph_max_bs is None else config.cuda_graph_max_bs
    drafter = _drafter(config.speculate, checkpoint)
    ends: frozenset[int] = frozenset()
    if embedder is None:
        template = ChatTemplate.of_folder(checkpoint.folder, config.load_chat_template(), config.template_kwargs)
        ends = EndTokens.of_folder(checkpoint.folder, template).ids
    rank = round_up(adapter_rank(config), RANK_STEP)
    graph_rows = min(wanted, config.max_running_requests) if has_graphs else 0
    spec = EngineSpec(
        folder=checkpoint.folder,
        model=model,
        dtype=DTYPES[dtype],
        quantization=config.quantization,
        fp8_cache=config.kv_cache_dtype == "fp8",
        max_seq_len=config.max_seq_len or checkpoint.max_model_len,
        page_size=checkpoint.page_size(config, device_type),
        max_running_requests=config.max_running_requests,
        attention_backend=config.attention_backend,
        memory_ratio=MEMORY_RATIOS[device_type] if config.memory_ratio is None else config.memory_ratio,
        num_pages=config.num_pages,
        dummy_weight=config.dummy_weight,
        graph_rows=graph_rows,
        max_step_tokens=max_step_tokens,
        eos_token_ids=ends,
        info=info,
        use_pynccl=not config.disable_pynccl,
        pooling=None if embedder is None else embedder.pooling,
        drafter=drafter,
        draft=checkpoint.draft,
        max_queries=1 if drafter is None else 1 + config.num_draft_tokens,
        host_kv=config.host_kv,
        disk_kv=config.disk_tier,
        adapters=AdapterSizes(config.max_loras, config.max_cpu_loras, rank) if rank else None,
        first_adapters=tuple(adapters_of(config.lora)),
    )
    return spec if config.dtype != "auto" else RUNNERS.load(device_type).choose_dtype(spec)
