"""Named model shapes: the config.json of well-known models, for runs with random weights, without a download.

And random adapters for a model.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any, Final

from minisgl.checkpoint.hf import BUILTIN_MODEL, load_config, resolve_model
from minisgl.core.errors import ConfigError

TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")

_QWEN3: Final[dict[str, Any]] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "torch_dtype": "bfloat16",
}
_LLAMA_3_1: Final[dict[str, Any]] = _QWEN3 | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}


def _sizes(hidden: int, intermediate: int, layers: int, heads: int) -> dict[str, int]:
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    return dict(zip(names, (hidden, intermediate, layers, heads), strict=True))


_QWEN_3_5: Final[dict[str, Any]] = {
    "vocab_size": 248320,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "rope_theta": 10000000,
    "max_position_embeddings": 262144,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
}
SHAPES: Final[dict[str, dict[str, Any]]] = {
    "qwen3-10m": _QWEN3
    | _sizes(256, 1024, 8, 8)
    | {"vocab_size": 4096, "head_dim": 64, "num_key_value_heads": 4, "tie_word_embeddings": True}
    | {"bos_token_id": 1, "eos_token_id": 2},
    "qwen3-0.6b": _QWEN3 | _sizes(1024, 3072, 28, 16) | {"tie_word_embeddings": True},
    "qwen3-8b": _QWEN3 | _sizes(4096, 12288, 36, 32),
    "qwen3-14b": _QWEN3 | _sizes(5120, 17408, 40, 40),
    "qwen3-32b": _QWEN3 | _sizes(5120, 25600, 64, 64),
    "qwen3-30b-a3b": _QWEN3  # 128 experts of 768, 8 for each token
    | _sizes(2048, 6144, 48, 32)
    | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_key_value_heads": 4}
    | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True},
    # 64 experts of 1,536, 4 for each token, and latents of 512 + 64 elements
    "glm-4.7-flash": {"architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite"}
    | _sizes(2048, 10240, 47, 20)
    | {"vocab_size": 154880, "kv_lora_rank": 512, "q_lora_rank": 768, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64}
    | {"v_head_dim": 256, "n_routed_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 1536}
    | {"n_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 1.8, "norm_topk_prob": True}
    | {"max_position_embeddings": 202752, "rope_theta": 1000000, "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16"}
    | {"bos_token_id": 0, "eos_token_id": 1},
    "qwen3.5-0.8b": _QWEN_3_5
    | _sizes(1024, 3584, 24, 8)
    | {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "linear_num_value_heads": 16}
    | {"tie_word_embeddings": True},
    # 256 experts of 512, 8 for each token, and one more for all
    "qwen3.5-35b-a3b": _QWEN_3_5
    | _sizes(2048, 512, 40, 16)
    | {"architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text", "moe_intermediate_size": 512}
    | {"num_experts": 256, "num_experts_per_tok": 8, "shared_expert_intermediate_size": 512},
    "llama-3.1-8b": _LLAMA_3_1 | _sizes(4096, 14336, 32, 32),
    "llama-3.1-70b": _LLAMA_3_1 | _sizes(8192, 28672, 80, 64),
    "gpt-oss-20b": {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "torch_dtype": "bfloat16"}
    | _sizes(2880, 2880, 24, 64)
    | {"vocab_size": 201088, "num_key_value_heads": 8, "num_local_experts": 32, "num_experts_per_tok": 4}
    | {"max_position_embeddings": 131072, "quantization_config": {"quant_method": "mxfp4"}}
    | {"rope_scaling": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}}
    | {"bos_token_id": 199998, "eos_token_id": 200002},
    "gemma-3-27b": {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "torch_dtype": "bfloat16"}
    | _sizes(5376, 21504, 62, 32)
    | {"vocab_size": 262208, "head_dim": 128, "num_key_value_heads": 16, "query_pre_attn_scalar": 168}
    | {"sliding_window": 1024, "sliding_window_pattern": 6, "max_position_embeddings": 131072}
    | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "bos_token_id": 2, "eos_token_id": 1},
    "gemma-3-12b": {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "torch_dtype": "bfloat16"}
    | _sizes(3840, 15360, 48, 16)
    | {"vocab_size": 262208, "head_dim": 256, "num_key_value_heads": 8, "query_pre_attn_scalar": 256}
    | {"sliding_window": 1024, "sliding_window_pattern": 6, "max_position_embeddings": 131072}
    | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "bos_token_id": 2, "eos_token_id": 1},
    "gemma-4-12b": {"architectures": ["Gemma4UnifiedForCausalLM"], "torch_dtype": "bfloat16"}
    | _sizes(3840, 15360, 48, 16)
    | {"model_type": "gemma4_unified_text", "vocab_size": 262144, "num_key_value_heads": 8}
    | {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "max_position_embeddings": 131072}
    | {"bos_token_id": 2, "eos_token_id": 1},
}
SHAPE_HELP: Final = f"use random weights in the shape of this model: {', '.join(SHAPES)}"


def write_config(shape: str, folder: Path) -> None:
    """Write config.json of `shape` and the built-in model's tokenizer to the new folder `folder`.

    Sampled ids beyond that tokenizer's vocabulary have no text. Raises `ConfigError` for an unknown shape.
    """
    if shape not in SHAPES:
        raise ConfigError(f"--shape {shape!r} is unknown; known: {', '.join(SHAPES)}")
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(SHAPES[shape], indent=2))
    for name in TOKENIZER_FILES:
        shutil.copy(BUILTIN_MODEL / name, folder / name)


@contextmanager
def shape_options(shape: str | None, options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield `options`; with a `shape`, they name its model, in a temporary folder, and ask for random weights.

    Raises `ConfigError` for an unknown shape, or if `options` also name a model.
    """
    if shape is None:
        yield options
        return
    if options.get("model"):
        raise ConfigError("give --shape or a model, not both")
    with tempfile.TemporaryDirectory(prefix="minisgl-shape-") as base:
        folder = Path(base) / shape
        write_config(shape, folder)
        yield options | {"model": str(folder), "dummy_weight": True}


def write_adapter(folder: Path, config: dict[str, Any], rank: int) -> None:
    """Write a random adapter of a Llama-like model's attention, and of its MLPs if it has no experts."""
    import torch
    from safetensors.torch import save_file

    hidden, size, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    dim = config.get("head_dim") or hidden // heads
    q, kv = heads * dim, config["num_key_value_heads"] * dim
    shapes = {f"self_attn.{name}_proj": (n, hidden) for name, n in (("q", q), ("k", kv), ("v", kv))}
    shapes["self_attn.o_proj"] = hidden, q
    if not config.keys() & {"num_experts", "num_local_experts", "n_routed_experts"}:
        shapes |= dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), (size, hidden)) | {"mlp.down_proj": (hidden, size)}
    tensors = {}
    for i, (name, (n_out, n_in)) in product(range(config["num_hidden_layers"]), shapes.items()):
        module = f"base_model.model.model.layers.{i}.{name}.lora"
        tensors[f"{module}_A.weight"] = torch.randn(rank, n_in, dtype=torch.bfloat16) / n_in**0.5
        tensors[f"{module}_B.weight"] = torch.randn(n_out, rank, dtype=torch.bfloat16) / 100
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    about = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": "all-linear"}
    (folder / "adapter_config.json").write_text(json.dumps(about))


@contextmanager
def adapter_options(count: int | None, rank: int, options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield `options`, whose `lora` also has a temporary folder of `count` adapters, which are links to one."""
    if count is None:
        yield options
        return
    config = load_config(resolve_model(options.get("model", ""), weights=False))
    with tempfile.TemporaryDirectory(prefix="minisgl-adapters-") as base:
        write_adapter(Path(base) / "0", config, rank)
        for i in range(1, count):
            shutil.copytree(f"{base}/0", f"{base}/{i}", copy_function=os.link)
        yield options | {"lora": ",".join(filter(None, (options.get("lora"), base)))}
