"""The supported architectures: for each, the differences from Llama."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final, NamedTuple

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


class Packed(NamedTuple):
    """The two tensors in the block of experts that have the projections of all of them.

    They are [E, 2I, H] and [E, H, I], or [E, H, 2I] and [E, I, H].

    gate_up, down    their names
    is_interleaved   the rows of gate and up alternate; else gate is above up
    """

    gate_up: str = "experts.gate_up_proj"
    down: str = "experts.down_proj"
    is_interleaved: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertFlags:
    """The mixture of experts of an architecture: names in its checkpoints and configuration, and how tokens choose.

    module        the block of experts in a layer
    router        the projection in the block that gives the experts' logits, with a bias if it `has_bias`
    parts         an expert's gate, up and down projections
    count_keys    fields of config.json for the number of experts
    top_k_key     the field for the number of experts of a token
    size_key      the field for an expert's intermediate size
    normalises    whether the weights of a token's experts are divided by their sum, or the field that says so
    dense         which layers have a dense MLP instead (`models/positions.py: DENSE`); None: no layer
    scoring       "softmax" or "sigmoid" of the router's logits
    bias          the tensor in the block that is added to scores before the choice, but not to weights; "" for none
    bias_rows     the number of rows of this tensor; None if it is a vector
    has_groups    experts are in `n_group` groups, of which a token may choose from `topk_group`
    group_best    how many of a group's best scores are added to compare it with others
    scale_key     the field for a factor of the experts' sum
    shared        an MLP in the block for all tokens, beside the experts; "" for none
    shared_keys   the fields whose product is its intermediate size
    shared_gate   the projection in the block whose sigmoid multiplies its output; "" for none
    gate          how an expert joins gate and up (`ops/reference.py: gate_and_mul`)
    has_bias      whether router and experts have biases
    packed        how a checkpoint stacks all experts of a layer; None if each has its own tensors
    switch        whether there are experts, or the field that says so
    softcap_key   the field for a limit of the router's logits
    is_beside     experts, with a norm and a scale for each as in Gemma 4, are beside the dense MLP of their layer
    """

    module: str = "mlp"
    router: str = "gate"
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    count_keys: tuple[str, ...] = ("num_local_experts", "num_experts")
    top_k_key: str = "num_experts_per_tok"
    size_key: str = "moe_intermediate_size"
    normalises: bool | str = "norm_topk_prob"
    dense: str | None = None
    scoring: str = "softmax"
    bias: str = ""
    bias_rows: int | None = None
    has_groups: bool = False
    group_best: int = 2
    scale_key: str = ""
    shared: str = ""
    shared_keys: tuple[str, ...] = ()
    shared_gate: str = ""
    gate: str = "silu"
    has_bias: bool = False
    packed: Packed | None = None
    switch: bool | str = True
    softcap_key: str = ""
    is_beside: bool = False


MIXTRAL: Final = ExpertFlags(
    module="block_sparse_moe",
    parts=("w1", "w3", "w2"),
    count_keys=("num_local_experts",),
    size_key="intermediate_size",
    normalises=True,
)
# As in DeepSeek V3 (arXiv:2412.19437).
GROUPED: Final = ExpertFlags(
    count_keys=("n_routed_experts", "num_local_experts"),
    dense="first",
    scoring="sigmoid",
    bias="gate.e_score_correction_bias",
    has_groups=True,
    scale_key="routed_scaling_factor",
    shared="shared_experts",
    shared_keys=("moe_intermediate_size", "n_shared_experts"),
)


class NextTokens(NamedTuple):
    """The layer of a checkpoint that predicts the token after the next (multi-token prediction, arXiv:2412.19437).

    count_key   the field of config.json for the number of these layers
    names       beginnings of the checkpoint's names -> ours (`speculative/mtp.py`), the first that matches counts;
                {} is the number of the model's layers
    """

    count_key: str
    names: Mapping[str, str]


DEEPSEEK_MTP: Final = NextTokens(
    "num_nextn_predict_layers",
    {
        "model.layers.{}.enorm.": "embedding_norm.",
        "model.layers.{}.hnorm.": "hidden_norm.",
        "model.layers.{}.eh_proj.": "model.layers.0.join_proj.",
        "model.layers.{}.shared_head.norm.": "norm.",
        "model.layers.{}.shared_head.head.": "lm_head.",
        "model.layers.{}.embed_tokens.": "model.embed_tokens.",
        "model.layers.{}.": "model.layers.0.",
    },
)
QWEN_MTP: Final = NextTokens(
    "mtp_num_hidden_layers",
    {
        "mtp.pre_fc_norm_embedding.": "embedding_norm.",
        "mtp.pre_fc_norm_hidden.": "hidden_norm.",
        "mtp.fc.": "model.layers.0.join_proj.",
        "mtp.norm.": "norm.",
        "mtp.layers.0.": "model.layers.0.",
    },
)

Norms = tuple[str | None, str | None, str | None, str | None]
"""The names of a layer's norms: before and after attention, before and after the MLP."""
PRE: Final[Norms] = "input_layernorm", None, "post_attention_layernorm", None
POST: Final[Norms] = None, "post_attention_layernorm", None, "post_feedforward_layernorm"
SANDWICH: Final[Norms] = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
MULTIPLIERS: Final = frozenset({"embedding_multiplier", "residual_multiplier", "attention_multiplier"})
SOFTCAPS: Final = frozenset({"attn_logit_softcapping", "final_logit_softcapping"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The differences of an architecture from Llama.

    norms                the norms of a layer
    is_parallel          attention and MLP read the same norm, and both are added to the residual
    norm                 "rms", or "layer" for LayerNorm, with a bias if `norm_bias`
    norm_offset          is added to the weights of norms
    eps_key              the field of config.json for the epsilon of norms
    qkv_bias, o_bias, mlp_bias, head_bias
                         whether projections have a bias, or the field of config.json that says so
    qk_norm              RMSNorm of q and k: over each "head", or over "all" heads together; "" for none
    qk_norm_key          the field of config.json that says whether there is this norm
    is_gated             the MLP is down(f(gate(x)) * up(x)); else down(f(up(x)))
    fused                of "qkv" and "gate_up", the projections that the checkpoint stacks in one tensor
    names                our names of modules -> the checkpoint's
    scales_embedding     the embedding is multiplied by sqrt(hidden_size), or the field of config.json that says so
    options              of MULTIPLIERS and SOFTCAPS, the fields of config.json that count
    logit_scale          the field of config.json for a multiplier of logits, and its exponent: 1 or -1
    is_interleaved       RoPE rotates adjacent elements of a head instead of its halves
    has_partial_rope     RoPE rotates the first `partial_rotary_factor` of a head
    scales_queries       q is multiplied by a number that grows with its position (`layers/rotary.py: query_scales`)
    without_rope         which layers have no RoPE (`models/positions.py: WITHOUT_ROPE`)
    slides               which layers may have a window (`models/positions.py: SLIDES`); None: no layer
    has_sinks            attention has a learned sink for each head
    has_latents          attention keeps a latent of each token instead of keys and values
    norms_v              heads of v have a norm without weights
    output_gate          attention's output is multiplied by this function of a projection of its input
                         (`ops/reference.py: OUTPUT_GATES`), for each head or element, as `gating` in config.json says
    has_gates_in_q       the gates are rows of q_proj, after those of q of each head
    has_linear           layers may have a recurrence instead of attention (`positions.read_linear_layers`)
    has_layer_tail       layers end as those of Gemma 4 (`models/gemma4.py: LayerTail`)
    next_tokens          where a checkpoint has a layer that predicts the token after the next
    has_window_switch    these layers have a window only if `use_sliding_window` is true
    activation_key       the field of config.json for the MLP's activation
    refuses              fields of config.json that are supported only if they are null, false or absent
    requires             fields of config.json -> the only value that is supported
    text_types           the `model_type`s of multimodal models' text parts that are such a decoder
    text_defaults        transformers' defaults for fields that such a part may lack, besides `defaults`
    defaults             transformers' defaults for fields that config.json may lack
    """

    norms: Norms = PRE
    is_parallel: bool = False
    norm: str = "rms"
    norm_bias: bool = False
    norm_offset: float = 0.0
    eps_key: str = "rms_norm_eps"
    qkv_bias: bool | str = "attention_bias"
    o_bias: bool | str = "attention_bias"
    mlp_bias: bool | str = False
    head_bias: bool = False
    qk_norm: str = ""
    qk_norm_key: str | None = None
    is_gated: bool = True
    fused: frozenset[str] = frozenset()
    names: Mapping[str, str] = field(default_factory=dict)
    scales_embedding: bool | str = False
    options: frozenset[str] = frozenset()
    logit_scale: tuple[str, int] | None = None
    is_interleaved: bool = False
    has_partial_rope: bool = False
    scales_queries: bool = False
    without_rope: str | None = None
    experts: ExpertFlags | None = None
    slides: str | None = None
    has_window_switch: bool = False
    has_sinks: bool = False
    has_latents: bool = False
    norms_v: bool = False
    output_gate: str = ""
    has_gates_in_q: bool = False
    has_linear: bool = False
    has_layer_tail: bool = False
    next_tokens: NextTokens | None = None
    activation_key: str = "hidden_act"
    refuses: tuple[str, ...] = ()
    requires: Mapping[str, float | str] = field(default_factory=dict)
    text_types: tuple[str, ...] = ()
    text_defaults: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)


GEMMA: Final[Mapping[str, Any]] = {
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}

GLM: Final = Family(
    o_bias=False,
    fused=frozenset({"gate_up"}),
    is_interleaved=True,
    has_partial_rope=True,
    defaults={
        "rms_norm_eps": 1.5625e-07,
        "attention_bias": True,
        "head_dim": 128,
        "partial_rotary_factor": 0.5,
    },
)
COHERE: Final = Family(
    norms=("input_layernorm", None, None, None),
    is_parallel=True,
    norm="layer",
    eps_key="layer_norm_eps",
    logit_scale=("logit_scale", 1),
    is_interleaved=True,
    refuses=("use_qk_norm",),
    defaults={
        "layer_norm_eps": 1e-5,
        "logit_scale": 0.0625,
        "tie_word_embeddings": True,
        "rope_theta": 5e5,
    },
)
GEMMA_2: Final = Family(
    norms=SANDWICH,
    norm_offset=1.0,
    scales_embedding=True,
    slides="pattern",
    activation_key="hidden_activation",
    options=SOFTCAPS,
    text_types=("gemma2",),
    defaults={
        **GEMMA,
        **WINDOW,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
)
GEMMA_4: Final = Family(
    norms=SANDWICH,
    scales_embedding=True,
    qk_norm="head",
    norms_v=True,
    has_layer_tail=True,
    slides="not last of 6 nor of all",
    activation_key="hidden_activation",
    options=frozenset({"final_logit_softcapping"}),
    text_types=("gemma4_text",),
    defaults={
        **GEMMA,
        "query_pre_attn_scalar": 1,
        "sliding_window": 512,
        "global_head_dim": 512,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262144,
        "rope_theta": 1e6,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": {
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
        },
    },
    experts=ExpertFlags(
        module="",
        router="router.proj",
        count_keys=("num_experts",),
        top_k_key="top_k_experts",
        normalises=True,
        gate="gelu_tanh",
        packed=Packed(),
        switch="enable_moe_block",
        is_beside=True,
    ),
)
QWEN_NEXT: Final = Family(
    norm_offset=1.0,
    qkv_bias=False,
    o_bias=False,
    qk_norm="head",
    output_gate="sigmoid",
    has_gates_in_q=True,
    has_linear=True,
    has_partial_rope=True,
    fused=frozenset({"qkvz"}),
    refuses=("attention_bias",),
    defaults={
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True,
        "mtp_num_hidden_layers": 1,
    },
    next_tokens=QWEN_MTP,
    experts=ExpertFlags(
        dense="step",
        shared="shared_expert",
        shared_keys=("shared_expert_intermediate_size",),
        shared_gate="shared_expert_gate",
        packed=Packed(),
    ),
)
ERNIE: Final = Family(
    qkv_bias="use_bias",
    o_bias="use_bias",
    mlp_bias="use_bias",
    is_interleaved=True,
    defaults={"rms_norm_eps": 1e-5, "rope_theta": 5e5, "head_dim": 128, "tie_word_embeddings": True},
)
# transformers' defaults that all models with latents have in common.
LATENT: Final[Mapping[str, Any]] = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
DEEPSEEK_3: Final = Family(
    has_latents=True,
    is_interleaved=True,
    refuses=("index_topk",),
    text_types=("deepseek_v3", "kimi_k2"),
    defaults={
        **LATENT,
        "q_lora_rank": 1536,
        "n_group": 8,
        "topk_group": 4,
        "n_shared_experts": 1,
        "first_k_dense_replace": 3,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "num_nextn_predict_layers": 1,
    },
    next_tokens=DEEPSEEK_MTP,
    experts=GROUPED,
)
FAMILIES: Final[Mapping[str, Family]] = MappingProxyType(
    {
        "LlamaForCausalLM": Family(
            mlp_bias="mlp_bias",
            text_types=("llama",),
            text_defaults=dict(zip(SIZES, (32000, 4096, 11008, 32, 32, None, 2048), strict=True)),
        ),
        "MistralForCausalLM": Family(
            qkv_bias=False,
            o_bias=False,
            slides="all",
            text_types=("mistral",),
            text_defaults=dict(zip(SIZES, (32000, 4096, 14336, 32, 32, 8, 131072), strict=True)),
            defaults=WINDOW,
        ),
        "Ministral3ForCausalLM": Family(
            qkv_bias=False,
            o_bias=False,
            scales_queries=True,
            slides="all",
            text_types=("ministral3",),
            defaults={"rms_norm_eps": 1e-5, "head_dim": 128},
        ),
        "MinistralForCausalLM": Family(qkv_bias=False, o_bias=False, slides="listed", defaults=WINDOW),
        "Qwen2ForCausalLM": Family(
            qkv_bias=True,
            o_bias=False,
            slides="last",
            has_window_switch=True,
            text_types=("qwen2", "qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"),
            defaults=WINDOW,
        ),
        "Qwen3ForCausalLM": Family(
            qk_norm="head",
            slides="last",
            has_window_switch=True,
            text_types=("qwen3", "qwen3_vl_text"),
            defaults=WINDOW | {"head_dim": 128},
        ),
        "Phi3ForCausalLM": Family(
            qkv_bias=False,
            o_bias=False,
            fused=frozenset({"qkv", "gate_up"}),
            has_partial_rope=True,
            slides="all",
            text_types=("phi3",),
            defaults={"rms_norm_eps": 1e-5},
        ),
        "PhiForCausalLM": Family(
            norms=("input_layernorm", None, None, None),
            is_parallel=True,
            norm="layer",
            norm_bias=True,
            eps_key="layer_norm_eps",
            qkv_bias=True,
            o_bias=True,
            mlp_bias=True,
            head_bias=True,
            is_gated=False,
            names={"o_proj": "dense", "up_proj": "fc1", "down_proj": "fc2", "norm": "final_layernorm"},
            has_partial_rope=True,
            refuses=("qk_layernorm",),
            defaults={"layer_norm_eps": 1e-5, "hidden_act": "gelu_new", "partial_rotary_factor": 0.5},
        ),
        "SmolLM3ForCausalLM": Family(
            mlp_bias="mlp_bias",
            without_rope="listed",
            has_window_switch=True,
            defaults={"rope_theta": 2e6, "tie_word_embeddings": True, "no_rope_layer_interval": 4},
        ),
        "SeedOssForCausalLM": Family(o_bias="attention_out_bias", defaults={"attention_bias": True, "head_dim": 128}),
        "CwmForCausalLM": Family(
            qkv_bias=False,
            o_bias=False,
            slides="not first of 4",
            defaults={
                "rms_norm_eps": 1e-5,
                "head_dim": 128,
                "sliding_window": 8192,
                "rope_theta": 1e6,
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 16.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 8192,
                },
            },
        ),
        "ArceeForCausalLM": Family(
            mlp_bias="mlp_bias", is_gated=False, defaults={"rms_norm_eps": 1e-5, "hidden_act": "relu2"}
        ),
        "GraniteForCausalLM": Family(
            mlp_bias="mlp_bias",
            options=MULTIPLIERS,
            logit_scale=("logits_scaling", -1),
            defaults={"attention_multiplier": 1.0},
        ),
        "HyperCLOVAXForCausalLM": Family(
            norms=("input_layernorm", "post_norm1", "post_attention_layernorm", "post_norm2"),
            mlp_bias="mlp_bias",
            options=MULTIPLIERS,
            logit_scale=("logits_scaling", 1),
        ),
        "GlmForCausalLM": GLM,
        "Glm4ForCausalLM": replace(
            GLM,
            norms=("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
        ),
        "HeliumForCausalLM": Family(
            o_bias=False, is_interleaved=True, defaults={"rms_norm_eps": 1e-8, "rope_theta": 1e5, "head_dim": 128}
        ),
        "Ernie4_5ForCausalLM": ERNIE,
        "CohereForCausalLM": COHERE,
        "Cohere2ForCausalLM": replace(
            COHERE,
            refuses=(),
            without_rope="full",
            slides="pattern",
            text_types=("cohere2",),
            defaults={**COHERE.defaults, **WINDOW, "rope_theta": 1e4, "sliding_window_pattern": 4},
        ),
        "Olmo2ForCausalLM": Family(norms=POST, qk_norm="all", defaults={"rms_norm_eps": 1e-5}),
        "Olmo3ForCausalLM": Family(
            norms=POST,
            qk_norm="all",
            slides="pattern",
            defaults={
                "rms_norm_eps": 1e-5,
                "rope_theta": 5e5,
                "rope_local_base_freq": 5e5,
                "sliding_window_pattern": 4,
                **WINDOW,
            },
        ),
        "Exaone4ForCausalLM": Family(
            norms=POST,
            qkv_bias=False,
            o_bias=False,
            qk_norm="head",
            without_rope="full",
            slides="pattern",
            defaults={"rms_norm_eps": 1e-5, "sliding_window_pattern": 4, **WINDOW},
        ),
        "StableLmForCausalLM": Family(
            norm="layer",
            norm_bias=True,
            eps_key="layer_norm_eps",
            qkv_bias="use_qkv_bias",
            o_bias=False,
            has_partial_rope=True,
            refuses=("qk_layernorm", "use_parallel_residual"),
            defaults={"layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25},
        ),
        "Starcoder2ForCausalLM": Family(
            norm="layer",
            norm_bias=True,
            eps_key="norm_epsilon",
            qkv_bias="use_bias",
            o_bias="use_bias",
            mlp_bias="use_bias",
            is_gated=False,
            names={"up_proj": "c_fc", "down_proj": "c_proj"},
            slides="all",
            defaults={
                "norm_epsilon": 1e-5,
                "hidden_act": "gelu_pytorch_tanh",
                "use_bias": True,
                "tie_word_embeddings": True,
            },
        ),
        "NemotronForCausalLM": Family(
            norm="layer",
            norm_bias=True,
            norm_offset=1.0,
            eps_key="norm_eps",
            mlp_bias="mlp_bias",
            is_gated=False,
            has_partial_rope=True,
            defaults={"norm_eps": 1e-5, "hidden_act": "relu2", "partial_rotary_factor": 0.5},
        ),
        "Jais2ForCausalLM": Family(
            norm="layer",
            norm_bias=True,
            eps_key="layer_norm_eps",
            mlp_bias="mlp_bias",
            is_gated=False,
            defaults={"layer_norm_eps": 1e-5, "hidden_act": "relu2", "attention_bias": True, "mlp_bias": True},
        ),
        "GemmaForCausalLM": Family(
            norm_offset=1.0,
            scales_embedding=True,
            defaults={**GEMMA, "hidden_act": "gelu_pytorch_tanh"},
        ),
        "Gemma2ForCausalLM": GEMMA_2,
        "VaultGemmaForCausalLM": replace(
            GEMMA_2, norms=("input_layernorm", None, "pre_feedforward_layernorm", None), text_types=()
        ),
        "Gemma3ForCausalLM": Family(
            norms=SANDWICH,
            norm_offset=1.0,
            qk_norm="head",
            scales_embedding=True,
            slides="pattern",
            activation_key="hidden_activation",
            text_types=("gemma3_text",),
            text_defaults=dict(zip(SIZES, (262208, 2304, 9216, 26, 8, 4, 131072), strict=True)),
            defaults={
                **GEMMA,
                "query_pre_attn_scalar": 256,
                "rope_local_base_freq": 10000.0,
                "rope_theta": 1e6,
                **WINDOW,
                "sliding_window_pattern": 6,
            },
        ),
        "Qwen3MoeForCausalLM": Family(
            qk_norm="head",
            slides="all",
            has_window_switch=True,
            defaults=WINDOW,
            text_types=("qwen3_vl_moe_text",),
            text_defaults={"norm_topk_prob": True},
            experts=ExpertFlags(dense="step", packed=Packed()),
        ),
        "Qwen3NextForCausalLM": QWEN_NEXT,
        "Qwen3_5ForCausalLM": replace(QWEN_NEXT, fused=frozenset(), experts=None, text_types=("qwen3_5_text",)),
        "Qwen3_5MoeForCausalLM": replace(
            QWEN_NEXT,
            fused=frozenset(),
            text_types=("qwen3_5_moe_text",),
            defaults={**QWEN_NEXT.defaults, "intermediate_size": 512},
            experts=ExpertFlags(
                normalises=True,
                shared="shared_expert",
                shared_keys=("shared_expert_intermediate_size",),
                shared_gate="shared_expert_gate",
                packed=Packed(),
            ),
        ),
        "MixtralForCausalLM": Family(
            qkv_bias=False,
            o_bias=False,
            experts=MIXTRAL,
            slides="all",
            defaults={"rms_norm_eps": 1e-5, "rope_theta": 1e6},
        ),
        "GptOssForCausalLM": Family(
            has_sinks=True,
            slides="pattern",
            defaults={
                "rms_norm_eps": 1e-5,
                "rope_theta": 150000.0,
                "head_dim": 64,
                "attention_bias": True,
                "sliding_window": 128,
                "sliding_window_pattern": 2,
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 32.0,
                    "beta_fast": 32.0,
                    "beta_slow": 1.0,
                    "truncate": False,
                    "original_max_position_embeddings": 4096,
                },
            },
            requires={"swiglu_limit": 7.0, "swiglu_alpha": 1.702},
            experts=ExpertFlags(
                router="router",
                size_key="intermediate_size",
                normalises=True,
                gate="clamped",
                has_bias=True,
                packed=Packed(is_interleaved=True),
            ),
        ),
        "Gemma4ForCausalLM": GEMMA_4,
        "Gemma4UnifiedForCausalLM": replace(
            GEMMA_4,
            text_types=("gemma4_unified_text",),
            defaults={**GEMMA_4.defaults, "sliding_window": 1024, "hidden_size_per_layer_input": 0},
            experts=None,
        ),
        "LagunaForCausalLM": Family(
            qk_norm="head",
            has_partial_rope=True,
            output_gate="softplus",
            slides="if listed",
            refuses=("moe_apply_router_weight_on_input",),
            defaults={
                "head_dim": 128,
                "sliding_window": 512,
                "first_k_dense_replace": 1,
                "shared_expert_intermediate_size": 512,
                "rope_local_base_freq": 10000.0,
                "rope_scaling": {
                    "full_attention": {"rope_theta": 5e5, "partial_rotary_factor": 0.5},
                },
            },
            experts=ExpertFlags(
                count_keys=("num_experts",),
                normalises=True,
                dense="listed",
                scoring="sigmoid",
                bias="experts.e_score_correction_bias",
                scale_key="moe_routed_scaling_factor",
                softcap_key="moe_router_logit_softcapping",
                shared="shared_expert",
                shared_keys=("shared_expert_intermediate_size",),
            ),
        ),
        "AfmoeForCausalLM": Family(
            norms=("input_layernorm", "post_attention_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm"),
            qk_norm="head",
            names={"g_proj": "gate_proj"},
            scales_embedding="mup_enabled",
            without_rope="full",
            slides="not every n-th",
            output_gate="sigmoid",
            requires={"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1},
            defaults={
                "rms_norm_eps": 1e-5,
                "head_dim": 128,
                "sliding_window": 1024,
                "global_attn_every_n_layers": 4,
                "gating": "per-element",
                "num_dense_layers": 1,
                "num_shared_experts": 2,
            },
            experts=ExpertFlags(
                router="router.gate",
                count_keys=("num_experts",),
                normalises=True,
                dense="first n",
                scoring="sigmoid",
                bias="expert_bias",
                scale_key="route_scale",
                shared="shared_experts",
                shared_keys=("moe_intermediate_size", "num_shared_experts"),
            ),
        ),
        "MellumForCausalLM": Family(
            qk_norm="head",
            slides="if listed",
            defaults={
                "head_dim": 128,
                "sliding_window": 1024,
                "norm_topk_prob": True,
                "rope_local_base_freq": 10000.0,
                "rope_theta": 5e5,
            },
            experts=ExpertFlags(dense="listed"),
        ),
        "GraniteMoeForCausalLM": Family(
            options=MULTIPLIERS,
            logit_scale=("logits_scaling", -1),
            defaults={"attention_multiplier": 1.0},
            experts=replace(
                MIXTRAL,
                router="router.layer",
                parts=("gate_proj", "up_proj", "down_proj"),
                packed=Packed("input_linear", "output_linear"),
            ),
        ),
        "Qwen2MoeForCausalLM": Family(
            qkv_bias="qkv_bias",
            o_bias=False,
            slides="even, not last",
            has_window_switch=True,
            defaults=WINDOW | {"qkv_bias": True, "shared_expert_intermediate_size": 5632},
            experts=ExpertFlags(
                dense="step",
                shared="shared_expert",
                shared_keys=("shared_expert_intermediate_size",),
                shared_gate="shared_expert_gate",
            ),
        ),
        "OlmoeForCausalLM": Family(
            qk_norm="all",
            refuses=("clip_qkv",),
            defaults={"rms_norm_eps": 1e-5},
            experts=ExpertFlags(size_key="intermediate_size"),
        ),
        "FlexOlmoForCausalLM": Family(
            norms=POST,
            qk_norm="all",
            defaults={"rope_theta": 5e5},
            experts=ExpertFlags(size_key="intermediate_size"),
        ),
        "Glm4MoeForCausalLM": Family(
            o_bias=False,
            qk_norm="head",
            qk_norm_key="use_qk_norm",
            has_partial_rope=True,
            defaults={
                "rms_norm_eps": 1e-5,
                "partial_rotary_factor": 0.5,
                "norm_topk_prob": True,
                "first_k_dense_replace": 1,
                "n_shared_experts": 1,
                "num_nextn_predict_layers": 1,
            },
            experts=GROUPED,
            next_tokens=DEEPSEEK_MTP,
        ),
        "SolarOpenForCausalLM": Family(
            o_bias=False,
            has_partial_rope=True,
            defaults={
                "rms_norm_eps": 1e-5,
                "rope_theta": 1e6,
                "head_dim": 128,
                "norm_topk_prob": True,
                "n_shared_experts": 1,
            },
            experts=replace(GROUPED, dense=None),
        ),
        "Dots1ForCausalLM": Family(
            qk_norm="head",
            slides="last",
            defaults={**WINDOW, "max_window_layers": 62},
            experts=GROUPED,
        ),
        "ExaoneMoeForCausalLM": Family(
            qkv_bias=False,
            o_bias=False,
            qk_norm="head",
            without_rope="full",
            slides="pattern",
            defaults={
                "rms_norm_eps": 1e-5,
                "sliding_window_pattern": 4,
                **WINDOW,
                "first_k_dense_replace": 1,
                "norm_topk_prob": True,
                "routed_scaling_factor": 2.5,
                "num_shared_experts": 1,
            },
            experts=replace(
                GROUPED,
                count_keys=("num_experts", "num_local_experts"),
                dense="listed",
                bias="e_score_correction_bias",
                shared_keys=("moe_intermediate_size", "num_shared_experts"),
            ),
        ),
        "MiniMaxM2ForCausalLM": Family(
            qkv_bias=False,
            o_bias=False,
            qk_norm="all",
            has_partial_rope=True,
            defaults={"rope_theta": 5e6, "head_dim": 128},
            experts=replace(MIXTRAL, scoring="sigmoid", bias="e_score_correction_bias"),
        ),
        "DeepseekV2ForCausalLM": Family(
            has_latents=True,
            is_interleaved=True,
            mlp_bias="mlp_bias",
            text_types=("deepseek_v2",),
            defaults={
                **LATENT,
                "q_lora_rank": 1536,
                "n_shared_experts": 2,
                "topk_method": "greedy",
            },
            experts=replace(GROUPED, scoring="softmax", bias="", group_best=1, normalises=False),
        ),
        "DeepseekV3ForCausalLM": DEEPSEEK_3,
        "Glm4MoeLiteForCausalLM": replace(
            DEEPSEEK_3,
            text_types=("glm4_moe_lite",),
            defaults={
                **LATENT,
                "q_lora_rank": 768,
                "qk_nope_head_dim": 192,
                "v_head_dim": 256,
                "rms_norm_eps": 1e-5,
                "n_shared_experts": 1,
                "first_k_dense_replace": 1,
                "norm_topk_prob": True,
                "routed_scaling_factor": 1.8,
            },
            experts=replace(GROUPED, dense="listed"),
        ),
        "Mistral4ForCausalLM": replace(
            DEEPSEEK_3,
            scales_queries=True,
            text_types=("mistral4",),
            defaults={
                **LATENT,
                "q_lora_rank": 1024,
                "kv_lora_rank": 256,
                "qk_nope_head_dim": 64,
                "n_shared_experts": 1,
                "norm_topk_prob": True,
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 128.0,
                    "original_max_position_embeddings": 8192,
                    "mscale": 1.0,
                    "mscale_all_dim": 1.0,
                    "llama_4_scaling_beta": 0.1,
                },
            },
            experts=replace(GROUPED, scoring="softmax", bias="", packed=Packed()),
        ),
        "Ernie4_5_MoeForCausalLM": replace(
            ERNIE,
            defaults={
                "rms_norm_eps": 1e-5,
                "rope_theta": 5e5,
                "tie_word_embeddings": True,
                "moe_layer_start_index": 1,
                "moe_layer_interval": 1,
                "moe_num_shared_experts": 2,
            },
            experts=ExpertFlags(
                count_keys=("moe_num_experts", "num_local_experts"),
                top_k_key="moe_k",
                normalises=True,
                dense="interval",
                bias="moe_statics.e_score_correction_bias",
                bias_rows=1,
                shared="shared_experts",
                shared_keys=("moe_intermediate_size", "moe_num_shared_experts"),
            ),
        ),
    }
)
