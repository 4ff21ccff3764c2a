"""Tiny random checkpoints in Hugging Face's formats, and transformers' logits for them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

COMMON: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,  # large enough for logits that differ
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def configurations() -> dict[str, Any]:
    """One per architecture and feature."""
    gqa = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return {
        "llama-gqa-llama3-untied": LlamaConfig(**COMMON, **gqa, rope_parameters=LLAMA3_ROPE, tie_word_embeddings=False),
        "llama-linear-biases": LlamaConfig(
            **COMMON,
            **gqa,
            rope_parameters={"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0},
            attention_bias=True,
            mlp_bias=True,
            head_dim=32,
        ),
        "mistral": MistralConfig(**COMMON, **gqa, sliding_window=None),
        "qwen2": Qwen2Config(**COMMON, num_attention_heads=8, num_key_value_heads=1, tie_word_embeddings=False),
        "qwen3-tied-wide-heads": Qwen3Config(**COMMON, **gqa, head_dim=32, tie_word_embeddings=True),
    }


@dataclass(frozen=True)
class Checkpoint:
    folder: Path
    model: Any

    @torch.inference_mode()
    def logits(self, ids: list[int]) -> torch.Tensor:
        """[len(ids), V] float32, in one prefill."""
        logits: torch.Tensor = self.model(torch.tensor([ids])).logits[0].float()
        return logits


def save(folder: Path, config: Any, dtype: torch.dtype = torch.float32, **options: Any) -> Checkpoint:
    """A random model of `config`, saved to `folder`; biases and norms are random too."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model = model.to(dtype).eval()
    model.save_pretrained(folder, **options)
    return Checkpoint(folder, model)
