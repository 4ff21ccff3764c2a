"""The layers' own rules: rotary angles against transformers, merged weights, a tied head."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from contract.checkpoints import COMMON, SCALED_ROPES, YARN_OPTIONS, YARN_ROPE, architecture, configurations
from minisgl.layers.builder import Builder
from minisgl.layers.linear import Embedding, Linear, RMSNorm, Stream
from minisgl.layers.parameter import Source
from minisgl.layers.rotary import cos_sin_table, inverse_frequencies
from minisgl.models.llama import LlamaForCausalLM
from minisgl.models.mlp import SparseMLP
from minisgl.models.model_config import ModelConfig
from minisgl.ops.table import load_ops

CPU = torch.device("cpu")


def builder(dtype: torch.dtype = torch.float32) -> Builder:
    return Builder(load_ops("cpu"), dtype, CPU)


ROPES: dict[str, dict] = {
    "default": {"rope_type": "default", "rope_theta": 1e6},
    **SCALED_ROPES,
    "yarn-high-theta": {**YARN_ROPE, "rope_theta": 1e6, "original_max_position_embeddings": 32768},
    "yarn-one-index": {**YARN_ROPE, "beta_fast": 2.0, "beta_slow": 2.0, "truncate": False},
    "yarn-no-factor": {**YARN_ROPE, "factor": None, "beta_fast": None},
    "yarn-half-of-mscale": {**YARN_ROPE, "mscale": 0.8, "mscale_all_dim": 0.0},
    "yarn-shrinks": {**YARN_ROPE, **YARN_OPTIONS, "factor": 0.5},
}


@pytest.mark.parametrize("name", ROPES)
def test_rope_angles_equal_transformers(name: str):
    """At every position that is served, most of them past the original context."""
    theirs = LlamaConfig(**COMMON, num_attention_heads=1, rope_parameters=dict(ROPES[name]))
    rope = ModelConfig.from_hf(
        {**theirs.to_dict(), "architectures": ["LlamaForCausalLM"], "rope_parameters": ROPES[name]}
    ).rope
    rotary = LlamaRotaryEmbedding(theirs)
    cos, sin = rotary(torch.zeros(1), torch.arange(256)[None])
    table = cos_sin_table(rope, 64, 256, CPU)
    torch.testing.assert_close(inverse_frequencies(rope, 64), rotary.inv_freq, rtol=3e-7, atol=0)
    torch.testing.assert_close(table[:, :32], cos[0, :, :32], rtol=0, atol=2e-5)
    torch.testing.assert_close(table[:, 32:], sin[0, :, :32], rtol=0, atol=2e-5)


def whole(name, *shape, start=0):
    return Source(name, shape, tuple(slice(0, n) for n in shape), start)


def test_moe_routes_each_token_to_its_experts():
    b = builder()
    sizes = {"hidden_size": 4, "intermediate_size": 3, "num_attention_heads": 2, "num_hidden_layers": 1}
    experts = {"num_local_experts": 3, "num_experts_per_tok": 1}
    other = {"architectures": ["MixtralForCausalLM"], "vocab_size": 8, "max_position_embeddings": 64}
    layer = SparseMLP(b, ModelConfig.from_hf(sizes | experts | other), 0)
    name = "model.layers.0.block_sparse_moe"
    router, gate_up, down = b.parameters
    assert router.sources == (whole(f"{name}.gate.weight", 3, 4),)
    assert gate_up.sources[1:3] == (
        whole(f"{name}.experts.0.w3.weight", 3, 4, start=3),
        whole(f"{name}.experts.1.w1.weight", 3, 4, start=6),
    )
    assert down.sources[2] == whole(f"{name}.experts.2.w2.weight", 4, 3, start=8)
    assert layer.weights.gate_up.shape == (3, 6, 4) and layer.weights.down.shape == (3, 4, 3)
    for parameter in b.parameters:
        torch.nn.init.normal_(parameter.tensor)
    norm = RMSNorm(b, "n", 4, 0.0)
    torch.nn.init.ones_(norm.weight)
    x, residual = torch.randn(2, 8, 4)
    out, total, _ = layer.forward(Stream(x, residual.clone()), norm)
    torch.testing.assert_close(total, x + residual)
    normed = torch.nn.functional.rms_norm(total, (4,))
    for y, row in zip(out, normed, strict=True):
        e = int((layer.router.weight @ row).argmax())
        gate, up = (layer.weights.gate_up[e] @ row).chunk(2)
        torch.testing.assert_close(y, layer.weights.down[e] @ (torch.nn.functional.silu(gate) * up))


def test_merged_linear_equals_its_parts():
    b = builder()
    layer = Linear(b, {"m.q": 5, "m.k": 2, "m.v": 2}, 4, bias=True)
    weight, bias = b.parameters
    assert weight.sources == (
        whole("m.q.weight", 5, 4),
        whole("m.k.weight", 2, 4, start=5),
        whole("m.v.weight", 2, 4, start=7),
    )
    assert bias.sources[2] == whole("m.v.bias", 2, start=7) and bias.tensor is layer.bias
    torch.nn.init.normal_(layer.weight), torch.nn.init.normal_(layer.bias)
    x = torch.randn(3, 4)
    torch.testing.assert_close(layer.forward(x), x @ layer.weight.T + layer.bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_with_an_offset_rounds_once_at_the_end(dtype: torch.dtype):
    b = builder(dtype)
    ours, theirs = RMSNorm(b, "n", 48, 1e-6, offset=1.0), Gemma3RMSNorm(48)
    (parameter,) = b.parameters
    assert parameter.offset == 1.0 and parameter.sources == (whole("n.weight", 48),)
    torch.nn.init.normal_(theirs.weight)
    theirs.to(dtype)
    ours.weight.copy_(theirs.weight.detach()).add_(1.0)
    x = torch.randn(5, 48, dtype=dtype) * 3
    assert ours.weight.dtype is torch.float32 and ours.forward(x).dtype is dtype
    torch.testing.assert_close(ours.forward(x), theirs(x), rtol=1e-6 if dtype is torch.float32 else 0, atol=0)


@pytest.mark.parametrize(("name", "scale"), [("gemma3", 7.0625), ("granite", 12 / 0.22)])
def test_only_gemmas_embedding_scale_is_rounded_to_the_dtype(name: str, scale: float):
    """By transformers for Gemma, as it was trained; a multiplier that takes in that of residuals must stay exact."""
    config = configurations()[name]
    config.hidden_size, config.head_dim = 50, 16  # the root of 50 is 7.071
    whole = config.to_dict() | {"architectures": [architecture(config)]}
    embedding = LlamaForCausalLM(builder(torch.bfloat16), ModelConfig.from_hf(whole)).model.embed_tokens
    assert embedding.scale == scale
    torch.nn.init.normal_(embedding.weight)
    ids = torch.tensor([3, 0], dtype=torch.int32)
    assert torch.equal(embedding.summed(ids), embedding.weight[[3, 0]] * scale)


def test_tied_head_multiplies_normed_states_by_the_embedding():
    b = builder()
    embedding = Embedding(b, "e", 11, 4)
    head, norm = Linear(b, {"h": 11}, 4, bias=False, tied=embedding.weight), RMSNorm(b, "n", 4, 0.0)
    assert len(b.parameters) == 2 and head.weight is embedding.weight
    torch.nn.init.normal_(embedding.weight), torch.nn.init.ones_(norm.weight)
    x = embedding.summed(torch.tensor([3], dtype=torch.int32))
    logits = head.after_sum_norm(Stream(x, x.clone()), norm)[0]
    torch.testing.assert_close(logits, torch.nn.functional.rms_norm(2 * x, (4,)) @ embedding.weight.T)
