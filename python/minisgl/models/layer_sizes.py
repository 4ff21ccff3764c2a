"""Reads from config.json the sizes that may differ between the layers of a model."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from minisgl.core.errors import ConfigError
from minisgl.models.positions import count, size


class LayerSizes(NamedTuple):
    """The heads of a layer's attention and the intermediate size of its dense MLP.

    A layer may read the keys and values of an earlier one, `kv_of`, instead of its own. If `is_v_k`, its values are
    projected as its keys are.
    """

    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    kv_of: int | None = None
    is_v_k: bool = False


class LatentSizes(NamedTuple):
    """The sizes of multi-head latent attention, as in `core/specs.py: Latent`.

    Queries are projected from `q_rank` elements; 0: from the hidden states.
    """

    q_rank: int
    rank: int
    rope_dim: int
    nope_dim: int
    v_dim: int

    @property
    def qk_dim(self) -> int:
        """The size of a head of q and k."""
        return self.nope_dim + self.rope_dim

    def num_weights(self, heads: int, hidden_size: int) -> tuple[int, int]:
        """Return the weights of a layer's projections, and those of `kv_b_proj`, which is never quantized."""
        q = self.q_rank * (hidden_size + heads * self.qk_dim) if self.q_rank else hidden_size * heads * self.qk_dim
        others = hidden_size * (self.rank + self.rope_dim + heads * self.v_dim)
        return q + others, self.rank * heads * (self.nope_dim + self.v_dim)


def read_latent(config: dict[str, Any]) -> tuple[LatentSizes, dict[str, Any]]:
    """Return the sizes of latents, and the fields of a decoder whose heads are the rotated parts."""
    q_rank = size(config, "q_lora_rank") if config.get("q_lora_rank") is not None else 0
    names = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    sizes = LatentSizes(q_rank, *(size(config, name) for name in names))
    if config.get("attention_bias") and not q_rank:
        raise ConfigError("attention_bias is not supported without q_lora_rank")
    config = {**config, "head_dim": sizes.rope_dim, "num_key_value_heads": 1}
    for key in ("rope_parameters", "rope_scaling"):
        ropes = config.get(key)
        # Mistral 4 counts the elements that rotate as a part of whole heads.
        if isinstance(ropes, dict) and ropes.get("partial_rotary_factor") == sizes.rope_dim / sizes.qk_dim:
            config[key] = {name: value for name, value in ropes.items() if name != "partial_rotary_factor"}
    return sizes, config


# Fields of transformers' `per_layer_config` -> ours.
FIELDS: Final = {"num_attention_heads": "heads", "num_key_value_heads": "kv_heads", "head_dim": "head_dim"}


def read_layers(config: dict[str, Any], windows: tuple[int | None, ...]) -> tuple[LayerSizes, ...]:
    """Return the sizes of each layer, for the windows of all. Raises `ConfigError` for contradictory fields."""
    hidden_size, heads = size(config, "hidden_size"), size(config, "num_attention_heads")
    if config.get("head_dim") is None and hidden_size % heads:
        raise ConfigError(f"head_dim is absent and hidden_size {hidden_size} is not a multiple of {heads} heads")
    alike = LayerSizes(
        heads,
        size(config, "num_key_value_heads", default=heads),
        size(config, "head_dim", default=hidden_size // heads),
        size(config, "intermediate_size"),
    )
    layers = [alike._replace(**_changes(config, i, window)) for i, window in enumerate(windows)]
    first = len(layers) - count(config, "num_kv_shared_layers")
    for i in range(first, len(layers)):
        alike_before = [j for j in range(first) if (windows[j] is None) == (windows[i] is None)]
        if not alike_before:
            raise ConfigError(f"config.json has num_kv_shared_layers={len(layers) - first}, which leaves none to share")
        times = 2 if config.get("use_double_wide_mlp") else 1
        layers[i] = layers[i]._replace(kv_of=alike_before[-1], intermediate=layers[i].intermediate * times)
    for layer in layers:
        if layer.heads % layer.kv_heads:
            raise ConfigError(f"{layer.heads} attention heads cannot share {layer.kv_heads} KV heads evenly")
        if layer.head_dim % 2:
            raise ConfigError(f"head_dim {layer.head_dim} is odd, so rotary embeddings cannot halve it")
    return tuple(layers)


def _changes(config: dict[str, Any], i: int, window: int | None) -> dict[str, Any]:
    """Return what layer i has of its own."""
    given = config.get("per_layer_config")
    if given is None:  # as on the hub
        given = {}
        if "global_head_dim" in config and window is None:
            given = {"head_dim": size(config, "global_head_dim")}
            if config.get("attention_k_eq_v") and config.get("num_global_key_value_heads") is not None:
                given["num_key_value_heads"] = config["num_global_key_value_heads"]
        if (heads := config.get("num_attention_heads_per_layer")) is not None:
            if not isinstance(heads, list) or i >= len(heads):
                raise ConfigError(f"config.json has num_attention_heads_per_layer={heads!r:.60}; a list is needed")
            given["num_attention_heads"] = heads[i]
    elif isinstance(given, dict):
        given = {str(key).lstrip("0") or "0": value for key, value in given.items()}.get(str(i), {})  # "05" of 12
    if not isinstance(given, dict) or given.keys() - FIELDS.keys():
        raise ConfigError(f"config.json has per_layer_config with {given!r:.60}; supported: {', '.join(FIELDS)}")
    changes: dict[str, Any] = {ours: size(given, name) for name, ours in FIELDS.items() if name in given}
    return changes | {"is_v_k": bool(config.get("attention_k_eq_v")) and window is None}
