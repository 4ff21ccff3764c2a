"""A model small enough to compute every token of every test: two layers, made from random weights (`dummy_weight`)."""

from __future__ import annotations

import json
from pathlib import Path

VOCAB = 97
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "eos_token_id": 0,
}


def write_tiny_model(path: Path, max_tokens: int) -> Path:
    """Write its config.json into the folder `path`; sequences have at most `max_tokens` tokens."""
    (path / "config.json").write_text(json.dumps(CONFIG | {"max_position_embeddings": max_tokens}))
    return path
