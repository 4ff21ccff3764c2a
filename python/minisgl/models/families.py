"""The architectures that can be served: each is one decoder class and the flags that make it this model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from minisgl.registry import Registry

if TYPE_CHECKING:
    from minisgl.models.llama import LlamaForCausalLM


@dataclass(frozen=True, slots=True)
class ExpertFlags:
    """How an architecture has experts.

    `module` is what a checkpoint calls the block of them within a layer, `parts` an expert's gate, up and down
    projections; `size_key` is the field of config.json for an expert's intermediate size. Without `has_options` all
    layers have experts, and the probabilities of the chosen ones are normalised.
    """

    module: str
    parts: tuple[str, str, str]
    size_key: str
    has_options: bool


@dataclass(frozen=True, slots=True)
class Flags:
    """Where an architecture differs from Llama. None for a bias means: as `attention_bias` in config.json says.

    `slides` says which layers may have a window (`models/windows.py: SLIDES`), None: no layer; with `has_window_switch`
    they have one if `use_sliding_window` says so. `activation_key` is the field for the MLP's activation. `defaults` is
    what transformers takes where config.json lacks a field.
    """

    qkv_bias: bool | None = None
    o_bias: bool | None = None
    qk_norm: bool = False
    has_mlp_bias_option: bool = False
    experts: ExpertFlags | None = None
    slides: str | None = None
    has_window_switch: bool = False
    activation_key: str = "hidden_act"
    defaults: Mapping[str, Any] = field(default_factory=dict)


MODELS: Final[Registry[type[LlamaForCausalLM]]] = Registry("model architecture")
MODELS.add("LlamaForCausalLM", "minisgl.models.llama:LlamaForCausalLM")
MODELS.add("MistralForCausalLM", "minisgl.models.llama:LlamaForCausalLM")
MODELS.add("Qwen2ForCausalLM", "minisgl.models.llama:LlamaForCausalLM")
MODELS.add("Qwen3ForCausalLM", "minisgl.models.llama:LlamaForCausalLM")
MODELS.add("Qwen3MoeForCausalLM", "minisgl.models.llama:LlamaForCausalLM")
MODELS.add("MixtralForCausalLM", "minisgl.models.llama:LlamaForCausalLM")
MODELS.add("Gemma3ForCausalLM", "minisgl.models.gemma3:Gemma3ForCausalLM")

FLAGS: Final[Mapping[str, Flags]] = MappingProxyType(
    {
        "LlamaForCausalLM": Flags(has_mlp_bias_option=True),
        "MistralForCausalLM": Flags(qkv_bias=False, o_bias=False, slides="all"),
        "Qwen2ForCausalLM": Flags(qkv_bias=True, o_bias=False, slides="last", has_window_switch=True),
        "Qwen3ForCausalLM": Flags(qk_norm=True, slides="last", has_window_switch=True),
        "Qwen3MoeForCausalLM": Flags(
            qk_norm=True,
            slides="all",
            has_window_switch=True,
            experts=ExpertFlags(
                "mlp", ("gate_proj", "up_proj", "down_proj"), "moe_intermediate_size", has_options=True
            ),
        ),
        "MixtralForCausalLM": Flags(
            qkv_bias=False,
            o_bias=False,
            experts=ExpertFlags("block_sparse_moe", ("w1", "w3", "w2"), "intermediate_size", has_options=False),
            slides="all",
            defaults={"rms_norm_eps": 1e-5, "rope_theta": 1e6},
        ),
        "Gemma3ForCausalLM": Flags(
            qk_norm=True,
            slides="pattern",
            activation_key="hidden_activation",
            defaults={
                "head_dim": 256,
                "hidden_activation": "gelu_pytorch_tanh",
                "query_pre_attn_scalar": 256,
                "rope_local_base_freq": 10000.0,
                "rope_theta": 1e6,
                "sliding_window": 4096,
                "sliding_window_pattern": 6,
                "tie_word_embeddings": True,
            },
        ),
    }
)
