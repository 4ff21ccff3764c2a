"""Reads a model's configuration from config.json. Every field that changes results is either used or refused."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from minisgl.checkpoint import hf
from minisgl.checkpoint.quantization import Quantization, read_quantization
from minisgl.core.errors import ConfigError
from minisgl.core.layout import FULL, WINDOW
from minisgl.core.specs import GatedDelta, GroupedQuery, Latent
from minisgl.layers.rope import NO_ROPE
from minisgl.models.families import FAMILIES, SOFTCAPS, ExpertFlags, Family
from minisgl.models.layer_sizes import LatentSizes, LayerSizes, read_latent, read_layers
from minisgl.models.positions import (
    count,
    number,
    read_dense_layers,
    read_latent_scale,
    read_layers_without_rope,
    read_linear_layers,
    read_query_scaling,
    read_ropes,
    read_windows,
    size,
)

if TYPE_CHECKING:
    from minisgl.distributed.info import DistributedInfo
    from minisgl.layers.rope import RopeConfig

DEFAULTS: Final = {"rms_norm_eps": 1e-6, "rope_theta": 10000.0}  # transformers' defaults, unless a family has its own
KNOWN: Final = f"{', '.join(name.removesuffix('ForCausalLM') for name in FAMILIES)} (each with ForCausalLM)"
PLAIN: Final = "LlamaForCausalLM"
LARGE: Final = 2**26  # weights: 256 MB in float32
MAX_LAYERS: Final = 4096  # more are a mistake or an attack on memory
ACTIVATIONS: Final = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
"""transformers' names -> names in `ops/reference.py: GATES`."""
UNGATED: Final = {**ACTIVATIONS, "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu": "gelu", "relu2": "relu2"}
"""The same for MLPs without a gate, in `ops/reference.py: ACTIVATIONS`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """A mixture of `count` experts, with `top_k` per token, in all layers except `dense_layers`.

    With `normalise`, the weights of a token's experts are divided by their sum. `scale` multiplies the sum of experts.
    A token chooses from the `top_groups` best of `groups` groups. An MLP of `shared_size` is for all tokens; 0: none.
    The router's logits have a limit `softcap`, or none if it is 0.
    """

    count: int
    top_k: int
    intermediate_size: int
    normalise: bool
    dense_layers: frozenset[int]
    groups: int
    top_groups: int
    scale: float
    shared_size: int
    softcap: float
    flags: ExpertFlags


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The configuration of a decoder. Sizes count elements; `dtype` is the checkpoint's ("bfloat16", ...).

    `layers` has the sizes of each; those of the first are properties, too. `family` has the differences between
    architectures. `windows` has the window of each layer, or None. Layers with a window use `window_rope`, the others
    `rope`, except `layers_without_rope`. Attention scores are multiplied by `attention_scale`; None means
    1 / sqrt(head_dim). The norms before blocks and the last one have the epsilon `norm_eps`, others `rms_norm_eps`.
    `embedding_scale` and `logit_scale` multiply embeddings and logits. Scores and logits have a limit `softcap` and
    `logit_softcap`, or none if it is 0. `query_scaling` is (beta, original length) of `layers/rotary.py: query_scales`.
    Each layer of Gemma 4 may have an embedding of `layer_input_size` of its own, for `layer_input_vocab` tokens; 0:
    none. `output_gate` is that of attention: for each "head" or "element"; "" for none. Of `num_next_tokens` layers
    that predict the token after the next, a drafter uses the first. `linear_layers` have a recurrent state instead of
    attention; `linear` has the heads of all ranks.
    With `latent`, attention reads latents, and the heads of `layers` are only the parts that rotate.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSizes, ...]
    rms_norm_eps: float
    norm_eps: float
    embedding_scale: float
    logit_scale: float
    softcap: float
    logit_softcap: float
    query_scaling: tuple[float, int] | None
    max_position_embeddings: int
    rope: RopeConfig
    window_rope: RopeConfig
    layers_without_rope: frozenset[int]
    windows: tuple[int | None, ...]
    attention_scale: float | None
    activation: str
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: str
    output_gate: str
    layer_input_size: int
    layer_input_vocab: int
    experts: ExpertsConfig | None
    dtype: str
    latent: LatentSizes | None = None
    quantization: Quantization | None = None
    is_text_part: bool = False  # of a multimodal model, whose other parts are not loaded
    is_interleaved: bool = False  # RoPE rotates adjacent elements of a head as they are stored
    is_rounded: bool = False  # the file has fewer than 16 bits for a weight, in a format that no device keeps
    num_next_tokens: int = 0
    linear: GatedDelta | None = None
    linear_layers: frozenset[int] = frozenset()
    gives_back: bool = False  # pages before the windows, if no layer needs them
    is_fallback: bool = False  # transformers computes the model

    @property
    def family(self) -> Family:
        return FAMILIES[PLAIN if self.is_fallback else self.architecture]

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_heads(self) -> int:
        return self.layers[0].heads

    @property
    def num_kv_heads(self) -> int:
        return self.layers[0].kv_heads

    @property
    def head_dim(self) -> int:
        return self.layers[0].head_dim

    @property
    def intermediate_size(self) -> int:
        return self.layers[0].intermediate

    @property
    def ropes(self) -> list[RopeConfig]:
        """The RoPE of each layer."""
        ropes = (self.rope if window is None else self.window_rope for window in self.windows)
        return [NO_ROPE if i in self.layers_without_rope else rope for i, rope in enumerate(ropes)]

    def mixer(self, layer: int, info: DistributedInfo) -> GroupedQuery | Latent | GatedDelta:
        """Return how a layer mixes tokens on one rank. Raises `ConfigError` if ranks cannot divide its heads."""
        sizes = self.layers[layer]
        if self.linear is not None and layer in self.linear_layers:
            return replace(
                self.linear,
                key_heads=len(info.shard(self.linear.key_heads, "key heads of linear attention")),
                value_heads=len(info.shard(self.linear.value_heads, "value heads of linear attention")),
            )
        heads = len(info.shard(sizes.heads, "attention heads"))
        if self.latent is not None:
            assert self.attention_scale is not None, "the scale of latents is read with them"
            return Latent(heads, *self.latent[1:], self.attention_scale)
        return GroupedQuery(
            heads=heads,
            kv_heads=len(info.shard_or_replicate(sizes.kv_heads, "KV heads")),
            head_dim=sizes.head_dim,
            scale=sizes.head_dim**-0.5 if self.attention_scale is None else self.attention_scale,
            window=self.windows[layer],
            softcap=self.softcap,
            has_sinks=self.family.has_sinks,
            group=FULL if self.window is None or self.windows[layer] is None else WINDOW,
        )

    @property
    def window(self) -> int | None:
        """The largest window of layers that give pages back; None without such layers."""
        windows = [window for window in self.windows if window is not None]
        return max(windows) if self.gives_back and 0 < len(windows) < self.num_layers else None

    def next_tokens_layer(self) -> ModelConfig:
        """Return the configuration of the layer that predicts the token after the next, as of a model of one layer.

        It attends to all tokens, as the last layer that does, and has experts if the last layer has.
        """
        full = (i for i, window in enumerate(self.windows) if window is None and i not in self.linear_layers)
        like = max(full, default=self.num_layers - 1)
        experts = self.experts
        if experts is not None:
            is_dense = self.num_layers - 1 in experts.dense_layers
            experts = replace(experts, dense_layers=frozenset({0} if is_dense else ()))
        return replace(
            self,
            layers=(self.layers[like]._replace(kv_of=None),),
            windows=(None,),
            layers_without_rope=frozenset({0} if like in self.layers_without_rope else ()),
            experts=experts,
            linear=None,
            linear_layers=frozenset(),
        )

    @property
    def num_weights(self) -> int:
        """The number of weights of all matrices; norms and biases are negligible."""
        return self.num_projections + self.num_expert_weights + self.num_others

    @property
    def num_others(self) -> int:
        """The number of weights that stay in 16 or 32 bits when projections are quantized."""
        e = self.experts
        routers = 0 if e is None else (self.num_layers - len(e.dense_layers)) * e.count
        inputs = self.num_layers * self.layer_input_size * (self.layer_input_vocab + 3 * self.hidden_size)
        if self.linear is not None:
            routers += 2 * self.linear.value_heads * len(self.linear_layers)
        if self.latent is not None:
            inputs += sum(self.latent.num_weights(layer.heads, self.hidden_size)[1] for layer in self.layers)
        return (routers + (1 if self.tie_word_embeddings else 2) * self.vocab_size) * self.hidden_size + inputs

    @property
    def num_expert_weights(self) -> int:
        """The number of weights of all experts."""
        e = self.experts
        sparse = 0 if e is None else (self.num_layers - len(e.dense_layers)) * e.count * e.intermediate_size
        return 3 * self.hidden_size * sparse

    @property
    def num_projections(self) -> int:
        """The number of weights of attention's projections and of dense MLPs."""
        e, features, latent = self.experts, 0, 0
        for i, layer in enumerate(self.layers):
            if e is None or i in e.dense_layers or e.flags.is_beside:
                features += (2 + self.family.is_gated) * layer.intermediate
            if e is not None and i not in e.dense_layers:
                features += 3 * e.shared_size
            if self.linear is not None and i in self.linear_layers:
                features += 2 * self.linear.key_heads * self.linear.key_dim
                features += 3 * self.linear.value_heads * self.linear.value_dim
                continue
            gate = {"": 0, "head": 1, "element": layer.head_dim}[self.output_gate]
            if self.latent is not None:
                latent += self.latent.num_weights(layer.heads, self.hidden_size)[0]
                continue
            features += layer.heads * (2 * layer.head_dim + gate)
            features += (0 if layer.kv_of is not None else 2 - layer.is_v_k) * layer.kv_heads * layer.head_dim
        return features * self.hidden_size + latent

    @property
    def num_adapted(self) -> int:
        """At least the inputs and outputs of all projections that adapters may change: weights of one with rank 1."""
        inputs_or_outputs = self.num_projections // self.hidden_size + self.vocab_size
        return inputs_or_outputs + (4 * self.num_layers + 1) * self.hidden_size

    @property
    def is_large_bfloat16(self) -> bool:
        """Whether a CPU may be faster with the checkpoint's bfloat16 than with float32."""
        return self.dtype == "bfloat16" and self.num_weights >= LARGE

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> ModelConfig:
        """Read the object in config.json, as transformers 4 or 5 writes it. Raises `ConfigError` if unsupported."""
        architecture = _architecture(config)
        family = FAMILIES[architecture]
        is_text_part = config["architectures"] != [architecture]
        config = {**DEFAULTS, **family.defaults, **(family.text_defaults if is_text_part else {}), **config}
        latent = None
        if family.has_latents:
            latent, config = read_latent(config)
        _refuse_unsupported(config, family)
        hidden_size = size(config, "hidden_size")
        num_layers = size(config, "num_hidden_layers", maximum=MAX_LAYERS)
        linear_layers = read_linear_layers(config, num_layers) if family.has_linear else frozenset()
        windows = read_windows(config, num_layers, family.slides, family.has_window_switch)
        layers = read_layers(config, windows)
        head_dim = layers[0].head_dim
        if family.has_partial_rope and "rotary_dim" in config:  # as in MiniMax-M2's checkpoints
            config.setdefault("partial_rotary_factor", size(config, "rotary_dim") / head_dim)
        max_positions = hf.max_model_len(config)
        dims = {window is None: layer.head_dim for window, layer in zip(windows, layers, strict=True)}
        rope, window_rope = read_ropes(config, (dims.get(True, head_dim), dims.get(False, head_dim)))
        layers_without_rope = read_layers_without_rope(config, windows, family.without_rope)
        if rope == window_rope and not layers_without_rope:  # a window as long as the context is no window
            windows = tuple(None if window is None or window >= max_positions else window for window in windows)
        options = {name: number(config, name) for name in family.options if config.get(name) is not None}
        # A residual multiplier m leaves the result as it is if the embedding is divided by m instead, and so the whole
        # residual, provided that the norms that read it have their epsilon divided by m^2.
        residual, eps = options.get("residual_multiplier", 1.0), number(config, family.eps_key)
        embedding = options.get(
            "embedding_multiplier", hidden_size**0.5 if _flag(config, family.scales_embedding) else 1.0
        )
        logit_scale = 1.0
        if family.logit_scale is not None:
            field, exponent = family.logit_scale
            logit_scale = number(config, field, 1.0) ** exponent
        scale = options.get("attention_multiplier")
        if scale == head_dim**-0.5:
            scale = None
        if "query_pre_attn_scalar" in config:
            scale = number(config, "query_pre_attn_scalar") ** -0.5
        if latent is not None:
            scale = latent.qk_dim**-0.5 * read_latent_scale(config)
        return cls(
            architecture=architecture,
            vocab_size=size(config, "vocab_size"),
            hidden_size=hidden_size,
            layers=layers,
            rms_norm_eps=eps,
            norm_eps=eps / residual**2,
            embedding_scale=embedding / residual,
            logit_scale=logit_scale,
            softcap=options.get("attn_logit_softcapping", 0.0),
            logit_softcap=options.get("final_logit_softcapping", 0.0),
            query_scaling=read_query_scaling(config) if family.scales_queries else None,
            max_position_embeddings=max_positions,
            rope=rope,
            window_rope=window_rope,
            layers_without_rope=layers_without_rope,
            windows=windows,
            attention_scale=scale,
            activation=_activation(config, family),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=_flag(config, family.qkv_bias),
            o_bias=_flag(config, family.o_bias),
            mlp_bias=_flag(config, family.mlp_bias),
            qk_norm=family.qk_norm if family.qk_norm_key is None or config.get(family.qk_norm_key) else "",
            output_gate=_output_gate(config, family),
            layer_input_size=count(config, "hidden_size_per_layer_input") if family.has_layer_tail else 0,
            layer_input_vocab=size(config, "vocab_size_per_layer_input") if family.has_layer_tail else 0,
            experts=_experts(config, num_layers, family.experts),
            linear=_linear(config) if linear_layers else None,
            linear_layers=linear_layers,
            quantization=read_quantization(config),
            is_text_part=is_text_part,
            num_next_tokens=0 if family.next_tokens is None else count(config, family.next_tokens.count_key),
            is_interleaved=_flag(config, "rope_interleave" if "rope_interleave" in config else family.is_interleaved),
            is_rounded=_flag(config, "is_rounded"),
            latent=latent,
            dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch."),
        )


def fallback_config(config: dict[str, Any]) -> ModelConfig:
    """Return what config.json tells of a decoder that transformers computes, as if it had one tiny layer.

    Its own layers are seen once it is loaded. Raises `ConfigError` for one that cannot be served.
    """
    name = _name(config)
    if config.get("is_encoder_decoder"):
        raise ConfigError(f"--model-impl transformers cannot run {name:.60}: it has an encoder")
    kept = ("vocab_size", "dtype", "torch_dtype", "tie_word_embeddings", "quantization_config")
    plain = {key: config[key] for key in kept if key in config}
    plain |= {"hidden_size": hf.first_of(config, hf.WIDTHS), "max_position_embeddings": hf.max_model_len(config)}
    plain |= {"num_attention_heads": 1, "head_dim": 2, "intermediate_size": 1, "num_hidden_layers": 1}
    model = ModelConfig.from_hf({"architectures": [PLAIN], **plain})
    return replace(model, architecture=name, is_fallback=True)


def _name(config: dict[str, Any]) -> str:
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise ConfigError(f"config.json has architectures={names!r:.60}; it must name one of {KNOWN}")
    return names[0]


def _architecture(config: dict[str, Any]) -> str:
    name = _name(config)
    if name in FAMILIES:
        return name
    kind = config.get("model_type")
    if name.endswith("ForConditionalGeneration"):
        found = next((other for other, family in FAMILIES.items() if kind in family.text_types), None)
        if found is not None:
            return found
        kinds = ", ".join(kind for family in FAMILIES.values() for kind in family.text_types)
        raise ConfigError(f"the text part of {name:.60} is a {kind!r:.60}, which is not supported; supported: {kinds}")
    raise ConfigError(f"model architecture {name:.60} is not supported; try --model-impl transformers, or {KNOWN}")


def _flag(config: dict[str, Any], value: bool | str) -> bool:
    return bool(config.get(value)) if isinstance(value, str) else value


def _output_gate(config: dict[str, Any], family: Family) -> str:
    if not family.output_gate:
        return ""
    if family.has_gates_in_q:
        return "element"
    kinds = {True: "head", "per-head": "head", "per-element": "element"}
    gating = config.get("gating", True)
    if not isinstance(gating, bool | str) or gating not in kinds:
        raise ConfigError(f"gating={gating!r:.60} is not supported; supported: {', '.join(map(str, kinds))}")
    return kinds[gating]


def _refuse_unsupported(config: dict[str, Any], family: Family) -> None:
    for field in SOFTCAPS - family.options:
        if config.get(field) is not None:
            raise ConfigError(f"{field}={config[field]} is not supported; only models without softcapping are")
    for field in family.refuses:
        if config.get(field):
            raise ConfigError(f"{field}={config[field]!r:.60} is not supported")
    for field, only in family.requires.items():
        if config.get(field, only) != only:
            raise ConfigError(f"{field}={config[field]!r:.60} is not supported; only {only} is")
    if config.get("use_bidirectional_attention") not in (None, False, "vision") or config.get("is_causal") is False:
        raise ConfigError("bidirectional attention is not supported; only causal attention is")
    scaling = config.get("rope_parameters") or config.get("rope_scaling")
    for fields in (config, *([scaling] if isinstance(scaling, dict) else [])):
        if not family.has_partial_rope and fields.get("partial_rotary_factor", 1.0) != 1.0:
            raise ConfigError(f"partial_rotary_factor {fields['partial_rotary_factor']} is not supported; only 1 is")


def _activation(config: dict[str, Any], family: Family) -> str:
    activation = config.get(family.activation_key, "silu")
    names = ACTIVATIONS if family.is_gated else UNGATED
    gate = None if family.experts is None else {"clamped": "silu"}.get(family.experts.gate, family.experts.gate)
    known = [name for name, ours in names.items() if gate is None or ours == gate]
    if activation not in known:
        raise ConfigError(f"{family.activation_key} {activation!r} is not supported; supported: {', '.join(known)}")
    return names[activation]


def _linear(config: dict[str, Any]) -> GatedDelta:
    names = {"key_heads": "num_key_heads", "value_heads": "num_value_heads", "width": "conv_kernel_dim"}
    names |= {"key_dim": "key_head_dim", "value_dim": "value_head_dim"}
    sizes: dict[str, Any] = {ours: size(config, f"linear_{name}") for ours, name in names.items()}
    linear = GatedDelta(**sizes)
    if linear.value_heads % linear.key_heads or linear.width < 2:
        raise ConfigError(f"linear attention with {linear} is not supported")
    return linear


def _experts(config: dict[str, Any], num_layers: int, flags: ExpertFlags | None) -> ExpertsConfig | None:
    """Read the mixture of experts, if there is one."""
    if flags is None or not _flag(config, flags.switch):
        return None
    given = {key: config[key] for key in flags.count_keys if config.get(key) is not None}
    if len({*map(repr, given.values())}) > 1:
        raise ConfigError(f"config.json has {' but '.join(f'{key}={value!r}' for key, value in given.items())}")
    count = size(config, next(iter(given), flags.count_keys[0]))
    top_k = size(config, flags.top_k_key)
    if top_k > count:
        raise ConfigError(f"{flags.top_k_key} {top_k} is more than the {count} experts")
    has_groups = flags.has_groups and config.get("topk_method") != "greedy"
    groups, top_groups = (size(config, key, 1) if has_groups else 1 for key in ("n_group", "topk_group"))
    if count % groups or top_groups > groups or top_k > count // groups * top_groups:
        raise ConfigError(f"{count} experts in {groups} groups, {top_k} of {top_groups} groups, do not divide")
    shared = [config.get(key) for key in flags.shared_keys]
    return ExpertsConfig(
        count=count,
        top_k=top_k,
        intermediate_size=size(config, flags.size_key),
        normalise=_flag(config, flags.normalises),
        dense_layers=read_dense_layers(config, num_layers, flags.dense),
        groups=groups,
        top_groups=top_groups,
        scale=number(config, flags.scale_key, 1.0) if flags.scale_key else 1.0,
        shared_size=math.prod(size(config, key) for key in flags.shared_keys) if all(shared) and shared else 0,
        softcap=number(config, flags.softcap_key) if config.get(flags.softcap_key) else 0.0,
        flags=flags,
    )
