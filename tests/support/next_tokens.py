"""A tiny model whose config.json promises a layer for further tokens; with random weights it has one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from minisgl.checkpoint.hf import BUILTIN_MODEL


def write_glm(path: Path) -> Path:
    """Write the configuration of a GLM-4.5 with the built-in model's tokenizer into the folder `path`."""
    config = json.loads((BUILTIN_MODEL / "config.json").read_text()) | {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
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
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUILTIN_MODEL / name, path / name)
    (path / "config.json").write_text(json.dumps(config))
    return path
