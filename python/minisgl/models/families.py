"""The supported architectures: for each, a decoder class and the differences from Llama."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

LLAMA: Final = "minisgl.models.llama:LlamaForCausalLM"
WINDOW: Final = {"sliding_window": 4096}
SIZES: Final = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)


@dataclass(frozen=True, slots=True)
class ExpertFlags:
    """The names of experts in an architecture's checkpoints and configuration.

    `module` is the checkpoint's name of the block of experts in a layer. `parts` are the names of an expert's gate, up
    and down projections. `size_key` is the field of config.json for an expert's intermediate size. Without
    `has_options`, all layers have experts, and the probabilities of the selected experts are normalised.
    """

    module: str
    parts: tuple[str, str, str]
    size_key: str
    has_options: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The differences of an architecture from Llama.

    on_cpu_step          whether the C++ step supports this architecture; if not, a CPU runs it op by op
    decoder              the decoder class
    qkv_bias, o_bias     None: as `attention_bias` in config.json
    qk_norm              RMSNorm over each head of q and k
    has_mlp_bias_option  config.json may have `mlp_bias`
    fused_projections    the checkpoint has `qkv_proj` and `gate_up_proj`, with q, k, v and gate, up stacked
    slides               which layers may have a window (`models/positions.py: SLIDES`); None: no layer
    has_window_switch    these layers have a window only if `use_sliding_window` is true
    activation_key       the field of config.json for the MLP's activation
    text_types           the `model_type`s of multimodal models' text parts that are such a decoder
    text_defaults        transformers' defaults for fields that such a part may lack, besides `defaults`
    defaults             transformers' defaults for fields that config.json may lack
    """

    on_cpu_step: bool
    decoder: str = LLAMA
    qkv_bias: bool | None = None
    o_bias: bool | None = None
    qk_norm: bool = False
    has_mlp_bias_option: bool = False
    fused_projections: bool = False
    experts: ExpertFlags | None = None
    slides: str | None = None
    has_window_switch: bool = False
    activation_key: str = "hidden_act"
    text_types: tuple[str, ...] = ()
    text_defaults: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)


FAMILIES: Final[Mapping[str, Family]] = MappingProxyType(
    {
        "LlamaForCausalLM": Family(
            on_cpu_step=True,
            has_mlp_bias_option=True,
            text_types=("llama",),
            text_defaults=dict(zip(SIZES, (32000, 4096, 11008, 32, 32, None, 2048), strict=True)),
        ),
        "MistralForCausalLM": Family(
            on_cpu_step=True,
            qkv_bias=False,
            o_bias=False,
            slides="all",
            text_types=("mistral",),
            text_defaults=dict(zip(SIZES, (32000, 4096, 14336, 32, 32, 8, 131072), strict=True)),
            defaults=WINDOW,
        ),
        "Qwen2ForCausalLM": Family(
            on_cpu_step=True,
            qkv_bias=True,
            o_bias=False,
            slides="last",
            has_window_switch=True,
            text_types=("qwen2", "qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"),
            defaults=WINDOW,
        ),
        "Qwen3ForCausalLM": Family(
            on_cpu_step=True,
            qk_norm=True,
            slides="last",
            has_window_switch=True,
            text_types=("qwen3", "qwen3_vl_text"),
            defaults=WINDOW | {"head_dim": 128},
        ),
        "Phi3ForCausalLM": Family(
            on_cpu_step=True,
            qkv_bias=False,
            o_bias=False,
            fused_projections=True,
            slides="all",
            text_types=("phi3",),
            defaults={"rms_norm_eps": 1e-5},
        ),
        "Qwen3MoeForCausalLM": Family(
            on_cpu_step=False,
            qk_norm=True,
            slides="all",
            has_window_switch=True,
            defaults=WINDOW,
            experts=ExpertFlags(
                "mlp", ("gate_proj", "up_proj", "down_proj"), "moe_intermediate_size", has_options=True
            ),
        ),
        "MixtralForCausalLM": Family(
            on_cpu_step=False,
            qkv_bias=False,
            o_bias=False,
            experts=ExpertFlags("block_sparse_moe", ("w1", "w3", "w2"), "intermediate_size", has_options=False),
            slides="all",
            defaults={"rms_norm_eps": 1e-5, "rope_theta": 1e6},
        ),
        "Gemma3ForCausalLM": Family(
            on_cpu_step=False,
            decoder="minisgl.models.gemma3:Gemma3ForCausalLM",
            qk_norm=True,
            slides="pattern",
            activation_key="hidden_activation",
            text_types=("gemma3_text",),
            text_defaults=dict(zip(SIZES, (262208, 2304, 9216, 26, 8, 4, 131072), strict=True)),
            defaults={
                "head_dim": 256,
                "hidden_activation": "gelu_pytorch_tanh",
                "query_pre_attn_scalar": 256,
                "rope_local_base_freq": 10000.0,
                "rope_theta": 1e6,
                **WINDOW,
                "sliding_window_pattern": 6,
                "tie_word_embeddings": True,
            },
        ),
    }
)
