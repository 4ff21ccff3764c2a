"""Reads a model's configuration from config.json. Every field that changes results is either used or refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from minisgl.checkpoint import hf
from minisgl.checkpoint.quantization import Quantization, read_quantization
from minisgl.core.errors import ConfigError
from minisgl.core.layout import FULL, WINDOW
from minisgl.core.specs import GroupedQuery
from minisgl.models.families import FAMILIES, ExpertFlags, Family
from minisgl.models.positions import number, read_ropes, read_windows, size

if TYPE_CHECKING:
    from minisgl.distributed.info import DistributedInfo
    from minisgl.layers.rope import RopeConfig

DEFAULTS: Final = {"rms_norm_eps": 1e-6, "rope_theta": 10000.0}  # transformers' defaults, unless a family has its own
LARGE: Final = 2**26  # weights: 256 MB in float32
MAX_LAYERS: Final = 4096  # more are a mistake or an attack on memory
ACTIVATIONS: Final = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
"""transformers' names -> names in `ops/reference.py: GATES`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """A mixture of `count` experts, with `top_k` per token, in all layers except `dense_layers`.

    With `normalise`, the probabilities of the selected experts are divided by their sum.
    """

    count: int
    top_k: int
    intermediate_size: int
    normalise: bool
    dense_layers: frozenset[int]
    flags: ExpertFlags


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The configuration of a decoder. Sizes count elements; `dtype` is the checkpoint's ("bfloat16", ...).

    `windows` has the window of each layer, or None. Layers with a window use `window_rope`, the others `rope`.
    Attention scores are multiplied by `attention_scale`; None means 1 / sqrt(head_dim).
    """

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
    window_rope: RopeConfig
    windows: tuple[int | None, ...]
    attention_scale: float | None
    activation: str
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    fused_projections: bool
    experts: ExpertsConfig | None
    dtype: str
    quantization: Quantization | None = None
    is_text_part: bool = False  # of a multimodal model, whose other parts are not loaded
    gives_back: bool = False  # pages before the windows, if no layer needs them

    def mixer(self, layer: int, info: DistributedInfo) -> GroupedQuery:
        """Return how a layer attends on one rank. Raises `ConfigError` if ranks cannot divide its heads."""
        return GroupedQuery(
            heads=len(info.shard(self.num_heads, "attention heads")),
            kv_heads=len(info.shard_or_replicate(self.num_kv_heads, "KV heads")),
            head_dim=self.head_dim,
            scale=self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale,
            window=self.windows[layer],
            group=FULL if self.window is None or self.windows[layer] is None else WINDOW,
        )

    @property
    def window(self) -> int | None:
        """The largest window of layers that give pages back; None without such layers."""
        windows = [window for window in self.windows if window is not None]
        return max(windows) if self.gives_back and 0 < len(windows) < self.num_layers else None

    @property
    def num_weights(self) -> int:
        """The number of weights of all matrices; norms and biases are negligible."""
        return self.num_projections + self.num_expert_weights + self.num_others

    @property
    def num_others(self) -> int:
        """The number of weights that stay in 16 or 32 bits when projections are quantized."""
        e = self.experts
        routers = 0 if e is None else (self.num_layers - len(e.dense_layers)) * e.count
        return (routers + (1 if self.tie_word_embeddings else 2) * self.vocab_size) * self.hidden_size

    @property
    def num_expert_weights(self) -> int:
        """The number of weights of all experts."""
        e = self.experts
        sparse = 0 if e is None else (self.num_layers - len(e.dense_layers)) * e.count * e.intermediate_size
        return 3 * self.hidden_size * sparse

    @property
    def num_projections(self) -> int:
        """The number of weights of attention's projections and of dense MLPs."""
        attention = 2 * self.hidden_size * self.head_dim * (self.num_heads + self.num_kv_heads)
        dense = 3 * self.hidden_size * self.intermediate_size
        num_dense = self.num_layers if self.experts is None else len(self.experts.dense_layers)
        return self.num_layers * attention + num_dense * dense

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
        _refuse_unsupported(config)
        hidden_size = size(config, "hidden_size")
        num_heads = size(config, "num_attention_heads")
        num_kv_heads = size(config, "num_key_value_heads", default=num_heads)
        if num_heads % num_kv_heads:
            raise ConfigError(f"{num_heads} attention heads cannot share {num_kv_heads} KV heads evenly")
        if config.get("head_dim") is None and hidden_size % num_heads:
            raise ConfigError(
                f"head_dim is absent and hidden_size {hidden_size} is not a multiple of {num_heads} heads"
            )
        head_dim = size(config, "head_dim", default=hidden_size // num_heads)
        if head_dim % 2:
            raise ConfigError(f"head_dim {head_dim} is odd, so rotary embeddings cannot halve it")
        max_positions = hf.max_model_len(config)
        num_layers = size(config, "num_hidden_layers", maximum=MAX_LAYERS)
        bias = bool(config.get("attention_bias", False))
        rope, window_rope = read_ropes(config, head_dim)
        windows = read_windows(config, num_layers, family.slides, family.has_window_switch)
        if rope == window_rope:  # a window as long as the context is no window
            windows = tuple(None if window is None or window >= max_positions else window for window in windows)
        scale = number(config, "query_pre_attn_scalar") ** -0.5 if "query_pre_attn_scalar" in config else None
        return cls(
            architecture=architecture,
            vocab_size=size(config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=size(config, "intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=number(config, "rms_norm_eps"),
            max_position_embeddings=max_positions,
            rope=rope,
            window_rope=window_rope,
            windows=windows,
            attention_scale=scale,
            activation=_activation(config, family),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=bias if family.qkv_bias is None else family.qkv_bias,
            o_bias=bias if family.o_bias is None else family.o_bias,
            mlp_bias=family.has_mlp_bias_option and bool(config.get("mlp_bias", False)),
            qk_norm=family.qk_norm,
            fused_projections=family.fused_projections,
            experts=_experts(config, num_layers, family.experts) if family.experts is not None else None,
            quantization=read_quantization(config),
            is_text_part=is_text_part,
            dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch."),
        )


def _architecture(config: dict[str, Any]) -> str:
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise ConfigError(f"config.json has architectures={names!r:.60}; it must name one of {', '.join(FAMILIES)}")
    name = names[0]
    if name in FAMILIES:
        return name
    kind = config.get("model_type")
    if name.endswith("ForConditionalGeneration"):
        found = next((other for other, family in FAMILIES.items() if kind in family.text_types), None)
        if found is not None:
            return found
        kinds = ", ".join(kind for family in FAMILIES.values() for kind in family.text_types)
        raise ConfigError(f"the text part of {name:.60} is a {kind!r:.60}, which is not supported; supported: {kinds}")
    raise ConfigError(f"model architecture {name:.60} is not supported; supported: {', '.join(FAMILIES)}")


def _refuse_unsupported(config: dict[str, Any]) -> None:
    for field in ("attn_logit_softcapping", "final_logit_softcapping"):
        if config.get(field) is not None:
            raise ConfigError(f"{field}={config[field]} is not supported; only models without softcapping are")
    if config.get("use_bidirectional_attention") or config.get("is_causal") is False:
        raise ConfigError("bidirectional attention is not supported; only causal attention is")
    if config.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError(f"partial_rotary_factor {config['partial_rotary_factor']} is not supported; only 1 is")


def _activation(config: dict[str, Any], family: Family) -> str:
    activation = config.get(family.activation_key, "silu")
    known = [name for name, ours in ACTIVATIONS.items() if family.experts is None or ours == "silu"]
    if activation not in known:
        raise ConfigError(f"{family.activation_key} {activation!r} is not supported; supported: {', '.join(known)}")
    return ACTIVATIONS[activation]


def _experts(config: dict[str, Any], num_layers: int, flags: ExpertFlags) -> ExpertsConfig:
    """Read the mixture of experts. transformers 4 names their count num_experts, 5 names it num_local_experts."""
    old, new = config.get("num_experts"), config.get("num_local_experts")
    if old is not None and new is not None and old != new:
        raise ConfigError(f"config.json has num_experts={old!r} but num_local_experts={new!r}")
    count = size(config, "num_local_experts" if old is None else "num_experts")
    top_k = size(config, "num_experts_per_tok")
    if top_k > count:
        raise ConfigError(f"num_experts_per_tok {top_k} is more than the {count} experts")
    normalise, dense = True, frozenset[int]()
    if flags.has_options:
        normalise = bool(config.get("norm_topk_prob", False))
        only, step = config.get("mlp_only_layers") or [], size(config, "decoder_sparse_step", default=1)
        if not isinstance(only, list) or not all(isinstance(i, int) for i in only):
            raise ConfigError(f"config.json has mlp_only_layers={only!r}; a list of layer indices is needed")
        dense = frozenset(i for i in range(num_layers) if i in only or (i + 1) % step)
    return ExpertsConfig(
        count=count,
        top_k=top_k,
        intermediate_size=size(config, flags.size_key),
        normalise=normalise,
        dense_layers=dense,
        flags=flags,
    )
