"""Tiny random checkpoints in Hugging Face's formats, and transformers' logits for them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AfmoeConfig,
    ArceeConfig,
    AutoModelForCausalLM,
    Cohere2Config,
    CohereConfig,
    CwmConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    Dots1Config,
    Ernie4_5_MoeConfig,
    Ernie4_5Config,
    Exaone4Config,
    ExaoneMoeConfig,
    FlexOlmoConfig,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    Gemma4UnifiedTextConfig,
    GemmaConfig,
    Glm4Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GlmConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeConfig,
    HeliumConfig,
    HyperCLOVAXConfig,
    Jais2Config,
    LagunaConfig,
    LlamaConfig,
    MellumConfig,
    MiniMaxM2Config,
    Ministral3Config,
    MinistralConfig,
    Mistral4Config,
    MistralConfig,
    MixtralConfig,
    NemotronConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoeConfig,
    Phi3Config,
    PhiConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SeedOssConfig,
    SmolLM3Config,
    SolarOpenConfig,
    StableLmConfig,
    Starcoder2Config,
    VaultGemmaConfig,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["mistral4"] = "Mistral4ForCausalLM"  # transformers lists it elsewhere

COMMON: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,  # large enough for logits that differ
}
HYBRID: dict[str, Any] = {
    **COMMON,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "rope_parameters": {"rope_type": "default", "rope_theta": 3e4, "partial_rotary_factor": 0.25},
}
HYBRID_TYPES = ["linear_attention", "full_attention", "linear_attention"]
GEMMA: dict[str, Any] = {
    **COMMON,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "sliding_window_pattern": 3,
}
GEMMA_4: dict[str, Any] = {
    **COMMON,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 21,
}
GROUPED_EXPERTS: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
}
LATENT: dict[str, Any] = {
    **COMMON,
    **GROUPED_EXPERTS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 40,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
LAYER_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
GEMMA_2: dict[str, Any] = {
    **COMMON,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "sliding_window": 17,
    "query_pre_attn_scalar": 20,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
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
        "gemma": GemmaConfig(**COMMON, num_attention_heads=4, num_key_value_heads=1, head_dim=32),
        "gemma2": Gemma2Config(
            **GEMMA_2 | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0},
        ),
        "gemma2-without-caps": Gemma2Config(
            **GEMMA_2 | {"attn_logit_softcapping": None, "final_logit_softcapping": None},
        ),
        "vaultgemma": VaultGemmaConfig(**GEMMA_2 | {"attn_logit_softcapping": 1.5}),
        "ministral3": Ministral3Config(
            **COMMON, **gqa, head_dim=16, rope_parameters={**YARN_ROPE, "llama_4_scaling_beta": 0.7, "factor": 8.0}
        ),
        "ministral": MinistralConfig(**COMMON, **gqa, head_dim=16, sliding_window=21, layer_types=LAYER_TYPES),
        "smollm3": SmolLM3Config(**COMMON, **gqa, pad_token_id=0, no_rope_layer_interval=2),
        "smollm3-listed": SmolLM3Config(
            **COMMON, **gqa, pad_token_id=0, no_rope_layers=[0, 1, 1], attention_bias=True, mlp_bias=True
        ),
        "seed-oss": SeedOssConfig(**COMMON, **gqa, head_dim=32, attention_out_bias=True),
        "cwm": CwmConfig(**COMMON, **gqa, head_dim=16, sliding_window=19, rope_parameters=LLAMA3_ROPE),
        "arcee": ArceeConfig(**COMMON, **gqa, head_dim=16, rope_parameters=YARN_ROPE),
        "granite": GraniteConfig(
            **COMMON,
            **gqa,
            embedding_multiplier=12.0,
            residual_multiplier=0.22,
            attention_multiplier=0.2,
            logits_scaling=8.0,
            tie_word_embeddings=True,
        ),
        "hyperclovax": HyperCLOVAXConfig(
            **COMMON,
            **gqa,
            embedding_multiplier=10.0,
            residual_multiplier=0.3,
            attention_multiplier=0.2,
            logits_scaling=0.125,
        ),
        "glm": GlmConfig(**COMMON, **gqa, head_dim=48, pad_token_id=0),
        "glm4": Glm4Config(**COMMON, **gqa, head_dim=32, pad_token_id=0, attention_bias=False),
        "helium": HeliumConfig(**COMMON, **gqa, head_dim=16, pad_token_id=0),
        "ernie4.5": Ernie4_5Config(**COMMON, **gqa, head_dim=32),
        "ernie4.5-biases": Ernie4_5Config(**COMMON, **gqa, head_dim=16, use_bias=True, tie_word_embeddings=False),
        "cohere": CohereConfig(**COMMON, **gqa, pad_token_id=0),
        "cohere2": Cohere2Config(**COMMON, **gqa, pad_token_id=0, sliding_window=18, layer_types=LAYER_TYPES),
        "olmo2": Olmo2Config(**COMMON, **gqa, pad_token_id=0),
        "olmo3": Olmo3Config(
            **COMMON,
            **gqa,
            pad_token_id=0,
            sliding_window=18,
            layer_types=LAYER_TYPES,
            rope_parameters={
                "full_attention": YARN_ROPE,
                "sliding_attention": {"rope_type": "default", "rope_theta": 3000.0},
            },
        ),
        "exaone4": Exaone4Config(**COMMON, **gqa, sliding_window=18, layer_types=LAYER_TYPES),
        "exaone4-full": Exaone4Config(
            **COMMON, **gqa, sliding_window=None, layer_types=["full_attention"] * 3, rope_parameters=LLAMA3_ROPE
        ),
        "stablelm": StableLmConfig(**COMMON, **gqa, use_qkv_bias=True),
        "starcoder2": Starcoder2Config(**COMMON, **gqa, sliding_window=31),
        "nemotron": NemotronConfig(**COMMON, **gqa, head_dim=24, mlp_bias=True, pad_token_id=0),
        "jais2": Jais2Config(**COMMON, **gqa, head_dim=16),
        "phi": PhiConfig(**COMMON, **gqa, tie_word_embeddings=False),
        "qwen2-moe": Qwen2MoeConfig(
            **COMMON,
            **gqa,
            num_experts=6,
            num_experts_per_tok=3,
            moe_intermediate_size=24,
            shared_expert_intermediate_size=40,
            decoder_sparse_step=2,
        ),
        "gpt-oss": GptOssConfig(
            **COMMON | {"num_hidden_layers": 4, "intermediate_size": 64},
            **gqa,
            head_dim=32,
            num_local_experts=6,
            num_experts_per_tok=3,
            sliding_window=17,
            rope_parameters=YARN_ROPE | {"truncate": False},
        ),
        "gemma4": Gemma4TextConfig(
            **GEMMA_4,
            layer_types=["sliding_attention", "full_attention"] * 2,
            num_key_value_heads=2,
            attention_k_eq_v=True,
            num_global_key_value_heads=1,
            hidden_size_per_layer_input=0,
        ),
        "gemma4-unified": Gemma4UnifiedTextConfig(
            **GEMMA_4,
            layer_types=["sliding_attention", "full_attention"] * 2,
            num_key_value_heads=2,
            attention_k_eq_v=True,
            num_global_key_value_heads=1,
        ),
        "gemma4-moe": Gemma4TextConfig(
            **GEMMA_4,
            layer_types=["sliding_attention", "full_attention"] * 2,
            num_key_value_heads=2,
            enable_moe_block=True,
            num_experts=6,
            top_k_experts=2,
            moe_intermediate_size=24,
            hidden_size_per_layer_input=0,
            final_logit_softcapping=5.0,
        ),
        "gemma4-shared": Gemma4TextConfig(
            **GEMMA_4 | {"num_hidden_layers": 6},
            layer_types=["sliding_attention", "full_attention"] * 3,
            num_key_value_heads=1,
            num_kv_shared_layers=3,
            use_double_wide_mlp=True,
            hidden_size_per_layer_input=16,
            vocab_size_per_layer_input=170,
        ),
        "laguna": LagunaConfig(
            **COMMON | {"num_hidden_layers": 4},
            **gqa,
            head_dim=16,
            sliding_window=19,
            layer_types=["full_attention", *LAYER_TYPES],
            num_attention_heads_per_layer=[4, 8, 4, 8],
            num_experts=7,
            num_experts_per_tok=3,
            moe_intermediate_size=24,
            shared_expert_intermediate_size=40,
            moe_routed_scaling_factor=1.4,
            moe_router_logit_softcapping=0.7,
        ),
        "laguna-elements": LagunaConfig(
            **COMMON,
            **gqa,
            head_dim=16,
            gating="per-element",
            num_experts=5,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            shared_expert_intermediate_size=24,
        ),
        "afmoe": AfmoeConfig(
            **COMMON | {"num_hidden_layers": 4},
            **gqa,
            head_dim=16,
            sliding_window=18,
            global_attn_every_n_layers=2,
            num_dense_layers=2,
            num_experts=6,
            num_experts_per_tok=3,
            moe_intermediate_size=24,
            num_shared_experts=2,
            route_scale=1.6,
            mup_enabled=True,
        ),
        "mellum": MellumConfig(
            **COMMON,
            **gqa,
            head_dim=48,
            num_experts=5,
            num_experts_per_tok=2,
            moe_intermediate_size=40,
            sliding_window=18,
            layer_types=LAYER_TYPES,
            mlp_layer_types=["sparse", "dense", "sparse"],
            num_mtp_layers=1,
        ),
        "qwen3-next": Qwen3NextConfig(
            **HYBRID,
            num_experts=5,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            shared_expert_intermediate_size=40,
            mlp_only_layers=[1],
        ),
        "qwen3.5": Qwen3_5TextConfig(**HYBRID, tie_word_embeddings=True, layer_types=[*HYBRID_TYPES, "full_attention"]),
        "qwen3.5-moe": Qwen3_5MoeTextConfig(
            **{key: value for key, value in HYBRID.items() if key != "intermediate_size"},
            num_experts=6,
            num_experts_per_tok=3,
            moe_intermediate_size=24,
            shared_expert_intermediate_size=24,
        ),
        "granite-moe": GraniteMoeConfig(
            **COMMON,
            **gqa,
            num_local_experts=6,
            num_experts_per_tok=3,
            residual_multiplier=0.4,
            embedding_multiplier=3.0,
            attention_multiplier=0.2,
            logits_scaling=2.0,
        ),
        "olmoe": OlmoeConfig(**COMMON, **gqa, num_experts=6, num_experts_per_tok=2, pad_token_id=0),
        "flex-olmo": FlexOlmoConfig(**COMMON, **gqa, num_experts=5, num_experts_per_tok=2, pad_token_id=0),
        "glm4-moe": Glm4MoeConfig(**COMMON, **gqa, **GROUPED_EXPERTS, use_qk_norm=True, head_dim=32),
        "glm4-moe-not-normalised": Glm4MoeConfig(
            **COMMON | {"num_hidden_layers": 4},
            **gqa,
            **GROUPED_EXPERTS | {"norm_topk_prob": False, "first_k_dense_replace": 2},
            attention_bias=True,
        ),
        "solar-open": SolarOpenConfig(**COMMON, **gqa, **GROUPED_EXPERTS, head_dim=16, pad_token_id=0),
        "dots1": Dots1Config(
            **COMMON, **gqa, **GROUPED_EXPERTS, sliding_window=20, max_window_layers=2, head_dim=16, pad_token_id=0
        ),
        "exaone-moe": ExaoneMoeConfig(
            **COMMON,
            **gqa,
            num_experts=8,
            num_experts_per_tok=3,
            moe_intermediate_size=24,
            n_group=4,
            topk_group=2,
            sliding_window=18,
            layer_types=LAYER_TYPES,
            mlp_layer_types=["dense", "sparse", "sparse"],
            pad_token_id=0,
        ),
        "minimax-m2": MiniMaxM2Config(
            **COMMON,
            **gqa,
            head_dim=32,
            num_local_experts=7,
            num_experts_per_tok=3,
            rope_parameters={"rope_type": "default", "rope_theta": 3e4, "partial_rotary_factor": 0.5},
        ),
        "deepseek-v2-lite": DeepseekV2Config(
            **LATENT | {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "v_head_dim": 40},
            rope_parameters={**YARN_ROPE, **YARN_OPTIONS, "mscale": 0.7},
        ),
        "deepseek-v2": DeepseekV2Config(**LATENT, topk_method="group_limited_greedy", attention_bias=True),
        "deepseek-v3": DeepseekV3Config(
            **LATENT, rope_parameters={**YARN_ROPE, "mscale": 1.0, "mscale_all_dim": 1.0}, attention_bias=True
        ),
        "deepseek-v3-halves": DeepseekV3Config(
            **LATENT | {"q_lora_rank": None, "kv_lora_rank": 24}, rope_interleave=False
        ),
        "glm4-moe-lite": Glm4MoeLiteConfig(
            **LATENT | {"kv_lora_rank": 48, "v_head_dim": 32}, mlp_layer_types=["dense", "sparse", "sparse"]
        ),
        "mistral4": Mistral4Config(
            **LATENT,
            pad_token_id=0,
            rope_parameters={**YARN_ROPE, "llama_4_scaling_beta": 0.3, "mscale": 1.0, "mscale_all_dim": 1.0},
        ),
        "ernie4.5-moe": Ernie4_5_MoeConfig(
            **COMMON,
            **gqa,
            moe_num_experts=6,
            moe_k=3,
            moe_intermediate_size=24,
            moe_num_shared_experts=2,
            moe_layer_end_index=1,
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
        for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
            if (
                name.endswith(("bias", "layer_scalar", "router.scale", "per_expert_scale", "router.gate.weight"))
                or "norm" in name
            ):
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model = model.to(dtype).eval()
    model.save_pretrained(folder, **options)
    return Checkpoint(folder, model)
