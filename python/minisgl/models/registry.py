"""The architectures that can be served: each is one decoder class and the flags that make it this model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from minisgl.utils.registry import Registry

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

    `rms_norm_eps` and `rope_theta` are what transformers takes where config.json has none.
    """

    qkv_bias: bool | None = None
    o_bias: bool | None = None
    qk_norm: bool = False
    has_mlp_bias_option: bool = False
    experts: ExpertFlags | None = None
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0


MODELS: Final[Registry[type[LlamaForCausalLM]]] = Registry("model architecture")
MODELS.add("LlamaForCausalLM", "minisgl.models.llama:LlamaForCausalLM")
MODELS.add("MistralForCausalLM", "minisgl.models.llama:LlamaForCausalLM")
MODELS.add("Qwen2ForCausalLM", "minisgl.models.llama:LlamaForCausalLM")
MODELS.add("Qwen3ForCausalLM", "minisgl.models.llama:LlamaForCausalLM")
MODELS.add("Qwen3MoeForCausalLM", "minisgl.models.llama:LlamaForCausalLM")
MODELS.add("MixtralForCausalLM", "minisgl.models.llama:LlamaForCausalLM")

FLAGS: Final[Mapping[str, Flags]] = MappingProxyType(
    {
        "LlamaForCausalLM": Flags(has_mlp_bias_option=True),
        "MistralForCausalLM": Flags(qkv_bias=False, o_bias=False),
        "Qwen2ForCausalLM": Flags(qkv_bias=True, o_bias=False),
        "Qwen3ForCausalLM": Flags(qk_norm=True),
        "Qwen3MoeForCausalLM": Flags(
            qk_norm=True,
            experts=ExpertFlags(
                "mlp", ("gate_proj", "up_proj", "down_proj"), "moe_intermediate_size", has_options=True
            ),
        ),
        "MixtralForCausalLM": Flags(
            qkv_bias=False,
            o_bias=False,
            experts=ExpertFlags("block_sparse_moe", ("w1", "w3", "w2"), "intermediate_size", has_options=False),
            rms_norm_eps=1e-5,
            rope_theta=1e6,
        ),
    }
)
