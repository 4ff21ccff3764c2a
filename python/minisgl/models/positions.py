"""Reads rotary embeddings and sliding windows from config.json; `layers/rotary.py` has the formulas."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

from minisgl.core.errors import ConfigError
from minisgl.layers.rope import ROPE_TYPES, RopeConfig

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"


def _is_last(config: dict[str, Any], i: int) -> bool:
    first = config.get("max_window_layers", 28)
    if not isinstance(first, int):
        raise ConfigError(f"config.json has max_window_layers={first!r}; a number of layers is needed")
    return i >= first


# By `Family.slides`: whether layer i has a window.
SLIDES: Final[Mapping[str, Callable[[dict[str, Any], int], bool]]] = MappingProxyType(
    {
        "all": lambda config, i: True,
        "listed": lambda config, i: True,  # unless `layer_types` says otherwise
        "if listed": lambda config, i: False,  # nor does any, unless `layer_types` says so
        "last": _is_last,
        "even, not last": lambda config, i: i % 2 == 0 and not _is_last(config, i),
        "not last of 6 nor of all": lambda config, i: (i + 1) % 6 != 0 and i + 1 != size(config, "num_hidden_layers"),
        "not first of 4": lambda config, i: i % 4 != 0,
        "not every n-th": lambda config, i: (i + 1) % size(config, "global_attn_every_n_layers") != 0,
        "pattern": lambda config, i: (i + 1) % size(config, "sliding_window_pattern") != 0,  # all but every n-th layer
    }
)


def read_windows(
    config: dict[str, Any], num_layers: int, slides: str | None, has_switch: bool
) -> tuple[int | None, ...]:
    """Return the window of each layer, or None. Raises `ConfigError` for contradictory fields.

    `layer_types` overrides the family's rule, except in families whose layers are equal, where both must agree.
    """
    kinds = config.get("layer_types")
    is_list = isinstance(kinds, list) and all(kind in (FULL, SLIDING) for kind in kinds)
    if kinds is not None and not (is_list and len(kinds) == num_layers):
        raise ConfigError(
            f"config.json has layer_types={kinds!r:.60}; "
            f"for {num_layers} layers as many of {FULL} and {SLIDING} are needed"
        )
    is_on = config.get("sliding_window") is not None
    if has_switch:
        is_on = is_on and bool(config.get("use_sliding_window", False))
    if slides is None and is_on and size(config, "sliding_window") < size(config, "max_position_embeddings"):
        raise ConfigError(f"sliding_window={config['sliding_window']} is not supported for this architecture")
    if slides is None or not is_on:
        has_window = [False] * num_layers
    elif kinds is not None and slides != "all":
        has_window = [kind == SLIDING for kind in kinds]
    else:
        has_window = [SLIDES[slides](config, i) for i in range(num_layers)]
    if kinds is not None and [kind == SLIDING for kind in kinds] != has_window:
        raise ConfigError("layer_types in config.json contradicts the other fields about sliding windows")
    window = size(config, "sliding_window") if any(has_window) else None
    return tuple(window if is_local else None for is_local in has_window)


def read_linear_layers(config: dict[str, Any], num_layers: int) -> frozenset[int]:
    """Return the indices of layers with a recurrence, and call them full ones in `layer_types` from then on."""
    kinds = config.get("layer_types")
    if kinds is None:
        interval = size(config, "full_attention_interval")
        return frozenset(i for i in range(num_layers) if (i + 1) % interval)
    if not isinstance(kinds, list) or len(kinds) != num_layers or not {*map(str, kinds)} <= {FULL, LINEAR}:
        names = f"{num_layers} of {FULL} and {LINEAR} are needed"
        raise ConfigError(f"config.json has layer_types={kinds!r:.60}; {names}")
    config["layer_types"] = [FULL] * num_layers
    return frozenset(i for i, kind in enumerate(kinds) if kind == LINEAR)


def _every_step_but(config: dict[str, Any], i: int) -> bool:
    only = config.get("mlp_only_layers") or []
    if not isinstance(only, list) or not all(isinstance(layer, int) for layer in only):
        raise ConfigError(f"config.json has mlp_only_layers={only!r}; a list of layer indices is needed")
    return i in only or (i + 1) % size(config, "decoder_sparse_step", default=1) != 0


def _outside_of_interval(config: dict[str, Any], i: int) -> bool:
    last = config.get("moe_layer_end_index", -1)
    is_after = last != -1 and i > count(config, "moe_layer_end_index")
    return (i + 1) % size(config, "moe_layer_interval") != 0 or i < count(config, "moe_layer_start_index") or is_after


def count(config: dict[str, Any], key: str) -> int:
    """Return a field that counts layers, 0 if it is null or absent. Raises `ConfigError` otherwise."""
    value = config.get(key) or 0
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ConfigError(f"config.json has {key}={value!r:.60}; a number of layers is needed")
    return value


def _listed_as_dense(config: dict[str, Any], i: int) -> bool:
    kinds = config.get("mlp_layer_types")
    if kinds is None:
        return i < count(config, "first_k_dense_replace")
    if not isinstance(kinds, list) or i >= len(kinds):
        raise ConfigError(f"config.json has mlp_layer_types={kinds!r:.60}; a kind for each layer is needed")
    return bool(kinds[i] == "dense")


# By `ExpertFlags.dense`: whether layer i has a dense MLP and no experts.
DENSE: Final[Mapping[str, Callable[[dict[str, Any], int], bool]]] = MappingProxyType(
    {
        "step": _every_step_but,
        "first": lambda config, i: i < count(config, "first_k_dense_replace"),
        "first n": lambda config, i: i < count(config, "num_dense_layers"),
        "listed": _listed_as_dense,
        "interval": _outside_of_interval,
    }
)


def read_dense_layers(config: dict[str, Any], num_layers: int, rule: str | None) -> frozenset[int]:
    """Return the indices of layers without experts, in a model that has them."""
    return frozenset(i for i in range(num_layers) if rule is not None and DENSE[rule](config, i))


def _is_listed_without(config: dict[str, Any], i: int, windows: tuple[int | None, ...]) -> bool:
    listed = config.get("no_rope_layers")
    if listed is None:
        return (i + 1) % size(config, "no_rope_layer_interval") == 0
    if not isinstance(listed, list) or len(listed) < len(windows):
        raise ConfigError(f"config.json has no_rope_layers={listed!r:.60}; a 0 or 1 for each layer is needed")
    return not listed[i]


# By `Family.without_rope`: whether layer i has no RoPE.
WITHOUT_ROPE: Final[Mapping[str, Callable[[dict[str, Any], int, tuple[int | None, ...]], bool]]] = MappingProxyType(
    {
        "listed": _is_listed_without,
        "full": lambda config, i, windows: windows[i] is None and config.get("sliding_window") is not None,
    }
)


def read_layers_without_rope(
    config: dict[str, Any], windows: tuple[int | None, ...], rule: str | None
) -> frozenset[int]:
    """Return the indices of layers without RoPE, for the windows of all layers."""
    if rule is None:
        return frozenset()
    return frozenset(i for i in range(len(windows)) if WITHOUT_ROPE[rule](config, i, windows))


def read_query_scaling(config: dict[str, Any]) -> tuple[float, int] | None:
    """Return (beta, original length) of `layers/rotary.py: query_scales`, if queries are scaled."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling")
    if not isinstance(scaling, dict):
        raise ConfigError(f"config.json has rope_parameters={scaling!r:.60}; an object is needed")
    if scaling.get("llama_4_scaling_beta") is None:
        return None
    return number(scaling, "llama_4_scaling_beta"), size(scaling, "original_max_position_embeddings")


def read_latent_scale(config: dict[str, Any]) -> float:
    """Return the factor of scores of latents: with yarn's `mscale_all_dim` m, (0.1 m ln(factor) + 1)^2."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    is_scaled = isinstance(scaling, dict) and scaling.get("rope_type", scaling.get("type", "default")) != "default"
    if not is_scaled or not scaling.get("mscale_all_dim"):
        return 1.0
    return _mscale(number(scaling, "factor"), number(scaling, "mscale_all_dim")) ** 2


def _mscale(factor: float, scale: float = 1.0) -> float:
    """Return yarn's 0.1 m ln(factor) + 1 (arXiv:2309.00071, equation 22)."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def read_ropes(config: dict[str, Any], head_dims: tuple[int, int]) -> tuple[RopeConfig, RopeConfig]:
    """Return the RoPE of layers without a window, and of those with one. Raises `ConfigError` if one is unsupported.

    `head_dims` are the sizes of their heads.

    Reads `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (transformers 4). Layers with a window
    have a different RoPE only in families with `rope_local_base_freq`, which transformers 5 writes as parameters for
    each kind of layer. `rope_scaling` does not apply to these layers.
    """
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(scaling, dict):
        raise ConfigError(f"config.json has rope parameters {scaling!r}; an object is needed")
    if "rope_local_base_freq" not in config:
        return _rope(config, scaling, head_dims[0]), _rope(config, scaling, head_dims[1])
    local_theta = {"rope_theta": number(config, "rope_local_base_freq")}
    full: dict[str, Any] = scaling
    local: dict[str, Any] = {}
    if scaling.keys() & {FULL, SLIDING}:
        full, local = scaling.get(FULL) or {}, scaling.get(SLIDING) or {}
    is_dict = isinstance(local, dict)
    return _rope(config, full, head_dims[0]), _rope(config, local_theta | local if is_dict else local, head_dims[1])


def _rope(config: dict[str, Any], scaling: dict[str, Any], head_dim: int) -> RopeConfig:
    if not isinstance(scaling, dict) or any(isinstance(value, dict) for value in scaling.values()):
        raise ConfigError("rope parameters that differ between layers are not supported for this architecture")
    max_positions = size(config, "max_position_embeddings")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "su" or (kind == "yarn" and "short_factor" in scaling):  # older names in Phi-3's checkpoints
        kind = "longrope"
    if kind == "mrope" and "factor" not in scaling:  # of images: the positions of a text are the same in all sections
        kind = "default"
    if kind not in ROPE_TYPES:
        raise ConfigError(f"rope type {kind!r} is not supported yet; supported: {', '.join(ROPE_TYPES)}")
    theta = number(scaling if "rope_theta" in scaling else config, "rope_theta")
    fields = scaling if "partial_rotary_factor" in scaling else config
    part = number(fields, "partial_rotary_factor", 1.0)
    if kind == "proportional":
        return RopeConfig(theta=theta, type=kind, factor=number(scaling, "factor", 1.0), part=min(part, 1.0))
    dim = int(head_dim * part)
    if dim < 2 or dim % 2 or dim > head_dim:
        raise ConfigError(f"partial_rotary_factor lets {dim} of {head_dim} elements of a head rotate")
    rope = _scaled_rope(config, scaling, kind, theta, max_positions, dim)
    return rope if dim == head_dim else replace(rope, dim=dim)


def _scaled_rope(
    config: dict[str, Any], scaling: dict[str, Any], kind: str, theta: float, max_positions: int, dim: int
) -> RopeConfig:
    if kind == "default":
        return RopeConfig(theta=theta)
    # transformers prefers the field outside the RoPE parameters.
    outside = config.get("original_max_position_embeddings") is not None
    original = size(config if outside else scaling, "original_max_position_embeddings", default=max_positions)
    if kind == "yarn":
        return _yarn(scaling, theta, original, max_positions)
    if kind == "longrope":
        return _longrope(scaling, theta, original, max_positions, dim)
    factor = number(scaling, "factor")
    if kind in ("linear", "dynamic"):
        return RopeConfig(theta=theta, type=kind, factor=factor)
    low, high = number(scaling, "low_freq_factor"), number(scaling, "high_freq_factor")
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
    """Read YaRN. Its attention factor is `_mscale`, or a ratio of two."""
    # transformers treats null as absent, and also 0 where a default exists.
    given = {key: value for key, value in scaling.items() if value or (value is not None and key.endswith("factor"))}
    if theta <= 1:
        raise ConfigError(f"rope type 'yarn' needs a rope_theta above 1, not {theta}")
    factor = number(given, "factor", max_positions / original)
    fast, slow = number(given, "beta_fast", 32.0), number(given, "beta_slow", 1.0)
    if fast < slow:
        raise ConfigError(f"rope's beta_fast {fast} must not be below its beta_slow {slow}")
    default = _mscale(factor)
    if "mscale" in given and "mscale_all_dim" in given:
        default = _mscale(factor, number(given, "mscale")) / _mscale(factor, number(given, "mscale_all_dim"))
    return RopeConfig(
        theta=theta,
        type="yarn",
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=fast,
        beta_slow=slow,
        truncate=bool(scaling.get("truncate", True)),
        attention_factor=number(given, "attention_factor", default),
    )


def _longrope(scaling: dict[str, Any], theta: float, original: int, max_positions: int, head_dim: int) -> RopeConfig:
    """Read LongRoPE. Its attention factor is sqrt(1 + ln(factor) / ln(original)) (arXiv:2402.13753)."""
    short = scaling.get("short_factor")
    if not isinstance(short, list) or len(short) != head_dim // 2:
        raise ConfigError(f"config.json has short_factor={short!r}; a list of {head_dim // 2} numbers is needed")
    given = {key: value for key, value in scaling.items() if value is not None}
    factor = number(given, "factor", max_positions / original)
    default = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return RopeConfig(
        theta=theta,
        type="longrope",
        original_max_position_embeddings=original,
        short_factors=tuple(number({"short_factor": value}, "short_factor") for value in short),
        attention_factor=number(given, "attention_factor", default),
    )


def size(config: dict[str, Any], key: str, default: int | None = None, maximum: int = 2**31 - 1) -> int:
    """Return an integer field from 1 to `maximum`, or `default` if it is null or absent; else raise `ConfigError`."""
    value = config.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= maximum:
        raise ConfigError(f"config.json has {key}={value!r:.60}; an integer from 1 to {maximum} is needed")
    return value


def number(config: dict[str, Any], key: str, default: float | None = None) -> float:
    """Return a positive finite number field, or `default` if it is absent. Raises `ConfigError` otherwise."""
    value = config.get(key, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= 1e308:
        raise ConfigError(f"config.json has {key}={value!r:.60}; a positive number is needed")
    return float(value)
