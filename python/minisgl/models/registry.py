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
class Flags:
    """Where an architecture differs from Llama. None for a bias means: as `attention_bias` in config.json says."""

    qkv_bias: bool | None = None
    o_bias: bool | None = None
    qk_norm: bool = False
    has_mlp_bias_option: bool = False


MODELS: Final[Registry[type[LlamaForCausalLM]]] = Registry("model architecture")
MODELS.add("LlamaForCausalLM", "minisgl.models.llama:LlamaForCausalLM")
MODELS.add("MistralForCausalLM", "minisgl.models.llama:LlamaForCausalLM")
MODELS.add("Qwen2ForCausalLM", "minisgl.models.llama:LlamaForCausalLM")
MODELS.add("Qwen3ForCausalLM", "minisgl.models.llama:LlamaForCausalLM")

FLAGS: Final[Mapping[str, Flags]] = MappingProxyType(
    {
        "LlamaForCausalLM": Flags(has_mlp_bias_option=True),
        "MistralForCausalLM": Flags(qkv_bias=False, o_bias=False),
        "Qwen2ForCausalLM": Flags(qkv_bias=True, o_bias=False),
        "Qwen3ForCausalLM": Flags(qk_norm=True),
    }
)
