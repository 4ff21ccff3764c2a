"""What config.json says about a model, checked: whatever would change the results is either honoured or refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from minisgl.layers.rotary import ROPE_TYPES, RopeConfig
from minisgl.models.registry import FLAGS, MODELS
from minisgl.utils.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A Llama-shaped decoder. Sizes count elements; `dtype` is the checkpoint's ("bfloat16", ...)."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    dtype: str

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> ModelConfig:
        """From the contents of config.json, as transformers 4 or 5 writes it; raises `ConfigError` otherwise."""
        architecture = _architecture(config)
        flags = FLAGS[architecture]
        _refuse_unsupported(config)
        hidden_size = _size(config, "hidden_size")
        num_heads = _size(config, "num_attention_heads")
        num_kv_heads = _size(config, "num_key_value_heads", default=num_heads)
        if num_heads % num_kv_heads:
            raise ConfigError(f"{num_heads} attention heads cannot share {num_kv_heads} KV heads evenly")
        if config.get("head_dim") is None and hidden_size % num_heads:
            raise ConfigError(
                f"head_dim is absent and hidden_size {hidden_size} is not a multiple of {num_heads} heads"
            )
        head_dim = _size(config, "head_dim", default=hidden_size // num_heads)
        if head_dim % 2:
            raise ConfigError(f"head_dim {head_dim} is odd, so rotary embeddings cannot halve it")
        max_positions = _size(config, "max_position_embeddings")
        bias = bool(config.get("attention_bias", False))
        return cls(
            architecture=architecture,
            vocab_size=_size(config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_size(config, "intermediate_size"),
            num_layers=_size(config, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=_number(config, "rms_norm_eps", 1e-6),
            max_position_embeddings=max_positions,
            rope=_rope(config, max_positions),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=bias if flags.qkv_bias is None else flags.qkv_bias,
            o_bias=bias if flags.o_bias is None else flags.o_bias,
            mlp_bias=flags.has_mlp_bias_option and bool(config.get("mlp_bias", False)),
            qk_norm=flags.qk_norm,
            dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch."),
        )


def _architecture(config: dict[str, Any]) -> str:
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise ConfigError(f"config.json has architectures={names!r}; it must name one of {', '.join(MODELS.names)}")
    if names[0] not in FLAGS:
        raise ConfigError(f"model architecture {names[0]} is not supported; supported: {', '.join(MODELS.names)}")
    return names[0]


def _refuse_unsupported(config: dict[str, Any]) -> None:
    if config.get("quantization_config") is not None:
        raise ConfigError("quantized checkpoints are not supported yet; use the model's float16 or bfloat16 version")
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ConfigError(f"hidden_act {activation!r} is not supported; only silu is")
    if _slides(config):
        raise ConfigError(
            f"sliding-window attention (sliding_window={config.get('sliding_window')}) is not supported; "
            "use a model with full attention"
        )
    if config.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError(f"partial_rotary_factor {config['partial_rotary_factor']} is not supported; only 1 is")


def _slides(config: dict[str, Any]) -> bool:
    """Whether some layer sees less than the whole context. Qwen states a window that `use_sliding_window` turns off."""
    layer_types = config.get("layer_types")
    if layer_types is not None and any(kind not in ("full_attention", "sliding_attention") for kind in layer_types):
        raise ConfigError(f"layer_types {sorted(set(layer_types))} are not supported; only full_attention is")
    window = config.get("sliding_window")
    if window is None or config.get("use_sliding_window") is False:
        return False
    if isinstance(window, int) and window >= config.get("max_position_embeddings", 0):
        return False
    if layer_types is not None:
        return "sliding_attention" in layer_types
    # In Qwen's files the first max_window_layers layers see everything, and the switch is off unless given.
    if str(config.get("model_type")).startswith("qwen"):
        full: int = config.get("max_window_layers", 0)
        return bool(config.get("use_sliding_window", False)) and full < _size(config, "num_hidden_layers")
    return True


def _rope(config: dict[str, Any], max_positions: int) -> RopeConfig:
    """From `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (4)."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(scaling, dict) or any(isinstance(value, dict) for value in scaling.values()):
        raise ConfigError("rope parameters that differ between layers are not supported")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise ConfigError(f"rope type {kind!r} is not supported yet; supported: {', '.join(ROPE_TYPES)}")
    if scaling.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError(f"partial_rotary_factor {scaling['partial_rotary_factor']} is not supported; only 1 is")
    theta = _number(scaling if "rope_theta" in scaling else config, "rope_theta", 10000.0)
    if kind == "default":
        return RopeConfig(theta=theta)
    factor = _number(scaling, "factor")
    if kind == "linear":
        return RopeConfig(theta=theta, type=kind, factor=factor)
    low, high = _number(scaling, "low_freq_factor"), _number(scaling, "high_freq_factor")
    if high <= low:
        raise ConfigError(f"rope's high_freq_factor {high} must be above its low_freq_factor {low}")
    return RopeConfig(
        theta=theta,
        type=kind,
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=_size(scaling, "original_max_position_embeddings", default=max_positions),
    )


def _size(config: dict[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"config.json has {key}={value!r}; a positive integer is needed")
    return value


def _number(config: dict[str, Any], key: str, default: float | None = None) -> float:
    value = config.get(key, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise ConfigError(f"config.json has {key}={value!r}; a positive number is needed")
    return float(value)
