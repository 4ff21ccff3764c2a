"""What config.json says about a model, checked: whatever would change the results is either honoured or refused."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from minisgl.layers.rotary import ROPE_TYPES, RopeConfig
from minisgl.models.registry import FLAGS, MODELS, ExpertFlags
from minisgl.utils.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """`top_k` of `count` experts of `intermediate_size` for each token, in all layers but `dense_layers`.

    `normalise`: the chosen experts' probabilities are divided by their sum.
    """

    count: int
    top_k: int
    intermediate_size: int
    normalise: bool
    dense_layers: frozenset[int]
    flags: ExpertFlags


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
    experts: ExpertsConfig | None
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
        num_layers = _size(config, "num_hidden_layers")
        bias = bool(config.get("attention_bias", False))
        return cls(
            architecture=architecture,
            vocab_size=_size(config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_size(config, "intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=_number(config, "rms_norm_eps", flags.rms_norm_eps),
            max_position_embeddings=max_positions,
            rope=_rope(config, max_positions, flags.rope_theta),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=bias if flags.qkv_bias is None else flags.qkv_bias,
            o_bias=bias if flags.o_bias is None else flags.o_bias,
            mlp_bias=flags.has_mlp_bias_option and bool(config.get("mlp_bias", False)),
            qk_norm=flags.qk_norm,
            experts=_experts(config, num_layers, flags.experts) if flags.experts is not None else None,
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
    if config.get("model_type") == "qwen3_moe":  # all layers or none
        return bool(config.get("use_sliding_window", False))
    if layer_types is not None:
        return "sliding_attention" in layer_types
    # In Qwen's files the first max_window_layers layers see everything, and the switch is off unless given.
    if str(config.get("model_type")).startswith("qwen"):
        full: int = config.get("max_window_layers", 0)
        return bool(config.get("use_sliding_window", False)) and full < _size(config, "num_hidden_layers")
    return True


def _experts(config: dict[str, Any], num_layers: int, flags: ExpertFlags) -> ExpertsConfig:
    """transformers 4 writes Qwen3's number of experts as num_experts, transformers 5 as num_local_experts."""
    old, new = config.get("num_experts"), config.get("num_local_experts")
    if old is not None and new is not None and old != new:
        raise ConfigError(f"config.json has num_experts={old!r} but num_local_experts={new!r}")
    count = _size(config, "num_local_experts" if old is None else "num_experts")
    top_k = _size(config, "num_experts_per_tok")
    if top_k > count:
        raise ConfigError(f"num_experts_per_tok {top_k} is more than the {count} experts there are")
    normalise, dense = True, frozenset[int]()
    if flags.has_options:
        normalise = bool(config.get("norm_topk_prob", False))
        only, step = config.get("mlp_only_layers") or [], _size(config, "decoder_sparse_step", default=1)
        if not isinstance(only, list) or not all(isinstance(i, int) for i in only):
            raise ConfigError(f"config.json has mlp_only_layers={only!r}; a list of layers is needed")
        dense = frozenset(i for i in range(num_layers) if i in only or (i + 1) % step)
    return ExpertsConfig(
        count=count,
        top_k=top_k,
        intermediate_size=_size(config, flags.size_key),
        normalise=normalise,
        dense_layers=dense,
        flags=flags,
    )


def _rope(config: dict[str, Any], max_positions: int, default_theta: float) -> RopeConfig:
    """From `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (4)."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(scaling, dict) or any(isinstance(value, dict) for value in scaling.values()):
        raise ConfigError("rope parameters that differ between layers are not supported")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise ConfigError(f"rope type {kind!r} is not supported yet; supported: {', '.join(ROPE_TYPES)}")
    if scaling.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError(f"partial_rotary_factor {scaling['partial_rotary_factor']} is not supported; only 1 is")
    theta = _number(scaling if "rope_theta" in scaling else config, "rope_theta", default_theta)
    if kind == "default":
        return RopeConfig(theta=theta)
    # Where both are given, transformers prefers the one outside.
    outside = config.get("original_max_position_embeddings") is not None
    original = _size(config if outside else scaling, "original_max_position_embeddings", default=max_positions)
    if kind == "yarn":
        return _yarn(scaling, theta, original, max_positions)
    factor = _number(scaling, "factor")
    if kind in ("linear", "dynamic"):
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
        original_max_position_embeddings=original,
    )


def _yarn(scaling: dict[str, Any], theta: float, original: int, max_positions: int) -> RopeConfig:
    """The attention factor is 0.1 ln(factor) + 1 (arXiv:2309.00071, equation 22), or the ratio of two such values."""
    # To transformers null is the same as absent, and so is 0 where a default takes its place.
    given = {key: value for key, value in scaling.items() if value or (value is not None and key.endswith("factor"))}
    if theta <= 1:
        raise ConfigError(f"rope type 'yarn' needs a rope_theta above 1, not {theta}")
    factor = _number(given, "factor", max_positions / original)
    fast, slow = _number(given, "beta_fast", 32.0), _number(given, "beta_slow", 1.0)
    if fast < slow:
        raise ConfigError(f"rope's beta_fast {fast} must not be below its beta_slow {slow}")

    def attention_factor(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    usual = attention_factor(1.0)
    if "mscale" in given and "mscale_all_dim" in given:
        usual = attention_factor(_number(given, "mscale")) / attention_factor(_number(given, "mscale_all_dim"))
    return RopeConfig(
        theta=theta,
        type="yarn",
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=fast,
        beta_slow=slow,
        truncate=bool(scaling.get("truncate", True)),
        attention_factor=_number(given, "attention_factor", usual),
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
