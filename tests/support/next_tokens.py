"""Tiny models without weights: one whose config.json promises a layer for further tokens, and a hybrid."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from minisgl.checkpoint.hf import BUILTIN_MODEL


def write_glm(path: Path) -> Path:
    """Write a GLM-4.5 into the folder `path`; with random weights it has a layer for further tokens."""
    changes = {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "head_dim": 64,
        "use_qk_norm": True,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "num_nextn_predict_layers": 1,
    }
    return _write(path, changes)


def write_hybrid(path: Path) -> Path:
    """Write a Qwen3.5 with a recurrent layer and one with attention into the folder `path`."""
    changes = {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "head_dim": 32,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    }
    return _write(path, changes)


def _write(path: Path, changes: dict[str, object]) -> Path:
    """Write the built-in model's tokenizer, and its configuration with other sizes and `changes`."""
    config = json.loads((BUILTIN_MODEL / "config.json").read_text()) | {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUILTIN_MODEL / name, path / name)
    (path / "config.json").write_text(json.dumps(config | changes))
    return path
