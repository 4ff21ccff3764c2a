"""Tiny random checkpoints in Hugging Face's formats, and transformers' logits for them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

COMMON: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,  # large enough for logits that differ
}
GEMMA: dict[str, Any] = {
    **COMMON,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "sliding_window_pattern": 3,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
YARN_OPTIONS = {"truncate": False, "beta_fast": 8.0, "beta_slow": 0.5, "mscale": 1.3, "mscale_all_dim": 0.6}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + i / 5 for i in range(8)],
    "long_factor": [4.0 + i for i in range(8)],
}
SCALED_ROPES = {
    "linear": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0},
    "llama3": LLAMA3_ROPE,
    "yarn": YARN_ROPE,
    "yarn-options": {**YARN_ROPE, **YARN_OPTIONS},
    "yarn-attention-factor": {**YARN_ROPE, "attention_factor": 0.7},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.7},
}


def configurations() -> dict[str, Any]:
    """One per architecture and feature."""
    gqa = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return {
        "llama-gqa-llama3-untied": LlamaConfig(**COMMON, **gqa, rope_parameters=LLAMA3_ROPE, tie_word_embeddings=False),
        "llama-linear-biases": LlamaConfig(
            **COMMON,
            **gqa,
            rope_parameters=SCALED_ROPES["linear"],
            attention_bias=True,
            mlp_bias=True,
            head_dim=32,
        ),
        "mistral": MistralConfig(**COMMON, **gqa, sliding_window=None),
        "mistral-window": MistralConfig(**COMMON, **gqa, head_dim=24, sliding_window=23),
        "qwen2": Qwen2Config(**COMMON, num_attention_heads=8, num_key_value_heads=1, tie_word_embeddings=False),
        "qwen2-yarn": Qwen2Config(**COMMON, **gqa, rope_parameters=YARN_ROPE),
        "qwen2-window-in-the-last-layer": Qwen2Config(
            **COMMON, **gqa, use_sliding_window=True, sliding_window=16, max_window_layers=2
        ),
        "qwen3-tied-wide-heads": Qwen3Config(**COMMON, **gqa, head_dim=32, tie_word_embeddings=True),
        "qwen3-moe-one-dense-layer": Qwen3MoeConfig(
            **COMMON,
            num_attention_heads=4,
            num_key_value_heads=1,
            head_dim=24,
            num_experts=5,
            num_experts_per_tok=2,
            moe_intermediate_size=40,
            norm_topk_prob=True,
            mlp_only_layers=[1],
            rope_parameters={**YARN_ROPE, **YARN_OPTIONS},
        ),
        "qwen3-moe-every-second-layer": Qwen3MoeConfig(
            **COMMON,
            **gqa,
            head_dim=16,
            num_experts=6,
            num_experts_per_tok=3,
            moe_intermediate_size=24,
            decoder_sparse_step=2,
            norm_topk_prob=False,
            attention_bias=True,
            tie_word_embeddings=True,
        ),
        "mixtral": MixtralConfig(
            **COMMON, num_attention_heads=4, num_key_value_heads=1, num_local_experts=5, num_experts_per_tok=2
        ),
        "mixtral-window": MixtralConfig(**COMMON, **gqa, sliding_window=40, num_local_experts=3),
        "phi3": Phi3Config(**COMMON, **gqa, pad_token_id=0, tie_word_embeddings=True),
        "phi3-window-longrope": Phi3Config(
            **(COMMON | {"max_position_embeddings": 1024, "num_hidden_layers": 2}),
            num_attention_heads=4,
            num_key_value_heads=1,
            pad_token_id=0,
            sliding_window=29,
            original_max_position_embeddings=256,
            rope_parameters=LONG_ROPE,
        ),
        "gemma3": Gemma3TextConfig(**GEMMA, num_key_value_heads=1, head_dim=32, sliding_window=17),
        "gemma3-options": Gemma3TextConfig(
            **GEMMA,
            num_key_value_heads=2,
            head_dim=16,
            sliding_window=50,
            layer_types=["full_attention", "sliding_attention", "full_attention", "sliding_attention"],
            query_pre_attn_scalar=48,
            attention_bias=True,
            tie_word_embeddings=False,
            rope_parameters={
                "full_attention": {"rope_type": "linear", "rope_theta": 50000.0, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 3000.0},
            },
        ),
    }


def architecture(config: Any) -> str:
    """What transformers writes into `architectures`."""
    return str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type])


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
