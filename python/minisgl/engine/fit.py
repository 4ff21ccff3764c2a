"""Checks from config.json alone that settings and model are compatible and fit this machine.

Imports no torch: a server checks this before it starts anything heavy. `engine/memory.py` checks what must be measured
(the largest step, CUDA graphs).
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from minisgl.checkpoint import hf
from minisgl.checkpoint.adapter import adapters_of, read_config
from minisgl.checkpoint.embedder import Embedder, decoder_config, read_embedder
from minisgl.checkpoint.gguf_folder import gguf_files
from minisgl.core.errors import ConfigError
from minisgl.core.layout import FOLD_TOKENS, FULL
from minisgl.core.rounding import ceil_div
from minisgl.device.machine import available_memory, choose_device, gpu_memory, usable_cores
from minisgl.distributed.info import DistributedInfo
from minisgl.kvcache.snapshots import recent_tokens
from minisgl.models.model_config import ModelConfig, fallback_config
from minisgl.settings.options import PAGE_SIZES, EngineConfig
from minisgl.speculative.source import HEAD_FOLDER, DraftSource, has_head, next_tokens, read_source

ITEM_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
QUANTIZATIONS: Final = {"cpu": {"int8": 8, "int4": 4}, "cuda": {"fp8": 8, "int8": 8, "int4": 4}}  # bits per weight
MAX_THREADS_PER_CORE: Final = 4  # more threads only wait for each other
DEFAULT_RANK: Final = 16  # of adapters
GB: Final = 1e9


@dataclass(frozen=True)
class Checkpoint:
    """A model folder and its configuration."""

    folder: Path
    model: ModelConfig
    embedder: Embedder | None
    max_model_len: int
    draft: DraftSource | None = None  # if the drafter has a model

    @classmethod
    def read(cls, config: EngineConfig) -> Checkpoint:
        """Find and read the model. Weights of a hub's model are downloaded, too, unless random ones are asked for.

        Raises `ConfigError` for a model that cannot be served.
        """
        folder = hf.resolve_model(config.model, config.download_source, not config.dummy_weight, config.revision)
        raw = hf.load_config(folder)
        embedder = read_embedder(folder)
        raw = raw if embedder is None else decoder_config(raw)
        model = fallback_config(raw) if config.model_impl == "transformers" else ModelConfig.from_hf(raw)
        model = replace(model, gives_back=embedder is None)
        asked = config.speculate or "auto"
        if asked == "auto" and not model.is_fallback and choose_device(config.device) == "cpu" and has_head(folder):
            asked = f"eagle3:{folder / HEAD_FOLDER}"
        has_weights = not config.dummy_weight
        if config.speculate == "auto" and asked == "auto" and embedder is None:
            asked = "auto" if isinstance(next_tokens(folder, model, has_weights=has_weights), str) else "mtp"
        draft = read_source(asked, model, folder, has_weights=has_weights) if embedder is None else None
        if draft is not None and asked != config.speculate and draft.model.num_heads % config.tp:
            draft = None  # The ranks cannot divide this head, and the user did not name it.
        drafts = config.num_draft_tokens * (draft is not None or config.speculate not in (None, "off"))
        if model.linear is not None:
            recent, is_narrow = recent_tokens(1 + drafts), config.state_dtype == "model"
            model = replace(model, linear=replace(model.linear, recent=recent, is_narrow=is_narrow))
        return cls(folder, model, embedder, model.max_position_embeddings, draft)

    def page_size(self, config: EngineConfig, device: str) -> int:
        """Return the page size. A recurrent state is kept at the end of a page, so large pages would lose hits."""
        return config.page_size or (FOLD_TOKENS if self.model.linear_layers else PAGE_SIZES[device])


@dataclass(frozen=True)
class Footprint:
    """The least bytes that a rank needs for weights, slots of adapters, the state of all rows, a page of each group."""

    weights: int
    adapters: int
    rows: int
    pages: tuple[int, ...]
    page_size: int

    @classmethod
    def of(cls, checkpoint: Checkpoint, config: EngineConfig, device: str, item: int) -> Footprint:
        """Return the footprint with elements of `item` bytes. Raises `ConfigError` if ranks cannot divide the model."""
        m, page_size = checkpoint.model, checkpoint.page_size(config, device)
        page_bytes = _page_bytes(m, config, page_size, item)
        pages = ceil_div(config.max_seq_len or checkpoint.max_model_len, page_size) * len(page_bytes)
        row = 4 * (pages + (m.vocab_size if checkpoint.embedder is None else 0))  # page tables, counts of tokens
        is_automatic = m.is_rounded and device == "cpu" and config.dtype == "auto"
        bits = QUANTIZATIONS[device].get(config.quantization or "int8" * is_automatic, 8 * item)
        if m.quantization is not None and (device == "cuda" or m.quantization.layout == "packed"):
            bits = m.quantization.bits
        expert_bits = bits if device == "cuda" else 8 * item

        def matrices(projections: int, experts: int, others: int) -> int:
            return others * item + (projections * bits + experts * expert_bits) // 8

        weights = matrices(m.num_projections, m.num_expert_weights, m.num_others)
        if config.quantization is not None and device == "cuda" and not m.tie_word_embeddings:
            weights -= m.vocab_size * m.hidden_size * (item - 1)  # the head has 8 bits: `HEAD_FORMAT`
        adapters = config.max_loras * adapter_rank(config) * m.num_adapted * item // config.tp
        if checkpoint.draft is not None:
            page_bytes[FULL] += _page_bytes(checkpoint.draft.model, config, page_size, item)[FULL]
            d, experts = checkpoint.draft, checkpoint.draft.model.num_expert_weights
            is_layer = bool(d.names)  # which is quantized as the model's are
            weights += matrices(d.num_projections, experts, d.num_others) if is_layer else d.model.num_weights * item
        return cls(weights // config.tp, adapters, config.max_running_requests * row, tuple(page_bytes), page_size)


def adapter_rank(config: EngineConfig) -> int:
    """Return the largest rank that an adapter may have, 0 without adapters. Raises `ConfigError` for a bad one."""
    ranks = [read_config(Path(adapter.folder)).largest_rank for adapter in adapters_of(config.lora)]
    if not ranks and config.lora_dynamic is None:
        return 0
    return config.max_lora_rank or max((DEFAULT_RANK, *ranks))


def _page_bytes(model: ModelConfig, config: EngineConfig, page_size: int, item: int) -> list[int]:
    """Return a page's bytes in each group on a rank. Raises `ConfigError` if ranks cannot divide the model."""
    m, info = model, DistributedInfo(0, config.tp)
    own = [layer for layer, sizes in enumerate(m.layers) if sizes.kv_of is None]
    states = [state for layer in own for state in m.mixer(layer, info).states]
    if m.experts is None or m.experts.dense_layers or m.experts.flags.is_beside:
        info.shard(m.intermediate_size, "intermediate features")
    if m.experts is not None:
        info.shard(m.experts.intermediate_size, "intermediate features of an expert")
    is_fp8 = config.kv_cache_dtype == "fp8"
    sizes = [0] * (1 + max(state.group for state in states))
    for state in states:
        sizes[state.group] += state.page_bytes(page_size, item, is_fp8)
    return sizes


def estimate_step(model: ModelConfig, config: EngineConfig, max_tokens: int, item: int) -> int:
    """Estimate the bytes of a rank's largest step, without weights and K/V; the engine measures them later."""
    m, ranks = model, config.tp
    mlp = m.experts.top_k * m.experts.intermediate_size if m.experts is not None else 0
    widest = max(max((2 * s.heads + 2 * s.kv_heads) * s.head_dim, 3 * max(s.intermediate, mlp)) for s in m.layers)
    if m.latent is not None:  # q, k and v of a prompt, each padded
        widest = max(widest, 4 * m.num_heads * max(m.latent.qk_dim, m.latent.v_dim))
    hidden = max_tokens * item * (3 * (m.hidden_size + m.num_layers * m.layer_input_size) + widest // ranks)
    return hidden + config.max_running_requests * m.vocab_size * 3 * 4 // ranks


def least_dtype(model: ModelConfig, config: EngineConfig, device: str) -> str:
    """Return the smallest type that `--dtype` may resolve to."""
    if config.dtype != "auto":
        return config.dtype
    return model.dtype if device == "cuda" or model.is_large_bfloat16 else "float32"


def check_settings(checkpoint: Checkpoint, config: EngineConfig, device: str) -> None:
    """Raise `ConfigError` for settings that this model or kind of device does not support."""
    if checkpoint.model.is_fallback:
        _check_fallback(checkpoint, config)
    if config.max_seq_len is not None and config.max_seq_len > checkpoint.max_model_len:
        limit = f"the model's context of {checkpoint.max_model_len} tokens; give less, or leave it out"
        raise ConfigError(f"--max-seq-len {config.max_seq_len} is more than {limit}")
    if (dtype := least_dtype(checkpoint.model, config, device)) not in ITEM_BYTES:
        raise ConfigError(f"the checkpoint's dtype {dtype!r} is not one of {', '.join(ITEM_BYTES)}; give --dtype")
    if config.host_kv and device != "cuda":
        raise ConfigError("--host-kv is for a GPU: on a CPU the pool is host memory, so give more --num-pages")
    if config.disk_tier is not None and checkpoint.embedder is not None and checkpoint.embedder.pooling == "mean":
        raise ConfigError("--disk-kv is not for a model with mean pooling, which has no prefix cache")
    if config.cuda_graph_max_bs and device != "cuda":
        raise ConfigError(f"--cuda-graph-max-bs needs an NVIDIA GPU, and the device is {device}")
    if config.cuda_graph_max_bs and checkpoint.embedder is not None:
        raise ConfigError("--cuda-graph-max-bs is not for an embedding model: its steps are not captured")
    if checkpoint.embedder is not None and config.speculate not in (None, "off", "auto"):
        raise ConfigError(f"--speculate {config.speculate} is for models that generate text; this one makes embeddings")
    if config.quantization is not None:
        if device == "cuda" and checkpoint.model.quantization is not None:
            raise ConfigError(f"--quantization {config.quantization} is for checkpoints that are not quantized yet")
        if config.quantization not in QUANTIZATIONS[device]:
            one_of = " or ".join(QUANTIZATIONS[device])
            raise ConfigError(f"--quantization {config.quantization} is not for {device}, where it can be {one_of}")


def _check_fallback(checkpoint: Checkpoint, config: EngineConfig) -> None:
    """Raise `ConfigError` for what `--model-impl transformers` does not support."""
    refused = {
        f"--tp {config.tp}": config.tp > 1,
        f"--quantization {config.quantization}": config.quantization is not None,
        f"--speculate {config.speculate}": checkpoint.draft is not None,
        f"--cuda-graph-max-bs {config.cuda_graph_max_bs}": bool(config.cuda_graph_max_bs),
        "an embedding model": checkpoint.embedder is not None,
        "a quantized checkpoint": checkpoint.model.quantization is not None,
        "adapters": config.lora is not None or config.lora_dynamic is not None,
        "GGUF files": bool(gguf_files(checkpoint.folder)),
    }
    for what, is_refused in refused.items():
        if is_refused:
            raise ConfigError(f"--model-impl transformers does not support {what}")
    if find_spec("transformers") is None:
        raise ConfigError("--model-impl transformers needs `pip install 'minisgl[transformers]'`")


def check_fit(config: EngineConfig, replicas: int = 1) -> Checkpoint:
    """Read the model's configuration. Raises `ConfigError` if so many replicas cannot be served on this machine.

    The weights of a hub's model are not downloaded: `Checkpoint.read` does that afterwards.
    """
    device = choose_device(config.device)
    checkpoint = Checkpoint.read(replace(config, dummy_weight=True))
    check_settings(checkpoint, config, device)
    ranks = replicas * config.tp // config.nnodes
    asked = f"--tp {config.tp}" if replicas == 1 else f"--dp {replicas} --tp {config.tp}"
    _check_cores(config, ranks, asked)
    dtype = least_dtype(checkpoint.model, config, device)
    needs = Footprint.of(checkpoint, config, device, ITEM_BYTES[dtype])
    if config.host_kv > (memory := available_memory()):
        raise ConfigError(f"--host-kv {config.host_kv / GB:.1f} GB is more than the free {memory / GB:.1f} GB")
    if config.disk_tier is not None:
        folder, size = config.disk_tier
        _check_disk(folder, size // config.nnodes)
    if device == "cuda":
        gpus = gpu_memory()
        if len(gpus) < ranks:
            raise ConfigError(f"{asked} needs {ranks} GPUs on this host, which has {len(gpus)}: give less")
        _check_memory(config, needs, dtype, 1, min(gpus[:ranks]), "a GPU")
    else:
        _check_memory(config, needs, dtype, ranks, available_memory(), "the available memory")
    return checkpoint


def _check_disk(folder: Path, size: int) -> None:
    """Raise `ConfigError` if the disk has less than `size` bytes for the files in `folder`, which may be there."""
    try:
        there = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
        free = shutil.disk_usage(there).free + sum(file.stat().st_size for file in folder.rglob("*.kv"))
    except OSError:
        return  # the engine says why the folder cannot be used
    if size > free:
        raise ConfigError(f"--disk-kv {folder} lacks space: {size / GB:.1f} GB are needed, {free / GB:.1f} GB are free")


def _check_cores(config: EngineConfig, ranks: int, asked: str) -> None:
    """Raise `ConfigError` if so many `ranks`, which are `asked` for, have far more threads than there are cores."""
    cores, threads = usable_cores(), config.threads or 1
    if ranks * threads > MAX_THREADS_PER_CORE * cores:
        flags = [f"--threads {threads}"] * (threads > 1) + [asked] * (ranks > 1 or threads == 1)
        raise ConfigError(
            f"{' '.join(flags)} is too much for a machine of {cores} cores, which runs at most "
            f"{MAX_THREADS_PER_CORE * cores} threads in all"
        )


def _check_memory(config: EngineConfig, needs: Footprint, dtype: str, ranks: int, memory: int, where: str) -> None:
    """Raise `ConfigError` unless `ranks` ranks fit in `memory` bytes."""
    num_pages = config.num_pages or 0
    parts = [
        (ranks * needs.weights, f"weights in {dtype}", "take a smaller model, or more GPUs (--tp)"),
        (
            ranks * needs.adapters,
            f"--max-loras {config.max_loras}",
            "give a smaller number, or a lower --max-lora-rank",
        ),
        (ranks * needs.rows, f"--max-running-requests {config.max_running_requests}", "give a smaller number"),
        (ranks * needs.pages[FULL] * num_pages, f"--num-pages {num_pages}", "give a smaller number"),
    ]
    if sum(size for size, *_ in parts) > memory:
        listed = ", ".join(f"{name} {size / GB:.1f} GB" for size, name, _ in parts if size >= 0.1 * GB)
        raise ConfigError(f"the model does not fit into {where} of {memory / GB:.1f} GB: {listed}; {max(parts)[2]}")
