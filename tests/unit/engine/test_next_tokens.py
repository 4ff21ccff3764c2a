"""A checkpoint's own layer for further tokens drafts: texts stay equal, and drafts are what its formulas say."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from minisgl.core.errors import ConfigError
from minisgl.core.layout import Flag
from minisgl.core.params import SamplingParams
from minisgl.device.device import CpuDevice
from minisgl.engine.batch import make_batch
from minisgl.engine.engine import Engine
from minisgl.engine.fit import Checkpoint, Footprint
from minisgl.engine.resolve import resolve
from minisgl.engine.trial import spread_plan
from minisgl.models.attention import LATENT_EPS
from minisgl.ops.quantized import INT8
from minisgl.settings.options import EngineConfig
from support.late_device import LateDevice
from unit.engine.test_draft_models import seen_drafts
from unit.engine.test_drafts import LAYOUTS, SOME_LAYOUTS, VOCAB, Requests, make_requests, run

pytestmark = pytest.mark.usefixtures("fixed_costs")

HIDDEN, HEADS, KV_HEADS, DIM, INNER, EXPERTS, TOP_K, SCALE = 32, 4, 2, 16, 64, 6, 2, 1.5
EPS, THETA, LAYERS, ROTATED, RANK = 1e-5, 10000.0, 2, DIM // 2, 24
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": DIM,
    "max_position_embeddings": 160,
    "rms_norm_eps": EPS,
    "rope_theta": THETA,
    "torch_dtype": "float32",
    "eos_token_id": 0,
    "tie_word_embeddings": False,
}
GROUPED = COMMON | {
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": SCALE,
    "num_nextn_predict_layers": 1,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "glm": GROUPED | {"architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "use_qk_norm": True},
    "deepseek": GROUPED
    | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "first_k_dense_replace": 1,
        "q_lora_rank": None,
        "kv_lora_rank": RANK,
        "qk_nope_head_dim": DIM - ROTATED,
        "qk_rope_head_dim": ROTATED,
        "v_head_dim": DIM,
    },
    "qwen": COMMON
    | {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "partial_rotary_factor": ROTATED / DIM,
        "layer_types": ["full_attention", "linear_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 16,
    },
}
PAGED_LAYERS = {"glm": LAYERS, "deepseek": LAYERS, "qwen": 1}
STEPS = ["C++", "op by op and late"]
KINDS_AND_STEPS = [("glm", STEPS[0]), *((kind, STEPS[1]) for kind in CONFIGS)]  # in C++, the others are refused
# The names of the layer's own parts in a checkpoint, and of its decoder layer.
DEEPSEEK = tuple(f"model.layers.{LAYERS}.{name}" for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm", ""))
NAMES: Mapping[str, tuple[str, ...]] = {
    "glm": DEEPSEEK,
    "deepseek": DEEPSEEK,
    "qwen": ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm", "mtp.layers.0."),
}


def random_weights(kind: str) -> dict[str, Tensor]:
    """Weights of the layer, in the published layout."""
    torch.manual_seed(3)
    embedding_norm, hidden_norm, join, norm, layer = NAMES[kind]
    shapes: dict[str, tuple[int, ...]] = {
        embedding_norm: (HIDDEN,),
        hidden_norm: (HIDDEN,),
        join: (HIDDEN, 2 * HIDDEN),
        norm: (HIDDEN,),
        f"{layer}input_layernorm": (HIDDEN,),
        f"{layer}post_attention_layernorm": (HIDDEN,),
        f"{layer}self_attn.o_proj": (HIDDEN, HEADS * DIM),
        f"{layer}self_attn.q_proj": (HEADS * DIM * (1 + (kind == "qwen")), HIDDEN),
    }
    if kind == "deepseek":
        shapes[f"{layer}self_attn.kv_a_proj_with_mqa"] = RANK + ROTATED, HIDDEN
        shapes[f"{layer}self_attn.kv_a_layernorm"] = (RANK,)
        shapes[f"{layer}self_attn.kv_b_proj"] = HEADS * (2 * DIM - ROTATED), RANK
    else:
        shapes |= {f"{layer}self_attn.{name}_proj": (KV_HEADS * DIM, HIDDEN) for name in "kv"}
        shapes |= {f"{layer}self_attn.{name}_norm": (DIM,) for name in "qk"}
    mlps = {f"{layer}mlp": INNER}
    if kind != "qwen":
        mlps = {f"{layer}mlp.{name}": 32 for name in ("shared_experts", *(f"experts.{i}" for i in range(EXPERTS)))}
        shapes[f"{layer}mlp.gate"] = EXPERTS, HIDDEN
        shapes |= {f"{layer}embed_tokens": (VOCAB, HIDDEN), f"{layer}shared_head.head": (VOCAB, HIDDEN)}  # not read
    for name, size in mlps.items():
        shapes |= {f"{name}.gate_proj": (size, HIDDEN), f"{name}.up_proj": (size, HIDDEN)}
        shapes[f"{name}.down_proj"] = HIDDEN, size
    weights = {f"{name}.weight": 0.3 * torch.randn(shape) + (len(shape) == 1) for name, shape in shapes.items()}
    if kind == "glm":
        weights[f"{layer}self_attn.q_proj.bias"] = torch.randn(HEADS * DIM)
        weights[f"{layer}self_attn.k_proj.bias"] = torch.randn(KV_HEADS * DIM)
        weights[f"{layer}self_attn.v_proj.bias"] = torch.randn(KV_HEADS * DIM)
    if kind != "qwen":
        weights[f"{layer}mlp.gate.e_score_correction_bias"] = 0.2 * torch.randn(EXPERTS)
    return weights


def write(path: Path, config: dict[str, Any], weights: dict[str, Tensor] | None = None) -> Path:
    """Write a model, with `weights` besides random ones of its own layers."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    if weights is not None:
        torch.manual_seed(2)
        for p in cpu_engine(path, dummy_weight=True).parts.model.parameters:
            for s in p.sources:
                scale = 0.1 if len(s.shape) == 2 else 0.2
                weights[s.name] = torch.randn(s.shape) * scale + (len(s.shape) == 1 and "norm" in s.name)
        save_file(weights, path / "model.safetensors")
    return path


def cpu_engine(model: Path, **options: Any) -> Engine:
    config = EngineConfig(model=str(model), attention_backend="cpu", **options)
    return Engine(resolve(config, "cpu"), CpuDevice(1))


@pytest.fixture(scope="module")
def dummy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("models") / "glm", CONFIGS["glm"] | {"attention_bias": True})


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("layout", SOME_LAYOUTS)
def test_answers_are_equal_with_and_without_drafts(dummy: Path, layout: dict[str, Any], step: str) -> None:
    """Requests of every kind, with chunks, cached prefixes and preemption. A late device finds NaN in freed pages."""
    requests = make_requests(random.Random(5), 32 if "num_pages" in layout else 12)
    depth, devices = (0, (None, None)) if step == "C++" else (1, (CpuDevice(1), LateDevice(1)))
    plain, _ = run(dummy, requests, device=devices[0], **layout)
    drafted, scheduler = run(dummy, requests, depth, devices[1], speculate="mtp", **layout)
    assert drafted.tokens == plain.tokens and drafted.ends == plain.ends
    assert step != "C++" or drafted.logprobs == plain.logprobs
    assert scheduler.stats.drafted_tokens > 0
    assert scheduler.stats.cached_tokens > 0 or layout.get("cache_type") == "naive"


@pytest.mark.parametrize("kind", ["deepseek", "qwen"])
def test_answers_of_latents_and_recurrent_states_are_equal(kind: str, tmp_path: Path) -> None:
    """Some drafts are right and others are not, so states must not hold these; `auto` drafts with the layer, too.

    A draft model may have latents, and draft for a model with a recurrent state.
    """
    model = write(tmp_path / kind, CONFIGS[kind], random_weights(kind))
    draft = write(tmp_path / "draft", CONFIGS["deepseek" if kind == "qwen" else "glm"], {})
    requests = make_requests(random.Random(6), 9)
    layout: dict[str, Any] = {"page_size": 16, "max_prefill_length": 48, "num_pages": 40, "dummy_weight": False}
    plain, _ = run(model, requests, device=CpuDevice(1), **layout)
    for speculate in ("mtp", "auto", f"draft:{draft}"):
        drafted, scheduler = run(model, requests, 1, LateDevice(1), speculate=speculate, num_draft_tokens=3, **layout)
        assert drafted.tokens == plain.tokens and drafted.ends == plain.ends
        assert 0 < scheduler.stats.accepted_tokens < scheduler.stats.drafted_tokens
        assert scheduler.stats.cached_tokens > 0


class ReferenceLayer:
    """The formulas of the layer over whole sequences, without a cache."""

    def __init__(self, kind: str, engine: Engine, weights: dict[str, Tensor], rounds: bool) -> None:
        """`rounds`: the target's hidden states to 8 bits, as the C++ step keeps them."""
        self.kind, self.engine, self.weights, self.rounds = kind, engine, weights, rounds
        self.decoder = engine.parts.model.model

    def features(self, ids: list[int]) -> Tensor:
        """The target's hidden states [T, H] after its last norm."""
        parts = self.engine.parts
        plan = spread_plan([(0, 0, len(ids), Flag.SAMPLES)], self.engine.page_size, self.engine.blocks)
        plan = replace(plan, tokens=torch.tensor(ids, dtype=torch.int32).numpy())
        input_ids, batch, out_loc = parts.begin(make_batch(plan, parts.device))
        batch = replace(batch, logit_tokens=torch.arange(len(ids)))
        hidden = parts.model.normed(self.decoder.forward(input_ids, parts.context(batch, out_loc)))
        if not self.rounds:
            return hidden
        groups = hidden.unflatten(1, (-1, INT8.group))
        scale = groups.abs().amax(2, keepdim=True) / 127
        return ((groups / scale).round() * scale).flatten(1)

    def drafts(self, ids: list[int], count: int) -> list[int]:
        """The drafts after `ids`."""
        embedding_norm, hidden_norm, join, norm, _ = NAMES[self.kind]
        hidden, tokens, drafts = self.features(ids[:-1]), ids[1:], []
        for _ in range(count):
            embedded = self.decoder.embed_tokens.weight[tokens]
            joined = torch.cat([self.normed(embedded, embedding_norm), self.normed(hidden, hidden_norm)], 1)
            x = self.layer(joined @ self.weights[f"{join}.weight"].T)
            last = self.normed(x, norm)[-1:]
            drafts.append(int((last @ self.engine.parts.model.lm_head.weight.T).argmax()))
            hidden, tokens = torch.cat([hidden, last]), [*tokens, drafts[-1]]
        return drafts

    def normed(self, x: Tensor, name: str) -> Tensor:
        is_latent = name.endswith("kv_a_layernorm")
        weight = self.weights[f"{name}.weight"] + (self.kind == "qwen")
        return F.rms_norm(x, x.shape[-1:], weight, LATENT_EPS if is_latent else EPS)

    def layer(self, x: Tensor) -> Tensor:
        w, prefix = self.weights, NAMES[self.kind][4]
        x = x + self.attention(self.normed(x, f"{prefix}input_layernorm"), f"{prefix}self_attn")
        normed = self.normed(x, f"{prefix}post_attention_layernorm")
        if self.kind == "qwen":
            return x + self.mlp(normed, f"{prefix}mlp")
        scores = (normed @ w[f"{prefix}mlp.gate.weight"].T).sigmoid()
        chosen = (scores + w[f"{prefix}mlp.gate.e_score_correction_bias"]).topk(TOP_K, 1).indices
        factors = torch.zeros_like(scores).scatter(1, chosen, scores.gather(1, chosen))
        factors = SCALE * factors / factors.sum(1, keepdim=True)
        experts = torch.stack([self.mlp(normed, f"{prefix}mlp.experts.{i}") for i in range(EXPERTS)], 1)
        return x + (factors[:, :, None] * experts).sum(1) + self.mlp(normed, f"{prefix}mlp.shared_experts")

    def attention(self, x: Tensor, module: str) -> Tensor:
        def heads(name: str, size: int, x: Tensor = x) -> Tensor:
            w, bias = (self.weights.get(f"{module}.{name}.{kind}") for kind in ("weight", "bias"))
            return F.linear(x, w, bias).unflatten(1, (-1, size)).transpose(0, 1)

        gates = 1.0
        if self.kind == "deepseek":
            latent, rotated = heads("kv_a_proj_with_mqa", RANK + ROTATED)[0].split([RANK, ROTATED], 1)
            whole = heads("kv_b_proj", 2 * DIM - ROTATED, self.normed(latent, f"{module}.kv_a_layernorm"))
            k, v = whole.split([DIM - ROTATED, DIM], 2)
            q, q_rotated = heads("q_proj", DIM).split([DIM - ROTATED, ROTATED], 2)
            q = torch.cat([q, self.rotated(q_rotated)], 2)
            k = torch.cat([k, self.rotated(rotated[None]).expand(HEADS, -1, -1)], 2)
        else:
            if self.kind == "qwen":
                q, logits = heads("q_proj", 2 * DIM).chunk(2, 2)
                gates = logits.sigmoid()
            else:
                q = heads("q_proj", DIM)
            k, v = heads("k_proj", DIM), heads("v_proj", DIM)
            q, k = (self.rotated(self.normed(y, f"{module}.{name}_norm")) for y, name in ((q, "q"), (k, "k")))
        out = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)[0] * gates
        return out.transpose(0, 1).flatten(1) @ self.weights[f"{module}.o_proj.weight"].T

    def mlp(self, x: Tensor, module: str) -> Tensor:
        gate, up, down = (self.weights[f"{module}.{name}_proj.weight"] for name in ("gate", "up", "down"))
        return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T

    def rotated(self, x: Tensor) -> Tensor:
        """RoPE of the first elements of each head: of halves, or as DeepSeek stores them, of adjacent elements."""
        angles = torch.arange(x.shape[1])[:, None] * THETA ** (-torch.arange(0, ROTATED, 2) / ROTATED)
        first, rest = x[..., :ROTATED], x[..., ROTATED:]
        is_adjacent = self.kind == "deepseek"
        a, b = (first[..., 0::2], first[..., 1::2]) if is_adjacent else first.chunk(2, -1)
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin(), rest], -1)


def in_fp8(weights: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    """Return what stores a matrix in FP8; `weights` has the rounded one afterwards."""
    scale = weights[name].abs().max() / 448
    stored = (weights[name] / scale).to(torch.float8_e4m3fn)
    weights[name] = stored.float() * scale
    return {name: stored, f"{name}_scale_inv": scale.view(1, 1)}


@pytest.mark.parametrize(("kind", "step"), KINDS_AND_STEPS)
def test_drafts_are_what_the_formulas_say(
    kind: str, step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after prompts of several chunks, beside other rows, and with some drafts accepted and some not.

    One of the layer's matrices is quantized in the file, and others are not.
    """
    weights = random_weights(kind)
    config = CONFIGS[kind] | {"attention_bias": kind == "glm"}
    config |= {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    quantized = in_fp8(weights, f"{NAMES[kind][4]}self_attn.o_proj.weight")
    model = write(tmp_path / kind, config, weights | quantized)
    reference = ReferenceLayer(kind, cpu_engine(model), weights, rounds=step == "C++")
    seen = seen_drafts(monkeypatch)
    rng = random.Random(1)
    greedy = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    requests: Requests = [([rng.randrange(1, VOCAB) for _ in range(n)], greedy) for n in (1, 2, 60, 25, 90, 3)]
    depth, device = (0, None) if step == "C++" else (1, LateDevice(1))
    options: dict[str, Any] = {"page_size": 16, "cache_type": "naive", "max_prefill_length": 24, "dummy_weight": False}
    _, scheduler = run(model, requests, depth, device, speculate="mtp", **options)
    with torch.inference_mode():
        assert [drafts for _, drafts in seen] == [reference.drafts(ids, len(drafts)) for ids, drafts in seen]
    assert scheduler.stats.drafted_tokens > 200


def test_a_quantized_layer_drafts_and_texts_stay(dummy: Path) -> None:
    requests = make_requests(random.Random(8), 10)
    plain, _ = run(dummy, requests, quantization="int8", **LAYOUTS[1])
    drafted, scheduler = run(dummy, requests, speculate="mtp", quantization="int8", **LAYOUTS[1])
    assert drafted.tokens == plain.tokens and scheduler.stats.accepted_tokens > 0


def test_a_model_without_the_layer_is_refused(dummy: Path, tmp_path: Path) -> None:
    """One sentence each; `auto` looks for other drafts instead."""
    config, none = CONFIGS["glm"], {"num_nextn_predict_layers": 0}
    model = write(tmp_path / "whole", config, random_weights("glm"))
    stored = load_file(model / "model.safetensors")
    (tmp_path / "cut").mkdir()
    own = {name: tensor for name, tensor in stored.items() if f".layers.{LAYERS}." not in name}
    save_file(own, tmp_path / "cut" / "model.safetensors")
    for folder, changed, message in (
        (tmp_path / "cut", config, rf"lack model\.layers\.{LAYERS}\.enorm\.\*, so this copy has no layer"),
        (tmp_path / "cut", config | none, "by num_nextn_predict_layers in config.json, the checkpoint has no layer"),
        (tmp_path / "llama", COMMON | {"architectures": ["LlamaForCausalLM"]}, "no layer of LlamaForCausalLM that"),
    ):
        write(folder, changed)
        is_dummy = folder.name == "llama"
        with pytest.raises(ConfigError, match=rf"^--speculate mtp: .*{message}"):
            resolve(EngineConfig(model=str(folder), speculate="mtp", dummy_weight=is_dummy), "cpu")
        assert (
            resolve(EngineConfig(model=str(folder), speculate="auto", dummy_weight=is_dummy), "cpu").drafter == "ngram"
        )
    assert resolve(EngineConfig(model=str(model), speculate="auto"), "cpu").drafter == "mtp"
    assert resolve(EngineConfig(model=str(model)), "cpu").drafter is None


@pytest.mark.parametrize("kind", CONFIGS)
def test_memory_of_the_layer_is_counted(kind: str, tmp_path: Path) -> None:
    """Before the start from config.json, up to norms and biases, and after it as it is."""
    model = write(tmp_path / kind, CONFIGS[kind])

    def sizes(speculate: str) -> tuple[int, int, int, int]:
        config = EngineConfig(model=str(model), dummy_weight=True, speculate=speculate)
        needs, memory = (
            Footprint.of(Checkpoint.read(config), config, "cpu", 4),
            cpu_engine(model, dummy_weight=True, speculate=speculate).memory,
        )
        return needs.weights, needs.pages[0], memory.weight_bytes, memory.block_bytes

    plain, drafted = sizes("off"), sizes("mtp")
    guessed, page, weights, block = (b - a for a, b in zip(plain, drafted, strict=True))
    assert 0.95 * weights < guessed <= weights
    assert page == plain[1] // PAGED_LAYERS[kind]
    assert block == page or kind == "qwen"  # whose blocks also have room for states
