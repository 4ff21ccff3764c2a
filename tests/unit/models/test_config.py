"""config.json: both generations of it are read, and nothing that matters is ignored."""

from __future__ import annotations

import pytest
from transformers import Gemma4TextConfig

from contract.checkpoints import LLAMA3_ROPE, architecture, configurations
from minisgl.core.errors import ConfigError
from minisgl.models.model_config import ModelConfig

BASE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}


def make(architecture: str = "Llama", **changes) -> ModelConfig:
    return ModelConfig.from_hf({**BASE, "architectures": [f"{architecture}ForCausalLM"], **changes})


def test_defaults():
    c = make()
    assert (c.head_dim, c.num_kv_heads, c.rope.theta, c.dtype) == (16, 4, 10000.0, "float32")
    assert not (c.qkv_bias or c.o_bias or c.mlp_bias or c.qk_norm or c.tie_word_embeddings)
    assert make(num_key_value_heads=None, head_dim=None) == c


def test_families_differ_by_flags():
    assert make("Qwen2").qkv_bias and not make("Qwen2", attention_bias=True).o_bias
    assert make("Qwen3").qk_norm and make("Qwen3", attention_bias=True).o_bias
    assert make(mlp_bias=True).mlp_bias and not make("Qwen3", mlp_bias=True).mlp_bias


def test_rope_parameters_and_rope_scaling_are_equivalent():
    scaling = {k: v for k, v in LLAMA3_ROPE.items() if k != "rope_theta"}
    old = make(rope_theta=5e5, rope_scaling=scaling, torch_dtype="bfloat16")
    new = make(rope_parameters={**LLAMA3_ROPE, "rope_theta": 5e5}, dtype="bfloat16")
    assert old == new and old.rope.type == "llama3" and old.rope.theta == 5e5 and old.dtype == "bfloat16"
    legacy = make(rope_scaling={"type": "linear", "factor": 2.0})
    assert legacy.rope.type == "linear" and legacy.rope.factor == 2.0
    assert make(rope_scaling=None, rope_theta=7.0).rope.theta == 7.0


@pytest.mark.parametrize("name", configurations())
def test_configs_written_by_transformers_are_read(name: str):
    theirs = configurations()[name]
    raw = {**theirs.to_dict(), "architectures": [architecture(theirs)]}
    assert make().rope is not None and ModelConfig.from_hf(raw).num_layers == theirs.num_hidden_layers


@pytest.mark.parametrize("name", configurations())
def test_absent_fields_mean_what_transformers_assumes(name: str):
    theirs = configurations()[name]
    raw = {**theirs.to_dict(), "architectures": [architecture(theirs)], "max_position_embeddings": 32768}
    if "use_sliding_window" in raw:
        raw |= {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 77}
        raw.pop("layer_types", None)
    # A wrong number of KV heads is seen in the weights. Phi-3's original context has a default that few models have.
    for key in raw.keys() - {"num_key_value_heads", "original_max_position_embeddings"}:
        less = {k: v for k, v in raw.items() if k != key}
        try:
            ours = ModelConfig.from_hf(less)
        except ConfigError:
            continue  # not assumed here
        try:
            full = type(theirs).from_dict(less).to_dict()
        except ZeroDivisionError:  # of EXAONE 4 without windows
            continue
        assert ours == ModelConfig.from_hf({**full, "architectures": raw["architectures"]}), key


def test_the_number_of_rotated_elements_counts_only_where_heads_rotate_in_part():
    raw = configurations()["minimax-m2"].to_dict() | {"architectures": ["MiniMaxM2ForCausalLM"], "rotary_dim": 8}
    raw["rope_parameters"] = {"rope_type": "default", "rope_theta": 3e4}
    assert ModelConfig.from_hf(raw).rope.dim == 8
    assert make(rotary_dim=8).rope.dim is None  # transformers does not read it for Llama


def test_transformers_pads_the_numbers_of_layers():
    raw = Gemma4TextConfig(num_hidden_layers=12).to_dict() | {"architectures": ["Gemma4ForCausalLM"]}
    assert raw["per_layer_config"].keys() == {"05", "11"}
    assert [layer.head_dim for layer in ModelConfig.from_hf(raw).layers] == [*[256] * 5, 512] * 2


def refusal(config: dict) -> str:
    try:
        ModelConfig.from_hf(config)
    except ConfigError as e:
        return str(e)
    return ""


ODD = [None, -1, 0, 1.5, "x", "", [], {}, [None], [[]], {"a": 1}, True, float("inf"), float("nan"), 10**30, 10**400]


@pytest.mark.parametrize("name", configurations())
def test_odd_values_are_read_or_refused(name: str):
    theirs = configurations()[name]
    raw = {**theirs.to_dict(), "architectures": [architecture(theirs)]}
    raw |= dict.fromkeys(("rope_scaling", "quantization_config", "rope_theta", "attn_logit_softcapping"))
    ropes = raw["rope_parameters"]
    cases = [{key: odd} for key in raw for odd in ODD]
    cases += [{"rope_parameters": {**ropes, key: odd}} for key in ropes for odd in ODD]
    for changes in cases:
        said = refusal({**raw, **changes})
        assert "\n" not in said and len(said) < 1000, changes


def test_yarn():
    rope = make(rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}).rope
    assert (rope.type, rope.original_max_position_embeddings, rope.beta_fast, rope.truncate) == ("yarn", 32, 32.0, True)
    assert rope.attention_factor == pytest.approx(1.1386294)  # 0.1 ln 4 + 1
    outside = make(
        rope_scaling={"type": "yarn", "original_max_position_embeddings": 16}, original_max_position_embeddings=64
    )
    assert (outside.rope.original_max_position_embeddings, outside.rope.factor) == (64, 2.0)


QWEN3_MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


def test_experts():
    assert make("Qwen3").experts is None
    old, new = make("Qwen3Moe", **QWEN3_MOE).experts, make("Qwen3Moe", **QWEN3_MOE, num_local_experts=6).experts
    assert old == new and old is not None
    assert (old.count, old.top_k, old.intermediate_size, old.normalise, old.dense_layers) == (6, 2, 24, False, set())
    some = make("Qwen3Moe", **QWEN3_MOE, num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3]).experts
    assert some is not None and some.dense_layers == {0, 2, 3, 4}
    mixtral = make("Mixtral", num_local_experts=4, num_experts_per_tok=1, norm_topk_prob=False)
    assert mixtral.experts is not None and mixtral.experts.normalise and mixtral.experts.intermediate_size == 96
    assert mixtral.rope.theta == 1e6 and mixtral.rms_norm_eps == 1e-5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": None}, "num_local_experts=None"),
        ({"num_local_experts": 5}, "num_local_experts=5 but num_experts=6"),
        ({"num_experts_per_tok": 7}, "7 is more than the 6 experts"),
        ({"num_experts_per_tok": None}, "num_experts_per_tok=None"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size=None"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step=0"),
        ({"mlp_only_layers": "all"}, "mlp_only_layers='all'"),
        ({"hidden_act": "gelu_pytorch_tanh"}, "'gelu_pytorch_tanh' is not supported; supported: silu, swish$"),
    ],
)
def test_unsupported_experts_are_refused(changes: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        make("Qwen3Moe", **{**QWEN3_MOE, **changes})


REFUSED = {
    "architecture": (
        {"architectures": ["GPT2LMHeadModel"]},
        "GPT2LMHeadModel is not supported; try --model-impl transformers, or Llama",
    ),
    "another router": (
        {"architectures": ["AfmoeForCausalLM"], "score_func": "softmax"},
        "score_func='softmax' is not supported; only sigmoid is",
    ),
    "groups of experts": (
        {"architectures": ["AfmoeForCausalLM"], "n_group": 4},
        "n_group=4 is not supported; only 1 is",
    ),
    "no architecture": ({"architectures": None}, "must name one of"),
    "quantized": ({"quantization_config": {"quant_method": "hqq"}}, r"quantized by hqq, .* supported: fp8,.* awq"),
    "quantized, somehow": ({"quantization_config": {}}, r"quantized by a method without a name"),
    "no object": ({"quantization_config": []}, r"quantization_config=\[\]; an object"),
    "AWQ of 3 bits": ({"quantization_config": {"quant_method": "awq", "bits": 3}}, r"bits=3.* supported: 4"),
    "AWQ for GEMV": (
        {"quantization_config": {"quant_method": "awq", "bits": 4, "version": "gemv"}},
        r"version='gemv'.* supported: gemm",
    ),
    "AWQ for GEMV by GPTQModel": (
        {"quantization_config": {"quant_method": "awq", "bits": 4, "checkpoint_format": "gemv_fast"}},
        r"checkpoint_format='gemv_fast'.* supported: gemm",
    ),
    "AWQ for llm-awq": (
        {"quantization_config": {"quant_method": "awq", "bits": 4, "version": "gemm", "backend": "llm-awq"}},
        r"backend='llm-awq', whose packing is not supported",
    ),
    "AutoRound": ({"quantization_config": {"quant_method": "auto-round", "bits": 4}}, r"quantized by auto-round, "),
    "MLX": ({"quantization_config": {"group_size": 64, "bits": 4}}, r"quantized by a method without a name"),
    "GPTQ of 2 bits": ({"quantization_config": {"quant_method": "gptq", "bits": 2}}, r"bits=2.* supported: 4, 8"),
    "GPTQ of no bits": ({"quantization_config": {"quant_method": "GPTQ"}}, r"bits=None.* supported: 4, 8"),
    "Marlin": (
        {"quantization_config": {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}},
        r"checkpoint_format='marlin'.* supported: gptq, gptq_v2",
    ),
    "Marlin, as it was first written": (
        {"quantization_config": {"desc_act": False, "bits": 4, "is_marlin_format": True}},
        r"is_marlin_format=True.* supported: False",
    ),
    "GPTQModel's other name": (
        {"quantization_config": {"quant_method": "gptq", "bits": 4, "format": "bitblas"}},
        r"format='bitblas'.* supported: gptq, gptq_v2",
    ),
    "rotated": (
        {"quantization_config": {"format": "pack-quantized", "config_groups": {}, "transform_config": {"a": 1}}},
        r"transform_config: rotations",
    ),
    "sparse": (
        {"quantization_config": {"format": "marlin-24", "config_groups": {}}},
        r"format='marlin-24', which is not supported",
    ),
    "blocks": ({"quantization_config": {"quant_method": "fp8", "weight_block_size": 128}}, r"weight_block_size=128"),
    "NVFP4": ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}, r"quant_algo='NVFP4'"),
    "no groups": (
        {"quantization_config": {"quant_method": "compressed-tensors", "format": "int-quantized"}},
        r"no config_groups with weights",
    ),
    "images": (
        {"architectures": ["LlavaForConditionalGeneration"], "vocab_size": None},
        "the text part of LlavaForConditionalGeneration is a None, which is not supported",
    ),
    "too many layers": ({"num_hidden_layers": 10**30}, "from 1 to 4096"),
    "activation": ({"hidden_act": "gelu"}, "'gelu'"),
    "window": ({"sliding_window": 32}, "sliding_window=32 is not supported"),
    "softcapping of logits": ({"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0 is not supported"),
    "softcapping of scores": ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0 is not supported"),
    "both directions": ({"use_bidirectional_attention": True}, "only causal"),
    "both directions, as embedding models say it": ({"is_causal": False}, "only causal"),
    "number of layer types": ({"layer_types": ["full_attention"]}, "for 2 layers"),
    "layer types": ({"layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
    "rope type": ({"rope_scaling": {"rope_type": "mrope", "factor": 4.0}}, "'mrope' is not supported yet"),
    "longrope": ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "a list of 8 numbers is needed"),
    "longrope factors": ({"rope_scaling": {"type": "su", "short_factor": [1.0] * 7 + [0]}}, "short_factor=0"),
    "yarn betas": ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 0.5}}, "beta_fast 0.5 must not"),
    "yarn theta": ({"rope_theta": 1, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_theta above 1"),
    "yarn factor": ({"rope_scaling": {"rope_type": "yarn", "factor": 0}}, "factor=0"),
    "dynamic": ({"rope_parameters": {"rope_type": "dynamic"}}, "factor=None"),
    "rope by layer": ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "differ between layers"),
    "partial rotary": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    "factor": ({"rope_scaling": {"rope_type": "linear"}}, "factor=None"),
    "llama3 bounds": ({"rope_parameters": {**LLAMA3_ROPE, "high_freq_factor": 1.0}}, "high_freq_factor"),
    "heads": ({"num_key_value_heads": 3}, "4 attention heads cannot share 3"),
    "head_dim": ({"hidden_size": 66}, "head_dim is absent"),
    "odd head_dim": ({"head_dim": 15}, "odd"),
    "missing size": ({"vocab_size": None}, "vocab_size=None"),
    "wrong type": ({"hidden_size": "64"}, "hidden_size='64'"),
    "bool": ({"num_hidden_layers": True}, "num_hidden_layers=True"),
    "eps": ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case: str):
    changes, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message) as error:
        ModelConfig.from_hf({**BASE, **changes})
    assert "\n" not in str(error.value)


SLIDING = ["full_attention", "sliding_attention"]
ON = {"sliding_window": 32, "use_sliding_window": True}


@pytest.mark.parametrize(
    ("architecture", "changes", "windows"),
    [
        ("Qwen2", {"sliding_window": 32, "use_sliding_window": False}, (None, None)),
        ("Qwen2", {"sliding_window": 32}, (None, None)),
        ("Qwen2", {**ON, "max_window_layers": 1}, (None, 32)),
        ("Qwen2", {**ON, "max_window_layers": 0}, (32, 32)),
        ("Qwen3", {**ON, "max_window_layers": 2}, (None, None)),
        ("Qwen3", {**ON}, (None, None)),  # 28 layers see everything unless said
        ("Qwen3", {**ON, "layer_types": ["full_attention"] * 2}, (None, None)),
        ("Qwen3", {**ON, "layer_types": SLIDING[::-1]}, (32, None)),
        ("Qwen3Moe", {**QWEN3_MOE, **ON, "max_window_layers": 2}, (32, 32)),
        ("Qwen3Moe", {**QWEN3_MOE, "sliding_window": 32}, (None, None)),
        ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 1, "sliding_window": 9}, (9, 9)),
        ("Mistral", {"sliding_window": None}, (None, None)),
        ("Mistral", {"max_position_embeddings": 32768}, (4096, 4096)),
        ("Mistral", {"sliding_window": 4096}, (None, None)),
        ("Mistral", {"sliding_window": 64}, (64, 64)),
        ("Phi3", {"sliding_window": None}, (None, None)),
        ("Phi3", {"sliding_window": 64}, (64, 64)),
        ("Llama", {"sliding_window": 4096}, (None, None)),
    ],
)
def test_windows(architecture: str, changes: dict, windows: tuple[int | None, ...]):
    assert make(architecture, **changes).windows == windows


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("Mistral", {"sliding_window": 64, "layer_types": SLIDING}, "contradicts"),
        ("Mistral", {"sliding_window": 0}, "sliding_window=0"),
        ("Qwen3", {"sliding_window": 32, "layer_types": SLIDING}, "contradicts"),
        ("Qwen2", {**ON, "max_window_layers": None}, "max_window_layers=None"),
        ("Gemma3", {"sliding_window": None, "layer_types": SLIDING}, "contradicts"),
        ("Gemma3", {"sliding_window_pattern": "LG"}, "sliding_window_pattern='LG'"),
        ("Gemma3", {"hidden_activation": "gelu"}, "hidden_activation 'gelu' is not supported"),
        ("Gemma3", {"rope_parameters": {"full_attention": {"factor": {}}}}, "differ between layers"),
    ],
)
def test_contradictory_windows_are_refused(architecture: str, changes: dict, message: str):
    with pytest.raises(ConfigError, match=message) as error:
        make(architecture, **changes)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", ["su", "yarn", "longrope"])
def test_longrope_ends_the_context_at_the_original_length(kind: str):
    scaling = {"type": kind, "short_factor": [1.1] * 8, "long_factor": [2.0] * 8}
    c = make("Phi3", max_position_embeddings=131072, original_max_position_embeddings=4096, rope_scaling=scaling)
    assert (c.rope.type, c.max_position_embeddings) == ("longrope", 4096)
    assert c.rope.attention_factor == pytest.approx(1.1902380714)  # sqrt(1 + ln 32 / ln 4096)


def test_gemma3():
    """As the first checkpoints were written, and as transformers 5 writes the same."""
    layers = {"num_hidden_layers": 8, "head_dim": 64, "sliding_window": 16}
    old = make(
        "Gemma3",
        **layers,
        sliding_window_pattern=3,
        rope_theta=2e6,
        rope_local_base_freq=7e3,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        query_pre_attn_scalar=100,
    )
    assert old.windows == (16, 16, None, 16, 16, None, 16, 16)
    assert (old.rope.theta, old.rope.type, old.rope.factor) == (2e6, "linear", 8.0)
    assert (old.window_rope.theta, old.window_rope.type) == (7e3, "default")
    assert (old.attention_scale, old.activation, old.tie_word_embeddings) == (0.1, "gelu_tanh", True)
    ropes = {
        "full_attention": {"rope_type": "linear", "rope_theta": 2e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 7e3},
    }
    new = make(
        "Gemma3",
        **layers,
        layer_types=["full_attention" if window is None else "sliding_attention" for window in old.windows],
        rope_parameters=ropes,
        query_pre_attn_scalar=100,
        hidden_activation="gelu_pytorch_tanh",
    )
    assert new == old
    bare = make("Gemma3", num_hidden_layers=7, sliding_window=2)
    assert bare.windows == (2,) * 5 + (None, 2) and bare.head_dim == 256 and bare.attention_scale == 1 / 16
    assert (bare.rope.theta, bare.window_rope.theta) == (1e6, 1e4)
    wide = make("Gemma3", sliding_window=4096)
    assert wide.windows == (4096, 4096)  # hides nothing, and still decides which rope they have
